"""What is bound, when, and how it goes away again: libraries, lone pointers, patterns, the environment."""

from __future__ import annotations

import ctypes
import gc
import weakref
from pathlib import Path
from types import SimpleNamespace

import pytest
from ctypes_functions import OTHER, STREAM, Int, Long, Pointer, Streams, forget_everything, recorder, undeclared

import streamshim
from streamshim import binders
from streamshim.binders.ctypes_ import config_structs, environment, labels, registry, tables
from streamshim.binders.ctypes_.specs import Spec

ORIGINAL = ctypes._CFuncPtr.__call__
ORIGINAL_INIT = ctypes.CDLL.__init__


@pytest.fixture(autouse=True)
def nothing_bound(monkeypatch):
    monkeypatch.delenv("STREAMSHIM_CTYPES", raising=False)
    yield
    streamshim.uninstall()
    forget_everything()
    assert ctypes.CDLL.__init__ is ORIGINAL_INIT


@pytest.fixture(autouse=True)
def streams():
    invented = Streams().use()
    invented.current[0] = STREAM
    return invented


def install(mode=None):
    return streamshim.install(mode, only=["ctypes"])


def libc(kind=ctypes.CDLL, name="libc.so.6"):
    """A library of its own; labs() returns its argument, and memset(s, c, 0) its first."""
    library = kind(name)
    library.labs.argtypes, library.labs.restype = [Long], Long
    library.memset.argtypes, library.memset.restype = [Pointer, Int, ctypes.c_size_t], Long
    return library


def is_bound(library):
    return library.labs(0) == STREAM


# A library


@pytest.mark.parametrize("kind", [ctypes.CDLL, ctypes.PyDLL])
@pytest.mark.parametrize("first", ["install", "bind"])
def test_functions_fetched_before_and_after(kind, first):
    library, stranger = libc(kind), libc(kind)
    before = library["memset"]
    before.argtypes, before.restype = library.memset.argtypes, Long
    install() if first == "install" else None
    assert streamshim.bind(library, {"memset": 0, "labs": -1}) is library
    install() if first == "bind" else None
    after = library["memset"]
    after.argtypes, after.restype = library.memset.argtypes, Long
    for function in (before, after, library.memset):
        assert function(None, 5, 0) == function(5, 0) == STREAM
        assert function(OTHER, 5, 0) == OTHER
    assert is_bound(library)
    assert stranger.labs(0) == 0
    streamshim.uninstall()
    for function in (before, after, library.memset):
        assert function(None, 5, 0) == 0
    assert library.labs(0) == 0


def test_what_is_not_named_is_left_alone(streams):
    library = libc()
    streamshim.bind(library, {"memset": 0})
    install()
    assert library.labs(0) == 0
    assert library.abs(-5) == 5
    assert streams.asked == 0


def test_a_function_object_that_was_not_fetched_from_the_library():
    """It has no name, so it is known by its address."""
    library = libc()
    install()
    streamshim.bind(library, {"labs": 0})
    for made in (library._FuncPtr(("labs", library)), library._FuncPtr(ctypes.cast(library.labs, Pointer).value)):
        made.argtypes, made.restype = [Long], Long
        assert made(0) == STREAM
    other = library._FuncPtr(("abs", library))
    assert other(-5) == 5


def test_the_library_is_left_as_it_was():
    library = ctypes.CDLL("libc.so.6")
    before = dict(vars(library)), dict(vars(library._FuncPtr))
    streamshim.bind(library, {"labs": 0})
    install()
    assert vars(library._FuncPtr) != before[1]
    streamshim.uninstall()
    assert (dict(vars(library)), dict(vars(library._FuncPtr))) == before


def test_install_and_uninstall_in_every_order():
    library = libc()
    function, seen = recorder(Int, Pointer)
    streamshim.bind(library, {"labs": 0})
    streamshim.bind(function)
    prototype = type(function)
    for step in "IIUUIUIUU":
        install() if step == "I" else streamshim.uninstall()
        assert is_bound(library) is (step == "I")
        function(5, 0)
        assert seen.pop() == (5, STREAM if step == "I" else None)
        assert (type(function) is prototype) is (step == "U")


