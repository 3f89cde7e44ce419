"""`streamshim.validate` on the CPU: what is called, what is compared, and what is refused."""

from __future__ import annotations

import ctypes
import pickle
import re
import threading

import pytest
import torch

import streamshim
from streamshim.callsite import Site
from streamshim.errors import HostSyncError
from streamshim.findings import SyncReport
from streamshim.validation import calls, report, stats


@pytest.fixture(autouse=True)
def nothing_validated(monkeypatch):
    """No functions and no counters from before."""
    monkeypatch.delenv("STREAMSHIM_VALIDATE", raising=False)
    monkeypatch.delenv("STREAMSHIM_REPORT_DIR", raising=False)
    calls.functions.clear()
    report._told.clear()
    stats.forget()
    yield
    calls.functions.clear()
    stats.forget()


def double(x):
    return x * 2


def double_with_fault(x, fault):
    return x * 2 + fault


def only_row():
    (row,) = streamshim.validation_report().rows
    return row


def test_the_kernels_output_is_returned_and_what_differs_is_counted():
    verify = streamshim.validate(lambda x, fault: x * 2 + fault, lambda x, fault: x * 2, name="verify")
    for number in range(5):
        fault = torch.zeros(2, 3)
        fault[1, 2] = 0.5 if number in (2, 4) else 0.0
        assert torch.equal(verify(torch.ones(2, 3), fault), 2 + fault)
    row = only_row()
    assert (row.function, row.output, row.tensor) == ("verify", "output", "float32[2, 3] on cpu")
    assert (row.calls, row.captured, row.replays, row.checked) == (5, 0, 0, 5)
    assert (row.mismatches, row.bad_elements, row.max_abs, row.max_rel) == (2, 2, 0.5, 0.25)
    (place,) = row.bad
    assert (place.where, place.count, place.first, place.index) == ("eager calls", 2, 3, (1, 2))
    assert "2 mismatches in 5 checked (5 eager calls" in str(streamshim.validation_report())


def test_each_line_and_each_shape_is_counted_by_itself():
    verify = streamshim.validate(double, lambda x: x + x)
    verify(torch.ones(2))
    for size in (2, 3, 3):
        verify(torch.ones(size))
    rows = streamshim.validation_report().rows
    first = test_each_line_and_each_shape_is_counted_by_itself.__code__.co_firstlineno + 2
    assert [(row.site.split(":")[1].split()[0], row.tensor, row.calls) for row in rows] == [
        (str(first), "float32[2] on cpu", 1),
        (str(first + 2), "float32[2] on cpu", 1),
        (str(first + 2), "float32[3] on cpu", 2),
    ]


def test_beyond_the_limit_calls_are_counted_together(monkeypatch):
    monkeypatch.setattr(calls, "MAX_ENTRIES", 2)
    verify = streamshim.validate(lambda x: x + (x > 5), lambda x: x + 0)
    for size in range(1, 8):
        verify(torch.arange(float(size)))
    *_, last = rows = streamshim.validation_report().rows
    assert len(rows) == 3
    assert (last.site, last.tensor, last.calls) == ("other call sites and shapes", "float32 on cpu", 5)
    assert last.bad[0].index == 6


STRUCTURES = {
    "tuple": (lambda x: (x, x + 1), ["output[0]", "output[1]"]),
    "dict": (lambda x: {"o": x, "lse": x.sum()}, ["output['o']", "output['lse']"]),
    "nested": (lambda x: [x, (None, {"n": 3, "t": x})], ["output[0]", "output[1][1]['t']"]),
    "empty": (lambda x: x[:0], ["output"]),
}


@pytest.mark.parametrize("name", STRUCTURES)
def test_structures(name):
    function, names = STRUCTURES[name]
    streamshim.validate(function, lambda x: function(x.clone()))(torch.ones(4))
    rows = streamshim.validation_report().rows
    assert [row.output for row in rows] == names
    assert all((row.checked, row.mismatches) == (1, 0) for row in rows)


def test_dicts_are_compared_by_key():
    streamshim.validate(lambda x: {"a": x, "b": x + 1}, lambda x: {"b": x + 1, "a": x.clone()})(torch.ones(4))
    assert streamshim.validation_report().mismatches == 0


