"""Shortcuts of bound functions: the same answers as without, and gone without a trace."""

from __future__ import annotations

import ctypes
import gc
import threading
import traceback
import warnings
import weakref

import pytest
from ctypes_functions import OTHER, STREAM, THIRD, Int, Long, Pointer, Streams, forget_everything, recorder, undeclared

import streamshim
from streamshim.binders.ctypes_ import shortcuts


@pytest.fixture(autouse=True)
def streams(monkeypatch):
    monkeypatch.delenv("STREAMSHIM_CTYPES", raising=False)
    invented = Streams().use()
    invented.current[0] = STREAM
    yield invented
    streamshim.uninstall()
    forget_everything()


def has_shortcut(function):
    return shortcuts._CALL in vars(type(function))


def warmed(function, *args):
    """The function once it has its shortcut: the first call finds out about the runtime."""
    function(*args)
    function(*args)
    assert has_shortcut(function)
    return function


def declared_and_warmed():
    """A function whose argtypes can be set anew, with a shortcut for (int, pointer), and what it was called with."""
    function, seen = recorder(Int, Pointer)
    bound = undeclared(function)
    bound.argtypes = [Int, Pointer]
    streamshim.bind(bound, 1)
    return warmed(bound, 5, 0), seen


def library():
    """libc with labs bound: it returns its argument, which stands for the stream."""
    loaded = ctypes.CDLL("libc.so.6")
    loaded.labs.argtypes, loaded.labs.restype = [Pointer], Long
    streamshim.bind(loaded, {"labs": 0})
    return loaded


def outcome(streams, function, args, kwargs):
    """What the caller sees, and how often the current stream was asked for."""
    streams.asked = 0
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            result = function(*args, **kwargs)
        except Exception as error:  # noqa: BLE001, whatever it is, it has to be the same
            lines = [line for line in str(error).splitlines() if "called at" not in line]
            return type(error), lines, [w.category for w in caught]
        return result, streams.asked, [w.category for w in caught]


GIVEN = [
    (), (None,), (0,), (1,), (2,), (3,), (STREAM,), (OTHER,), (THIRD,), (-1,), (2**64,), (2**64 - 16,), (True,),
    ("text",), (Pointer(0),), (Pointer(OTHER),), (None, 5),
]  # fmt: skip


@pytest.mark.parametrize("mode", ["bind", "strict"])
@pytest.mark.parametrize("capturing", [(), (STREAM,), (STREAM, OTHER)])
@pytest.mark.parametrize("place", [0, 1, 2, -1])
@pytest.mark.parametrize("devices", [1, 2])
def test_it_does_what_the_long_way_does(streams, monkeypatch, mode, capturing, place, devices):
    """For every kind of value, in every row of the rule: the same arguments in C or the same error, once asked."""
    streams.devices = devices
    streams.current[1] = OTHER
    streams.device = devices - 1
    streamshim.install(mode, only=["ctypes"])
    kinds = [Int, Int]
    kinds.insert(place if place >= 0 else 2, Pointer)
    long, seen_long = recorder(*kinds)
    short, seen_short = recorder(*kinds)
    short.__name__ = long.__name__ = "f"
    streamshim.bind(long, place)
    warmed(streamshim.bind(short, place), 1, 2)
    streams.capture(*capturing)
    streams.capture(THIRD, id=8)
    for given in GIVEN:
        args = [1, 2]
        args[place if place >= 0 else 2 : place if place >= 0 else 2] = given
        for some, kwargs in [(args, {}), (args[:1], {}), ([], {}), (args, {"a0": 5})]:
            seen_long.clear()
            seen_short.clear()
            with monkeypatch.context() as patched:
                patched.setattr(shortcuts, "quick_place", lambda path, types: -1)
                expected = outcome(streams, long, some, kwargs)
            assert outcome(streams, short, some, kwargs) == expected, (given, some, kwargs)
            assert seen_short == seen_long
            assert has_shortcut(short)
            assert not has_shortcut(long)


def test_check_mode_has_none(streams):
    streamshim.install("check", only=["ctypes"])
    function, seen = recorder(Int, Pointer)
    streamshim.bind(function)
    for _ in range(3):
        function(5, 0)
    assert not has_shortcut(function)
    assert seen == [(5, None)] * 3


@pytest.mark.parametrize("options", [{"device": 0}, {"tensors": "data_ptr"}, {"stream": None}])
def test_what_is_unusual_has_none(streams, options):
    streamshim.install(only=["ctypes"])
    function, _ = recorder(Int, Pointer)
    streamshim.bind(function, **options)
    for _ in range(3):
        function(5, 0)
    assert not has_shortcut(function)


def test_argtypes_that_change(streams):
    streamshim.install(only=["ctypes"])
    bound, seen = declared_and_warmed()
    bound.argtypes = [Int, ctypes.c_uint64]
    bound(5, 0)
    bound.argtypes = None
    bound(5, 0)
    bound.argtypes = [ctypes.c_long, Pointer]
    bound(5, 0)
    assert has_shortcut(bound)
    assert seen == [(5, STREAM)] * 5


