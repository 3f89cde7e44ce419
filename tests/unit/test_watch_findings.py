"""The watch over a stand-in for CUPTI that delivers the same structures: what is a finding, and what is not."""

from __future__ import annotations

import _thread
import ctypes
import threading
import types
import warnings

import pytest
from fake_cupti import (
    FORK,
    KERNEL,
    KERNEL_EX,
    NUMBERS,
    OTHER,
    OUTSIDE,
    STREAM,
    escapes,
    installed_watch,
)

import streamshim
from streamshim import EscapedLaunchWarning, capture, gate, ledger
from streamshim.callsite import UNKNOWN, Site
from streamshim.findings import Escape, EscapeReport
from streamshim.guards import watch
from streamshim.runtime import CaptureState
from streamshim.runtime import cupti as cupti_module
from streamshim.runtime.cupti import CallbackData, CuptiError
from streamshim.runtime.driver_calls import BREAKING, LAUNCHES


@pytest.mark.parametrize("function", [n for n, call in LAUNCHES.items() if call.stream >= 0])
@pytest.mark.parametrize("given", [0, 1, 2, OUTSIDE])
def test_a_launch_outside_the_capture_is_found(watched, cupti, function, given):
    (found,) = escapes(watched, lambda: cupti.launch(function, given))
    assert found.what == LAUNCHES[function].name
    assert found.site.file.endswith("test_watch_findings.py")
    assert found.expected == "0x7f0010, torch's current stream of cuda:0"
    assert found.count == 1


@pytest.mark.parametrize("function", [n for n, call in LAUNCHES.items() if call.stream < 0])
def test_what_takes_no_stream_is_found(watched, cupti, function):
    (found,) = escapes(watched, lambda: cupti.launch(function, 0))
    assert found.given == "none; the NULL stream (0)"


@pytest.mark.parametrize("function", [KERNEL, KERNEL_EX])
def test_the_kernel_is_named(watched, cupti, function):
    (found,) = escapes(watched, lambda: cupti.launch(function, 0, b"_Z7add_onePfi"))
    assert found.what == f"{LAUNCHES[function].name}, kernel '_Z7add_onePfi'"


def test_what_is_in_the_capture_is_no_finding(watched, cupti, cuda):
    def body():
        cuda.captures[FORK] = CaptureState(7)
        for function, call in LAUNCHES.items():
            if call.stream >= 0:
                cupti.launch(function, STREAM)
                cupti.launch(function, FORK)

    watched(body)
    assert ledger.events() == []


def test_another_threads_work_is_no_finding(watched, cupti, cuda):
    def elsewhere():
        cuda.current = OTHER
        cupti.launch(KERNEL, 0)
        cupti.launch(KERNEL, OUTSIDE)

    def body():
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        cuda.current = STREAM

    watched(body)


def test_an_allowed_launch_is_no_finding(watched, cupti):
    def body():
        with streamshim.allow("launch", reason="telemetry"):
            cupti.launch(KERNEL, 0)

    watched(body)
    assert ledger.counts() == {"allowed launch": 1}


@pytest.mark.parametrize("first_only", [False, True])
def test_what_the_gate_has_let_through_is_counted_once(watched, cupti, first_only):
    kernel = gate.Launch("a kernel")

    def launch():
        cupti.launch(KERNEL, gate.resolve(OUTSIDE, 0, kernel))

    def body():
        with streamshim.allow("launch", reason="telemetry", first_only=first_only):
            launch()

    watched(body)
    assert ledger.counts() == {"allowed launch": 1}
    # What was let through once is no licence for what comes later, from below Python.
    (found,) = escapes(watched, lambda: cupti.launch(KERNEL, OUTSIDE))
    assert found.count == 1


def test_a_line_is_told_once_with_how_often(watched, cupti):
    def body():
        for _ in range(5):
            cupti.launch(KERNEL, 0, b"a")
        cupti.launch(KERNEL, 0, b"b")

    first, second = escapes(watched, body)
    assert (first.count, second.count) == (5, 1)


def test_memory_is_bounded(watched, cupti):
    def body():
        for i in range(3 * watch.KEPT):
            cupti.launch(KERNEL, 0, f"kernel_{i}".encode())

    assert len(escapes(watched, body)) == watch.KEPT
    assert ledger.counts() == {"escaped launch": 3 * watch.KEPT}
    assert watched.guard._found == {}


