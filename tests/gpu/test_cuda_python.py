"""cuda-python on a GPU: NVRTC kernels, copies and sets in a capture, and in eager mode on a side stream."""

import contextlib
import ctypes
import struct

import pytest
import torch

pytest.importorskip("cuda.bindings", reason="cuda-bindings is not installed")

from cuda.bindings import driver, nvrtc, runtime
from cuda.bindings.driver import cuLaunchKernel as imported_by_name
from harness import DELAY, RIGHT, N, captured, eager_rounds, fresh_stream, is_missing

import streamshim

THREADS = 32
BLOCKS = (N + THREADS - 1) // THREADS
SOURCE = r"""
extern "C" __global__ void add_one(const float* x, float* out, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) out[i] = x[i] + 1.0f;
}

extern "C" __global__ void add_cluster_size(const float* x, float* out, int n) {
  unsigned size;
  asm("mov.u32 %0, %%cluster_nctaid.x;" : "=r"(size));
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) out[i] = x[i] + static_cast<float>(size);
}
"""
COPIED = (-1.0, 41.0, 7.0)
ONE_AND_A_HALF = struct.unpack("I", struct.pack("f", 1.5))[0]


def check(result):
    """What a function returned, without its error code."""
    error, *values = result
    assert int(error) == 0, error
    return values[0] if values else None


class Protocol:
    def __init__(self, handle):
        self.handle = handle

    def __cuda_stream__(self):
        return (0, self.handle)


@pytest.fixture(scope="module")
def functions():
    """The kernels, loaded before anything is installed."""
    torch.zeros(1, device="cuda")  # makes the context current
    major, minor = torch.cuda.get_device_capability()
    program = check(nvrtc.nvrtcCreateProgram(SOURCE.encode(), b"add_one.cu", 0, [], []))
    options = [f"--gpu-architecture=sm_{major}{minor}".encode()]
    check(nvrtc.nvrtcCompileProgram(program, len(options), options))
    cubin = b" " * check(nvrtc.nvrtcGetCUBINSize(program))
    check(nvrtc.nvrtcGetCUBIN(program, cubin))
    module = check(driver.cuModuleLoadData(cubin))
    return {name: check(driver.cuModuleGetFunction(module, name.encode())) for name in ("add_one", "add_cluster_size")}


def parameters(x, out):
    return ((x.data_ptr(), out.data_ptr(), N), (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int))


def launcher(functions, stream):
    """``cuLaunchKernel`` with what ``stream()`` returns."""

    def call(x, out):
        arguments = (functions["add_one"], BLOCKS, 1, 1, THREADS, 1, 1, 0, stream(), parameters(x, out), 0)
        check(driver.cuLaunchKernel(*arguments))

    return call


def config_launcher(config, function):
    """``cuLaunchKernelEx`` with one config for all calls."""
    return lambda x, out: check(driver.cuLaunchKernelEx(config, function, parameters(x, out), 0))


def make_config(stream=0, cluster=0):
    config = driver.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = BLOCKS, 1, 1
    config.blockDimX, config.blockDimY, config.blockDimZ = THREADS, 1, 1
    config.hStream = driver.CUstream(stream)
    if cluster:
        attribute = driver.CUlaunchAttribute()
        attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
        attribute.value.clusterDim.x, attribute.value.clusterDim.y, attribute.value.clusterDim.z = cluster, 1, 1
        config.attrs, config.numAttrs = [attribute], 1
    return config


def current():
    return torch.cuda.current_stream().cuda_stream


#: Wrong without the shim.
DEFAULT_STREAMS = {
    "0": lambda: 0,
    "None": lambda: None,
    "legacy": lambda: 1,
    "per-thread": lambda: driver.CUstream(2),
    "CUstream(0)": lambda: driver.CUstream(0),
}
#: Right without the shim, or not taken at all.
SOUND_STREAMS = {
    "current handle": current,
    "current CUstream": lambda: driver.CUstream(current()),
    "current torch stream": torch.cuda.current_stream,
    "protocol": lambda: Protocol(current()),
    "protocol, NULL": lambda: Protocol(0),
    "c_void_p": lambda: ctypes.c_void_p(0),
}


@pytest.mark.parametrize("name", DEFAULT_STREAMS)
def test_a_default_stream_is_missing_from_the_graph_without_the_shim(functions, name):
    assert is_missing(captured(launcher(functions, DEFAULT_STREAMS[name])))


@pytest.mark.parametrize("name", [*DEFAULT_STREAMS, *SOUND_STREAMS])
def test_captured(functions, shim, name):
    assert captured(launcher(functions, {**DEFAULT_STREAMS, **SOUND_STREAMS}[name])) == RIGHT


@pytest.mark.parametrize("name", ["0", "per-thread", "current CUstream", "protocol, NULL"])
def test_eager_on_a_side_stream(functions, shim, name):
    assert eager_rounds(launcher(functions, {**DEFAULT_STREAMS, **SOUND_STREAMS}[name])) == 200