DIFFERENT = {
    "shape": (lambda x: x[None], "output differs in shape", "float32[1, 2] on cpu"),
    "dtype": (lambda x: x.half(), "output differs in dtype", "float16[2] on cpu"),
    "device": (lambda x: x.to("meta"), "output is on different devices", "float32[2] on meta"),
    "structure": (lambda x: (x,), "output is of different types", "(float32[2] on cpu,)"),
    "sparse": (lambda x: x.to_sparse(), "output is not a plain strided tensor", "(not a plain strided tensor)"),
    "none": (lambda x: None, "output is of different types", "None"),
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_outputs_that_cannot_be_compared_are_listed_both(name):
    kernel, why, words = DIFFERENT[name]
    with pytest.raises(streamshim.ValidationError) as error:
        streamshim.validate(kernel, lambda x: x + 1, name="verify")(torch.ones(2))
    assert f"verify: the kernel and the reference cannot be compared: {why}" in str(error.value)
    assert f"the kernel gives     {words}" in str(error.value) or words in str(error.value)
    assert "the reference gives  float32[2] on cpu" in str(error.value)


def test_items_and_keys_that_differ():
    with pytest.raises(streamshim.ValidationError, match=r"output\['a'\] has 1 items and 2"):
        streamshim.validate(lambda x: {"a": (x,)}, lambda x: {"a": (x, x)})(torch.ones(2))
    with pytest.raises(streamshim.ValidationError, match="output has different keys"):
        streamshim.validate(lambda x: {"a": x}, lambda x: {"b": x})(torch.ones(2))


def test_nothing_to_compare():
    with pytest.raises(streamshim.ValidationError, match="there is nothing to compare"):
        streamshim.validate(lambda x: None, lambda x: None)(torch.ones(2))


@pytest.mark.parametrize("use", ["kernel", "reference"])
def test_arguments_that_are_written_to(use):
    seen = {}

    def kernel(x, out, *, cache):
        seen["kernel"] = (out.tolist(), cache.tolist())
        out.copy_(x)
        cache.add_(1)

    def reference(x, out, *, cache):
        seen["reference"] = (out.tolist(), cache.tolist())
        out.copy_(x + 1)
        cache.add_(1)

    verify = streamshim.validate(kernel, reference, inplace=("out", "cache"), use=use)
    x, out, cache = torch.ones(2), torch.zeros(2), torch.full((2,), 5.0)
    assert verify(x, out, cache=cache) is None
    assert seen == {"kernel": ([0, 0], [5, 5]), "reference": ([0, 0], [5, 5])}
    assert out.tolist() == ([1, 1] if use == "kernel" else [2, 2])
    assert cache.tolist() == [6, 6]
    rows = {row.output: row for row in streamshim.validation_report().rows}
    assert (rows["out"].mismatches, rows["cache"].mismatches) == (1, 0)


def test_a_written_argument_that_is_returned_and_one_given_by_position():
    verify = streamshim.validate(lambda x, out: out.copy_(x), lambda x, out: out.copy_(x), inplace=1)
    out = torch.zeros(2)
    assert verify(torch.ones(2), out) is out
    assert [(row.output, row.mismatches) for row in streamshim.validation_report().rows] == [("output", 0), ("out", 0)]


@pytest.mark.parametrize("side", ["kernel", "reference"])
def test_writing_to_an_argument_that_is_not_named_is_an_error(side):
    writes, reads = (lambda x: x.add_(1)), (lambda x: x + 1)
    verify = streamshim.validate(*((writes, reads) if side == "kernel" else (reads, writes)))
    with pytest.raises(streamshim.ValidationError, match=rf"the {side} writes to args\[0\], which"):
        verify(torch.ones(2))


def test_an_argument_may_be_a_part_of_what_is_written_to():
    verify = streamshim.validate(lambda x, out: out.copy_(x), lambda x, out: out.copy_(x), inplace="out")
    both = torch.arange(4.0)
    verify(both[:2], both[2:])
    assert both.tolist() == [0, 1, 0, 1]


def test_one_memory_for_both_results_is_an_error():
    static = torch.zeros(2)
    verify = streamshim.validate(lambda x: static.copy_(x), lambda x: static.copy_(x))
    with pytest.raises(streamshim.ValidationError, match="return the same memory as output"):
        verify(torch.ones(2))


def test_a_ctypes_kernel():
    """memcpy: it takes pointers, and torch does not know that it writes."""
    memcpy = ctypes.CDLL(None).memcpy
    memcpy.argtypes, memcpy.restype = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t], ctypes.c_void_p

    def kernel(out, x):
        memcpy(out.data_ptr(), x.data_ptr(), x.numel() * 4)

    verify = streamshim.validate(kernel, lambda out, x: out.copy_(x), inplace="out", name="verify")
    with pytest.raises(streamshim.ValidationError, match="cannot be compared"):
        verify(torch.zeros(3), torch.ones(3))
    out = torch.zeros(3)
    streamshim.validate(kernel, lambda out, x: (out.copy_(x), None)[1], inplace="out")(out, torch.ones(3))
    assert out.tolist() == [1, 1, 1]
    assert only_row().mismatches == 0


