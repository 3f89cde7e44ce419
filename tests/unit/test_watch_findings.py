"""The watch over a stand-in for CUPTI that delivers the same structures: what is a finding, and what is not."""

from __future__ import annotations

import _thread
import ctypes
import threading
import types
import warnings

import pytest

import streamshim
from streamshim import EscapedLaunchWarning, WrongStreamError, capture, gate, ledger
from streamshim.callsite import UNKNOWN, Site
from streamshim.errors import Escape, EscapeReport
from streamshim.guards import redirect, watch
from streamshim.patching import PatchSet
from streamshim.runtime import CaptureState
from streamshim.runtime.cupti import CallbackData, CuptiError
from streamshim.runtime.driver_calls import BREAKING, CONFIG_STREAM, LAUNCHES
from streamshim.settings import Mode

STREAM, FORK, OUTSIDE, OTHER = 0x7F0010, 0x7F0018, 0x7F0020, 0x7F0030
KERNEL, KERNEL_EX, COPY_AT_ONCE = 307, 652, 278
NUMBERS = {name: number for number, name in watch.NAMES.items()}


class FakeCupti:
    """Tells of the calls that a test makes."""

    def __init__(self):
        self.told, self.closed, self.error = None, 0, None
        self.names = dict(watch.NAMES)

    def name_of(self, function):
        return self.names.get(function, "")

    def subscribe(self, told, functions):
        if self.error is not None:
            raise self.error
        assert set(functions) == set(self.names)
        assert self.told is None, "CUPTI has one subscriber"
        self.told = told
        return self

    def close(self):
        self.told = None
        self.closed += 1

    def launch(self, function, stream, symbol=None):
        """A launch, as the driver is called with it; returns the stream that the driver reads."""
        call, memory = LAUNCHES[function], (ctypes.c_uint64 * 16)()
        if call.in_config:
            config = (ctypes.c_uint64 * 16)()
            config[CONFIG_STREAM // 8] = stream
            memory[call.stream // 8] = ctypes.addressof(config)
        elif call.stream >= 0:
            memory[call.stream // 8] = stream
        data = CallbackData(functionParams=ctypes.addressof(memory), symbolName=symbol)
        where = config if call.in_config else memory
        place = CONFIG_STREAM // 8 if call.in_config else call.stream // 8
        seen = None
        for site in (0, 1):
            data.callbackSite = site
            if self.told is not None:
                self.told(function, data)
            if site == 0:
                seen = where[place] if call.stream >= 0 else None
        self.after = where[place]
        return seen

    def enter(self, function, parameters):
        """The entry of a call with these parameters."""
        self.told(function, CallbackData(callbackSite=0, functionParams=parameters))

    def leave(self, function, parameters):
        """Its return."""
        self.told(function, CallbackData(callbackSite=1, functionParams=parameters))

    def fail(self, name, status):
        """A call that the driver refuses."""
        result = ctypes.c_int(status)
        data = CallbackData(callbackSite=1, functionReturnValue=ctypes.addressof(result))
        self.told(NUMBERS[name], data)


@pytest.fixture
def cupti():
    return FakeCupti()


@pytest.fixture
def watched(cupti, cuda, monkeypatch):
    """``watched(body)`` captures a block under the watch."""

    class CUDAGraph:
        id = 7

        def capture_begin(self, capture_error_mode="global"):
            cuda.captures[STREAM] = CaptureState(self.id)

        def capture_end(self):
            cuda.captures.pop(STREAM)

    cuda.current = STREAM
    patches = PatchSet(capture.patches(CUDAGraph))
    patches.apply()
    mover = redirect.Redirect(lambda: None)
    guard = watch.Watch(lambda: cupti, lambda: True, mover)
    monkeypatch.setattr(capture, "enabled", True)
    monkeypatch.setattr(capture, "guards", [guard])
    monkeypatch.setattr(capture, "judges", [guard.judge])

    def run(body=lambda: None, mode="strict"):
        gate.set_mode(Mode(mode))
        graph = CUDAGraph()
        graph.capture_begin()
        try:
            body()
        finally:
            graph.capture_end()

    run.guard, run.redirect, run.graph = guard, mover, CUDAGraph
    yield run
    patches.undo()


def escapes(watched, body, mode="strict"):
    """The findings of a capture."""
    with pytest.raises(WrongStreamError) as error:
        watched(body, mode)
    return error.value.report.escapes


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
    assert (cupti.told, cupti.closed) == (None, 2)


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


@pytest.mark.parametrize("function", [n for n, call in LAUNCHES.items() if call.stream >= 0])
@pytest.mark.parametrize("given", [0, 1, 2])
def test_a_launch_is_moved_while_a_call_asks_for_it(watched, cupti, function, given):
    watched.redirect.prepare()
    seen = []

    def body():
        with watched.redirect.calling():
            seen.append(cupti.launch(function, given))
            seen.append(cupti.after)

    watched(body)
    # What is the caller's own is as it was afterwards.
    assert seen[0] == STREAM
    assert seen[1] == (given if LAUNCHES[function].in_config else STREAM)
    assert ledger.counts() == {"moved launch": 1}
    (found,) = escapes(watched, lambda: cupti.launch(function, given))
    assert found.count == 1


def test_a_call_that_launches_elsewhere_too_is_refused_at_its_return(watched, cupti):
    watched.redirect.prepare()

    def call():
        with watched.guard.calling():
            cupti.launch(KERNEL, 0)
            cupti.launch(KERNEL, OUTSIDE, b"own_stream")
            cupti.launch(KERNEL, OUTSIDE, b"own_stream")

    def body():
        with pytest.raises(WrongStreamError, match="the CUDA graph being captured") as error:
            call()
        (found,) = error.value.report.escapes
        assert (found.what, found.count) == ("cuLaunchKernel, kernel 'own_stream'", 2)
        assert "capture 7 on stream" in error.value.report.capture
        with watched.guard.calling():
            cupti.launch(KERNEL, 0)

    watched(body, "bind")


def test_it_moves_only_while_it_watches(watched):
    watched.redirect.prepare()
    assert not watched.guard.available
    seen = []
    watched(lambda: seen.append(watched.guard.available))
    assert seen == [True]


def test_an_explicit_stream_is_never_moved(watched, cupti):
    watched.redirect.prepare()

    def body():
        with watched.redirect.calling():
            assert cupti.launch(KERNEL, OUTSIDE) == OUTSIDE

    assert len(escapes(watched, body)) == 1


def test_what_takes_no_stream_at_all_is_found_all_the_same(watched, cupti):
    watched.redirect.prepare()

    def body():
        with watched.redirect.calling():
            cupti.launch(COPY_AT_ONCE, 0)

    assert len(escapes(watched, body)) == 1


def test_another_threads_launch_is_not_moved(watched, cupti, cuda):
    watched.redirect.prepare()
    seen = []

    def body():
        with watched.redirect.calling():
            thread = threading.Thread(target=lambda: seen.append(cupti.launch(KERNEL, 0)))
            thread.start()
            thread.join()

    assert len(escapes(watched, body)) == 1
    assert seen == [0]


def test_everything_is_moved_if_that_was_asked_for(watched, cupti):
    watched.redirect.everything = True
    watched.redirect.prepare()
    watched(lambda: cupti.launch(KERNEL, 0))
    assert ledger.counts() == {"moved launch": 1}


def test_nothing_is_moved_where_the_test_failed_or_was_not_made(watched, cupti, caplog):
    def fail():
        raise RuntimeError("a launch on NULL was not moved")

    mover = watched.redirect
    mover.everything = True
    escapes(watched, lambda: cupti.launch(KERNEL, 0))
    mover._test = fail
    mover.prepare()
    mover.prepare()
    assert mover.off == "RuntimeError: a launch on NULL was not moved"
    assert len(caplog.records) == 1
    assert not mover.available
    escapes(watched, lambda: cupti.launch(KERNEL, 0))


def test_a_test_that_failed_since_nothing_is_watched_says_so(watched, cupti):
    cupti.error = CuptiError("CUPTI has another subscriber already", 39)
    watched()

    def fail():
        raise RuntimeError("a launch on NULL was not moved")

    watched.redirect._test = fail
    watched.redirect.prepare(lambda: watched.guard.off)
    assert watched.redirect.off == "CuptiError: CUPTI has another subscriber already"


def test_the_test_itself_is_moved(watched):
    seen = []
    watched.redirect._test = lambda: seen.append(watched.redirect.is_wanted)
    watched.redirect.prepare()
    assert seen == [True]
    assert not watched.redirect.is_wanted


def test_it_is_tried_before_the_first_capture_that_may_need_it(monkeypatch, cuda):
    tried = []
    monkeypatch.setattr("streamshim.installer.self_test", lambda: tried.append(1))
    monkeypatch.setattr(gate, "needs_mover", False)
    streamshim.install()
    for check in capture.before_begin:
        check()
    assert tried == []
    streamshim.uninstall()
    streamshim.install(redirect=True)
    for _ in range(2):
        for check in capture.before_begin:
            check()
    assert tried == [1]
    assert not gate.mover.available  # it works, but there is no CUPTI here


def test_in_check_mode_nothing_is_moved(cuda):
    streamshim.install("check", redirect=True)
    assert not gate.mover.available


def test_a_reason_is_in_the_status(monkeypatch, cuda):
    def fail():
        raise RuntimeError("no")

    monkeypatch.setattr("streamshim.installer.self_test", fail)
    streamshim.install(redirect=True)
    for check in capture.before_begin:
        check()
    assert streamshim.status().guards_off == "redirect: RuntimeError: no"


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
    (guard,) = [guard for guard in capture.guards if isinstance(guard, watch.Watch)]
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


def test_status_tells_why_it_is_off(cuda):
    streamshim.install("strict")
    (guard,) = [guard for guard in capture.guards if isinstance(guard, watch.Watch)]
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


def config_of(stream):
    """The parameters of cuLaunchKernelEx, and the caller's structure that they point to."""
    config, memory = (ctypes.c_uint64 * 16)(), (ctypes.c_uint64 * 16)()
    config[CONFIG_STREAM // 8], memory[0] = stream, ctypes.addressof(config)
    return ctypes.addressof(memory), config, memory


def test_the_callers_structure_is_put_back_by_a_thread_that_is_not_pythons(watched, cupti, monkeypatch):
    """Such a thread has another ``threading.local`` each time that it is in Python."""
    watched.redirect.everything = True
    watched.redirect.prepare()

    def body():
        parameters, config, _ = config_of(0)
        cupti.enter(KERNEL_EX, parameters)
        assert config[CONFIG_STREAM // 8] == STREAM
        monkeypatch.setattr(watched.guard, "_inside", threading.local())
        cupti.leave(KERNEL_EX, parameters)
        assert config[CONFIG_STREAM // 8] == 0

    watched(body)
    assert watched.guard._moved == {}


def test_a_launch_inside_a_launch_puts_back_its_own(watched, cupti):
    watched.redirect.everything = True
    watched.redirect.prepare()

    def body():
        outer, first, _a = config_of(1)
        inner, second, _b = config_of(0)
        cupti.enter(KERNEL_EX, outer)
        cupti.enter(KERNEL_EX, inner)
        cupti.leave(KERNEL_EX, inner)
        assert (first[CONFIG_STREAM // 8], second[CONFIG_STREAM // 8]) == (STREAM, 0)
        cupti.launch(KERNEL, 0)
        assert first[CONFIG_STREAM // 8] == STREAM
        cupti.leave(KERNEL_EX, outer)
        assert first[CONFIG_STREAM // 8] == 1

    watched(body)


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


def test_a_call_that_raises_keeps_its_error_and_its_launches_are_told_at_the_end(watched, cupti):
    watched.redirect.prepare()

    def call():
        with watched.guard.calling():
            cupti.launch(KERNEL, OUTSIDE, b"own_stream")
            raise KeyError("the user's")

    def body():
        with pytest.raises(KeyError, match="the user's"):
            call()
        assert watched.guard._inside.escaped is None
        assert not watched.redirect.is_wanted

    (found,) = escapes(watched, body)
    assert found.what == "cuLaunchKernel, kernel 'own_stream'"


def test_a_call_inside_a_call_tells_of_its_own_launches(watched, cupti):
    watched.redirect.prepare()

    def inner():
        with watched.guard.calling():
            cupti.launch(KERNEL, OUTSIDE, b"inner")

    def outer():
        with watched.guard.calling():
            with pytest.raises(WrongStreamError, match="inner"):
                inner()
            cupti.launch(KERNEL, OUTSIDE, b"outer")

    def body():
        with pytest.raises(WrongStreamError, match="outer"):
            outer()

    watched(body)


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
    assert (cupti.told, cupti.closed) == (None, 1)
    watched.guard.opened(window)
    assert cupti.told is None


def test_nothing_counts_as_movable_while_it_is_tried_or_if_that_was_interrupted(watched, cupti):
    seen = []

    def elsewhere():
        seen.append((watched.redirect.available, watched.redirect.is_wanted))

    def interrupted():
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        raise KeyboardInterrupt

    watched.redirect.everything = True
    watched.redirect._test = interrupted
    with pytest.raises(KeyboardInterrupt):
        watched.redirect.prepare()
    elsewhere()
    assert seen == [(False, False)] * 2
    watched.redirect._test = lambda: None
    watched.redirect.prepare()
    assert watched.redirect.available


def test_it_is_not_tried_while_a_capture_is_open(watched):
    tried = []
    watched.redirect._test = lambda: tried.append(1)
    watched(watched.redirect.prepare)
    assert tried == []
    watched.redirect.prepare()
    assert tried == [1]


def test_a_capture_that_begins_meanwhile_waits_for_the_test(monkeypatch, cuda):
    started, go_on, began = threading.Event(), threading.Event(), []

    def test():
        # The test has a capture of its own.
        monkeypatch.setitem(capture._windows, 9, capture.Window(9, STREAM, 0, Site("a.py", 1, "a"), "a", "global"))
        started.set()
        assert go_on.wait(10)
        began.append("tried")

    def begin():
        for check in capture.before_begin:
            check()
        began.append("begins")

    monkeypatch.setattr("streamshim.installer.self_test", test)
    streamshim.install(redirect=True)
    threads = [threading.Thread(target=begin) for _ in range(2)]
    threads[0].start()
    assert started.wait(10)
    threads[1].start()
    threads[1].join(0.05)
    go_on.set()
    for thread in threads:
        thread.join()
    assert began == ["tried", "begins", "begins"]


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
