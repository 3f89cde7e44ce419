"""Launches that are moved into the capture below Python, over a stand-in for CUPTI."""

from __future__ import annotations

import ctypes
import threading

import pytest
from fake_cupti import (
    COPY_AT_ONCE,
    KERNEL,
    KERNEL_EX,
    OUTSIDE,
    STREAM,
    escapes,
    installed_watch,
)

import streamshim
from streamshim import WrongStreamError, capture, gate, ledger
from streamshim.callsite import Site
from streamshim.guards import recorded, watch
from streamshim.runtime.cupti import CuptiError
from streamshim.runtime.driver_calls import CONFIG_STREAM, LAUNCHES


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


@pytest.mark.parametrize("fault", [KeyError, KeyboardInterrupt])
def test_the_callers_structure_is_put_back_whatever_happens(watched, cupti, monkeypatch, fault):
    watched.redirect.prepare()

    def failing(self, *args):
        raise fault

    def body():
        with monkeypatch.context() as patched, watched.redirect.calling():
            patched.setattr(recorded.Recorded, "launched", failing)
            assert cupti.launch(KERNEL_EX, 0, b"add") == STREAM
        assert cupti.after == 0

    if fault is KeyboardInterrupt:
        with pytest.raises(KeyboardInterrupt):
            watched(body)
    else:
        watched(body)
    assert watched.guard._moved == {}


def test_a_call_that_launches_elsewhere_too_is_refused_at_its_return(watched, cupti):
    watched.redirect.prepare()

    def call():
        with watched.guard.calling():
            cupti.launch(KERNEL, 0)
            for _ in range(2):
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


def test_of_many_moved_launches_a_part_is_kept(watched, cupti):
    watched.redirect.everything = True
    watched.redirect.prepare()
    for captures in (1, 2):
        watched(lambda: [cupti.launch(KERNEL, 0) for _ in range(watch.KEPT + 20)])
        assert ledger.counts() == {"moved launch": captures * (watch.KEPT + 20)}
        assert len(ledger.events()) == captures * watch.KEPT


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
    monkeypatch.setattr("streamshim.guards.arming.self_test", lambda: tried.append(1))
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
    assert installed_watch() is gate.mover
    assert not gate.mover.available


def test_a_reason_is_in_the_status(monkeypatch, cuda):
    def fail():
        raise RuntimeError("no")

    monkeypatch.setattr("streamshim.guards.arming.self_test", fail)
    streamshim.install(redirect=True)
    for check in capture.before_begin:
        check()
    assert streamshim.status().guards_off == "redirect: RuntimeError: no"


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
        cupti.come_back(KERNEL_EX, parameters)
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
        cupti.come_back(KERNEL_EX, inner)
        assert (first[CONFIG_STREAM // 8], second[CONFIG_STREAM // 8]) == (STREAM, 0)
        cupti.launch(KERNEL, 0)
        assert first[CONFIG_STREAM // 8] == STREAM
        cupti.come_back(KERNEL_EX, outer)
        assert first[CONFIG_STREAM // 8] == 1

    watched(body)


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

    monkeypatch.setattr("streamshim.guards.arming.self_test", test)
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
