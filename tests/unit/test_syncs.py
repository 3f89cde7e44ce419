"""The rule for host synchronisation: who breaks which capture, what is said of it, and what is let through."""

from __future__ import annotations

import logging
import sys
import threading
from types import ModuleType

import pytest

import streamshim
from streamshim import capture, gate, ledger, runtime
from streamshim.callsite import Site
from streamshim.errors import HostSyncError, NoCudaError
from streamshim.findings import SyncReport
from streamshim.guards import syncs
from streamshim.guards.sync_table import (
    EVENT_METHODS,
    METHODS,
    STREAM_METHODS,
    SYNCHRONIZE,
    WAIT,
    WARM_UP,
    Kind,
    Operation,
)
from streamshim.runtime import CaptureState
from streamshim.settings import Mode

STREAM, FORK, SIDE, MINE = 0x7F0010, 0x7F0018, 0x7F0020, 0x7F0030
MODES = ("global", "thread_local", "relaxed")
ALLOCATION = Operation("cudaMalloc", WAIT, Kind.MEMORY)
UNKNOWN = Operation("lib.so: wait_all", WAIT, Kind.UNKNOWN)


@pytest.fixture(autouse=True)
def nothing_logged(monkeypatch):
    monkeypatch.setattr(syncs, "_logged", set())


def refused(operation, target=0):
    """Whether a call is refused; nothing else may happen."""
    try:
        syncs.check(operation, target)
    except HostSyncError:
        return True
    return False


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("waits_for_it", [True, False])
@pytest.mark.parametrize("my_capture", [True, False])
@pytest.mark.parametrize("thread_mode", MODES)
def test_the_table(mode, waits_for_it, my_capture, thread_mode):
    expected = waits_for_it
    if thread_mode != "relaxed":
        expected |= mode == "global" and (my_capture or thread_mode == "global")
        expected |= mode == "thread_local" and my_capture
    assert syncs.breaks(mode, waits_for_it, my_capture, thread_mode) is expected