def test_in_bind_mode_it_is_a_warning(watched, cupti):
    with pytest.warns(EscapedLaunchWarning, match="Launches are missing from the CUDA graph"):
        watched(lambda: cupti.launch(KERNEL, 0), "bind")


def test_another_exception_is_not_hidden(watched, cupti, caplog):
    def body():
        cupti.launch(KERNEL, 0)
        raise KeyError("the user's")

    with pytest.raises(KeyError, match="the user's"):
        watched(body)
    assert "Launches are missing" in caplog.records[-1].getMessage()
    watched()


def test_what_was_found_is_forgotten_with_its_capture(watched, cupti):
    escapes(watched, lambda: cupti.launch(KERNEL, 0))
    watched()


def test_it_is_subscribed_from_begin_to_end(watched, cupti):
    assert cupti.told is None
    watched(lambda: cupti.launch(KERNEL, STREAM))
    assert (cupti.told, cupti.closed) == (None, 1)
    with pytest.raises(ZeroDivisionError):
        watched(lambda: 1 / 0)
    assert (cupti.told, cupti.closed, cupti.left) == (None, 2, 0)


def test_two_captures_share_the_subscription(watched, cupti):
    guard = watched.guard
    windows = [capture.Window(i, STREAM, 0, Site("a.py", 1, "a"), "MainThread", "global") for i in (7, 8)]
    for window in windows:
        guard.opened(window)
    guard.closing(windows[0])
    assert cupti.told is not None
    guard.closing(windows[1])
    guard.closing(windows[1])
    assert (cupti.told, cupti.closed) == (None, 1)


@pytest.mark.parametrize("mode", ["bind", "strict"])
def test_without_cupti_the_capture_goes_on_and_it_is_told(watched, cupti, caplog, mode):
    cupti.error = CuptiError("CUPTI has another subscriber already: a profiler", 39)
    watched(mode=mode)
    watched(mode=mode)
    assert "another subscriber" in watched.guard.off
    # In strict mode at every capture.
    assert len(caplog.records) == (2 if mode == "strict" else 1)
    cupti.error = None
    escapes(watched, lambda: cupti.launch(KERNEL, 0))
    assert watched.guard.off == ""


def test_numbers_of_another_version_are_not_used(watched, cupti, caplog):
    cupti.names[KERNEL] = "cuSomethingElse"
    watched(lambda: None)
    assert (
        watched.guard.off
        == "LookupError: CUPTI's number 307 is cuSomethingElse, not cuLaunchKernel: its version is not known"
    )


def test_a_number_that_an_older_version_does_not_know_is_no_problem(watched, cupti):
    del cupti.names[KERNEL_EX]
    watched()
    assert watched.guard.off == ""


@pytest.mark.parametrize("name", ["cuCtxSynchronize", "cuMemHostAlloc", "cuStreamSynchronize"])
@pytest.mark.parametrize("status", [900, 901, 907])
def test_a_call_that_the_driver_refused_is_remembered(watched, cupti, name, status):
    watched(lambda: cupti.fail(name, status))
    (event,) = ledger.events()
    assert (event.kind, event.what, event.capture) == ("failed sync", f"{name} in thread MainThread", 7)
    assert event.site.file.endswith("test_watch_findings.py")


def test_other_failures_are_not(watched, cupti):
    watched(lambda: cupti.fail("cuMemHostAlloc", 2))
    assert ledger.events() == []


def test_a_fault_of_ours_is_logged_and_does_not_reach_the_driver(watched, cupti, cuda, monkeypatch, caplog):
    def broken():
        raise KeyError("out of order")

    def body():
        monkeypatch.setattr(cuda, "current_device", broken)
        cupti.launch(KERNEL, 0)
        monkeypatch.undo()

    guard = watched.guard
    guard.opened(capture.Window(7, STREAM, 0, Site("a.py", 1, "a"), "MainThread", "global"))
    body()
    assert "the watch failed at cuLaunchKernel" in caplog.records[0].getMessage()
    guard.closing(capture.Window(7, STREAM, 0, Site("a.py", 1, "a"), "MainThread", "global"))


