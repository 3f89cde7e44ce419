"""The real cuda.bindings and cuda.core without a GPU, over the simulator's streams.

What a launch does is played by the simulator: the function at the bottom is replaced before streamshim is installed,
and launches the simulator's kernel at the handle that arrives. Without a driver the real functions get as far as
looking for it, which is after they have converted their arguments.
"""

import ctypes
import functools

import pytest

pytest.importorskip("cuda.core", reason="cuda-core is not installed")

import cuda.core
import cute_kernels
from cuda.bindings import driver
from cuda.bindings import runtime as cudart
from cuda.core import LEGACY_DEFAULT_STREAM, LaunchConfig, _launcher
from cuda_recorders import Protocol, Recorder

import streamshim
from streamshim import WrongStreamError
from streamshim.binders.cuda_functions import TABLES
from streamshim.streams import handle_of


class Library:
    """Somebody's code on top of cuda-python: adds 1 to a buffer in place, in one of several ways."""

    def __init__(self, sim, monkeypatch):
        self.config = driver.CUlaunchConfig()
        self.config.gridDimX = 1

        def play(module, name, buffer_at, handle):
            @functools.wraps(getattr(module, name))
            def bottom(*args):
                sim.launch(_add_one, args[buffer_at], stream=handle(args), name=name)
                return (0,)

            monkeypatch.setattr(module, name, bottom)

        play(driver, "cuLaunchKernel", 9, lambda args: int(driver.CUstream(args[8] or 0)))
        play(driver, "cuLaunchKernelEx", 2, lambda args: int(args[0].hStream))
        play(cudart, "cudaMemcpyAsync", 0, lambda args: int(driver.CUstream(args[4] or 0)))
        play(_launcher, "launch", 3, lambda args: args[0].__cuda_stream__()[1])
        monkeypatch.setattr(cuda.core, "launch", _launcher.launch)

    def kernel(self, x, stream):
        driver.cuLaunchKernel(0, 1, 1, 1, 1, 1, 1, 0, stream, x, 0)

    def kernel_ex(self, x, stream):
        self.config.hStream = stream
        driver.cuLaunchKernelEx(self.config, 0, x, 0)
        assert int(self.config.hStream) == handle_of(stream)

    def copy(self, x, stream):
        cudart.cudaMemcpyAsync(x, 0, 4, cudart.cudaMemcpyKind.cudaMemcpyDeviceToDevice, stream)

    def core(self, x, stream):
        cuda.core.launch(Protocol(handle_of(stream)), LaunchConfig(grid=1, block=1), "kernel", x)


def _add_one(buffer):
    buffer.values[:] = [value + 1.0 for value in buffer.values]


WAYS = ("kernel", "kernel_ex", "copy", "core")


@pytest.fixture
def library(sim, monkeypatch):
    return Library(sim, monkeypatch)


def replayed(sim, call):
    """The value right after the capture, and after a replay with another input."""
    x, graph = sim.buffer([1.0]), sim.graph()
    with sim.capture(graph):
        call(x)
    sim.synchronize()
    seen = list(x.values)
    x.values[:] = [40.0]
    graph.replay()
    return seen + sim.read(x)


IN_THE_GRAPH, MISSING = [1.0, 41.0], [2.0, 40.0]


@pytest.mark.parametrize("way", WAYS)
def test_a_default_stream_is_missing_from_the_graph_without_the_shim(sim, library, way):
    call = getattr(library, way)
    assert replayed(sim, lambda x: call(x, 0)) == MISSING
    with streamshim.install():
        assert replayed(sim, lambda x: call(x, 0)) == IN_THE_GRAPH
    assert replayed(sim, lambda x: call(x, 0)) == MISSING


@pytest.mark.parametrize("way", WAYS)
def test_the_input_that_comes_late_is_waited_for(sim, library, shim, way):
    x = sim.buffer([0.0])
    with sim.stream(sim.new_stream()):
        for value in range(20):
            sim.delay()
            x.fill(float(value))
            getattr(library, way)(x, 0)
            assert sim.read(x) == [value + 1.0]