def test_argtypes_are_what_they_were_set_to(streams):
    streamshim.install(only=["ctypes"])
    bound, seen = declared_and_warmed()
    assert bound.argtypes == type(bound).__base__.argtypes.__get__(bound)
    bound.argtypes = bound.argtypes
    assert not has_shortcut(bound)
    warmed(bound, 5, 0)
    with pytest.raises(TypeError, match="argtypes"):
        bound.argtypes = [5]
    bound(5, 0)
    del bound.argtypes
    assert bound.argtypes is None
    assert not has_shortcut(bound)
    bound(5, 0)
    assert seen == [(5, STREAM)] * 6


def test_argtypes_change_under_a_shortcut_that_somebody_has_wrapped(streams):
    streamshim.install(only=["ctypes"])
    (bound, seen), calls = declared_and_warmed(), []
    ours = vars(type(bound))["__call__"]
    type(bound).__call__ = lambda self, *args: calls.append(args) or ours(self, *args)
    bound.argtypes = [Int, ctypes.c_uint64]
    bound(5, 0)
    assert calls == [(5, 0)]
    assert seen == [(5, STREAM)] * 3
    assert list(bound.argtypes) == [Int, ctypes.c_uint64]


def test_argtypes_that_another_thread_sets_while_a_shortcut_is_made(streams, monkeypatch):
    streamshim.install(only=["ctypes"])
    function, _ = recorder(Int, Pointer)
    bound, make = undeclared(function), shortcuts.subclass
    bound.argtypes = [Int, Pointer]
    streamshim.bind(bound, 1)

    def meanwhile(*args, **names):
        monkeypatch.setattr(shortcuts, "subclass", make)
        bound.argtypes = [ctypes.c_uint64, Pointer]
        return make(*args, **names)

    monkeypatch.setattr(shortcuts, "subclass", meanwhile)
    bound(5, 0)
    assert shortcuts.subclass is make
    assert not has_shortcut(bound)
    warmed(bound, 5, 0)


def test_a_call_of_another_thread_while_argtypes_are_set(streams):
    streamshim.install(only=["ctypes"])
    bound, seen = declared_and_warmed()
    thread = threading.Thread(target=bound, args=(5, 0))

    class Types(list):
        def __iter__(self):
            thread.start()
            thread.join(0.3)
            return super().__iter__()

    bound.argtypes = Types([ctypes.c_uint64, Pointer])
    thread.join()
    bound(2**33 + 5, 0)
    assert seen == [(5, STREAM)] * 4
    assert not has_shortcut(bound) or vars(type(bound))[shortcuts._FOR][0] is bound.argtypes


def test_another_runtime(streams):
    streamshim.install(only=["ctypes"])
    function, seen = recorder(Int, Pointer)
    warmed(streamshim.bind(function), 5)
    other = Streams().use()
    other.current[0] = OTHER
    function(5)
    warmed(function, 5)
    assert seen == [(5, STREAM)] * 2 + [(5, OTHER)] * 3


def test_a_library_and_back(streams):
    streamshim.install(only=["ctypes"])
    libc = library()
    kept = libc.labs
    assert warmed(kept, 0)(0) == STREAM
    assert type(kept).__base__ is libc._FuncPtr
    assert type(kept).__name__ == libc._FuncPtr.__name__
    again = libc["labs"]
    again.argtypes, again.restype = [Pointer], Long
    assert again(0) == STREAM
    streamshim.unbind(libc)
    assert type(kept) is type(again) is libc._FuncPtr
    assert kept(0) == 0
    streamshim.bind(libc, {"labs": 0})
    warmed(kept, 0)
    streamshim.uninstall()
    assert type(kept) is libc._FuncPtr
    assert "__call__" not in vars(libc._FuncPtr)
    assert kept(0) == 0


def test_a_function_that_is_unbound_while_others_stay(streams):
    streamshim.install(only=["ctypes"])
    libc = library()
    warmed(libc.labs, 0)
    streamshim.bind("libc.so.*", {"memset": 0})
    streamshim.unbind(libc)
    assert libc.labs(0) == 0
    streamshim.bind(libc, {"labs": {"stream": None, "nargs": 1}})
    assert libc.labs(0) == 0
    assert streams.ordered == [(STREAM, 0, 0), (0, STREAM, 0)]


def test_bound_by_itself_after_its_library(streams):
    streamshim.install(only=["ctypes"])
    libc = library()
    warmed(libc.labs, 0)
    streamshim.bind("libc.so.*", {"memset": 0})
    streamshim.unbind(libc)
    streamshim.bind(libc.labs, 0)
    streams.asked = 0
    for _ in range(3):
        assert libc.labs(0) == STREAM
    assert streams.asked == 3
    streamshim.uninstall()
    assert type(libc.labs) is libc._FuncPtr
    assert libc.labs(0) == 0