def test_questions_to_the_driver_are_not_looked_at(watched, cupti, cuda):
    """The state of a stream is asked from the driver, which tells of that call, too."""

    def asking(handle):
        cupti.launch(KERNEL, OUTSIDE)
        return cuda.captures.get(handle, CaptureState())

    def body():
        cuda.capture_state = asking
        cupti.launch(KERNEL, 0)
        del cuda.capture_state

    assert len(escapes(watched, body)) == 1


@pytest.mark.parametrize(
    ("mode", "watch_argument", "variable", "expected"),
    [
        ("bind", None, None, False),
        ("strict", None, None, True),
        ("check", None, None, True),
        ("bind", True, None, True),
        ("strict", False, None, False),
        ("bind", None, "1", True),
        ("strict", None, "0", False),
        ("strict", True, "0", True),
    ],
)
def test_when_it_is_on(mode, watch_argument, variable, expected, monkeypatch, cuda):
    if variable is not None:
        monkeypatch.setenv("STREAMSHIM_WATCH", variable)
    monkeypatch.setattr(gate, "needs_mover", False)
    streamshim.install(mode, watch=watch_argument)
    guard = installed_watch()
    assert guard._wanted() is expected
    streamshim.uninstall()
    assert capture.judges == []
    assert gate.mover is None


def test_wrong_settings(monkeypatch):
    with pytest.raises(ValueError, match="watch is 'yes'; allowed values: True, False, None"):
        streamshim.install(watch="yes")
    monkeypatch.setenv("STREAMSHIM_WATCH", "maybe")
    with pytest.raises(ValueError, match="STREAMSHIM_WATCH is 'maybe'"):
        streamshim.install()


def test_status_tells_why_it_is_off(cuda, monkeypatch):
    monkeypatch.setattr("streamshim.runtime.cupti.found", cupti_module.Cupti)
    monkeypatch.setattr(cupti_module, "_mapped", lambda name: None)
    streamshim.install("strict")
    guard = installed_watch()
    with warnings.catch_warnings():
        guard.opened(capture.Window(7, STREAM, 0, Site("a.py", 1, "a"), "MainThread", "global"))
    assert "watch: CuptiError: no libcupti is loaded in this process" in streamshim.status().guards_off


def test_the_tables_have_no_number_twice():
    assert not set(LAUNCHES) & set(BREAKING)
    assert len(set(watch.NAMES.values())) == len(watch.NAMES)


def test_the_text(at_root):
    site = Site("model.py", 40, "forward")
    one = Escape("cuLaunchKernel, kernel 'gate'", site, "0 (the NULL stream)", "0x7f0010, torch's", 7, 3)
    text = str(EscapeReport((one,), "capture 7", "strict"))
    assert (
        text
        == """\
Launches are missing from the CUDA graph that was captured; the first was made at model.py:40 in forward.

  launch           cuLaunchKernel, kernel 'gate' (3 times)
  called at        model.py:40 in forward
  stream           0 (the NULL stream)
  stream expected  0x7f0010, torch's
  captured         capture 7
  streamshim mode  strict

They were made below Python on a stream outside the capture, so they ran once and are not in the graph: the
first result is right and every replay wrong.
What to do:
  * Give the code that launches torch's current stream (in C++: at::cuda::getCurrentCUDAStream()), for every
    launch inside it.
  * If a launch is meant to stay outside the graph, say so: with streamshim.allow('launch', reason='...')."""
    )
    many = EscapeReport((one,) * 8, "capture 7", "strict")
    assert str(many).count("cuLaunchKernel") == 5
    assert "and              3 more" in str(many)


@pytest.mark.parametrize(
    "name", ["cuMemAlloc_v2", "cuMemFree_v2", "cuMemFreeHost", "cuEventQuery", "cuEventSynchronize"]
)
def test_nothing_is_asked_of_python_where_torch_holds_its_allocators_lock(name):
    """torch's order is the GIL, then the lock; a thread that frees a tensor has the GIL and waits for the lock."""
    assert name not in NUMBERS


PER_THREAD_FORMS = [n for n, call in LAUNCHES.items() if call.name.endswith("_ptsz")]


