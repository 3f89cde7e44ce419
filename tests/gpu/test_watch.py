"""Launches below Python on a GPU: findings are exactly the guilty ones, and what takes no stream can be moved."""

import gc
import subprocess
import sys

import pytest
import torch
from harness import RIGHT, N, captured, fresh_stream
from test_ctypes import libraries, load, none, path  # noqa: F401, fixtures

import streamshim
from streamshim import capture
from streamshim.guards.watch import Watch
from streamshim.runtime.cupti import Cupti


def capture_of(*calls):
    """A graph of some calls ``call(x, out)``, after each has been called once."""
    x, out = torch.zeros(N, device="cuda"), torch.zeros(N, device="cuda")
    for call in calls:
        call(x, out)
    torch.cuda.synchronize()
    gc.collect()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(torch.cuda.current_stream()):
        with torch.cuda.graph(graph, stream=fresh_stream()):
            torch.add(x, 1.0, out=out)
            for call in calls:
                call(x, out)
    return graph


def escapes_of(*calls):
    """The findings in a capture of these calls."""
    with pytest.raises(streamshim.WrongStreamError) as error:
        capture_of(*calls)
    return error.value.report.escapes


def the_watch():
    return next(guard for guard in capture.guards if isinstance(guard, Watch))


@pytest.fixture
def strict():
    with streamshim.install("strict") as installation:
        yield installation


def innocent():
    """torch's own operations, a fork, cuBLAS, copies and sets, Triton."""
    import triton_kernels

    matrix, side, kernel = torch.ones(64, 64, device="cuda"), torch.cuda.Stream(), triton_kernels.fresh()

    def fork(x, out):
        main = torch.cuda.current_stream()
        side.wait_stream(main)
        with torch.cuda.stream(side):
            out.mul_(2.0)
        main.wait_stream(side)

    return [
        lambda x, out: torch.matmul(matrix, matrix),
        lambda x, out: (out.zero_(), out.copy_(x), torch.cat([x, out]).sort()),
        lambda x, out: torch.nn.functional.softmax(x, 0).cumsum(0),
        lambda x, out: torch.rand(8, device="cuda"),
        lambda x, out: kernel[(1,)](x, out, N, BLOCK=128),
        fork,
    ]


def test_the_innocent_are_no_findings(strict):
    graph = capture_of(*innocent())
    assert streamshim.status().guards_off == ""
    assert the_watch()._subscription is None
    audit = streamshim.audit(graph)
    assert audit.count("_add_one") == 1
    assert len(audit.nodes) > 6
    assert len(audit.edges) >= len(audit.nodes) - 1
    streamshim.assert_captured(graph, "_add_one", count=1)


@pytest.mark.parametrize(
    ("function", "extra", "kernel", "own"),
    [("no_stream", 0, "add_one", False), ("forgets_once", 1, "copy", False), ("own_stream", 0, "add_one", True)],
)
def test_a_library_that_ignores_the_stream_is_found(strict, path, function, extra, kernel, own):  # noqa: F811
    library = load(path)

    def guilty(x, out):
        current = (torch.cuda.current_stream().cuda_stream,) * extra
        getattr(library, function)(x.data_ptr(), out.data_ptr(), N, *current)

    (found,) = escapes_of(*innocent(), guilty)
    assert kernel in found.what
    assert found.site.file.endswith("test_watch.py")
    assert found.site.function == "guilty"
    assert found.given.startswith("0x") is own
    capture_of(*innocent())


def test_cupy_on_its_own_stream_is_found(strict):
    cupy = pytest.importorskip("cupy", reason="cupy is not installed")
    array, result = cupy.arange(8.0), cupy.zeros(8)
    (found,) = escapes_of(lambda x, out: cupy.add(array, 1.0, out=result))
    assert found.site.file.endswith("test_watch.py")


def test_in_bind_mode_it_is_a_warning(path):  # noqa: F811
    library = load(path)
    with streamshim.install("bind", watch=True):
        with pytest.warns(streamshim.EscapedLaunchWarning, match="add_one"):
            capture_of(none(library))


def test_an_allowed_launch_is_no_finding(strict, path):  # noqa: F811
    library = load(path)
    capture_of(streamshim.allow("launch", reason="meant to run once")(none(library)))
    assert streamshim.status().events["allowed launch"] == 1


def test_a_sync_below_python_is_named(strict):
    device = pytest.importorskip("cupy", reason="cupy is not installed").cuda.Device()
    with pytest.raises(streamshim.CaptureInvalidatedError) as lost:
        capture_of(lambda x, out: device.synchronize())
    assert "cuCtxSynchronize" in str(lost.value)
    assert "in thread MainThread, at" in " ".join(str(lost.value).split())
    assert "test_watch.py" in str(lost.value)
    assert the_watch()._subscription is None
    subscription = Cupti().subscribe(lambda function, data: None, [])
    subscription.close()
    torch.cuda.synchronize()
    capture_of(*innocent())


@pytest.mark.parametrize("mode", ["bind", "strict"])
def test_everything_is_moved_if_that_was_asked_for(path, mode):  # noqa: F811
    library = load(path)
    with streamshim.install(mode, redirect=True):
        assert captured(none(library)) == RIGHT
        assert captured(lambda x, out: library.forgets_once(x.data_ptr(), out.data_ptr(), N, None)) == RIGHT
        assert streamshim.status().guards_off == ""
        assert streamshim.status().events["moved launch"] > 0


PROFILED = """
import torch, streamshim
from torch.profiler import ProfilerActivity, profile

streamshim.install("strict")
x = torch.zeros(8, device="cuda")

def capture():
    torch.cuda.synchronize()
    with torch.cuda.graph(torch.cuda.CUDAGraph(), stream=stream):
        torch.add(x, 1.0, out=x)

def profiled(inside):
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        inside()
        x.mul_(2)
        torch.cuda.synchronize()
    return sum(event.device_type == torch.autograd.DeviceType.CUDA for event in seen.events())

stream = torch.cuda.Stream()
if BEFORE:
    capture()
print(profiled(lambda: None) > 0, profiled(capture) > 0)
capture()
print(profiled(lambda: None) > 0, streamshim.status().guards_off)
"""


@pytest.mark.parametrize("before", [True, False])
def test_torchs_profiler_keeps_its_events_in_every_order(before):
    """In a process of its own, since the profiler keeps CUPTI for itself once it has run."""
    code = PROFILED.replace("BEFORE", str(before))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()
    assert first == "True True"
    assert second.startswith("True")
