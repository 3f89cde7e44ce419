"""Subscribing to CUPTI, over a stand-in for its library: who is told, and that nothing is left behind."""

from __future__ import annotations

import ctypes
import gc
import os
import threading
from types import SimpleNamespace

import pytest

from streamshim.runtime import cupti
from streamshim.runtime.cupti import CallbackData, Cupti, CuptiError

LAUNCH, COPY = 307, 306


HANDLE = 0x7F00_0000_0001


class Library:
    """``libcupti``, which keeps the address that it is to call, as C does."""

    def __init__(self, refuse=None):
        self.address, self.enabled, self.refuse = 0, [], refuse
        self.asked = []  # in the order in which it was

    def cuptiSubscribe(self, handle, call, user):
        handle._obj.value = HANDLE
        self.address = ctypes.cast(call, ctypes.c_void_p).value
        self.asked.append("subscribe")
        return 0

    def cuptiEnableCallback(self, on, handle, domain, function):
        assert (on, handle.value, domain) == (1, HANDLE, 1)
        self.enabled.append(function)
        return 3 if function == self.refuse else 0

    def cuptiEnableDomain(self, on, handle, domain):
        assert (on, handle.value, domain) == (0, HANDLE, 1)
        self.enabled.clear()
        self.asked.append("disable")
        return 0

    def cuptiUnsubscribe(self, handle):
        assert handle.value == HANDLE
        self.asked.append("unsubscribe")
        return 0

    def call(self, function):
        data = CallbackData()
        cupti._Callback(self.address)(None, 1, function, ctypes.pointer(data))


def over(library):
    made = Cupti.__new__(Cupti)
    made._library, made._names, made._resting = library, {}, None
    return made


@pytest.fixture(autouse=True)
def callbacks():
    """What is to be called at a garbage collection."""
    before = list(gc.callbacks)
    yield gc.callbacks
    gc.callbacks[:] = before


@pytest.fixture
def not_found():
    """Nobody has looked for the library yet, and nobody has found what a test makes of it."""
    cupti.found.cache_clear()
    yield
    cupti.found.cache_clear()


def test_the_library_is_looked_for_once_but_until_it_is_there(not_found, monkeypatch):
    looked = []
    monkeypatch.setattr(cupti, "_mapped", lambda name: looked.append(name))
    for _ in range(2):
        with pytest.raises(CuptiError, match="no libcupti is loaded"):
            cupti.found()
    monkeypatch.setattr(cupti, "_mapped", lambda name: looked.append(name) or "/opt/libcupti.so.13")
    library = SimpleNamespace(**{name: SimpleNamespace() for name in cupti._FUNCTIONS})
    monkeypatch.setattr(ctypes, "CDLL", lambda path: library)
    assert cupti.found() is cupti.found()
    assert looked == ["libcupti.so"] * 3


def test_a_function_is_asked_for_its_name_once():
    asked, library = [], Library()

    def name_of(domain, function, name):
        asked.append((domain, function))
        name._obj.value = b"cuLaunchKernel"
        return 0 if function == LAUNCH else 1

    library.cuptiGetCallbackName = name_of
    made = over(library)
    assert [made.name_of(function) for function in (LAUNCH, COPY, LAUNCH, COPY)] == ["cuLaunchKernel", ""] * 2
    assert asked == [(1, LAUNCH), (1, COPY)]


def test_the_library_is_found_among_what_the_process_has_mapped(monkeypatch):
    lines = (
        "7f00-7f10 r--p 00000000 08:01 11 /usr/lib/libc.so.6",
        "7f10-7f20 rw-p 00000000 00:00 0",
        "7f20-7f30 r-xp 00000000 08:01 12 /opt/libcupti.so.d/other.so",
        "7f30-7f40 r-xp 00000000 08:01 13 /opt/a folder/libcupti.so.13",
        "7f40-7f50 r-xp 00000000 08:01 14 /opt/second/libcupti.so.12",
    )
    monkeypatch.setattr(cupti.Path, "read_text", lambda path: "\n".join(lines))
    assert cupti._mapped("libcupti.so") == "/opt/a folder/libcupti.so.13"
    assert cupti._mapped("libcuda.so") is None