@pytest.mark.parametrize("function", PER_THREAD_FORMS)
def test_to_a_per_thread_form_null_is_the_threads_own_stream(watched, cupti, cuda, function):
    """That one can be forked into a capture, other than the NULL stream."""
    (found,) = escapes(watched, lambda: cupti.launch(function, 0))
    assert found.given == "the per-thread default stream (2)"

    def body():
        cuda.captures[2] = CaptureState(7)
        cupti.launch(function, 0)
        cupti.launch(function, 2)

    watched.redirect.everything = True
    watched.redirect.prepare()
    watched(body)
    assert "moved launch" not in ledger.counts()


def test_what_a_lost_capture_has_left_does_not_keep_others_from_being_told(watched, cupti, cuda):
    def lost():
        for i in range(watch.KEPT):
            cupti.launch(KERNEL, 0, f"kernel_{i}".encode())
        cuda.captures.clear()

    with pytest.raises(KeyError):  # the stand-in's error for the end of a capture that is no more
        watched(lost)
    watched.graph.id = 8
    (found,) = escapes(watched, lambda: cupti.launch(KERNEL, 0, b"another"))
    assert found.what == "cuLaunchKernel, kernel 'another'"


def test_ctrl_c_during_a_launch_comes_at_the_end_of_the_capture(watched, cupti, cuda, monkeypatch):
    def interrupted():
        raise KeyboardInterrupt

    went_on = []

    def body():
        with monkeypatch.context() as patched:
            patched.setattr(cuda, "current_device", interrupted)
            cupti.launch(KERNEL, 0)
        went_on.append(True)

    with pytest.raises(KeyboardInterrupt):
        watched(body)
    assert went_on == [True]
    watched()


def test_uninstalling_while_a_capture_begins_leaves_nothing_subscribed(watched, cupti):
    window = capture.Window(7, STREAM, 0, Site("a.py", 1, "a"), "MainThread", "global")
    watched.guard.opened(window)
    watched.guard.end()
    assert (cupti.told, cupti.closed, cupti.left) == (None, 1, 1)
    watched.guard.opened(window)
    assert cupti.told is None


def test_a_thread_without_a_python_frame_has_no_line(watched, cupti, cuda):
    """autograd's threads launch a custom function's backward; what runs there is ours alone."""
    done = threading.Event()
    memory = (ctypes.c_uint64 * 16)()
    data = CallbackData(callbackSite=0, functionParams=ctypes.addressof(memory))
    # The frames of such a thread begin with the callback.
    told = types.FunctionType(_tell.__code__, {**watch.__dict__, "__name__": "streamshim.runtime.cupti"})

    def body():
        _thread.start_new_thread(told, (cupti.told, data, done))
        assert done.wait(10)

    (found,) = escapes(watched, body)
    assert found.site == UNKNOWN


def _tell(told, data, done):
    told(307, data)
    done.set()


def test_a_launch_that_the_driver_refused_is_remembered(watched, cupti):
    """On the NULL stream, while a stream captures that waits for that one (906)."""
    watched(lambda: cupti.launch(KERNEL, STREAM, b"gate", status=906))
    (event,) = ledger.events()
    assert (event.kind, event.what) == ("failed sync", "cuLaunchKernel, kernel 'gate' in thread MainThread")


def test_a_launch_that_came_too_late_is_not(watched, cupti):
    watched(lambda: cupti.launch(KERNEL, STREAM, status=901))
    assert ledger.events() == []


def test_only_of_launches_it_is_read_which_kernel_they_were_of(watched, cupti):
    """CUPTI fills in the symbol's name for launches; for other calls nothing is said of what that pointer is."""

    class Unnamed:
        callbackSite = 1

        def __init__(self):
            self.result = ctypes.c_int(900)
            self.functionReturnValue = ctypes.addressof(self.result)

        @property
        def symbolName(self):
            raise OSError("a pointer to anywhere")

    watched(lambda: [cupti.told(NUMBERS[name], Unnamed()) for name in ("cuStreamSynchronize", "cuMemHostAlloc")])
    assert [event.what for event in ledger.events()] == [
        "cuStreamSynchronize in thread MainThread", "cuMemHostAlloc in thread MainThread",
    ]  # fmt: skip