def test_unbind_forgets():
    library = libc()
    install()
    streamshim.bind(library, {"labs": 0})
    streamshim.unbind(library)
    assert library.labs(0) == 0
    assert vars(library._FuncPtr).get("__call__") is None
    streamshim.uninstall()
    install()
    assert library.labs(0) == 0
    function, _ = recorder(Int, Pointer)
    prototype = type(function)
    streamshim.bind(function)
    streamshim.unbind(function)
    assert type(function) is prototype
    for target in (library, function, "libc*"):
        with pytest.raises(ValueError, match="is not bound"):
            streamshim.unbind(target)


def test_a_missing_function_is_an_error():
    library = libc()
    install()
    with pytest.raises(AttributeError, match=r"libc\.so\.6 has no function 'nobody', 'noone'; nothing was bound"):
        streamshim.bind(library, {"labs": 0, "noone": 0, "nobody": None})
    assert library.labs(0) == 0
    assert not hasattr(library, "nobody")


def test_binding_again():
    library = libc()
    function, _ = recorder(Int, Pointer)
    for _ in range(2):
        streamshim.bind(library, {"labs": 0})
        streamshim.bind(function, 1)
        with pytest.raises(ValueError, match="labs is bound already with stream=0, and now with stream=None"):
            streamshim.bind(library, {"labs": None})
        with pytest.raises(ValueError, match="is bound already with stream=1, and now with stream=0"):
            streamshim.bind(function, 0)
        install()
    ours = vars(library._FuncPtr)["__call__"]
    streamshim.bind(library, {"memset": 0})
    assert vars(library._FuncPtr)["__call__"] is ours
    assert is_bound(library)
    assert library.memset(5, 0) == STREAM


@pytest.mark.parametrize("first", ["function", "library"])
def test_a_function_bound_by_itself_and_with_its_library(streams, first):
    install()
    library = libc()
    bind = [lambda: streamshim.bind(library.labs, 0), lambda: streamshim.bind(library, {"labs": 0})]
    for step in bind if first == "function" else reversed(bind):
        step()
    streams.asked = 0
    assert is_bound(library)
    assert streams.asked == 1
    with pytest.raises(ValueError, match="labs is bound already"):
        streamshim.bind(library.labs, None)
    with pytest.raises(ValueError, match="unbind its library"):
        streamshim.unbind(library.labs)
    streamshim.unbind(library)
    assert library.labs(0) == 0


def test_a_function_of_a_bound_library_bound_by_itself(streams):
    install()
    library = libc()
    streamshim.bind(library, {"labs": 0})
    streamshim.bind(library.memset, 0)
    with pytest.raises(ValueError, match="memset is bound already"):
        streamshim.bind(library, {"memset": None})
    streams.asked = 0
    assert library.memset(5, 0) == STREAM
    assert streams.asked == 1
    streamshim.uninstall()
    assert library.memset(0, 5, 0) == 0
    assert type(library.memset) is library._FuncPtr


def test_load(tmp_path):
    install()
    library = streamshim.load("libc.so.6", {"labs": -1})
    library.labs.argtypes, library.labs.restype = [Long], Long
    assert type(library) is ctypes.CDLL
    assert is_bound(library)
    assert type(streamshim.load("libc.so.6", {"labs": -1}, loader=ctypes.PyDLL)) is ctypes.PyDLL
    with pytest.raises(OSError, match="absent"):
        streamshim.load(tmp_path / "absent.so", {"labs": -1})


def test_options_in_a_map():
    install()
    library = ctypes.CDLL("libc.so.6")
    streamshim.bind(
        library, {"labs": {"stream": -1, "nargs": 1}, "memset": {"stream": "s", "argnames": ["s", "c", "n"]}}
    )
    library.labs.restype = library.memset.restype = Long
    assert library.labs() == STREAM
    assert library.memset(5, 0) == STREAM


# Others who patch the same


@pytest.mark.parametrize("target", ["library", "function"])
def test_someone_elses_wrapper_below(streams, target):
    library = libc()
    seen = []

    def wrapper(self, *args):
        seen.append(args)
        return ORIGINAL(self, *args)

    library._FuncPtr.__call__ = wrapper
    install()
    streamshim.bind(library, {"labs": 0}) if target == "library" else streamshim.bind(library.labs, 0)
    assert is_bound(library)
    assert seen == [(STREAM,)]
    streamshim.uninstall()
    assert vars(library._FuncPtr)["__call__"] is wrapper
    assert library.labs(0) == 0


