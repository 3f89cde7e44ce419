"""What reaches the launch when a real compiled object is called; the last step, which needs a GPU, is recorded."""

import ctypes
import functools
import threading

import cuda.bindings.driver as cuda
import cuda.bindings.runtime as cudart
import cute_kernels as kernels
import cutlass
import pytest
import torch
import tvm_ffi
from cutlass.base_dsl.jit_executor import JitExecutor
from cutlass.cute.runtime import from_dlpack, make_fake_stream

import streamshim
from streamshim import gate
from streamshim.binders.cute import devices

CUDA = 2


def environment_stream(device=0):
    return tvm_ffi.core._env_get_current_stream(CUDA, device)


class Recorder:
    """Stands for the launch: keeps the stream argument and the environment stream that it would have used."""

    def __init__(self):
        self.streams = []
        self.environments = []
        self.error = None

    def note(self, stream):
        self.streams.append(stream)
        self.environments.append(environment_stream())
        if self.error is not None:
            raise self.error


@pytest.fixture
def recorder():
    return Recorder()


@pytest.fixture
def side(sim):
    """A side stream that is torch's current stream in the test."""
    stream = sim.new_stream()
    with sim.stream(stream):
        yield stream.cuda_stream


def ffi(function, recorder, *streams, **kwargs):
    """A TVM-FFI function whose generated wrapper records its last argument instead of launching."""
    compiled = kernels.compile_fake(function, *streams, **kwargs)
    if not hasattr(compiled, "_kwargs_wrapper"):
        pytest.skip("before 4.6 such a function has no Python step to record")
    # A partial, so that nobody takes the stand-in's signature for the kernel's.
    compiled._kwargs_wrapper = functools.partial(
        lambda *args, stream=None: recorder.note(args[2] if len(args) > 2 else stream)
    )
    return compiled


@pytest.fixture
def plain(recorder, monkeypatch):
    """Compiles plain functions whose executors record the stream handle behind the third packed address."""

    def make(function, *streams, **kwargs):
        compiled = kernels.compile_fake(function, *streams, options="", **kwargs)
        executor = JitExecutor.__new__(JitExecutor)
        executor.jit_module = compiled
        executor._has_cuda_result = False
        executor._get_invoke_packed_args_func = lambda exe_args: exe_args
        executor._pyir_spec = None
        executor.capi_func = lambda exe_args: recorder.note(
            ctypes.c_uint64.from_address(exe_args[2]).value if len(exe_args) > 2 else None
        )
        compiled._default_executor = executor
        monkeypatch.setattr(type(compiled), "to", lambda self, device=None: self._default_executor)
        return compiled

    return make


class GpuTensor:
    """Stands for a torch tensor on a GPU, of which there is none here; known to the binder by its exact type."""

    is_cuda = True

    def get_device(self):
        return 0


@pytest.fixture(autouse=True)
def _gpu_tensors(monkeypatch):
    monkeypatch.setattr(devices, "tensor_type", GpuTensor)


def gpu():
    return GpuTensor(), GpuTensor()


def tensors():
    return torch.zeros(8), torch.zeros(8)


STREAMS = {
    "None": None,
    "0": 0,
    "legacy": 1,
    "per-thread": 2,
    "CUstream(0)": cuda.CUstream(0),
    "cudaStream_t(0)": cudart.cudaStream_t(0),
    "c_void_p": ctypes.c_void_p(0),
    "fake": make_fake_stream(),
}


@pytest.mark.parametrize("value", STREAMS.values(), ids=STREAMS)
def test_default_class_streams_become_torchs_current_stream(shim, side, recorder, plain, value):
    ffi(kernels.with_stream, recorder, make_fake_stream())(*gpu(), value)
    plain(kernels.with_stream, make_fake_stream())(*tensors(), value)
    assert type(recorder.streams[0]) is cuda.CUstream
    assert [int(s) for s in recorder.streams] == [side, side]


class Subclass(cuda.CUstream):
    pass


class Protocol:
    def __init__(self, handle):
        self.handle = handle

    def __cuda_stream__(self):
        return (0, self.handle)


class TorchStreamType:
    """Has the class attribute by which a torch.cuda.Stream is known."""

    cuda_stream = 0

    def __init__(self, handle):
        self.cuda_stream = handle


EXPLICIT = {
    "int": int,
    "CUstream": cuda.CUstream,
    "cudaStream_t": cudart.cudaStream_t,
    "c_void_p": ctypes.c_void_p,
    "subclass": Subclass,
    "__cuda_stream__": Protocol,
    "torch.cuda.Stream": TorchStreamType,
}


