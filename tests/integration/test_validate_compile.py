"""A validated function under torch.compile: one operator, no graph break, and counted whenever it runs."""

from __future__ import annotations

import pytest
import torch

import streamshim
from streamshim.validation import calls, report, stats

# torch's own, from inside its compiler.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated")


@pytest.fixture(autouse=True)
def nothing_validated(monkeypatch):
    monkeypatch.delenv("STREAMSHIM_VALIDATE", raising=False)
    monkeypatch.delenv("STREAMSHIM_REPORT_DIR", raising=False)
    calls.functions.clear()
    report._told.clear()
    stats.forget()
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
    calls.functions.clear()
    stats.forget()


@pytest.fixture(params=["eager", "aot_eager", "inductor"])
def backend(request):
    return request.param


def compiled(function, backend):
    return torch.compile(function, backend=backend, fullgraph=True)


def opaque(x, scale, names=None, *, dtype=torch.float32):
    """A kernel that torch cannot trace: it needs values."""
    return {"o": (x * scale).to(dtype), "rest": [torch.tensor([float(x.sum().item())]), None]}


def plain(x, scale, names=None, *, dtype=torch.float32):
    return {"o": (x * scale).to(dtype), "rest": [x.sum().view(1), None]}


def test_structures_numbers_and_plain_arguments_go_through(backend):
    verify = streamshim.validate(opaque, plain, name="verify")

    def model(x, n):
        out = verify(x + 1, n, ("a", None), dtype=torch.float64)
        assert out["rest"][1] is None
        return out["o"].sin(), out["rest"][0] * 2

    call = compiled(model, backend)
    for n in range(4):
        x = torch.arange(4.0) + n
        first, second = call(x, n)
        assert torch.equal(first, ((x + 1) * n).double().sin())
        assert second.item() == (x + 1).sum() * 2
    (one, two) = streamshim.validation_report().rows
    assert (one.output, two.output) == ("output['o']", "output['rest'][0]")
    assert (one.calls, one.mismatches) == (4, 0)
    line = test_structures_numbers_and_plain_arguments_go_through.__code__.co_firstlineno + 4
    assert one.site.endswith(f"test_validate_compile.py:{line} in model")


def test_a_mismatch_is_counted_in_each_run(backend):
    verify = streamshim.validate(lambda x, fault: x * 2 + fault, lambda x, fault: x + x)
    call = compiled(lambda x, fault: verify(x.relu(), fault).cos(), backend)
    for number in range(5):
        call(torch.ones(3), torch.full((3,), float(number == 3)))
    (row,) = streamshim.validation_report().rows
    assert (row.calls, row.mismatches, row.bad[0].first) == (5, 1, 4)


def test_arguments_that_are_written_to(backend):
    def kernel(x, out, *, cache):
        out.copy_(x * 2)
        cache.add_(x)
        return out

    verify = streamshim.validate(kernel, kernel, inplace=("out", "cache"))

    def model(x, cache):
        out = torch.empty_like(x)
        again = verify(x, out, cache=cache)
        return again + out

    call, cache = compiled(model, backend), torch.zeros(3)
    for number in range(1, 4):
        assert call(torch.ones(3), cache).tolist() == [4, 4, 4]
        assert cache.tolist() == [number] * 3
    rows = {row.output: row for row in streamshim.validation_report().rows}
    assert set(rows) == {"output", "out", "cache"}
    assert all((row.calls, row.mismatches) == (3, 0) for row in rows.values())


def test_shapes_that_change(backend):
    verify = streamshim.validate(lambda x: x * 2, lambda x: x + x)
    call = torch.compile(lambda x: verify(x) + 1, backend=backend, fullgraph=True, dynamic=True)
    for size in (3, 4, 5):
        assert call(torch.ones(size)).tolist() == [3.0] * size
    assert [row.tensor for row in streamshim.validation_report().rows] == [f"float32[{n}] on cpu" for n in (3, 4, 5)]


def test_a_reference_that_needs_values_is_replaced_for_shapes_by_fake(backend):
    def needs_values(x):
        return x * float(x[0].item())

    verify = streamshim.validate(needs_values, needs_values, fake=torch.empty_like)
    assert compiled(lambda x: verify(x) + 1, backend)(torch.full((2,), 3.0)).tolist() == [10, 10]
    bare = streamshim.validate(needs_values, needs_values, name="bare")
    with pytest.raises(Exception, match=r"bare: torch.compile calls the reference .*(.|\n)*fake=function"):
        compiled(lambda x: bare(x) + 1, backend)(torch.full((2,), 3.0))


def test_a_call_with_an_object_breaks_the_graph_and_is_validated_eagerly(backend):
    """An operator takes no objects, so there is nothing else to be done; with ``fullgraph`` torch says so."""
    verify = streamshim.validate(lambda x, config: x * 2, lambda x, config: x + x)
    config = object()
    call = torch.compile(lambda x: verify(x.relu(), config) + 1, backend=backend)
    for _ in range(3):
        assert call(torch.ones(2)).tolist() == [3, 3]
    (row,) = streamshim.validation_report().rows
    assert (row.calls, row.mismatches) == (3, 0)
    with pytest.raises(Exception, match=r"call_with_objects"):
        compiled(lambda x: verify(x, config), backend)(torch.ones(2))


def test_new_outputs_beside_written_arguments_are_an_error(backend):
    def kernel(x, out):
        out.copy_(x)
        return x * 2

    verify = streamshim.validate(kernel, kernel, inplace="out", name="verify")
    with pytest.raises(
        Exception, match=r"verify: under torch.compile a function with `inplace` may return its arguments"
    ):
        compiled(lambda x, out: verify(x, out), backend)(torch.ones(2), torch.ones(2))


def test_a_reference_that_returns_its_input_and_a_kernel_that_does_not(backend):
    verify = streamshim.validate(lambda x: x + 1, lambda x: x)
    assert compiled(lambda x: verify(x * 1) + 1, backend)(torch.ones(2)).tolist() == [3, 3]
    assert streamshim.validation_report().mismatches == 1


def test_results_that_are_parts_of_the_input_are_copied(backend):
    verify = streamshim.validate(lambda x: x[:2], lambda x: x[:2])
    assert compiled(lambda x: verify(x * 1) + 1, backend)(torch.ones(4)).tolist() == [2, 2]


def test_compiled_code_that_is_loaded_without_its_function_says_so():
    verify = streamshim.validate(lambda x: x * 2, lambda x: x + x, name="verify")
    call = compiled(lambda x: verify(x) + 1, "aot_eager")
    call(torch.ones(2))
    calls.functions.clear()
    with pytest.raises(
        Exception, match="Compiled code calls the validated function 'verify', which this process has not"
    ):
        call(torch.ones(2))


@pytest.mark.parametrize("run", ["kernel", "reference", "off"])
def test_what_runs_is_said_by_the_environment(monkeypatch, run):
    monkeypatch.setenv("STREAMSHIM_VALIDATE", run)
    verify = streamshim.validate(lambda x: x + 1, lambda x: x + 2)
    got = compiled(lambda x: verify(x) * 10, "aot_eager")(torch.zeros(1)).item()
    assert got == (20 if run == "reference" else 10)


@pytest.mark.filterwarnings("ignore:Error detected in")  # torch tells where the forward call was
def test_gradients_need_the_eager_mode():
    verify = streamshim.validate(lambda x: x * 2, lambda x: x + x)
    x = torch.ones(2, requires_grad=True)
    with pytest.raises(Exception, match=r"autograd|backward"):
        compiled(lambda x: verify(x) + 1, "aot_eager")(x).sum().backward()