@pytest.mark.parametrize("target", ["library", "function"])
def test_someone_elses_wrapper_above(streams, target):
    library = libc()
    install()
    streamshim.bind(library, {"labs": 0}) if target == "library" else streamshim.bind(library.labs, 0)
    owner = type(library.labs)
    ours = owner.__call__
    seen = []

    def wrapper(self, *args):
        seen.append(args)
        return ours(self, *args)

    owner.__call__ = wrapper
    assert is_bound(library)
    streamshim.uninstall()
    # Theirs stays, and ours passes through.
    assert owner.__call__ is wrapper
    assert library.labs(0) == 0
    for _ in range(2):
        install()
        streams.asked = 0
        assert is_bound(library)
        assert streams.asked == 1
        streamshim.uninstall()
        assert library.labs(0) == 0
    # They take theirs away.
    owner.__call__ = ours
    install()
    assert is_bound(library)
    streamshim.uninstall()
    assert library.labs(0) == 0
    assert library.labs.__class__ is library._FuncPtr
    assert "__call__" not in vars(library._FuncPtr)


def test_a_wrapper_above_is_told():
    library = libc()
    install()
    streamshim.bind(library, {"labs": 0})
    library._FuncPtr.__call__ = lambda self, *args: 5
    notes = next(b.notes for b in streamshim.status().binders if b.name == "ctypes")
    assert "libc.so.6: its functions' __call__ was replaced or wrapped by someone else" in notes


# Patterns


@pytest.mark.parametrize("order", ["bind install load", "install bind load", "load bind install", "load install bind"])
def test_a_pattern_binds_whatever_is_loaded_before_and_after(order):
    library = None
    for step in order.split():
        if step == "bind":
            assert streamshim.bind("libc.so.*", {"labs": 0}) == "libc.so.*"
        elif step == "install":
            install()
        else:
            library, other = libc(), ctypes.CDLL("libm.so.6")
    assert is_bound(library)
    assert "__call__" not in vars(other._FuncPtr)
    streamshim.uninstall()
    assert library.labs(0) == 0
    assert "__call__" not in vars(library._FuncPtr)
    assert libc().labs(0) == 0
    install()
    assert is_bound(library)
    streamshim.unbind("libc.so.*")
    assert library.labs(0) == 0
    assert libc().labs(0) == 0


def test_a_pattern_sees_classes_derived_from_cdll():
    class Mine(ctypes.CDLL):
        def __init__(self, name):
            super().__init__(name)
            self.late = self.labs(0)

    install()
    streamshim.bind("libc.so.6", {"labs": {"stream": 0, "nargs": 1}})
    library = Mine("libc.so.6")
    library.labs.restype = Long
    assert library.labs() == STREAM


@pytest.mark.parametrize("name", ["libc.so.6", b"/lib/libc.so.6", Path("/lib/libc.so.6")])
def test_the_name_of_a_library(name):
    """What ctypes keeps is what it was given, in some versions."""
    assert labels.label_of(SimpleNamespace(_name=name)) == "libc.so.6"
    assert labels.label_of(ctypes.CDLL(None)) == "the main program"


def test_loading_fails_as_before():
    install()
    streamshim.bind("*", {"labs": 0})
    with pytest.raises(OSError, match=r"libabsent\.so"):
        ctypes.CDLL("libabsent.so")
    with pytest.raises(TypeError):
        ctypes.CDLL()


def test_what_goes_wrong_in_binding_does_not_break_the_load(monkeypatch, caplog):
    install()
    streamshim.bind("libc*", {"labs": 0})
    monkeypatch.setattr(registry, "_match", lambda library: 1 / 0)
    assert ctypes.CDLL("libc.so.6").labs(5) == 5
    assert "could not bind libc.so.6" in caplog.text


def test_a_missing_function_of_a_pattern_is_a_note():
    install()
    streamshim.bind("libc.so.6", {"labs": 0, "nobody": None})
    library = libc()
    assert is_bound(library)
    text = str(streamshim.status())
    assert "note: libc.so.6 (matched by 'libc.so.6') has no function 'nobody'" in text
    assert "note: libc.so.6: labs" in text


def test_a_pattern_that_matches_nothing_is_a_note():
    install()
    streamshim.bind("libabsent-*.so", {"f": 0})
    assert "pattern 'libabsent-*.so': no library loaded through ctypes matches so far" in str(streamshim.status())