@pytest.mark.parametrize("make", EXPLICIT.values(), ids=EXPLICIT)
def test_an_explicit_stream_of_any_kind_arrives_as_an_exact_custream(shim, sim, recorder, plain, make):
    handle = sim.new_stream().cuda_stream
    ffi(kernels.with_stream, recorder, make_fake_stream())(*gpu(), make(handle))
    plain(kernels.with_stream, make_fake_stream())(*tensors(), make(handle))
    assert type(recorder.streams[0]) is cuda.CUstream
    assert [int(s) for s in recorder.streams] == [handle, handle]


@pytest.mark.parametrize(
    "value", ["default", 1.5, -1, True, torch.zeros(1)], ids=["str", "float", "negative", "bool", "tensor"]
)
def test_garbage_is_refused_before_anything_is_launched(shim, recorder, plain, value):
    for compiled in (
        ffi(kernels.with_stream, recorder, make_fake_stream()),
        plain(kernels.with_stream, make_fake_stream()),
    ):
        with pytest.raises(TypeError, match=r"^stream: .*accepted: None, an int handle"):
            compiled(*tensors(), value)
    assert recorder.streams == []


def test_an_omitted_default_and_a_keyword_are_filled_in(shim, side, recorder, plain):
    ffi(kernels.default_none, recorder, make_fake_stream())(*gpu())
    plain(kernels.default_none, make_fake_stream())(*tensors())
    ffi(kernels.keyword_only, recorder, stream=make_fake_stream())(*gpu(), stream=None)
    plain(kernels.with_stream, make_fake_stream())(*tensors(), stream=None)
    assert [int(s) for s in recorder.streams] == [side] * 4


@pytest.mark.skipif(
    tuple(map(int, cutlass.__version__.split(".")[:2])) < (4, 6),
    reason="before 4.6 the DSL cannot compile a NamedTuple or dataclass with a stream in it",
)
def test_streams_nested_in_arguments_are_replaced_in_a_copy(shim, side, recorder):
    import cutlass.cute as cute

    x, out = tensors()
    for make, function in ((kernels.NamedParams, kernels.in_named_tuple), (kernels.DataParams, kernels.in_dataclass)):
        compiled = cute.compile(function, kernels.fake(), make(kernels.fake(), make_fake_stream()), options=kernels.FFI)
        compiled._kwargs_wrapper = lambda x, params: recorder.note(params.stream)
        given = make(out, None)
        compiled(x, given)
        assert given.stream is None
    assert [int(s) for s in recorder.streams] == [side, side]


@pytest.mark.parametrize("kind", ["tvm_ffi", "cute"])
def test_the_environment_stream_is_set_for_every_kind_of_tensor(shim, side, recorder, kind):
    convert = {
        "tvm_ffi": tvm_ffi.from_dlpack,
        "cute": lambda t: from_dlpack(t, enable_tvm_ffi=True),
    }[kind]
    ffi(kernels.no_stream, recorder)(*map(convert, tensors()))
    ffi(kernels.with_stream, recorder, kernels.env_stream())(*map(convert, tensors()))
    assert recorder.environments == [side, side]
    assert environment_stream() == 0


def test_the_environment_stream_is_set_around_a_plain_call(shim, side, recorder, plain):
    plain(kernels.no_stream)(*tensors())
    assert recorder.environments == [side]
    assert environment_stream() == 0


def test_the_environment_stream_is_back_after_an_exception(shim, side, recorder, plain):
    recorder.error = KeyError("from the launch")
    with pytest.raises(KeyError):
        ffi(kernels.no_stream, recorder)(*map(tvm_ffi.from_dlpack, tensors()))
    assert environment_stream() == 0
    with pytest.raises(Exception, match="from the launch"):
        plain(kernels.no_stream)(*tensors())
    assert environment_stream() == 0
    assert recorder.environments == [side, side]


def test_an_environment_stream_that_the_user_set_is_a_given_stream(shim, sim, side, recorder):
    mine = sim.new_stream().cuda_stream
    compiled = ffi(kernels.no_stream, recorder)
    tvm_ffi.core._env_set_current_stream(CUDA, 0, mine)
    try:
        compiled(*map(tvm_ffi.from_dlpack, tensors()))
        assert environment_stream() == mine
    finally:
        tvm_ffi.core._env_set_current_stream(CUDA, 0, 0)
    assert recorder.environments == [mine]


