"""cuda-python's calls that wait, copy at once, allocate, and begin or end captures."""

from __future__ import annotations

import importlib
import inspect
from types import SimpleNamespace

import pytest

pytest.importorskip("cuda.bindings", reason="cuda-bindings is not installed")

from cuda.bindings import driver, runtime
from cuda_recorders import Recorder

import streamshim
from streamshim import HostSyncError, WrongStreamError, capture
from streamshim.binders.cuda_functions import ALLOCATING, AT_ONCE, BEGINS, ENDS, TABLES, WAITING, WAITS
from streamshim.callsite import Site
from streamshim.findings import Escape, EscapeReport
from streamshim.runtime import CaptureState
from streamshim.streams import PER_THREAD

CURRENT, STALE = 0x7F00, 0x7E00
MODULES = tuple(TABLES)


def having(table):
    """The functions of a table that the installed version has."""
    return [(m, n) for m in MODULES for n in table[m] if hasattr(importlib.import_module(m), n)]


def short(value):
    return value.rpartition(".")[2]


@pytest.fixture(autouse=True)
def current(cuda):
    """torch's current stream."""
    cuda.current = CURRENT
    return cuda


@pytest.fixture
def in_capture(current):
    """This thread captures, in a capture that was begun below Python unless a test opens a window."""
    current.captures[CURRENT] = CaptureState(7)


def install(mode="bind"):
    streamshim.install(mode, only=["cuda_bindings"])


def test_every_function_is_one_of_the_installed_version():
    lacking = {
        "cuCtxSynchronize_v2", "cudaExecutionCtxSynchronize", "cuStreamBeginCaptureToGraph",
    }  # fmt: skip
    for table in (WAITING, ALLOCATING, AT_ONCE, BEGINS):
        for module in MODULES:
            assert {n for n in table[module] if not hasattr(importlib.import_module(module), n)} <= lacking
    for module in MODULES:
        assert hasattr(importlib.import_module(module), ENDS[module])


@pytest.mark.parametrize("module", MODULES)
def test_the_mode_of_a_capture_is_where_the_table_says(module):
    for name, place in BEGINS[module].items():
        assert list(inspect.signature(getattr(importlib.import_module(module), name)).parameters).index("mode") == place


# Waiting


@pytest.mark.parametrize(("module", "name"), having(WAITING), ids=short)
@pytest.mark.parametrize("mode", ["bind", "strict", "check"])
def test_a_call_that_would_break_the_capture_is_refused(module, name, mode, monkeypatch, in_capture):
    recorder = Recorder(monkeypatch, importlib.import_module(module), name)
    install(mode)
    capture.begun(CURRENT, 0, "global")
    with pytest.raises(HostSyncError, match=rf"{module}\.{name}, at .*cuda_recorders\.py"):
        recorder(CURRENT)
    assert recorder.calls == []


@pytest.mark.parametrize(("module", "name"), having(WAITING), ids=short)
def test_outside_a_capture_it_passes(module, name, monkeypatch):
    recorder = Recorder(monkeypatch, importlib.import_module(module), name)
    install()
    assert recorder(STALE) is recorder.result
    assert recorder.calls == [((STALE,), {})]


@pytest.mark.parametrize("module", MODULES)
def test_a_stream_that_does_not_capture_may_be_waited_for_in_relaxed_mode(module, monkeypatch, in_capture):
    recorder = Recorder(monkeypatch, importlib.import_module(module), WAITS[module])
    install()
    capture.begun(CURRENT, 0, "relaxed")
    assert recorder(STALE) is recorder.result
    for taken_for_the_current_one in (CURRENT, 0, None):
        with pytest.raises(HostSyncError):
            recorder(taken_for_the_current_one)


@pytest.mark.parametrize("module", WAITS)
@pytest.mark.parametrize("mode", ["bind", "strict"])
def test_waiting_for_stream_0_waits_for_what_was_bound_too(module, mode, monkeypatch):
    """cuMemcpyDtoHAsync(..., 0) is bound to the current stream; whoever then waits for stream 0 reads its result."""
    recorder = Recorder(monkeypatch, importlib.import_module(module), WAITS[module])
    recorder.result = (0,)
    install(mode)
    for given in (0, None, driver.CUstream(0), 1, 2):
        recorder.calls.clear()
        assert recorder(given) == (0,)
        (first, _), (second, _) = recorder.calls
        assert int(first[0]) == CURRENT
        assert second == (given,)


def test_an_explicit_stream_is_waited_for_alone(monkeypatch):
    recorder = Recorder(monkeypatch, driver, "cuStreamSynchronize")
    recorder.result = (0,)
    install()
    recorder(STALE)
    recorder(hStream=CURRENT)
    assert recorder.calls == [((STALE,), {}), ((), {"hStream": CURRENT})]


def test_in_check_mode_and_on_the_default_stream_a_wait_is_as_it_was(current, monkeypatch):
    recorder = Recorder(monkeypatch, driver, "cuStreamSynchronize")
    recorder.result = (0,)
    install()
    current.current = 0
    recorder(0)
    streamshim.uninstall()
    current.current = CURRENT
    install("check")
    recorder(0)
    assert recorder.calls == [((0,), {})] * 2


def test_a_failed_wait_is_told_at_once(monkeypatch):
    recorder = Recorder(monkeypatch, driver, "cuStreamSynchronize")
    recorder.result = (700,)
    install()
    assert recorder(0) == (700,)
    assert len(recorder.calls) == 1


def test_what_is_no_stream_is_the_originals_to_refuse(monkeypatch, in_capture):
    recorder = Recorder(monkeypatch, driver, "cuStreamQuery")
    install()
    recorder("a stream")
    recorder()
    assert recorder.calls == [(("a stream",), {}), ((), {})]