def test_what_is_bound_before_install_is_a_note():
    library = libc()
    function, _ = recorder(Int, Pointer)
    streamshim.bind(library, {"labs": 0})
    streamshim.bind(function)
    notes = binders.load("ctypes").notes()
    assert notes[0] == "libc.so.6: labs (once installed)"
    assert notes[1].startswith("function pointer ctypes function: 0x")
    assert notes[1].endswith(" (once installed)")


def test_what_was_said_about_the_library_counts_more_than_a_pattern():
    library = libc()
    streamshim.bind(library, {"labs": 0})
    streamshim.bind("libc.so.6", {"labs": None, "memset": 0})
    install()
    assert is_bound(library)
    assert library.memset(5, 0) == STREAM
    assert "libc.so.6: labs is bound with stream=0, not as 'libc.so.6' says" in str(streamshim.status())
    streamshim.unbind(library)
    assert library.labs(5) == 5
    with pytest.raises(ValueError, match="only a pattern that it matches is: unbind that"):
        streamshim.unbind(library)
    with pytest.raises(ValueError, match="labs is bound already with stream=None"):
        streamshim.bind(library, {"labs": 0})


def test_a_pattern_bound_again():
    install()
    library = libc()
    streamshim.bind("libc.so.6", {"labs": 0})
    streamshim.bind("libc.so.6", {"labs": 0})
    streamshim.bind("libc.so.6", {"memset": 0})
    assert is_bound(library)
    assert library.memset(5, 0) == STREAM
    with pytest.raises(ValueError, match=r"the pattern 'libc\.so\.6': labs is bound already with stream=0"):
        streamshim.bind("libc.so.6", {"labs": None})
    with pytest.raises(
        ValueError, match=r"is bound already, with a map of functions, and now without one; call .*\.unbind"
    ):
        streamshim.bind("libc.so.6")


def test_loading_is_cheap_while_there_are_no_patterns(monkeypatch):
    install()
    monkeypatch.setattr(registry, "_match", None)
    ctypes.CDLL("libc.so.6")


# The environment


def test_the_environment_says_the_same(monkeypatch):
    monkeypatch.setenv("STREAMSHIM_CTYPES", " libc.so.*:labs=-1 , abs=None; libm.so.6 :labs=0;")
    assert environment.patterns_from() == {
        "libc.so.*": {"labs": Spec(-1), "abs": Spec(None)}, "libm.so.6": {"labs": Spec(0)}
    }  # fmt: skip
    before = libc()
    install()
    after = libc()
    assert is_bound(before)
    assert is_bound(after)
    with pytest.raises(ValueError, match="STREAMSHIM_CTYPES says it"):
        streamshim.unbind("libc.so.*")
    streamshim.uninstall()
    monkeypatch.delenv("STREAMSHIM_CTYPES")
    install()
    assert before.labs(0) == 0


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("libx.so", "the part 'libx.so' is not PATTERN:FUNCTION=STREAM"),
        ("libx.so:", "the part 'libx.so:' is not PATTERN"),
        (":f=0", "the part ':f=0' is not PATTERN"),
        ("libx.so:f", "has 'f', which is not FUNCTION=STREAM"),
        ("libx.so:g:f=0", "has 'g:f=0', which is not FUNCTION=STREAM"),
        ("libx.so:=0", "has '=0', which is not FUNCTION=STREAM"),
        ("libx.so:f=0,", "has '', which is not FUNCTION=STREAM"),
        ("liba.so:f=0;libx.so:f=last", "the part 'libx.so:f=last' has the stream 'last', which is neither"),
        ("/opt/libx.so:f=0", "has a folder in its pattern"),
        ("libx.so:f=0,f=1", "names 'f' again, with another stream"),
    ],
)
def test_wrong_syntax_in_the_environment(monkeypatch, text, problem):
    monkeypatch.setenv("STREAMSHIM_CTYPES", text)
    with pytest.raises(ValueError, match=r"^STREAMSHIM_CTYPES: ") as refused:
        streamshim.install()
    assert problem in str(refused.value)
    assert "for instance libscale-*.so:scale_on=-1,scale=none" in str(refused.value)
    monkeypatch.delenv("STREAMSHIM_CTYPES")
    assert not streamshim.status().installed


