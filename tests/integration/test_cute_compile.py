"""What the shim does to real CuTe compiles: where launches take their stream, and what stays the DSL's own."""

import contextlib
import ctypes

import cuda.bindings.driver as cuda
import cute_kernels as kernels
import cutlass
import cutlass.cute as cute
import pytest
import torch
from cutlass.cute.runtime import from_dlpack, load_module, make_fake_stream
from cutlass.cutlass_dsl.cutlass import CutlassBaseDSL

import streamshim
from streamshim.binders.cute.plans import plan_of

BOTH = pytest.mark.parametrize("options", [kernels.FFI, ""], ids=["ffi", "plain"])


def launch_streams(text):
    """The operation that makes the stream operand of each launch configuration of the traced host function."""
    host = text[text.index("  func.func @") :]
    definitions = {}
    for line in host[: host.index("\n  }\n")].splitlines():
        name, equals, rest = line.strip().partition(" = ")
        if equals and name.startswith("%"):
            definitions[name] = rest
    streams = []
    for rest in definitions.values():
        if "launch_cfg.create" in rest:
            streams.append(definitions.get(rest.split("stream = ")[1].split(")")[0], "argument"))
    return streams, definitions


def traced(function, *streams, options=kernels.FFI, tensors=2):
    """The module's text as it is when tracing has finished, and the compiled function."""
    texts = []
    compiled = kernels.compile_fake(
        function,
        *streams,
        options=options,
        tensors=tensors,
        trace_finalize_hooks=lambda owner, module, name: texts.append(str(module)),
    )
    return texts[0], compiled


needs_hooks = pytest.mark.skipif(
    tuple(map(int, cutlass.__version__.split(".")[:2])) < (4, 8), reason="trace_finalize_hooks came with 4.8"
)


needs_structures = pytest.mark.skipif(
    tuple(map(int, cutlass.__version__.split(".")[:2])) < (4, 6),
    reason="before 4.6 the DSL cannot compile a NamedTuple or dataclass with a stream in it",
)


@needs_hooks
@BOTH
def test_without_the_shim_a_launch_without_a_stream_is_constant_null(options):
    text, _ = traced(kernels.no_stream, options=options)
    [stream], definitions = launch_streams(text)
    assert stream.startswith("cuda.cast")
    assert definitions[stream.split()[1]].startswith(("arith.constant 0", "llvm.mlir.constant(0"))
    assert "streamshim" not in text


@needs_hooks
@BOTH
@pytest.mark.parametrize(
    ("function", "streams", "tensors", "launches"),
    [
        (kernels.no_stream, (), 2, 1),
        (kernels.with_stream, (make_fake_stream(),), 2, 1),
        (kernels.with_stream, (kernels.env_stream(),), 2, 1),
        (kernels.forwards_in_part, (make_fake_stream(),), 3, 2),
    ],
    ids=["no_stream", "with_stream", "env", "in_part"],
)
def test_with_the_shim_every_launch_asks_the_helper(shim, options, function, streams, tensors, launches):
    text, _ = traced(function, *streams, options=options, tensors=tensors)
    found, definitions = launch_streams(text)
    assert len(found) == launches
    for stream in found:
        bits = definitions[stream.split()[1]]
        assert bits.startswith("llvm.ptrtoint")
        assert definitions[bits.split()[1]].startswith("llvm.call @streamshim_stream(")
    assert text.count("llvm.func internal @streamshim_stream") == 1
    assert "llvm.call @TVMFFIEnvGetStream(" in text


@BOTH
def test_the_compiled_module_asks_for_the_environment_stream(shim, options):
    compiled = kernels.compile_fake(kernels.no_stream, options=options)
    assert "@TVMFFIEnvGetStream" in str(compiled.ir_module)


@BOTH
def test_types_and_attributes_are_the_dsls_own(options):
    bare = kernels.compile_fake(kernels.no_stream, options=options)
    own = set(vars(bare))
    with streamshim.install():
        shimmed = kernels.compile_fake(kernels.no_stream, options=options)
    assert type(shimmed) is type(bare)
    assert set(vars(shimmed)) - own == {"_streamshim_plan"}
    assert own <= set(vars(shimmed))
    shimmed.my_attribute = 1  # engines keep their own attributes on compiled objects
    assert shimmed.my_attribute == 1


@needs_hooks
@BOTH
def test_uninstall_gives_the_original_trace_back(options):
    before, _ = traced(kernels.no_stream, options=options)
    with streamshim.install():
        between, _ = traced(kernels.no_stream, options=options)
    after, _ = traced(kernels.no_stream, options=options)
    assert after == before != between


@needs_hooks
def test_check_mode_traces_what_the_dsl_alone_would_trace(sim):
    bare, _ = traced(kernels.no_stream)
    with streamshim.install("check"):
        checked, compiled = traced(kernels.no_stream)
    assert checked == bare
    launch = plan_of(compiled).launch
    assert not launch.can_bind
    assert "tests/cute_kernels.py:" in launch.note