@pytest.mark.parametrize("where", ["the library's class", "the shortcut"])
def test_someone_elses_wrapper(streams, where):
    """Whoever wraps the library's class sees every call that comes after the next binding, or falls back to it."""
    streamshim.install(only=["ctypes"])
    libc = library()
    if where == "the shortcut":
        warmed(libc.labs, 0)
    owner = type(libc.labs)
    ours, seen = owner.__call__, []

    def wrapper(self, *args):
        seen.append(args)
        return ours(self, *args)

    owner.__call__ = wrapper
    for _ in range(3):
        assert libc.labs(0) == STREAM
    assert seen == [(0,)] * 3
    streamshim.uninstall()
    assert owner.__call__ is wrapper
    assert libc.labs(0) == 0
    assert len(seen) == 4


def test_a_function_that_someone_has_taken_to_another_class(streams):
    streamshim.install(only=["ctypes"])
    libc = library()
    theirs = shortcuts.subclass(libc._FuncPtr, lambda self, *args: 5)
    libc.labs.__class__ = theirs
    assert libc.labs(0) == 5
    streamshim.uninstall()
    assert type(libc.labs) is theirs


def test_another_function_of_its_class_is_called_itself(streams):
    streamshim.install(only=["ctypes"])
    function, seen = recorder(Int, Pointer)
    other, theirs = recorder(Int, Pointer)
    warmed(streamshim.bind(function), 5)
    address = ctypes.cast(other, Pointer)
    for made in (type(function)(address.value), ctypes.cast(address, type(function))):
        made(7, OTHER)
    assert (seen, theirs) == ([(5, STREAM)] * 2, [(7, OTHER)] * 2)


def test_nothing_is_kept(streams):
    streamshim.install(only=["ctypes"])
    libc = library()
    function, _ = recorder(Int, Pointer)
    streamshim.bind(function)
    warmed(libc.labs, 0)
    warmed(function, 5)
    alive = [weakref.ref(o) for o in (libc, libc._FuncPtr, libc.labs, function, type(function))]
    del libc, function
    for _ in range(2):
        gc.collect()
    assert [ref() for ref in alive] == [None] * len(alive)


def test_threads_that_call_while_it_is_bound_and_unbound(streams):
    streamshim.install(only=["ctypes"])
    libc = library()
    kept, wrong, stop = libc.labs, [], threading.Event()

    def call():
        while not stop.is_set():
            got = kept(0)
            if got not in (0, STREAM):
                wrong.append(got)

    threads = [threading.Thread(target=call) for _ in range(3)]
    for thread in threads:
        thread.start()
    for _ in range(50):
        streamshim.uninstall()
        streamshim.install(only=["ctypes"])
    stop.set()
    for thread in threads:
        thread.join()
    streamshim.uninstall()
    assert wrong == []
    assert type(kept) is libc._FuncPtr
    assert kept(0) == 0


def test_a_traceback_shows_its_line(streams):
    streamshim.install(only=["ctypes"])
    function, _ = recorder(Int, Pointer)
    warmed(streamshim.bind(function), 5)
    with pytest.raises(ctypes.ArgumentError) as refused:
        function("no number", None)
    assert "return call(a0, question(0))" in "".join(traceback.format_exception(refused.value))


def test_the_line_of_a_refusal_is_the_users(streams, at_root):
    streamshim.install("strict", only=["ctypes"])
    function, _ = recorder(Int, Pointer)
    warmed(streamshim.bind(function), 5)
    streams.capture(STREAM)
    with pytest.raises(streamshim.WrongStreamError) as refused:
        function(5, OTHER)
    assert refused.value.report.site.file == "tests/unit/test_ctypes_shortcuts.py"


def test_every_count_and_place():
    for count in range(1, 12):
        for place in range(count):
            assert callable(shortcuts._maker(count, place, True))


def test_a_finaliser_that_calls_a_bound_function_while_a_shortcut_is_made(monkeypatch):
    """The garbage collector may run at any line."""
    streamshim.install(only=["ctypes"])
    (first, seen), (freeing, freed) = recorder(Pointer, Long), recorder(Pointer)
    streamshim.bind(first, 0)
    streamshim.bind(freeing, 0)
    make = shortcuts._maker

    def collecting(*args):
        monkeypatch.setattr(shortcuts, "_maker", make)
        freeing(0)
        return make(*args)

    monkeypatch.setattr(shortcuts, "_maker", collecting)
    thread = threading.Thread(target=lambda: [first(0, 1), first(0, 1)], daemon=True)
    thread.start()
    thread.join(10)
    assert not thread.is_alive()
    assert (seen, freed) == ([(STREAM, 1)] * 2, [(STREAM,)])
    assert has_shortcut(first)