def test_the_environment_in_a_fresh_process(run_python):
    code = """
import ctypes, sys
import streamshim
streamshim.install()
assert "torch" not in sys.modules
library = ctypes.CDLL("libc.so.6")
assert "__call__" in vars(library._FuncPtr)
assert "__call__" not in vars(ctypes.CDLL("libm.so.6")._FuncPtr)
streamshim.uninstall()
assert "__call__" not in vars(library._FuncPtr)
print(streamshim.bind, streamshim.load, streamshim.unbind, streamshim.Stream)
"""
    assert "function bind" in run_python(code, STREAMSHIM_CTYPES="libc.so.6:labs=-1")


# What is kept


def test_neither_libraries_nor_functions_are_kept():
    install()
    library = libc()
    function, _ = recorder(Int, Pointer)
    streamshim.bind(library, {"labs": 0})
    streamshim.bind("libc.so.6", {"memset": 0})
    streamshim.bind(function)
    function(5)
    alive = [weakref.ref(library), weakref.ref(library._FuncPtr), weakref.ref(function), weakref.ref(type(function))]
    prototype = type(function).__mro__[1]
    assert prototype is not type(function)
    del library, function
    for _ in range(2):  # the classes, once what they are patched with has gone
        gc.collect()
    assert [ref() for ref in alive] == [None] * 4
    assert registry._libraries == {}
    assert registry._pointers == {}


def test_no_argument_is_kept():
    install()
    function, _ = recorder(Int, Pointer)
    bound = undeclared(function)
    bound.argtypes = [Int, Pointer]
    streamshim.bind(bound)

    class Given:
        def __cuda_stream__(self):
            return (0, OTHER)

    given = Given()
    alive = weakref.ref(given)
    bound(5, given)
    del given
    assert alive() is None


# Wrong arguments


WRONG = [
    ((5,), {}, TypeError, r"target: got builtins\.int; accepted: a ctypes function pointer, a ctypes\.CDLL or PyDLL"),
    ((None,), {}, TypeError, r"target: got builtins\.NoneType"),
    ((ctypes.CFUNCTYPE(None),), {}, TypeError, r"the type CFunctionType.*bind these one by one"),
    ((ctypes.cdll,), {}, TypeError, r"target: got ctypes\.LibraryLoader"),
    (("", {"f": 0}), {}, ValueError, "accepted: a pattern for file names, without a folder"),
    (("/lib/libx.so", {"f": 0}), {}, ValueError, "without a folder"),
    (("libx.so", 5), {}, TypeError, "stream: got int; accepted for a library: a map from"),
    (("libx.so", None), {}, TypeError, "stream: got NoneType; accepted for a library"),
    (("libx.so", {}), {}, ValueError, "stream is empty"),
    (("libx.so", {5: 0}), {}, TypeError, "a function's name is 5"),
    (("libx.so", {"f": 1.5}), {}, TypeError, r"stream\['f'\], stream: got float; accepted: an index"),
    (("libx.so", {"f": True}), {}, TypeError, r"stream\['f'\], stream: got bool"),
    (("libx.so", {"f": "s"}), {}, ValueError, "stream is 's', but argnames is not given"),
    (("libx.so", {"f": {"nargs": 5}}), {}, ValueError, r"stream\['f'\] has no 'stream'; accepted keys"),
    (("libx.so", {"f": {"stream": 0, "args": 5}}), {}, ValueError, "has 'args'; accepted keys: stream, nargs"),
    (("libx.so", {"f": 0}, 3), {}, TypeError, r"nargs says something about one function.*'nargs': 3"),
    (("libx.so", {"f": 0}), {"argnames": ["a"]}, TypeError, r"argnames says something about one function"),
    (("libx.so",), {"device": 0}, TypeError, "device and tensors go with a map"),
    (("libx.so", {"f": 0}), {"device": "cuda:0"}, ValueError, "device is 'cuda:0'; accepted: 'current', 'tensors', or"),
    (("libx.so", {"f": 0}), {"device": -1}, ValueError, "device is -1"),
    (("libx.so", {"f": 0}), {"device": True}, ValueError, "device is True"),
    (("libx.so", {"f": 0}), {"tensors": True}, ValueError, "tensors is True; accepted: None or 'data_ptr'"),
    (("FUNCTION", {"f": 0}), {}, TypeError, "stream: got a map; accepted for a function pointer"),
    (("FUNCTION", "s"), {"argnames": ["a", "b"]}, ValueError, "stream is 's', but argnames has a, b"),
    (("FUNCTION", 2, 2), {}, ValueError, "stream is 2, but there are 2 arguments"),
    (("FUNCTION", -3, 2), {}, ValueError, "stream is -3, but there are 2 arguments"),
    (("FUNCTION", 0, 0), {}, ValueError, "nargs is 0; accepted: how many arguments there are, from 1"),
    (("FUNCTION", 0, "5"), {}, ValueError, "nargs is '5'"),
    (("FUNCTION", 0, 3), {"argnames": ["a", "b"]}, ValueError, "nargs is 3, but argnames has 2 names"),
    (("FUNCTION", 0), {"argnames": "ab"}, TypeError, "argnames: got str; accepted: the names of all arguments"),
    (("FUNCTION", 0), {"argnames": [1, 2]}, TypeError, "argnames: got list"),
    (("FUNCTION", 0), {"argnames": []}, ValueError, r"argnames is \(\)"),
    (("FUNCTION", 0), {"argnames": ["a", "a"]}, ValueError, "each once"),
    (("FUNCTION", [0]), {}, TypeError, "stream: got list; accepted: an index"),
]  # fmt: skip