def test_what_is_called_is_told_until_it_is_closed():
    library, seen = Library(), []
    made = over(library)
    subscription = made.subscribe(lambda function, data: seen.append((function, data.callbackSite)), [LAUNCH])
    assert library.enabled == [LAUNCH]
    library.call(LAUNCH)
    subscription.close()
    subscription.close()
    library.call(LAUNCH)
    assert (seen, library.enabled, library.asked) == ([(LAUNCH, 0)], [], ["subscribe", "disable"])


def test_captures_one_after_the_other_have_one_subscriber():
    """A thread may come back from a callback of the first one while the second is subscribed."""
    library, seen = Library(), []
    made = over(library)
    for number in range(3):
        subscription = made.subscribe(lambda function, data, number=number: seen.append(number), [LAUNCH])
        library.call(LAUNCH)
        subscription.close()
    assert (seen, library.asked) == ([0, 1, 2], ["subscribe", *["disable"] * 3])


def test_who_leaves_waits_for_threads_that_are_in_a_callback(monkeypatch):
    library, inside, go_on, left_with = Library(), threading.Event(), threading.Event(), []

    def told(function, data):
        inside.set()
        assert go_on.wait(10)
        left_with.append(list(library.asked))

    made = over(library)
    subscription = made.subscribe(told, [LAUNCH])
    thread = threading.Thread(target=library.call, args=(LAUNCH,))
    thread.start()
    assert inside.wait(10)
    monkeypatch.setattr(cupti.time, "sleep", lambda seconds: (go_on.set(), thread.join()))
    subscription.close()
    made.leave()
    made.leave()
    assert left_with == [["subscribe", "disable"]]
    assert library.asked == ["subscribe", "disable", "unsubscribe"]
    subscription = made.subscribe(lambda function, data: None, [LAUNCH])
    assert library.asked[-1] == "subscribe"
    subscription.close()


def test_a_thread_that_is_on_its_way_into_the_callback_finds_it_after_the_end():
    """CUPTI may have read the address before it was unsubscribed."""
    library, seen = Library(), []
    subscription = over(library).subscribe(lambda function, data: seen.append(function), [LAUNCH])
    subscription.close()
    del subscription
    gc.collect()
    filler = [cupti._Callback(lambda *args: seen.append("somebody else's")) for _ in range(100)]
    library.call(LAUNCH)
    assert seen == []
    del filler


@pytest.fixture
def clock(monkeypatch):
    """The time, as it is told to `cupti`."""
    clock = SimpleNamespace(now=100.0, monotonic=lambda: clock.now, sleep=lambda seconds: None)
    monkeypatch.setattr(cupti, "time", clock)
    return clock


def test_a_while_after_the_last_capture_cupti_is_given_back(clock):
    library = Library()
    made = over(library)
    made.subscribe(lambda function, data: None, [LAUNCH]).close()
    clock.now += 0.9
    gc.collect()
    made.subscribe(lambda function, data: None, [LAUNCH]).close()
    clock.now += 0.9
    gc.collect()
    assert library.asked == ["subscribe", "disable", "disable"]
    clock.now += 0.2
    gc.collect()
    gc.collect()
    assert library.asked == ["subscribe", "disable", "disable", "unsubscribe"]


def test_it_is_not_given_back_from_under_a_capture(clock):
    library, seen = Library(), []
    made = over(library)
    made.subscribe(lambda function, data: None, [LAUNCH]).close()
    subscription = made.subscribe(lambda function, data: seen.append(function), [LAUNCH])
    clock.now += 10
    gc.collect()
    library.call(LAUNCH)
    assert (library.asked, seen) == (["subscribe", "disable"], [LAUNCH])
    subscription.close()


