"""Libraries built with a C compiler: every place of the stream, in libraries that are loaded before and after."""

from __future__ import annotations

import ctypes
import subprocess
import sys

import pytest
from ctypes_functions import OTHER, SOURCE, STREAM, Long, Streams, build, declare, forget_everything

import streamshim

MAP = {"first": 0, "middle": 1, "last": -1, "only": -1, "none": None}


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return build(tmp_path_factory.mktemp("library"), "libplain-1.so")


@pytest.fixture(autouse=True)
def streams(monkeypatch):
    monkeypatch.delenv("STREAMSHIM_CTYPES", raising=False)
    invented = Streams().use()
    invented.current[0] = STREAM
    yield invented
    streamshim.uninstall()
    forget_everything()


def install(mode=None):
    return streamshim.install(mode, only=["ctypes"])


CALLS = {
    "first": lambda lib, *s: lib.first(*s, 8, 9),
    "middle": lambda lib, *s: lib.middle(8, *s, 9),
    "last": lambda lib, *s: lib.last(8, 9, *s),
    "only": lambda lib, *s: lib.only(*s),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("given", [(), (None,), (0,), (1,), (2,), (STREAM,), (OTHER,)], ids=str)
@pytest.mark.parametrize("how", ["bind", "load", "pattern", "environment"])
def test_every_place_and_every_stream(path, monkeypatch, call, given, how):
    if how == "environment":
        monkeypatch.setenv("STREAMSHIM_CTYPES", "libplain-*.so:first=0,middle=1,last=-1,only=-1,none=none")
    install()
    if how == "pattern":
        streamshim.bind("libplain-*.so", MAP)
    library = declare(streamshim.load(path, MAP) if how == "load" else ctypes.CDLL(path))
    if how == "bind":
        streamshim.bind(library, MAP)
    assert call(library, *given) == (OTHER if given == (OTHER,) else STREAM)
    if call is not CALLS["only"]:
        assert [Long.in_dll(library, name).value for name in ("last_a", "last_b")] == [8, 9]
    streamshim.uninstall()
    if given:
        assert call(library, *given) == (given[0] or 0)


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("given", [None, 0, STREAM, OTHER])
def test_without_argtypes_the_stream_arrives_whole(path, call, given):
    install()
    library = ctypes.CDLL(path)
    streamshim.bind(
        library,
        {
            "first": {"stream": 0, "nargs": 3}, "middle": {"stream": -2, "nargs": 3},
            "last": {"stream": -1, "argnames": ["a", "b", "stream"]}, "only": 0,
        },
    )  # fmt: skip
    for name in CALLS:
        getattr(library, name).restype = Long
    assert call(library, given) == (OTHER if given == OTHER else STREAM)
    if call is not CALLS["only"]:
        assert call(library) == STREAM


def test_a_function_without_a_stream(path, streams):
    install()
    library = declare(streamshim.load(path, MAP))
    assert library.none(8, 9) == 17
    assert streams.ordered == [(STREAM, 0, 0), (0, STREAM, 0)]
    streams.capture(STREAM)
    before = Long.in_dll(library, "calls").value
    with pytest.raises(streamshim.WrongStreamError) as refused:
        library.none(8, 9)
    assert refused.value.report.launch.startswith("libplain-1.so: none\n")
    assert Long.in_dll(library, "calls").value == before


@pytest.mark.parametrize("mode", ["bind", "strict", "check"])
def test_stale_and_default_streams_in_a_capture(path, streams, mode):
    streams.capture(STREAM)
    install(mode)
    library = declare(streamshim.load(path, MAP))
    assert library.last(8, 9, STREAM) == STREAM
    if mode == "check":
        with pytest.raises(streamshim.WrongStreamError, match=r"libplain-1\.so: last, argument 'stream'"):
            library.last(8, 9, None)
    else:
        assert library.last(8, 9, None) == STREAM
    if mode == "bind":
        with pytest.warns(streamshim.RescuedLaunchWarning, match=r"libplain-1\.so: last"):
            assert library.last(8, 9, OTHER) == STREAM
    else:
        with pytest.raises(streamshim.WrongStreamError, match=r"libplain-1\.so: last"):
            library.last(8, 9, OTHER)


def test_as_a_callback_and_as_an_address(path):
    install()
    library = declare(streamshim.load(path, MAP))
    prototype = ctypes.CFUNCTYPE(Long, Long, Long, ctypes.c_void_p)
    address = ctypes.cast(library.last, ctypes.c_void_p).value
    assert prototype(address)(8, 9, None) == 0
    library.back.argtypes = [ctypes.c_void_p, Long, Long, ctypes.c_void_p]
    assert library.back(library.last, 8, 9, OTHER) == 1


def test_a_lone_pointer_to_a_function_of_the_library(path):
    """As from cuGetProcAddress: the linker knows its name for messages."""
    install()
    library = ctypes.CDLL(path)
    prototype = ctypes.CFUNCTYPE(Long, Long, Long, ctypes.c_void_p)
    pointer = prototype(ctypes.cast(library.last, ctypes.c_void_p).value)
    streamshim.bind(pointer)
    assert pointer(8, 9) == STREAM
    with pytest.raises(TypeError, match=r"^libplain-1\.so: last takes 3 arguments, or 2 without its stream"):
        pointer(8)


def test_outputs_among_paramflags(path):
    """The places are those that the caller sees."""
    install()
    library = ctypes.CDLL(path)
    kinds = [ctypes.c_void_p, ctypes.POINTER(Long), Long]
    function = ctypes.CFUNCTYPE(Long, *kinds)(("first", library), ((1, "stream"), (2, "out"), (1, "n", 9)))
    function.errcheck = lambda result, func, args: result
    streamshim.bind(function, "stream", argnames=("stream", "n"))
    for given in [(None, 9), (9,), (0, 9)]:
        assert function(*given) == STREAM
    assert function(stream=None, n=9) == function(n=9) == function(stream=0) == STREAM
    assert function(OTHER, n=9) == OTHER
    assert Long.in_dll(library, "last_b").value == 9


def test_two_objects_of_one_library(path):
    install()
    bound, other = declare(streamshim.load(path, MAP)), declare(ctypes.CDLL(path))
    assert (bound.only(0), other.only(0)) == (STREAM, 0)


def test_through_the_loader_objects(path):
    install()
    streamshim.bind("libplain-*.so", MAP)
    for library in (ctypes.cdll.LoadLibrary(str(path)), ctypes.PyDLL(str(path))):
        assert declare(library).only(0) == STREAM


def test_a_start_up_file_binds_a_library_that_a_spawned_process_loads(tmp_path, path):
    """Installed before torch is imported, and the library is loaded by code that nobody edits."""
    (tmp_path / "sitecustomize.py").write_text(
        "import sys, streamshim\n"
        "streamshim.install()\n"
        f"streamshim.bind('libplain-*.so', {MAP})\n"
        "assert 'torch' not in sys.modules\n"
    )
    (tmp_path / "program.py").write_text(
        "import ctypes, multiprocessing, sys, types\n"
        "def work(path):\n"
        "    import streamshim\n"
        "    from ctypes_functions import STREAM, Streams, declare\n"
        "    streams = Streams().use()\n"
        "    streams.current[0] = STREAM\n"
        "    library = declare(ctypes.CDLL(path))\n"
        "    assert library.only(None) == library.last(8, 9) == STREAM\n"
        "    assert library.none(8, 9) == 17 and len(streams.ordered) == 2\n"
        "if __name__ == '__main__':\n"
        "    process = multiprocessing.get_context('spawn').Process(target=work, args=(sys.argv[1],))\n"
        "    process.start()\n"
        "    process.join()\n"
        "    sys.exit(process.exitcode)\n"
    )
    root = str(streamshim.__path__[0]).rpartition("/")[0]
    done = subprocess.run(
        [sys.executable, str(tmp_path / "program.py"), str(path)],
        env={"PYTHONPATH": f"{tmp_path}:{root}:{root}/tests", "PATH": "/usr/bin:/bin"},
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_the_source_has_what_the_tests_name():
    assert all(f" {name}(" in SOURCE for name in MAP)