def test_the_stream_by_keyword(functions, shim):
    def call(x, out):
        arguments = (functions["add_one"], BLOCKS, 1, 1, THREADS, 1, 1, 0)
        check(driver.cuLaunchKernel(*arguments, kernelParams=parameters(x, out), extra=0, hStream=0))

    assert captured(call) == RIGHT


def test_a_name_imported_before_install(functions, shim):
    def call(x, out):
        check(imported_by_name(functions["add_one"], BLOCKS, 1, 1, THREADS, 1, 1, 0, 0, parameters(x, out), 0))

    assert imported_by_name is driver.cuLaunchKernel
    assert captured(call) == RIGHT
    assert eager_rounds(call) == 200
    streamshim.uninstall()
    assert imported_by_name is driver.cuLaunchKernel
    assert is_missing(captured(call))


def test_cooperative_launch(functions, shim):
    def call(x, out):
        arguments = (functions["add_one"], BLOCKS, 1, 1, THREADS, 1, 1, 0, 0, parameters(x, out))
        check(driver.cuLaunchCooperativeKernel(*arguments))

    assert captured(call) == RIGHT


# The config of cuLaunchKernelEx


def test_one_config_for_all_launches(functions, shim):
    config = make_config()
    call = config_launcher(config, functions["add_one"])
    assert captured(call) == RIGHT
    assert eager_rounds(call) == 200
    assert captured(call) == RIGHT
    assert int(config.hStream) == 0


def test_the_attributes_of_a_config_arrive(functions, shim):
    """The kernel adds the size of its cluster, which only an attribute can make 2."""
    call = config_launcher(make_config(cluster=2), functions["add_cluster_size"])
    assert captured(call) == (-1.0, 43.0, 9.0)
    assert eager_rounds(call, rounds=20, add=2.0) == 20


def test_a_config_that_is_changed_between_launches(functions, shim):
    """As engines do it: one config, whose stream is set before each launch."""
    config = make_config()

    def call(x, out):
        config.hStream = driver.CUstream(current())
        check(driver.cuLaunchKernelEx(config, functions["add_one"], parameters(x, out), 0))

    assert captured(call) == RIGHT


# Copies, sets, memory


def copies():
    def dtod(x, out):
        check(driver.cuMemcpyDtoDAsync(out.data_ptr(), x.data_ptr(), 4 * N, 0))

    def any_to_any(x, out):
        check(driver.cuMemcpyAsync(out.data_ptr(), x.data_ptr(), 4 * N, driver.CUstream(1)))

    def of_the_runtime(x, out):
        kind = runtime.cudaMemcpyKind.cudaMemcpyDeviceToDevice
        check(runtime.cudaMemcpyAsync(out.data_ptr(), x.data_ptr(), 4 * N, kind, 0))

    return {f.__name__: f for f in (dtod, any_to_any, of_the_runtime)}


@pytest.mark.parametrize("name", copies())
def test_copies_with_a_default_stream(shim, name):
    assert captured(copies()[name]) == COPIED
    assert eager_rounds(copies()[name], add=0.0) == 200


def test_sets_with_a_default_stream(shim):
    assert captured(lambda x, out: check(driver.cuMemsetD32Async(out.data_ptr(), ONE_AND_A_HALF, N, 0))) == (
        -1.0, 1.5, 1.5
    )  # fmt: skip
    assert captured(lambda x, out: check(runtime.cudaMemsetAsync(out.data_ptr(), 0, 4 * N, 0))) == (-1.0, 0.0, 0.0)


def test_memory_in_stream_order_goes_where_the_kernels_go(functions, shim):
    """Allocated, used and freed on the default stream; freed anywhere else it would be freed under the kernel."""

    def call(x, out):
        memory = check(driver.cuMemAllocAsync(4 * N, 0))
        check(driver.cuMemcpyDtoDAsync(memory, x.data_ptr(), 4 * N, 0))
        values = ((int(memory), out.data_ptr(), N), (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int))
        check(driver.cuLaunchKernel(functions["add_one"], BLOCKS, 1, 1, THREADS, 1, 1, 0, 0, values, 0))
        check(driver.cuMemFreeAsync(memory, 0))

    assert eager_rounds(call) == 200
    assert captured(call) == RIGHT


# Explicit streams


def test_a_fork(functions, shim):
    side = fresh_stream()

    def call(x, out):
        main = torch.cuda.current_stream()
        side.wait_stream(main)
        launcher(functions, lambda: side.cuda_stream)(x, out)
        main.wait_stream(side)

    assert captured(call) == RIGHT


def test_a_side_stream_on_purpose_runs_beside_the_current_one(functions, shim):
    x, out = torch.full((N,), 5.0, device="cuda"), torch.zeros(N, device="cuda")
    main, side = torch.cuda.Stream(), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(main):
        torch.cuda._sleep(DELAY * 100)
        launcher(functions, lambda: side.cuda_stream)(x, out)
    side.synchronize()
    assert not main.query()
    with torch.cuda.stream(side):
        assert out.tolist() == [6.0] * N
    torch.cuda.synchronize()


