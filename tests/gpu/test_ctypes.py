"""Kernels in a shared object, called through ctypes, on a GPU: in captures, and in eager mode on a side stream.

The library is built from foreign.cu with nvcc, with the static and with the shared CUDA runtime.
"""

import ctypes
import os
import shutil
import subprocess
import threading
from pathlib import Path

import pytest
import torch
from harness import DELAY, RIGHT, N, captured, eager_rounds, fresh_stream, is_missing

import streamshim

Pointer, Int = ctypes.c_void_p, ctypes.c_int
FUNCTIONS = {"stream_last": -1, "stream_first": 0, "no_stream": None}
#: A library may be built where there is a compiler, and used where there is a GPU.
BUILT = os.environ.get("STREAMSHIM_FOREIGN_LIBRARIES")


@pytest.fixture(scope="session")
def libraries(tmp_path_factory):
    """The folder with both libraries."""
    if BUILT:
        return Path(BUILT)
    nvcc = shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")
    if nvcc is None:
        pytest.skip("needs nvcc")
    folder = tmp_path_factory.mktemp("foreign")
    source = Path(__file__).with_name("foreign.cu")
    major, minor = torch.cuda.get_device_capability()
    # The libraries of the compiler's own CUDA, should torch have another.
    lib64 = Path(nvcc).resolve().parents[1] / "lib64"
    common = [nvcc, "-O2", f"-arch=sm_{major}{minor}", "-shared", "-Xcompiler", "-fPIC", "-Xlinker", f"-rpath={lib64}"]
    for cudart in ("static", "shared"):
        built = str(folder / f"libforeign-{cudart}.so")
        subprocess.run([*common, "-cudart", cudart, "-o", built, str(source)], check=True)
    return folder


@pytest.fixture(params=["static", "shared"])
def path(libraries, request):
    """A library's path; nothing of it is bound."""
    yield str(libraries / f"libforeign-{request.param}.so")
    _forget()


def _forget():
    for target in list(_bound):
        streamshim.unbind(target)
    _bound.clear()


_bound = []


def bind(target, *args, **kwargs):
    """As `streamshim.bind`, until the end of the test."""
    streamshim.bind(target, *args, **kwargs)
    _bound.append(target)
    return target


def load(path):
    library = ctypes.CDLL(path)
    library.stream_last.argtypes = library.forgets_once.argtypes = [Pointer, Pointer, Int, Pointer]
    library.stream_first.argtypes = [Pointer, Pointer, Pointer, Int]
    library.no_stream.argtypes = library.own_stream.argtypes = [Pointer, Pointer, Int]
    library.kernel_symbol.restype = Pointer
    return library


def checked(status):
    assert status == 0, f"CUDA error {status}"


def last(library, *stream):
    return lambda x, out: checked(library.stream_last(x.data_ptr(), out.data_ptr(), N, *stream))


def first(library, *stream):
    return lambda x, out: checked(library.stream_first(*stream, x.data_ptr(), out.data_ptr(), N))


def none(library, function="no_stream"):
    return lambda x, out: checked(getattr(library, function)(x.data_ptr(), out.data_ptr(), N))


def current():
    return torch.cuda.current_stream().cuda_stream


# Where the stream is, and what is passed


@pytest.mark.parametrize("call", [last, first])
def test_without_the_shim_the_kernel_is_missing_from_the_graph(path, call):
    assert is_missing(captured(call(load(path), None)))
    assert is_missing(captured(none(load(path))))


GIVEN = {
    "left out": (), "None": (None,), "NULL": (0,), "legacy": (1,), "per-thread": (2,), "c_void_p(0)": (Pointer(0),),
}  # fmt: skip


@pytest.mark.parametrize("given", GIVEN.values(), ids=GIVEN)
@pytest.mark.parametrize("call", [last, first])
def test_with_the_shim_the_kernel_is_in_the_graph(shim, path, call, given):
    library = bind(load(path), FUNCTIONS)
    assert captured(call(library, *given)) == RIGHT
    assert eager_rounds(call(library, *given), rounds=20) == 20