@pytest.mark.parametrize("way", WAYS)
def test_a_stale_stream(sim, library, way):
    stale, call = sim.new_stream().cuda_stream, getattr(library, way)
    with streamshim.install():
        with pytest.warns(streamshim.RescuedLaunchWarning):
            assert replayed(sim, lambda x: call(x, stale)) == IN_THE_GRAPH
    with streamshim.install("strict"):

        def refused(x):
            with pytest.raises(WrongStreamError):
                call(x, stale)
            call(x, 0)

        assert replayed(sim, refused) == IN_THE_GRAPH


@pytest.mark.parametrize("way", WAYS)
def test_a_side_stream_on_purpose(sim, library, shim, way):
    """As engines prefetch: eagerly it runs beside the current stream, in a capture as a fork that is joined."""
    side, call = sim.new_stream(), getattr(library, way)
    x = sim.buffer([0.0])
    with sim.stream(sim.new_stream()):
        sim.delay()
        call(x, side.cuda_stream)
        side.synchronize()
        assert x.values == [1.0]

    def forked(x):
        main = sim.current_stream()
        side.wait_stream(main)
        call(x, side.cuda_stream)
        main.wait_stream(side)

    assert replayed(sim, forked) == IN_THE_GRAPH


# The real functions, as far as they go without a driver

STREAMS = {
    "NULL": lambda handle: 0,
    "none": lambda handle: None,
    "int": lambda handle: handle,
    "c_void_p": ctypes.c_void_p,
    "protocol": Protocol,
    "CUstream": driver.CUstream,
    "cudaStream_t": cudart.cudaStream_t,
}


def no_driver():
    return cudart.cudaGetDeviceCount()[0] != cudart.cudaError_t.cudaSuccess


@pytest.mark.parametrize("kind", STREAMS)
def test_the_real_functions_take_what_they_get(sim, shim, kind):
    """A stream that they do not take would be a TypeError, raised before they look for the driver."""
    if not no_driver():
        pytest.skip("there is a driver, and these are no real arguments")
    current = sim.new_stream()
    stream = STREAMS[kind](current.cuda_stream)
    with sim.stream(current):
        for call in (
            lambda: driver.cuLaunchKernel(0, 1, 1, 1, 1, 1, 1, 0, stream, 0, 0),
            lambda: driver.cuMemcpyDtoDAsync(0, 0, 4, stream),
            lambda: driver.cuMemsetD32Async(0, 0, 4, hStream=stream),
            lambda: driver.cuGraphLaunch(0, stream),
        ):
            with pytest.raises(Exception, match="driver"):
                call()
        assert cudart.cudaMemsetAsync(0, 0, 4, stream)[0] == cudart.cudaError_t.cudaErrorInsufficientDriver


def test_the_real_launch_takes_what_it_gets(sim, shim):
    if not no_driver():
        pytest.skip("there is a driver, and these are no real arguments")
    with sim.stream(sim.new_stream()):
        with pytest.raises(TypeError, match="'kernel' has incorrect type"):
            cuda.core.launch(LEGACY_DEFAULT_STREAM, LaunchConfig(grid=1, block=1), "no kernel")


def test_the_dsl_does_not_compile_through_these_functions(sim, monkeypatch):
    modules = {"cuda.bindings.driver": driver, "cuda.bindings.runtime": cudart}
    recorders = [
        Recorder(monkeypatch, modules[module], name)
        for module, table in TABLES.items()
        for name in table
        if hasattr(modules[module], name)
    ]
    with streamshim.install():
        for options in (cute_kernels.FFI, ""):
            cute_kernels.compile_fake(cute_kernels.no_stream, options=options)
    assert [r.name for r in recorders if r.calls] == []