#: Operation and target -> refused by the capturing thread, and by another one, in each mode.
ROWS = {
    "the device": (SYNCHRONIZE, 0, (True, True, True), (True, True, True)),
    "the capturing stream": (STREAM_METHODS["query"], STREAM, (True, True, True), (True, True, True)),
    "a fork": (STREAM_METHODS["synchronize"], FORK, (True, True, True), (True, True, True)),
    "another stream": (STREAM_METHODS["synchronize"], SIDE, (True, True, False), (True, False, False)),
    "a default stream": (STREAM_METHODS["synchronize"], 0, (True, True, False), (True, False, False)),
    "an event": (EVENT_METHODS["query"], 0, (True, True, False), (True, False, False)),
    "an allocation": (ALLOCATION, 0, (True, True, False), (True, False, False)),
    "something unknown": (UNKNOWN, 0, (True, True, True), (True, False, False)),
}


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("by_other", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_who_is_refused(capturing, cuda, row, by_other, mode):
    capturing(mode, by_other)
    cuda.captures[FORK] = CaptureState(7)
    operation, target, mine, others = ROWS[row]
    assert refused(operation, target) is (others if by_other else mine)[MODES.index(mode)]


@pytest.mark.parametrize(("mode", "expected"), [("global", True), ("thread_local", False), ("relaxed", False)])
def test_a_value_of_another_threads_stream(capturing, mode, expected):
    capturing(mode, by_other=True)
    assert refused(METHODS["item"], MINE) is expected


@pytest.mark.parametrize("mode", MODES)
def test_a_value_of_the_capturing_stream(capturing, mode):
    capturing(mode)
    assert refused(METHODS["item"], STREAM)


@pytest.mark.parametrize("mode", MODES)
def test_a_thread_that_shares_the_capturing_stream_waits_for_it(capturing, cuda, mode):
    """torch hands out the same 32 streams in turn, and autograd's threads follow the capturing one."""
    capturing(mode, by_other=True)
    cuda.current = STREAM
    with pytest.raises(HostSyncError, match="part of the capture that thread engine has begun"):
        syncs.check(METHODS["item"], STREAM)


@pytest.mark.parametrize(("mode", "expected"), [("global", True), ("thread_local", True), ("relaxed", False)])
def test_the_thread_that_captures_is_bound_also_on_another_stream(capturing, cuda, mode, expected):
    capturing(mode)
    cuda.current = MINE
    assert refused(EVENT_METHODS["query"]) is expected


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("by_other", [False, True])
def test_another_device_may_be_waited_for(capturing, cuda, mode, by_other):
    capturing(mode, by_other)
    cuda.current = MINE
    cuda.device = 1
    assert not refused(SYNCHRONIZE)


def test_a_thread_that_excused_itself_at_the_driver_is_not_refused(capturing, cuda):
    capturing("global")
    cuda.mode = "relaxed"
    assert not refused(ALLOCATION)
    assert refused(SYNCHRONIZE)


def test_without_a_capture_nothing_is_refused(cuda):
    gate.set_mode(Mode.BIND)
    cuda.current = MINE
    assert [row for row, (operation, target, *_) in ROWS.items() if refused(operation, target)] == []


def test_on_the_default_stream_no_question_is_asked_without_a_capture(cuda):
    gate.set_mode(Mode.BIND)
    assert not refused(SYNCHRONIZE)
    assert cuda.asked == []


def test_a_capture_that_was_begun_below_python_is_recognised(cuda):
    gate.set_mode(Mode.BIND)
    cuda.current = STREAM
    cuda.captures[STREAM] = CaptureState(9)
    for operation, target in ((SYNCHRONIZE, 0), (METHODS["item"], STREAM), (STREAM_METHODS["query"], STREAM)):
        with pytest.raises(HostSyncError, match=r"capture 9 \(begun before install\(\), or below Python\)"):
            syncs.check(operation, target)
    # Its mode is not known, so what some modes allow is CUDA's to say.
    assert not refused(EVENT_METHODS["query"])
    assert not refused(STREAM_METHODS["query"], SIDE)


def test_a_window_whose_capture_is_over_refuses_nothing(capturing, cuda):
    """A capture may be ended below Python; its window is left over then."""
    capturing("global", by_other=True)
    cuda.captures.clear()
    assert not refused(SYNCHRONIZE)


def test_a_capture_that_is_lost_already_refuses_nothing(capturing, cuda):
    capturing("global")
    cuda.captures[STREAM] = CaptureState(0, valid=False)
    assert not refused(METHODS["item"], STREAM)


def test_a_refusal_names_operation_line_capture_and_remedy(capturing):
    capturing()
    with pytest.raises(HostSyncError) as error:
        syncs.check(METHODS["item"], STREAM)
    assert isinstance(error.value, RuntimeError)
    text = str(error.value)
    assert text.startswith("Host sync refused inside a CUDA graph capture: .item() on a CUDA tensor, at ")
    assert "test_syncs.py:" in text
    assert "capture 7 on stream 0x7f0010" in text
    assert "Keep the value on the device" in text
    assert "in thread" not in text


@pytest.mark.parametrize(
    ("operation", "mode", "why", "remedy"),
    [
        (EVENT_METHODS["query"], "global", "Thread engine captures in mode 'global'", "thread_local"),
        (SYNCHRONIZE, "relaxed", "does not wait for cuda:0 while thread engine captures on it", "stream or an event"),
    ],
)  # fmt: skip
def test_another_thread_is_told_whose_capture_it_is(capturing, operation, mode, why, remedy):
    capturing(mode, by_other=True)
    with pytest.raises(HostSyncError) as error:
        syncs.check(operation)
    text = str(error.value).replace("\n", " ").replace("    ", "")
    assert text.startswith("Host sync refused during another thread's CUDA graph capture")
    assert f"in thread        {threading.current_thread().name}" in str(error.value)
    assert why in text
    assert remedy in text


def test_another_thread_that_tunes_is_told_to_warm_up(capturing):
    """It cannot choose what the tuner waits for."""
    capturing("thread_local", by_other=True)
    with pytest.raises(HostSyncError) as error:
        syncs.check(Operation("autotuning", WARM_UP, Kind.DEVICE))
    assert error.value.report.remedy == WARM_UP


def test_a_region_lets_it_through_and_is_counted(capturing):
    capturing()
    with streamshim.allow("sync", reason="a test"):
        syncs.check(METHODS["item"], STREAM)
    assert ledger.counts() == {"allowed sync": 1}
    assert refused(METHODS["item"], STREAM)


def test_it_is_logged_at_once_but_once_a_line(capturing, caplog):
    capturing()
    with caplog.at_level(logging.ERROR, logger="streamshim"):
        assert [refused(SYNCHRONIZE) for _ in range(3)] == [True] * 3
    assert len(caplog.records) == 1


def test_the_own_capture_is_named_before_others(capturing, cuda):
    capturing("global", by_other=True)
    cuda.captures[MINE] = CaptureState(8)
    site = Site("mine.py", 1, "mine")
    capture._windows[8] = capture.Window(8, MINE, 0, site, "MainThread", "global", threading.get_ident())
    with pytest.raises(HostSyncError, match=r"capture 8 .*mine\.py:1"):
        syncs.check(METHODS["item"], MINE)


def test_the_text():
    report = SyncReport(
        ".item() on a CUDA tensor",
        Site("model.py", 40, "forward"),
        "",
        "capture 7 on stream 0x7f0010 of cuda:0, begun at serve.py:12 in capture_model, thread MainThread",
        "bind",
        "The host would wait for work that is only being recorded.",
        ("Keep the value on the device.",),
    )
    assert (
        str(report)
        == """\
Host sync refused inside a CUDA graph capture: .item() on a CUDA tensor, at model.py:40 in forward.

  operation        .item() on a CUDA tensor
  called at        model.py:40 in forward
  capturing        capture 7 on stream 0x7f0010 of cuda:0, begun at serve.py:12 in capture_model, thread MainThread
  streamshim mode  bind

The host would wait for work that is only being recorded. Nothing has been touched, and the capture is still
valid.
What to do:
  * Keep the value on the device.
  * If it is known to be harmless: with streamshim.allow('sync', reason='...')."""
    )


def test_the_text_for_another_thread():
    report = SyncReport(
        "Event.query()",
        Site("io.py", 3, "poll"),
        "pinner",
        "capture 7",
        "strict",
        "Thread engine captures.",
        ("Wait.",),
    )
    assert (
        str(report)
        == """\
Host sync refused during another thread's CUDA graph capture: Event.query(), at io.py:3 in poll.

  operation        Event.query()
  called at        io.py:3 in poll
  in thread        pinner
  capturing        capture 7
  streamshim mode  strict

Thread engine captures. Nothing has been touched, and the capture is still valid.
What to do:
  * Wait.
  * If it is known to be harmless: with streamshim.allow('sync', reason='...')."""
    )


@pytest.mark.parametrize("has_torch", [True, False])
def test_where_torch_has_no_streams_other_libraries_may_wait(monkeypatch, has_torch):
    def no_cuda():
        raise NoCudaError("torch was built without CUDA")

    def imported():
        raise AssertionError("torch was looked for")

    monkeypatch.setattr(runtime._holder, "_runtime", None)
    monkeypatch.setattr(runtime, "get", no_cuda if has_torch else imported)
    if not has_torch:
        monkeypatch.delitem(sys.modules, "torch", raising=False)
    elif "torch" not in sys.modules:
        monkeypatch.setitem(sys.modules, "torch", ModuleType("torch"))
    gate.set_mode(Mode.BIND)
    assert [row for row, (operation, target, *_) in ROWS.items() if refused(operation, target)] == []