@pytest.mark.parametrize("call", [last, first])
def test_two_hundred_of_two_hundred_rounds_are_right(shim, path, call):
    assert eager_rounds(call(bind(load(path), FUNCTIONS), None)) == 200


@pytest.mark.parametrize("call", [last, none])
def test_without_the_shim_rounds_are_wrong(path, call):
    library = load(path)
    assert eager_rounds(last(library, None) if call is last else none(library), rounds=20) < 20


@pytest.mark.parametrize("call", [last, first])
def test_the_current_stream_given_in_every_form(shim, path, call):
    library = bind(load(path), FUNCTIONS)
    for form in (current, lambda: Pointer(current()), torch.cuda.current_stream):
        assert captured(lambda x, out, form=form: call(library, form())(x, out)) == RIGHT


def test_without_argtypes_the_handle_arrives_whole(shim, path):
    library = ctypes.CDLL(path)
    bind(library, {"stream_last": {"stream": -1, "nargs": 4}})

    def call(x, out):
        checked(library.stream_last(Pointer(x.data_ptr()), Pointer(out.data_ptr()), N))

    assert captured(call) == RIGHT
    assert eager_rounds(call, rounds=20) == 20


def test_a_library_that_somebody_else_loads_later(shim, path):
    bind("libforeign-*.so", FUNCTIONS)
    library = load(path)
    assert captured(last(library, None)) == RIGHT
    assert eager_rounds(last(library, None), rounds=20) == 20


def test_a_library_that_was_loaded_before(path):
    library = load(path)
    function = library["stream_last"]
    function.argtypes = library.stream_last.argtypes
    bind("libforeign-*.so", FUNCTIONS)
    with streamshim.install():
        assert captured(last(library, None)) == RIGHT
        assert captured(lambda x, out: checked(function(x.data_ptr(), out.data_ptr(), N, 0))) == RIGHT
    assert is_missing(captured(last(library, None)))


def test_a_lone_function_pointer(shim, path):
    library = load(path)
    prototype = ctypes.CFUNCTYPE(Int, Pointer, Pointer, Int, Pointer)
    pointer = prototype(ctypes.cast(library.stream_last, Pointer).value)
    bind(pointer)
    assert captured(lambda x, out: checked(pointer(x.data_ptr(), out.data_ptr(), N))) == RIGHT


def test_a_declared_stream_follows_torch(shim, path):
    library = load(path)
    library.stream_last.argtypes = [Pointer, Pointer, Int, streamshim.Stream]
    assert captured(last(library, None)) == RIGHT
    assert eager_rounds(last(library, None), rounds=20) == 20


def test_tensors_as_they_are(shim, path):
    library = bind(load(path), {"stream_last": {"stream": -1, "device": "tensors", "tensors": "data_ptr"}})
    assert captured(lambda x, out: checked(library.stream_last(x, out, N))) == RIGHT


# Functions without a stream


def test_eager_on_a_side_stream_a_function_without_a_stream_is_in_order(shim, path):
    assert eager_rounds(none(bind(load(path), FUNCTIONS))) == 200