# Memory and copies


@pytest.mark.parametrize(("module", "name"), having(ALLOCATING), ids=short)
def test_an_allocation_is_refused_where_cuda_would(module, name, monkeypatch, in_capture):
    recorder = Recorder(monkeypatch, importlib.import_module(module), name)
    install()
    capture.begun(CURRENT, 0, "thread_local")
    with pytest.raises(HostSyncError, match="Allocate before the capture"):
        recorder(64)
    capture.forget_windows()
    capture.begun(CURRENT, 0, "relaxed")
    assert recorder(64) is recorder.result


@pytest.mark.parametrize(("module", "name"), having(AT_ONCE), ids=short)
def test_a_copy_without_a_stream_would_be_missing_from_the_graph(module, name, monkeypatch, current):
    recorder = Recorder(monkeypatch, importlib.import_module(module), name)
    install()
    assert recorder(1, 2, 3) is recorder.result
    current.captures[CURRENT] = CaptureState(7)
    with pytest.raises(WrongStreamError, match="Use the call that ends in Async"):
        recorder(1, 2, 3)
    with streamshim.allow("launch", reason="fills a table once"):
        assert recorder(1, 2, 3) is recorder.result


# Captures


@pytest.fixture(params=MODULES, ids=short)
def captures(request, monkeypatch, current):
    """``begin(stream, mode)`` and ``end(stream)`` of one of the modules, over invented streams."""
    module = importlib.import_module(request.param)
    begin_name, end_name = next(iter(BEGINS[request.param])), ENDS[request.param]
    begin, end = Recorder(monkeypatch, module, begin_name), Recorder(monkeypatch, module, end_name)
    begin.result, end.result = (0,), (0, "graph")
    install()

    def begun(stream, mode):
        current.captures[int(stream)] = CaptureState(7)
        return begin(stream, mode)

    def ended(stream):
        if end.result[0] != 401:
            current.captures.pop(int(stream), None)
        return end(stream)

    modes = [driver.CUstreamCaptureMode(i) for i in range(3)]
    if module is runtime:
        modes = [runtime.cudaStreamCaptureMode(i) for i in range(3)]
    return SimpleNamespace(begin=begun, end=ended, recorder=end, modes=modes, refused=begin)


@pytest.mark.parametrize(("place", "mode"), [(0, "global"), (1, "thread_local"), (2, "relaxed")])
def test_a_capture_opens_a_window(captures, place, mode):
    assert captures.begin(driver.CUstream(CURRENT), captures.modes[place]) == (0,)
    (window,) = capture.open_windows()
    assert (window.id, window.stream, window.error_mode) == (7, CURRENT, mode)
    assert window.site.file.endswith("cuda_recorders.py")
    assert captures.end(CURRENT) == (0, "graph")
    assert capture.open_windows() == []


def test_a_capture_of_the_per_thread_stream_is_closed_by_its_end(captures):
    captures.begin(PER_THREAD, captures.modes[1])
    assert [w.id for w in capture.open_windows()] == [7]
    assert captures.end(PER_THREAD) == (0, "graph")
    assert capture.open_windows() == []


def test_a_capture_that_could_not_begin_opens_none(captures):
    captures.refused.result = (1,)
    captures.begin(CURRENT, captures.modes[0])
    assert capture.open_windows() == []


def test_an_end_that_was_refused_leaves_it_open(captures):
    captures.begin(CURRENT, captures.modes[0])
    captures.recorder.result = (401, None)
    assert captures.end(CURRENT) == (401, None)
    assert [w.id for w in capture.open_windows()] == [7]


def test_a_lost_capture_is_explained_in_the_log(captures, caplog):
    captures.begin(CURRENT, captures.modes[0])
    captures.recorder.result = (901, None)
    assert captures.end(CURRENT) == (901, None)
    assert capture.open_windows() == []
    (record,) = caplog.records
    assert "The CUDA graph capture was lost" in record.getMessage()
    assert "901" in record.getMessage()


def test_what_is_missing_from_a_capture_is_told_at_its_end(captures, monkeypatch):
    told, escape = [], Escape("cuLaunchKernel", Site("model.py", 40, "forward"), "0", "0x7f00", 7)
    report = EscapeReport((escape,), "capture 7", "strict")
    monkeypatch.setattr(capture, "judges", [told.append, lambda window: WrongStreamError(report)])
    captures.begin(CURRENT, captures.modes[0])
    with pytest.raises(WrongStreamError, match="Launches are missing"):
        captures.end(CURRENT)
    assert [window.id for window in told] == [7]
    assert capture.open_windows() == []


def test_the_end_of_a_capture_that_nobody_saw_begin_passes(captures):
    assert captures.end(STALE) == (0, "graph")


# Without torch's CUDA


@pytest.mark.parametrize(
    ("module", "name"), [*having(WAITING), *having(ALLOCATING), *having(AT_ONCE), *having(BEGINS)], ids=short
)
def test_where_torch_has_no_streams_nothing_is_asked(module, name, monkeypatch):
    recorder = Recorder(monkeypatch, importlib.import_module(module), name)
    recorder.result = (0,)
    install()
    monkeypatch.setattr("streamshim.runtime.found", lambda: None)
    monkeypatch.setattr("streamshim.gate.current_device", lambda: pytest.fail("asked"))
    assert recorder(0, 1, 2, 3, 4, 0) is recorder.result
    assert recorder.calls == [((0, 1, 2, 3, 4, 0), {})]


@pytest.mark.parametrize("module", MODULES)
def test_the_end_of_a_capture_on_no_stream_is_the_originals_to_refuse(module, monkeypatch):
    recorder = Recorder(monkeypatch, importlib.import_module(module), ENDS[module])
    install()
    assert recorder(None) is recorder.result