def test_generated_arguments_follow_torch_at_every_run(shim, sim, recorder, plain):
    compiled = plain(kernels.with_stream, make_fake_stream())
    exe_args, _ = compiled.generate_execution_args(*tensors(), None)
    kept = list(exe_args)
    streams = [sim.new_stream() for _ in range(3)]
    for stream in streams:
        with sim.stream(stream):
            compiled.to().run_compiled_program(kept)
    assert recorder.streams == [s.cuda_stream for s in streams]
    assert kept == exe_args, "a kept list belongs to the caller and is not written to"


def test_two_threads_run_the_same_generated_arguments_on_their_own_streams(shim, sim, recorder, plain):
    compiled = plain(kernels.with_stream, make_fake_stream())
    exe_args, _ = compiled.generate_execution_args(*tensors(), None)
    barrier, seen = threading.Barrier(4), {}

    def work(stream):
        with sim.stream(stream):
            barrier.wait()
            for _ in range(50):
                compiled.to().run_compiled_program(exe_args)
            seen[stream.cuda_stream] = environment_stream()

    streams = [sim.new_stream() for _ in range(4)]
    threads = [threading.Thread(target=work, args=(s,)) for s in streams]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {s: recorder.streams.count(s) for s in seen} == {s.cuda_stream: 50 for s in streams}


@pytest.mark.parametrize("mode", ["bind", "strict"])
def test_a_stream_cached_before_the_capture_is_rescued_or_refused(sim, recorder, plain, mode):
    stale, capturing = sim.new_stream().cuda_stream, sim.new_stream()
    with streamshim.install(mode):
        compiled = plain(kernels.with_stream, make_fake_stream())
        with sim.capture(sim.graph(), capturing):
            if mode == "bind":
                with pytest.warns(streamshim.RescuedLaunchWarning, match="with_stream"):
                    compiled(*tensors(), cuda.CUstream(stale))
            else:
                with pytest.raises(streamshim.WrongStreamError, match=hex(stale)):
                    compiled(*tensors(), cuda.CUstream(stale))
    assert recorder.streams == ([capturing.cuda_stream] if mode == "bind" else [])


def test_check_mode_refuses_a_launch_without_a_stream_at_its_line(sim, recorder, plain):
    with streamshim.install("check"):
        for compiled in (ffi(kernels.no_stream, recorder), plain(kernels.no_stream)):
            compiled(*tensors())
            with sim.capture(sim.graph(), sim.new_stream()), pytest.raises(streamshim.WrongStreamError) as refused:
                compiled(*tensors())
            assert refused.value.report.site.file.endswith("test_cute_calls.py")
            assert "cute_kernels.py" in refused.value.report.launch
    assert len(recorder.streams) == 2


def test_a_kernel_compiled_before_install_without_a_stream_is_refused_in_a_capture(sim, recorder, plain):
    made = [ffi(kernels.no_stream, recorder), plain(kernels.no_stream)]
    with streamshim.install("bind"):
        for compiled in made:
            compiled(*tensors())
            with sim.capture(sim.graph(), sim.new_stream()):
                with pytest.raises(streamshim.WrongStreamError, match="compiled before streamshim"):
                    compiled(*tensors())
    assert len(recorder.streams) == 2


def test_a_kernel_compiled_before_install_with_a_stream_follows_torch(sim, side, recorder, plain):
    made = [ffi(kernels.with_stream, recorder, make_fake_stream()), plain(kernels.with_stream, make_fake_stream())]
    with streamshim.install("bind"):
        for compiled in made:
            compiled(*tensors(), cuda.CUstream(0))
    assert [int(s) for s in recorder.streams] == [side, side]


def test_after_uninstall_the_dsl_gets_what_the_caller_passes(sim, side, recorder, plain):
    with streamshim.install("bind"):
        made = [ffi(kernels.with_stream, recorder, make_fake_stream()), plain(kernels.with_stream, make_fake_stream())]
    for compiled in made:
        compiled(*tensors(), cuda.CUstream(0))
    assert [int(s) for s in recorder.streams] == [0, 0]
    assert gate.mode().value == "off"


def test_the_wrong_number_of_arguments_is_the_dsls_own_error(shim, recorder):
    compiled = kernels.compile_fake(kernels.with_stream, make_fake_stream())
    with pytest.raises(TypeError):
        compiled(torch.zeros(8))