def test_gradients_belong_to_the_side_that_is_used():
    grads = []
    verify = streamshim.validate(lambda x: x * 3, lambda x: (grads.append(torch.is_grad_enabled()), x * 3)[1])
    x = torch.ones(2, requires_grad=True)
    verify(x).sum().backward()
    assert x.grad.tolist() == [3, 3]
    assert grads == [False]
    with torch.no_grad():
        assert not verify(x).requires_grad
    with torch.inference_mode():
        verify(x)
    assert sum(row.checked for row in streamshim.validation_report().rows) == 3


def test_tolerances_by_output_and_by_type():
    def kernel(x):
        return {"o": x + 0.5, "lse": x + 0.5, "h": (x + 0.5).half()}

    def reference(x):
        return {"o": x, "lse": x, "h": x.half()}

    bounds = {"output['o']": 1.0, torch.float16: 0.6}
    streamshim.validate(kernel, reference, atol=bounds, rtol={})(torch.ones(2))
    rows = {row.output: row for row in streamshim.validation_report().rows}
    assert [rows[f"output['{key}']"].mismatches for key in ("o", "lse", "h")] == [0, 1, 0]
    assert (rows["output['lse']"].rtol, rows["output['lse']"].atol) == (1.3e-6, 1e-5)
    with pytest.raises(streamshim.ValidationError, match=r"atol names output\[0\]; the outputs are output\['o'\]"):
        streamshim.validate(kernel, reference, atol={"output[0]": 1.0}, rtol={})(torch.ones(2))


def test_a_sample_of_the_eager_calls():
    seen = []
    verify = streamshim.validate(double, lambda x: (seen.append(1), x * 2)[1], sample=3)
    for _ in range(7):
        assert verify(torch.ones(2)).tolist() == [2, 2]
    assert len(seen) == 3
    (function,) = streamshim.validation_report().functions
    assert (function.rows[0].calls, function.skipped) == (3, 4)


def test_warn_and_raise_tell_each_mismatch_once():
    wrong = streamshim.validate(lambda x: x + 1, double, name="wrong", on_mismatch="warn")
    wrong(torch.zeros(2))
    with pytest.warns(streamshim.ValidationMismatchWarning, match="does not agree with its reference: 'wrong'"):
        streamshim.validation_report()
    streamshim.validation_report()
    worse = streamshim.validate(lambda x: x + 1, double, name="worse", on_mismatch="raise")
    worse(torch.zeros(2))
    with pytest.raises(streamshim.ValidationMismatchError, match="'worse'") as error:
        streamshim.validation_report()
    assert error.value.report.mismatches == 2
    twin = pickle.loads(pickle.dumps(error.value))
    assert (str(twin), twin.report) == (str(error.value), error.value.report)
    assert streamshim.validation_report().mismatches == 2
    worse(torch.zeros(2))
    with pytest.raises(streamshim.ValidationMismatchError):
        streamshim.validation_report()


def test_an_eager_call_is_a_checkpoint_from_time_to_time(monkeypatch):
    verify = streamshim.validate(lambda x: x + 1, double, on_mismatch="raise")
    monkeypatch.setattr(report, "_next_checkpoint", float("inf"))
    verify(torch.zeros(2))
    verify(torch.zeros(2))
    monkeypatch.setattr(report, "_next_checkpoint", 0.0)
    with pytest.raises(streamshim.ValidationMismatchError):
        verify(torch.zeros(2))


@pytest.mark.parametrize("run", ["off", "kernel", "reference", "BOTH"])
def test_what_runs_is_said_by_the_environment(monkeypatch, run):
    monkeypatch.setenv("STREAMSHIM_VALIDATE", run)
    kernel = lambda x: x + 1  # noqa: E731
    verify = streamshim.validate(kernel, lambda x: x + 2)
    assert (verify is kernel) == (run == "off")
    assert verify(torch.zeros(1)).item() == (2 if run == "reference" else 1)
    assert streamshim.validation_report().mismatches == (1 if run == "BOTH" else 0)