@pytest.mark.parametrize("form", ["argument", "config"])
def test_a_stale_stream_is_rescued(functions, shim, form):
    stale = fresh_stream().cuda_stream
    if form == "argument":
        call = launcher(functions, lambda: stale)
    else:
        call = config_launcher(make_config(stale), functions["add_one"])
    with pytest.warns(streamshim.RescuedLaunchWarning):
        assert captured(call) == RIGHT


def test_strict_refuses_by_name_and_the_capture_stays_valid(functions):
    with streamshim.install("strict"):
        stale = fresh_stream().cuda_stream

        def call(x, out):
            with pytest.raises(streamshim.WrongStreamError, match=r"cuLaunchKernel.*, kernel 'add_one'"):
                launcher(functions, lambda: stale)(x, out)
            launcher(functions, lambda: 0)(x, out)

        assert captured(call, warm_up=False) == RIGHT


def test_check_mode_tells_what_is_wrong_without_the_shim(functions):
    with streamshim.install("check"):
        refused = []

        def attempt(x, out):
            try:
                launcher(functions, lambda: 0)(x, out)
            except streamshim.WrongStreamError as error:
                refused.append(error)
            out.add_(0.0)

        captured(attempt)
        assert len(refused) == 1
        assert captured(launcher(functions, current)) == RIGHT


# cuda.core


@pytest.fixture(scope="module")
def core():
    return pytest.importorskip("cuda.core", reason="cuda-core is not installed")


@pytest.fixture(scope="module")
def kernel(core):
    torch.zeros(1, device="cuda")
    core.Device().set_current()
    major, minor = torch.cuda.get_device_capability()
    program = core.Program(SOURCE, "c++", core.ProgramOptions(arch=f"sm_{major}{minor}"))
    return program.compile("cubin").get_kernel("add_one")


def core_launcher(core, kernel, stream):
    config = core.LaunchConfig(grid=BLOCKS, block=THREADS)
    return lambda x, out: core.launch(stream(), config, kernel, x.data_ptr(), out.data_ptr(), ctypes.c_int(N))


CORE_STREAMS = {
    "default_stream": lambda core: core.Device().default_stream,
    "LEGACY_DEFAULT_STREAM": lambda core: core.LEGACY_DEFAULT_STREAM,
    "PER_THREAD_DEFAULT_STREAM": lambda core: core.PER_THREAD_DEFAULT_STREAM,
    "torch's default stream": lambda core: torch.cuda.default_stream(),
    "protocol": lambda core: Protocol(0),
}


@pytest.mark.parametrize("name", ["default_stream", "LEGACY_DEFAULT_STREAM", "PER_THREAD_DEFAULT_STREAM"])
def test_core_default_streams_are_missing_from_the_graph_without_the_shim(core, kernel, name):
    assert is_missing(captured(core_launcher(core, kernel, lambda: CORE_STREAMS[name](core))))


@pytest.mark.parametrize("name", CORE_STREAMS)
def test_core_launch_with_a_default_stream(core, kernel, shim, name):
    call = core_launcher(core, kernel, lambda: CORE_STREAMS[name](core))
    assert captured(call) == RIGHT
    assert eager_rounds(call) == 200


def test_core_launch_with_the_current_stream(core, kernel, shim):
    for stream in (torch.cuda.current_stream, lambda: core.Stream.from_handle(current()), lambda: None):
        assert captured(core_launcher(core, kernel, stream)) == RIGHT


def test_core_launch_while_torch_is_on_its_default_stream(core, kernel, shim):
    """The current handle is 0 then, which cuda.core must accept."""
    x, out = torch.full((N,), 5.0, device="cuda"), torch.zeros(N, device="cuda")
    assert current() == 0
    for name in CORE_STREAMS:
        out.zero_()
        core_launcher(core, kernel, lambda name=name: CORE_STREAMS[name](core))(x, out)
        assert out.tolist() == [6.0] * N


def test_core_launch_with_a_stale_stream(core, kernel, shim):
    stale = core.Stream.from_handle(fresh_stream().cuda_stream)
    with pytest.warns(streamshim.RescuedLaunchWarning, match=r"cuda\.core\.launch"):
        assert captured(core_launcher(core, kernel, lambda: stale)) == RIGHT


def test_core_graph_builders_are_left_alone(core, kernel, shim):
    x, out = torch.full((N,), 5.0, device="cuda"), torch.zeros(N, device="cuda")
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side), contextlib.closing(core.Device().create_graph_builder()) as builder:
        builder.begin_building()
        core_launcher(core, kernel, lambda: builder)(x, out)
        graph = builder.end_building().complete()
        assert out.tolist() == [0.0] * N
        graph.launch(core.Stream.from_handle(side.cuda_stream))
        assert out.tolist() == [6.0] * N