@pytest.mark.parametrize(("args", "kwargs", "kind", "text"), WRONG, ids=[w[3][:40] for w in WRONG])
def test_a_wrong_argument_of_bind(args, kwargs, kind, text):
    function, _ = recorder(Int, Pointer)
    target = function if isinstance(args[0], str) and args[0] == "FUNCTION" else args[0]
    install()
    with pytest.raises(kind, match=text):
        streamshim.bind(target, *args[1:], **kwargs)
    assert binders.load("ctypes").notes() == []
    assert vars(ctypes.CDLL)["__init__"] is not ORIGINAL_INIT


@pytest.mark.parametrize("target", [5, None, ctypes.CFUNCTYPE(None)])
def test_a_wrong_argument_of_unbind(target):
    with pytest.raises(TypeError, match="target: got"):
        streamshim.unbind(target)


@pytest.mark.parametrize(
    ("args", "kwargs", "text"),
    [
        ((5, {"f": 0}), {}, "path: got int"),
        (("libc.so.6", 5), {}, "functions: got int"),
        (("libc.so.6", {"labs": 0}), {"loader": open}, "loader is <built-in function open>; accepted: ctypes.CDLL"),
        (("libc.so.6", {"labs": 0}), {"loader": int}, "loader is <class 'int'>"),
    ],
)
def test_a_wrong_argument_of_load(args, kwargs, text):
    with pytest.raises(TypeError, match=text):
        streamshim.load(*args, **kwargs)


# CUDA's own functions


def test_a_library_without_cudas_functions_needs_a_map():
    with pytest.raises(ValueError, match=r"libc\.so\.6 has none of CUDA's own functions, so name those that launch"):
        streamshim.bind(libc())


def test_the_table():
    for name, spec in tables.SPECS.items():
        assert spec.waits is not None or 0 <= spec.stream < spec.count
        assert name.startswith("cu")
        assert spec.waits is not None or "Event" not in name
        assert name.removesuffix("_ptsz") in tables.SPECS
        assert f"{name.removesuffix('_ptsz')}_ptsz" in tables.SPECS
    assert tables.SPECS["cuLaunchKernel"] == Spec(8, 11)
    assert tables.SPECS["cudaLaunchKernel_ptsz"] == Spec(5, 6)
    assert tables.SPECS["cuLaunchKernelEx"] == Spec(0, 4, field=32)
    assert tables.SPECS["cuLaunchHostFunc"] == Spec(0, 3)


def test_the_structure_of_the_table():
    pointer, number = ctypes.c_void_p, ctypes.c_uint

    class Driver(ctypes.Structure):  # CUlaunchConfig
        _fields_ = [("numbers", number * 7), ("stream", pointer), ("attrs", pointer), ("n", number)]

    class Runtime(ctypes.Structure):  # cudaLaunchConfig_t
        _fields_ = [
            ("grid", number * 3), ("block", number * 3), ("shared", ctypes.c_size_t),
            ("stream", pointer), ("attrs", pointer), ("n", number),
        ]  # fmt: skip

    for kind in (Driver, Runtime):
        assert (kind.stream.offset, ctypes.sizeof(kind)) == (config_structs.STREAM_OFFSET, config_structs.SIZE)