@BOTH
@pytest.mark.parametrize(
    ("function", "streams", "label", "index"),
    [
        (kernels.with_stream, (make_fake_stream(),), "stream", 2),
        (kernels.with_stream, (cuda.CUstream(0x7F0000),), "stream", 2),
        (kernels.default_none, (), "stream", 2),
        (kernels.Layer(), (make_fake_stream(),), "stream", 2),
    ],
    ids=["fake", "real", "omitted", "method"],
)
def test_the_stream_is_found_by_its_value_at_compile_time(shim, options, function, streams, label, index):
    [slot] = plan_of(kernels.compile_fake(function, *streams, options=options)).slots
    assert (slot.label, slot.index) == (label, index)


@BOTH
def test_a_stream_that_comes_first_or_by_keyword_is_found(shim, options):
    first = cute.compile(kernels.stream_first, make_fake_stream(), kernels.fake(), kernels.fake(), options=options)
    keyword = kernels.compile_fake(kernels.keyword_only, options=options, stream=make_fake_stream())
    assert [(s.label, s.index) for s in plan_of(first).slots] == [("queue", 0)]
    assert [(s.label, s.index) for s in plan_of(keyword).slots] == [("stream", -1)]


@needs_structures
def test_streams_in_a_named_tuple_and_a_dataclass_are_found(shim):
    out = kernels.fake()
    named = cute.compile(
        kernels.in_named_tuple, kernels.fake(), kernels.NamedParams(out, make_fake_stream()), options=kernels.FFI
    )
    data = cute.compile(
        kernels.in_dataclass, kernels.fake(), kernels.DataParams(out, make_fake_stream()), options=kernels.FFI
    )
    assert [s.label for s in plan_of(named).slots] == ["params[1]"]
    assert [s.label for s in plan_of(data).slots] == ["params.stream"]


@BOTH
@pytest.mark.parametrize(
    "value", ["default", 1.5, -1, True, object()], ids=["str", "float", "negative", "bool", "object"]
)
def test_garbage_in_a_stream_parameter_is_refused_when_compiling(shim, options, value):
    with pytest.raises(TypeError, match=r"stream: .*accepted: None, an int handle"):
        kernels.compile_fake(kernels.with_stream, value, options=options)


@BOTH
@pytest.mark.parametrize("value", [None, 0, 0x7F00, ctypes.c_void_p(0x7F00)], ids=["None", "0", "int", "c_void_p"])
def test_any_stream_like_value_compiles_where_the_parameter_is_annotated(shim, options, value):
    compiled = kernels.compile_fake(kernels.with_stream, value, options=options)
    assert [s.label for s in plan_of(compiled).slots] == ["stream"]


def hashes_of(call, monkeypatch):
    """The cache keys that the DSL computes while ``call`` runs."""
    keys = []
    original = CutlassBaseDSL.get_module_hash

    def spy(self, *args):
        keys.append(original(self, *args))
        return keys[-1]

    monkeypatch.setattr(CutlassBaseDSL, "get_module_hash", spy)
    call()
    monkeypatch.undo()
    return keys


def direct_call(function, *args):
    """Call a @cute.jit function; without a GPU it compiles, and fails when it would launch."""
    from cutlass.base_dsl.common import DSLBaseError

    with contextlib.suppress(DSLBaseError, RuntimeError):
        function(*args)


def cute_tensors():
    return from_dlpack(torch.zeros(8)), from_dlpack(torch.zeros(8))


def test_caches_keep_shimmed_and_unshimmed_kernels_apart(sim, monkeypatch):
    def call():
        direct_call(kernels.no_stream, *cute_tensors())

    [bare] = hashes_of(call, monkeypatch)
    with streamshim.install():
        [shimmed] = hashes_of(call, monkeypatch)
        [again] = hashes_of(call, monkeypatch)
    [after] = hashes_of(call, monkeypatch)
    assert bare == after != shimmed == again


def test_a_streams_value_is_not_part_of_the_caches_key(shim, monkeypatch):
    def call():
        for handle in (0, 0x10, 0x1234567, 0x7F12AB30, 0x55AA12345670):
            direct_call(kernels.with_stream, *cute_tensors(), cuda.CUstream(handle))

    keys = hashes_of(call, monkeypatch)
    assert len(keys) == 5
    assert len(set(keys)) == 1


@BOTH
def test_an_exported_kernel_asks_for_the_environment_stream_after_reloading(shim, options, tmp_path):
    compiled = kernels.compile_fake(kernels.no_stream, options=options)
    path = tmp_path / "exported.o"
    if options:
        compiled.export_to_c(str(path), function_name="exported")
    else:
        compiled.export_to_c(str(tmp_path), "exported", function_prefix="exported")
    assert b"TVMFFIEnvGetStream" in path.read_bytes()
    assert load_module(str(path), enable_tvm_ffi=bool(options))["exported"] is not None


def test_a_reloaded_plain_kernel_keeps_its_stream_parameter(shim, tmp_path):
    compiled = kernels.compile_fake(kernels.with_stream, make_fake_stream(), options="")
    compiled.export_to_c(str(tmp_path), "exported", function_prefix="exported")
    plan = plan_of(load_module(str(tmp_path / "exported.o"))["exported"])
    assert [(s.label, s.index) for s in plan.slots] == [("stream", 2)]
    assert plan.launch.what == "CuTe kernel 'with_stream' (plain)"