def test_what_comes_after_a_function_without_a_stream_waits_for_it(shim, path):
    """The result is read on the side stream, and the function is behind a delay on the NULL stream."""
    library = bind(load(path), FUNCTIONS)
    x, out, doubled = (torch.zeros(N, device="cuda") for _ in range(3))
    torch.cuda.synchronize()
    with torch.cuda.stream(fresh_stream()) as side:
        for i in range(50):
            out.fill_(float("nan"))
            x.fill_(float(i))
            with torch.cuda.stream(torch.cuda.default_stream()):
                torch.cuda._sleep(DELAY // 10)
            none(library)(x, out)
            torch.mul(out, 2.0, out=doubled)
            torch.cuda.current_stream().synchronize()
            assert doubled.tolist() == [2.0 * (i + 1)] * N
    del side


def test_on_the_default_stream_nothing_is_ordered(shim, path):
    library = bind(load(path), FUNCTIONS)
    x, out = torch.full((N,), 41.0, device="cuda"), torch.zeros(N, device="cuda")
    none(library)(x, out)
    assert out.tolist() == [42.0] * N


WITHOUT = ["no_stream", "forgets_once", "own_stream"]


@pytest.mark.parametrize("mode", ["bind", "strict"])
def test_b04_what_takes_no_stream_is_moved_into_the_capture_or_refused(path, mode):
    """Of four entry points one can be bound; two are moved: none, and one launch without it. One is refused, since it
    has a stream of its own. A function that uses its stream for some launches only is bound as one without a stream.
    """
    library = load(path)
    bind(library, {"stream_last": -1, **dict.fromkeys(WITHOUT)})
    with streamshim.install(mode):
        assert captured(none(library)) == RIGHT
        assert captured(lambda x, out: checked(library.forgets_once(x.data_ptr(), out.data_ptr(), N, None))) == RIGHT

        def call(x, out):
            with pytest.raises(streamshim.WrongStreamError) as refused:
                none(library, "own_stream")(x, out)
            (escape,) = refused.value.report.escapes
            assert "add_one" in escape.what
            assert escape.site.file.endswith("test_ctypes.py")
            torch.add(x, 1.0, out=out)

        assert captured(call, warm_up=False)[1:] == RIGHT[1:]


def test_b04_in_check_mode_it_is_refused_and_the_capture_stays_valid(path):
    library = load(path)
    bind(library, {"stream_last": -1, **dict.fromkeys(WITHOUT)})
    label = f"{Path(path).name}: "
    with streamshim.install("check"):
        x, out = torch.full((N,), 41.0, device="cuda"), torch.zeros(N, device="cuda")
        for name in WITHOUT:
            extra = (None,) if name == "forgets_once" else ()
            checked(getattr(library, name)(x.data_ptr(), out.data_ptr(), N, *extra))
            torch.cuda.synchronize()
            assert out.tolist() == [42.0] * N

        def call(x, out):
            for name in WITHOUT:
                extra = (None,) if name == "forgets_once" else ()
                with pytest.raises(streamshim.WrongStreamError) as refused:
                    getattr(library, name)(x.data_ptr(), out.data_ptr(), N, *extra)
                assert refused.value.report.launch.startswith(label + name)
                assert refused.value.report.site.file.endswith("test_ctypes.py")
            last(library, current())(x, out)

        assert captured(call, warm_up=False) == RIGHT


@pytest.mark.parametrize("given", [0, None])
def test_one_launch_of_two_without_the_stream_is_right_eagerly(shim, path, given):
    """Both launches on the NULL stream, which is ordered on both sides."""
    library = bind(load(path), {"forgets_once": None})
    assert eager_rounds(lambda x, out: checked(library.forgets_once(x.data_ptr(), out.data_ptr(), N, given))) == 200


def test_one_launch_of_two_without_the_stream_is_missing_if_it_is_bound(shim, path):
    """The limit: filling the stream in is no proof that all launches use it."""
    library = bind(load(path), {"forgets_once": -1})
    seen = captured(lambda x, out: checked(library.forgets_once(x.data_ptr(), out.data_ptr(), N)))
    assert seen != RIGHT


# Stale streams


@pytest.mark.parametrize("mode", ["bind", "strict"])
def test_a_handle_cached_before_the_capture(path, mode):
    library = bind(load(path), FUNCTIONS)
    stale = fresh_stream()
    call = last(library, stale.cuda_stream)
    with streamshim.install(mode):
        if mode == "bind":
            with pytest.warns(streamshim.RescuedLaunchWarning, match=r"libforeign-.*: stream_last"):
                assert captured(call, warm_up=False) == RIGHT
        else:
            with pytest.raises(streamshim.WrongStreamError, match=hex(stale.cuda_stream)):
                captured(call, warm_up=False)
        assert captured(last(library, None)) == RIGHT


def test_a_fork_keeps_its_stream(shim, path):
    library = bind(load(path), FUNCTIONS)
    side = fresh_stream()

    def call(x, out):
        side.wait_stream(torch.cuda.current_stream())
        last(library, side.cuda_stream)(x, out)
        torch.cuda.current_stream().wait_stream(side)

    assert captured(call) == RIGHT


# Threads


def test_threads_launch_on_their_own_streams(shim, path):
    library = bind(load(path), FUNCTIONS)
    wrong, barrier = [], threading.Barrier(4)

    def work(i):
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            x, out = torch.zeros(N, device="cuda"), torch.zeros(N, device="cuda")
            barrier.wait()
            for round_ in range(30):
                for call in (last(library), first(library, None)):
                    out.fill_(float("nan"))
                    torch.cuda._sleep(DELAY // 20)
                    x.fill_(float(round_ * 10 + i))
                    call(x, out)
                    side.synchronize()
                    if out.tolist() != [round_ * 10 + i + 1.0] * N:
                        wrong.append((i, round_))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


# CUDA's own launch functions through ctypes


class Dim3(ctypes.Structure):
    _fields_ = [("x", ctypes.c_uint), ("y", ctypes.c_uint), ("z", ctypes.c_uint)]


class DriverConfig(ctypes.Structure):
    """``CUlaunchConfig``."""

    _fields_ = [
        ("grid", Dim3), ("block", Dim3), ("shared", ctypes.c_uint), ("stream", Pointer),
        ("attributes", Pointer), ("count", ctypes.c_uint),
    ]  # fmt: skip


class RuntimeConfig(ctypes.Structure):
    """``cudaLaunchConfig_t``."""

    _fields_ = [
        ("grid", Dim3), ("block", Dim3), ("shared", ctypes.c_size_t), ("stream", Pointer),
        ("attributes", Pointer), ("count", ctypes.c_uint),
    ]  # fmt: skip


def arguments(x, out):
    """The ``void**`` of a launch, and what it points to."""
    values = (Pointer(x.data_ptr()), Pointer(out.data_ptr()), Int(N))
    return (Pointer * 3)(*(ctypes.addressof(value) for value in values)), values


@pytest.fixture
def driver():
    library = ctypes.CDLL("libcuda.so.1")
    numbers = [ctypes.c_uint] * 7
    library.cuLaunchKernel.argtypes = [Pointer, *numbers, Pointer, Pointer, Pointer]
    library.cuLaunchCooperativeKernel.argtypes = [Pointer, *numbers, Pointer, Pointer]
    library.cuLaunchKernelEx.argtypes = [ctypes.POINTER(DriverConfig), Pointer, Pointer, Pointer]
    library.cuMemcpyDtoDAsync_v2.argtypes = [ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t, Pointer]
    yield library
    _forget()


@pytest.fixture
def kernel(libraries):
    function = Pointer()
    checked(ctypes.CDLL(str(libraries / "libforeign-static.so")).kernel_function(ctypes.byref(function)))
    return function


def driver_launches(driver, kernel, config):
    def plain(x, out):
        values, keep = arguments(x, out)
        checked(driver.cuLaunchKernel(kernel, 1, 1, 1, 128, 1, 1, 0, None, values, None))
        del keep

    def cooperative(x, out):
        values, keep = arguments(x, out)
        checked(driver.cuLaunchCooperativeKernel(kernel, 1, 1, 1, 128, 1, 1, 0, None, values))
        del keep

    def configured(x, out):
        values, keep = arguments(x, out)
        checked(driver.cuLaunchKernelEx(ctypes.byref(config), kernel, values, None))
        del keep

    return plain, cooperative, configured


def test_the_drivers_launches(shim, driver, kernel):
    config = DriverConfig(grid=Dim3(1, 1, 1), block=Dim3(128, 1, 1))
    launches = driver_launches(driver, kernel, config)
    assert [is_missing(captured(launch)) for launch in launches] == [True] * 3
    bind(driver)
    for launch in launches:
        assert captured(launch) == RIGHT
        assert eager_rounds(launch, rounds=20) == 20
    assert config.stream is None


def test_the_drivers_copies(shim, driver):
    bind(driver)

    def call(x, out):
        x.add_(1.0)
        checked(driver.cuMemcpyDtoDAsync_v2(out.data_ptr(), x.data_ptr(), 4 * N, None))
        x.sub_(1.0)

    assert captured(call) == RIGHT
    assert eager_rounds(call, rounds=20) == 20


def loaded_runtime():
    """The libcudart that the library with the shared runtime uses, which knows its kernels."""
    mapped = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "libcudart.so" in line}
    return sorted(mapped)


def test_the_runtimes_launches(shim, libraries):
    library = load(str(libraries / "libforeign-shared.so"))
    symbol = library.kernel_symbol()
    if len(loaded_runtime()) != 1:
        pytest.skip("torch's CUDA runtime is not that of nvcc")
    runtime = ctypes.CDLL(loaded_runtime()[0])
    runtime.cudaLaunchKernel.argtypes = [Pointer, Dim3, Dim3, Pointer, ctypes.c_size_t, Pointer]
    runtime.cudaLaunchKernelExC.argtypes = [ctypes.POINTER(RuntimeConfig), Pointer, Pointer]
    config = RuntimeConfig(grid=Dim3(1, 1, 1), block=Dim3(128, 1, 1))

    def plain(x, out):
        values, keep = arguments(x, out)
        checked(runtime.cudaLaunchKernel(symbol, Dim3(1, 1, 1), Dim3(128, 1, 1), values, 0, None))
        del keep

    def configured(x, out):
        values, keep = arguments(x, out)
        checked(runtime.cudaLaunchKernelExC(config, symbol, values))
        del keep

    bind(runtime)
    try:
        for launch in (plain, configured):
            assert captured(launch) == RIGHT
            assert eager_rounds(launch, rounds=20) == 20
        assert config.stream is None
    finally:
        _forget()


# Two devices


@pytest.mark.two_gpus
def test_b05_tensors_on_another_device_than_the_current_one(shim, path):
    library = bind(load(path), {"stream_last": {"stream": -1, "device": "tensors", "tensors": "data_ptr"}})
    x, out = torch.zeros(N, device="cuda:1"), torch.zeros(N, device="cuda:1")
    side = torch.cuda.Stream(1)
    torch.cuda.synchronize(1)
    with torch.cuda.stream(side), torch.cuda.device(0):
        for i in range(20):
            out.fill_(float("nan"))
            with torch.cuda.device(1):
                torch.cuda._sleep(DELAY // 10)
            x.fill_(float(i))
            checked(library.stream_last(x, out, N))
            assert torch.cuda.current_device() == 0
            side.synchronize()
            assert out.tolist() == [i + 1.0] * N
        with pytest.raises(ctypes.ArgumentError):
            library.stream_last(x, out, "no number")
        assert torch.cuda.current_device() == 0
        with pytest.raises(ValueError, match="argument 0 on cuda:0, argument 1 on cuda:1"):
            library.stream_last(torch.zeros(N, device="cuda:0"), out, N)


@pytest.mark.two_gpus
def test_a_function_without_a_stream_on_a_given_device(shim, path):
    library = bind(load(path), {"no_stream": {"stream": None, "device": 1}})
    assert torch.cuda.current_device() == 0
    x, out = torch.zeros(N, device="cuda:1"), torch.zeros(N, device="cuda:1")
    side = torch.cuda.Stream(1)
    torch.cuda.synchronize(1)
    with torch.cuda.stream(side), torch.cuda.device(0):
        for i in range(20):
            out.fill_(float("nan"))
            with torch.cuda.device(1):
                torch.cuda._sleep(DELAY // 10)
            x.fill_(float(i))
            none(library)(x, out)
            side.synchronize()
            assert out.tolist() == [i + 1.0] * N
    assert torch.cuda.current_device() == 0
