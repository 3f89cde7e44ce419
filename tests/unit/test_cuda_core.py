"""The binder of cuda.core: what stands for a stream there, graph builders, keywords, and copies of ``launch``."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType

import pytest

pytest.importorskip("cuda.core", reason="cuda-core is not installed")

import cuda.core
from cuda.bindings.driver import CUstream
from cuda.core import Stream, _launcher
from cuda_recorders import Protocol, Recorder

import streamshim
from streamshim import WrongStreamError
from streamshim.runtime import CaptureState

CURRENT, STALE = 0x7F00, 0x7E00
# Old versions do not export them.
LEGACY_DEFAULT_STREAM = getattr(cuda.core, "LEGACY_DEFAULT_STREAM", None) or Stream.from_handle(1)
PER_THREAD_DEFAULT_STREAM = getattr(cuda.core, "PER_THREAD_DEFAULT_STREAM", None) or Stream.from_handle(2)


@pytest.fixture(autouse=True)
def current(cuda):
    """torch's current stream."""
    cuda.current = CURRENT
    return cuda


@pytest.fixture
def launch(monkeypatch) -> Recorder:
    """``launch``, with ``cuda.core.launch`` as the copy that it is."""
    recorder = Recorder(monkeypatch, _launcher, "launch")
    monkeypatch.setattr(cuda.core, "launch", recorder.function)
    return recorder


def install(mode: str = "bind") -> None:
    streamshim.install(mode, only=["cuda_core"])


class AsProperty:
    """How early versions of the protocol answered."""

    __cuda_stream__ = (0, 0)


@pytest.mark.parametrize(
    "stream",
    [
        LEGACY_DEFAULT_STREAM,
        PER_THREAD_DEFAULT_STREAM,
        Stream.from_handle(0),
        None,
        0,
        CUstream(0),
        Protocol(1),
        AsProperty(),
    ],
    ids=lambda s: type(s).__name__,
)
def test_default_streams_are_bound(launch, stream):
    install()
    cuda.core.launch(stream, "config", "kernel", 1, 2.0)
    bound, *rest = launch.last
    assert bound.__cuda_stream__() == (0, CURRENT)
    assert rest == ["config", "kernel", 1, 2.0]


@pytest.mark.parametrize("make", [Stream.from_handle, Protocol], ids=["Stream", "protocol"])
@pytest.mark.parametrize("handle", [CURRENT, STALE])
def test_explicit_streams_are_passed_on_untouched(launch, make, handle):
    install()
    stream = make(handle)
    cuda.core.launch(stream, "config", "kernel")
    assert launch.last[0] is stream


def test_what_launch_accepts_is_what_it_gets(launch):
    """An int is no stream for cuda.core, and is converted also where it is right already."""
    install()
    cuda.core.launch(CURRENT, "config", "kernel")
    assert launch.last[0].__cuda_stream__() == (0, CURRENT)
    assert Stream.from_handle(launch.last[0].__cuda_stream__()[1]).__cuda_stream__() == (0, CURRENT)


def test_a_stale_stream_is_rescued(launch, current):
    current.captures[CURRENT] = CaptureState(5)
    install()
    with pytest.warns(streamshim.RescuedLaunchWarning, match=r"cuda\.core\.launch"):
        cuda.core.launch(Stream.from_handle(STALE), "config", "kernel")
    assert launch.last[0].__cuda_stream__() == (0, CURRENT)


def test_a_stale_stream_is_refused_in_strict_mode(launch, current):
    current.captures[CURRENT] = CaptureState(5)
    install("strict")
    with pytest.raises(WrongStreamError, match=r"cuda\.core\.launch, argument 'stream'"):
        cuda.core.launch(Stream.from_handle(STALE), "config", "kernel")
    assert launch.calls == []


@pytest.mark.parametrize("mode", ["bind", "strict", "check"])
def test_a_graph_builder_is_its_own_capture(launch, current, mode):
    """cuda.core's own cannot be made without a driver; what counts is its name and where it comes from."""

    class GraphBuilder:
        __module__ = "cuda.core.graph._graph_builder"

        def __cuda_stream__(self):
            raise AssertionError("a graph builder was asked for its stream")

    class Derived(GraphBuilder):
        pass

    current.captures[CURRENT] = CaptureState(5)
    install(mode)
    for builder in (GraphBuilder(), Derived()):
        for _ in range(2):
            cuda.core.launch(builder, "config", "kernel")
            assert launch.last[0] is builder


def test_the_real_graph_builder_is_recognised():
    from streamshim.binders import cuda_core

    home = cuda.core if hasattr(cuda.core, "GraphBuilder") else importlib.import_module("cuda.core.graph")
    assert cuda_core._kind_of(home.GraphBuilder) is cuda_core._BUILDER
    assert cuda_core._kind_of(Stream) is cuda_core._STREAM


def test_by_keyword(launch):
    install()
    cuda.core.launch(stream=LEGACY_DEFAULT_STREAM, config="config", kernel="kernel")
    args, kwargs = launch.calls[-1]
    assert args == ()
    assert kwargs.pop("stream").__cuda_stream__() == (0, CURRENT)
    assert kwargs == {"config": "config", "kernel": "kernel"}


@pytest.mark.parametrize("args", [(), (0,), (0, "config")], ids=len)
def test_too_few_arguments_are_left_to_the_original(launch, args):
    install()
    cuda.core.launch(*args)
    assert launch.last == args


def test_the_original_complains_in_its_own_words():
    def complaint():
        with pytest.raises(TypeError) as caught:
            cuda.core.launch(LEGACY_DEFAULT_STREAM, "no config", "no kernel")
        return str(caught.value)

    unpatched = complaint()
    install()
    assert complaint() == unpatched


def test_no_stream_is_refused_by_name(launch):
    install()
    with pytest.raises(TypeError, match=r"^cuda\.core\.launch, argument 'stream': got builtins\.str"):
        cuda.core.launch("a string", "config", "kernel")


def test_every_copy_is_replaced_and_put_back(launch, monkeypatch):
    user = ModuleType("streamshim_unit_user")
    user.launch = launch.function
    monkeypatch.setitem(sys.modules, user.__name__, user)
    install()
    assert user.launch is cuda.core.launch is _launcher.launch is not launch.function
    (mine,) = [b for b in streamshim.status().binders if b.name == "cuda_core"]
    assert mine.patched == ["cuda.core._launcher.launch"]
    assert len(mine.notes) == 1
    user.later = cuda.core.launch
    streamshim.uninstall()
    assert user.launch is user.later is cuda.core.launch is _launcher.launch is launch.function


def test_installed_before_the_import(run_python):
    code = """
import streamshim
streamshim.install(only=["cuda_core"])
from cuda.core import launch
import cuda.core._launcher
assert launch is cuda.core.launch is cuda.core._launcher.launch
assert launch.__globals__["__name__"] == "streamshim.binders.cuda_core"
(mine,) = [b for b in streamshim.status().binders if b.name == "cuda_core"]
print(mine.state, mine.notes)
streamshim.uninstall()
assert launch is cuda.core.launch is cuda.core._launcher.launch
assert "cyfunction" in repr(launch)
"""
    assert run_python(code) == "bound []\n"