@pytest.mark.parametrize("who", ["a capture", "a profiler"])
def test_who_comes_while_cupti_is_given_back_waits_for_the_end_of_that(clock, who):
    """CUPTI refuses a second subscriber until it has let go of the first; meanwhile other threads run."""
    library, seen, begun = Library(), [], []
    made = over(library)
    made.subscribe(lambda function, data: None, [LAUNCH]).close()
    clock.now += 10

    def come():
        if who == "a capture":
            begun.append(made.subscribe(lambda function, data: seen.append(function), [LAUNCH]))
        else:
            made.leave()
            library.asked.append("subscribe")

    thread, unsubscribe = threading.Thread(target=come), library.cuptiUnsubscribe

    def in_the_middle(handle):
        thread.start()
        thread.join(0.2)
        return unsubscribe(handle)

    library.cuptiUnsubscribe = in_the_middle
    gc.collect()
    thread.join(10)
    library.cuptiUnsubscribe = unsubscribe
    assert library.asked == ["subscribe", "disable", "unsubscribe", "subscribe"]
    for subscription in begun:
        library.call(LAUNCH)
        subscription.close()
    assert seen == [LAUNCH] * len(begun)


def test_a_collection_does_not_wait_for_a_thread_that_takes_cupti(clock):
    """That one may wait for what this thread holds, which is in the middle of anything."""
    library = Library()
    made = over(library)
    made.subscribe(lambda function, data: None, [LAUNCH]).close()
    clock.now += 10
    inside, go_on = threading.Event(), threading.Event()

    def hold():
        with cupti._changing:
            inside.set()
            go_on.wait(10)

    thread = threading.Thread(target=hold)
    thread.start()
    assert inside.wait(10)
    gc.collect()
    assert library.asked == ["subscribe", "disable"]
    go_on.set()
    thread.join()
    gc.collect()
    assert library.asked == ["subscribe", "disable", "unsubscribe"]


def test_who_leaves_leaves_nothing_behind(clock, callbacks):
    before = list(callbacks)
    made = over(Library())
    for _ in range(3):
        made.subscribe(lambda function, data: None, [LAUNCH]).close()
    assert len(callbacks) == len(before) + 1
    made.leave()
    assert callbacks == before


def test_a_refusal_leaves_nothing_enabled():
    library = Library(refuse=COPY)
    made = over(library)
    with pytest.raises(CuptiError, match="cuptiEnableCallback failed with CUptiResult 3"):
        made.subscribe(lambda function, data: None, [LAUNCH, COPY])
    assert (library.enabled, library.asked) == ([], ["subscribe", "disable"])


def test_a_forked_child_does_not_ask_cupti(monkeypatch):
    library, seen = Library(), []
    made = over(library)
    subscription = made.subscribe(lambda function, data: seen.append(function), [LAUNCH])
    child = os.getpid() + 1
    monkeypatch.setattr(cupti.os, "getpid", lambda: child)
    subscription.close()
    made.leave()
    library.call(LAUNCH)
    assert (library.asked, seen) == (["subscribe"], [])


def test_what_a_forked_child_captures_is_its_own(monkeypatch):
    library, seen = Library(), []
    made = over(library)
    made.subscribe(lambda function, data: None, [LAUNCH]).close()
    child = os.getpid() + 1
    monkeypatch.setattr(cupti.os, "getpid", lambda: child)
    subscription = made.subscribe(lambda function, data: seen.append(function), [LAUNCH])
    library.call(LAUNCH)
    assert (library.asked, seen) == (["subscribe", "disable", "subscribe"], [LAUNCH])
    subscription.close()


def test_at_the_end_of_a_process_it_is_closed(run_python):
    code = """
from streamshim.runtime.cupti import Cupti
class Library:
    def cuptiSubscribe(self, handle, call, user): return 0
    def cuptiEnableCallback(self, *call): return 0
    def cuptiUnsubscribe(self, handle): print("closed")
cupti = Cupti.__new__(Cupti)
cupti._library, cupti._resting = Library(), None
kept = cupti.subscribe(lambda function, data: None, [])
"""
    assert run_python(code) == "closed\n"
