"""Launches below Python on a GPU: findings are exactly the guilty ones, and what takes no stream can be moved."""

import ctypes
import gc
import subprocess
import sys
import time

import pytest
import torch
from harness import RIGHT, N, captured, fresh_stream, is_missing
from test_ctypes import libraries, load, none, path  # noqa: F401, fixtures

import streamshim
from streamshim import callsite, capture
from streamshim.guards.watch import Watch
from streamshim.runtime.cupti import TAKEN, Cupti, CuptiError
from streamshim.runtime.driver_calls import LAUNCHES, stream_address


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


@pytest.fixture
def deaf_driver(monkeypatch):
    """As if the driver did not read what is written into the parameters of a launch."""

    def told(self, function, data):
        call = LAUNCHES.get(function)
        address = stream_address(call, data.functionParams or 0) if call is not None else 0
        place = ctypes.c_void_p.from_address(address) if address else None
        given = place.value if place is not None else None
        if data.callbackSite == 0:
            original(self, function, data)
            if place is not None and place.value != given:
                written.append(place.value)
                place.value = given
            return
        if written and place is not None:
            place.value = written.pop()
        original(self, function, data)

    original, written = Watch._told, []
    monkeypatch.setattr(Watch, "_told", told)
    monkeypatch.setattr(callsite, "MACHINERY", callsite.MACHINERY | {__name__})
    return written


@pytest.mark.parametrize("mode", ["strict", "bind"])
def test_a_launch_that_was_moved_in_vain_is_missing_from_the_graph(path, mode, deaf_driver, monkeypatch):  # noqa: F811
    library = load(path)
    # The self-test would find out.
    monkeypatch.setattr("streamshim.guards.arming.self_test", lambda: None)
    with streamshim.install(mode, redirect=True):
        if mode == "bind":
            # Whose graphs are not read.
            assert is_missing(captured(none(library)))
            return
        with pytest.raises(streamshim.MissingFromGraphError) as error:
            capture_of(*innocent(), none(library))
        (found,) = error.value.report.kernels
        assert "add_one" in found.what
        assert (found.launched, found.nodes) == (1, 0)
        assert found.site.file.endswith("test_ctypes.py")


def test_the_self_test_finds_out_that_launches_are_moved_in_vain(path, deaf_driver):  # noqa: F811
    with streamshim.install("bind", redirect=True):
        capture_of()
        assert "a launch on NULL was not moved" in streamshim.status().guards_off


DEADLOCK = """
import faulthandler, threading, time, torch, streamshim

faulthandler.dump_traceback_later(60, exit=True)
streamshim.install("strict")
torch.zeros(1, device="cuda")
stop, errors, captures = time.monotonic() + 3, [], 0

def allocate_and_free():
    torch.cuda.set_stream(torch.cuda.Stream())
    while time.monotonic() < stop:
        kept = [torch.empty(1 << 22, device="cuda") for _ in range(4)]
        del kept

threads = [threading.Thread(target=allocate_and_free) for _ in range(3)]
for thread in threads:
    thread.start()
size = 1
while time.monotonic() < stop:
    with torch.cuda.graph(torch.cuda.CUDAGraph(), stream=torch.cuda.Stream(), capture_error_mode="thread_local"):
        for _ in range(4):
            size = (size * 7 + 13) % 60 + 1
            torch.zeros(size << 20, device="cuda")
    captures += 1
for thread in threads:
    thread.join()
print(captures > 20, repr(streamshim.status().guards_off))
"""


def test_threads_that_free_tensors_meanwhile_do_not_hang():
    """torch's allocator calls CUDA with its lock held, and the watch needs Python's."""
    done = subprocess.run([sys.executable, "-c", DEADLOCK], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "True ''"


IN_A_CALLBACK = """
import faulthandler, threading, torch, streamshim
from streamshim.guards.watch import Watch

faulthandler.enable()
faulthandler.dump_traceback_later(60, exit=True)
streamshim.install("strict")
x = torch.zeros(8, device="cuda")
mine, theirs = torch.cuda.Stream(), torch.cuda.Stream()
inside, go_on, original = threading.Event(), threading.Event(), Watch._told

def told(self, function, data):
    if threading.current_thread().name == "launcher" and not inside.is_set():
        inside.set()
        assert go_on.wait(10)
    original(self, function, data)

def launch():
    with torch.cuda.stream(theirs):
        x.add_(1)

Watch._told = told
for _ in range(200):
    inside.clear()
    go_on.clear()
    first, second = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
    with torch.cuda.stream(mine):
        first.capture_begin(capture_error_mode="thread_local")
        thread = threading.Thread(target=launch, name="launcher")
        thread.start()
        assert inside.wait(10)
        first.capture_end()
        second.capture_begin(capture_error_mode="thread_local")
        go_on.set()
        thread.join()
        second.capture_end()
torch.cuda.synchronize()
print(x.tolist() == [200.0] * 8, repr(streamshim.status().guards_off))
"""


def test_a_thread_that_comes_back_from_a_callback_in_the_next_capture():
    """It goes on in CUPTI's list of subscribers, whose entry must be the one that it came from."""
    done = subprocess.run([sys.executable, "-c", IN_A_CALLBACK], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "True ''"


def test_cupti_is_kept_from_capture_to_capture_and_given_back():
    with streamshim.install("strict"):
        capture_of(*innocent())
        with pytest.raises(CuptiError) as taken:
            Cupti().subscribe(lambda function, data: None, [])
        assert taken.value.code == TAKEN
        capture_of(*innocent())
        assert streamshim.status().guards_off == ""
        # A while after the last one, too.
        time.sleep(1.1)
        gc.collect()
        other = Cupti()
        other.subscribe(lambda function, data: None, []).close()
        other.leave()
        capture_of(*innocent())
        assert streamshim.status().guards_off == ""
    other = Cupti()
    other.subscribe(lambda function, data: None, []).close()
    other.leave()
    with streamshim.install("strict"):
        capture_of(*innocent())
        assert streamshim.status().guards_off == ""


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


STARTED_INSIDE = """
import torch, streamshim
from torch.profiler import ProfilerActivity, profile

streamshim.install("strict")
x = torch.zeros(8, device="cuda")
seen = profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA])
torch.cuda.synchronize()
with torch.cuda.graph(torch.cuda.CUDAGraph(), stream=torch.cuda.Stream()):
    torch.add(x, 1.0, out=x)
    seen.start()
    torch.add(x, 1.0, out=x)
x.mul_(2)
torch.cuda.synchronize()
seen.stop()
print(sum(event.device_type == torch.autograd.DeviceType.CUDA for event in seen.events()) > 0)
"""


def test_a_profiler_that_starts_inside_a_capture_keeps_its_events():
    """For the first time in the process, when CUPTI may not be taken."""
    done = subprocess.run([sys.executable, "-c", STARTED_INSIDE], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "True"
    assert "the rest of this capture is not watched: torch.profiler was started inside a capture" in done.stderr