def test_names_are_unique():
    names = [streamshim.validate(double, double).name for _ in range(3)]
    assert names == ["double", "double#2", "double#3"]


BAD = [
    ({"kernel": 3}, TypeError, "kernel is 3; accepted: a callable"),
    ({"reference": None}, TypeError, "reference is None"),
    ({"rtol": 1e-3}, ValueError, "rtol and atol: give both or neither"),
    ({"rtol": -1.0, "atol": 0.0}, ValueError, "rtol is -1.0; it must not be negative"),
    ({"rtol": "1", "atol": 0.0}, TypeError, "rtol is '1'; accepted: a number"),
    (
        {"rtol": {3: 1.0}, "atol": {}},
        TypeError,
        "rtol has the key 3; accepted: the name of an",
    ),
    ({"use": "both"}, ValueError, "use is 'both'; allowed values: 'kernel', 'reference'"),
    ({"on_mismatch": "exit"}, ValueError, "on_mismatch is 'exit'; allowed values: 'record', 'warn', 'raise'"),
    ({"sample": 0}, ValueError, "sample is 0; it must be at least 1"),
    ({"sample": 1.5}, TypeError, "sample is 1.5; accepted: an int"),
    ({"keep": -1}, ValueError, "keep is -1; it must be at least 0"),
    ({"inplace": "y"}, ValueError, "inplace names 'y'; the kernel's parameters are 'x'"),
    ({"inplace": [1.5]}, TypeError, "inplace has 1.5"),
    ({"inplace": 1.5}, TypeError, "inplace has 1.5; accepted: names and positions"),
    ({"inplace": 3}, ValueError, "inplace names position 3 (from 0); the kernel's positional parameters are 'x'"),
    ({"inplace": ("x", 0)}, ValueError, "inplace names 'x' twice"),
    ({"name": 5}, TypeError, "name is 5; accepted: a str or None"),
    ({"equal_nan": "yes"}, TypeError, "equal_nan is 'yes'; accepted: a bool"),
]


@pytest.mark.parametrize(("arguments", "error", "text"), BAD, ids=[text for *_, text in BAD])
def test_bad_arguments(arguments, error, text):
    given = {"kernel": double, "reference": double, **arguments}
    with pytest.raises(error, match=re.escape(text)):
        streamshim.validate(given.pop("kernel"), given.pop("reference"), **given)


def test_a_bad_variable(monkeypatch):
    monkeypatch.setenv("STREAMSHIM_VALIDATE", "yes")
    with pytest.raises(ValueError, match="STREAMSHIM_VALIDATE is 'yes'; allowed values: 'off', 'kernel'"):
        streamshim.validate(double, double)


def test_a_written_argument_must_be_a_tensor():
    verify = streamshim.validate(lambda x, out=None: x, lambda x, out=None: x, inplace="out", name="verify")
    with pytest.raises(streamshim.ValidationError, match="names 'out', which was left out of this call; it must be"):
        verify(torch.ones(2))
    with pytest.raises(streamshim.ValidationError, match="names 'out', which was None in this call; it must be"):
        verify(torch.ones(2), None)


def test_tensors_without_values_cannot_be_compared():
    verify = streamshim.validate(double, double, name="verify")
    with pytest.raises(streamshim.ValidationError, match="output is on the meta device, where there are no values"):
        verify(torch.ones(2, device="meta"))


@pytest.mark.parametrize("side", ["kernel", "reference"])
def test_a_refused_sync_names_the_side_that_does_it(side):
    def syncs(x):
        site = Site("model.py", 3, "reference")
        raise HostSyncError(SyncReport(".item() on a CUDA tensor", site, "", "a capture", "bind", "why", ("remedy",)))

    verify = streamshim.validate(*((syncs, double) if side == "kernel" else (double, syncs)), name="verify")
    with pytest.raises(HostSyncError, match=rf"\.item\(\) on a CUDA tensor, in the {side} of the validated .*'verify'"):
        verify(torch.ones(2))


def test_threads_lose_no_call():
    verify = streamshim.validate(lambda x: x + (x > 1), lambda x: x + 0)

    def work():
        for number in range(50):
            verify(torch.tensor([0.0, float(number % 5 == 0) * 2]))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    row = only_row()
    assert (row.calls, row.checked, row.mismatches, row.bad[0].first) == (200, 200, 40, 1)
