"""Capture windows: what is known of the captures that torch has open. The graph is a stand-in, the patches are real."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import ClassVar

import pytest

from streamshim import capture, installer
from streamshim.callsite import Site
from streamshim.capture import Window, describe, open_windows
from streamshim.patching import PatchSet
from streamshim.runtime import CaptureState

STREAM = 0x7F0010


@pytest.fixture
def graph_class(cuda):
    """A class with the methods of ``torch.cuda.CUDAGraph``, patched; its captures are ids from 7 on."""
    cuda.current, cuda.device = STREAM, 1
    ids = iter(range(7, 100))

    class CUDAGraph:
        calls: ClassVar[list[tuple]] = []
        end_raises = False

        def capture_begin(self, pool=None, capture_error_mode="global", check_input_liveness=False):
            """Begin capturing."""
            self.calls.append(("begin", pool, capture_error_mode, check_input_liveness))
            cuda.captures[cuda.current] = CaptureState(next(ids))
            return "begun"

        def capture_end(self):
            """End capturing."""
            self.calls.append(("end",))
            if cuda.captures.pop(cuda.current, None) is None:
                raise RuntimeError("capture must end on the same stream it began on")
            if self.end_raises:
                raise RuntimeError("operation failed due to a previous error during capture")
            return "ended"

    patches = PatchSet(capture.patches(CUDAGraph))
    assert patches.probe() == []
    patches.apply()
    capture.enabled = True
    yield CUDAGraph
    patches.undo()


def test_a_window_is_open_from_begin_to_end(graph_class, at_root):
    graph = graph_class()
    assert open_windows() == []
    assert graph.capture_begin() == "begun"
    line = test_a_window_is_open_from_begin_to_end.__code__.co_firstlineno + 3
    site = Site("tests/unit/test_capture.py", line, "test_a_window_is_open_from_begin_to_end")
    assert open_windows() == [Window(7, STREAM, 1, site, "MainThread", "global", threading.get_ident())]
    assert graph.capture_end() == "ended"
    assert open_windows() == []


@pytest.mark.parametrize(
    ("args", "kwargs", "arguments"),
    [
        ((), {}, (None, "global", False)),
        (("pool",), {}, ("pool", "global", False)),
        (("pool", "relaxed"), {}, ("pool", "relaxed", False)),
        ((), {"capture_error_mode": "thread_local"}, (None, "thread_local", False)),
        (("pool",), {"capture_error_mode": "relaxed"}, ("pool", "relaxed", False)),
        ((), {"pool": "pool"}, ("pool", "global", False)),
        (("pool", "relaxed", True), {}, ("pool", "relaxed", True)),
        ((), {"check_input_liveness": True, "pool": "pool"}, ("pool", "global", True)),
    ],
)
def test_arguments_pass_and_the_error_mode_is_known(graph_class, args, kwargs, arguments):
    graph_class().capture_begin(*args, **kwargs)
    assert graph_class.calls == [("begin", *arguments)]
    assert open_windows()[0].error_mode == arguments[1]


def test_a_capture_that_does_not_begin_opens_no_window(graph_class, cuda):
    with pytest.raises(TypeError, match="unexpected keyword"):
        graph_class().capture_begin(no_such_argument=1)
    assert open_windows() == []


def test_a_capture_whose_end_raises_is_closed(graph_class):
    """torch raises from capture_end when a fork was not joined, say; the capture is over nevertheless."""
    graph = graph_class()
    graph.end_raises = True
    graph.capture_begin()
    with pytest.raises(RuntimeError, match="previous error"):
        graph.capture_end()
    assert open_windows() == []


def test_a_capture_that_was_invalidated_is_closed_by_its_end(graph_class, cuda):
    """The driver gives the id of a valid capture only, so an invalidated one must be recognised by something else."""
    graph = graph_class()
    graph.end_raises = True
    graph.capture_begin()
    cuda.captures[STREAM] = CaptureState(0, valid=False)
    with pytest.raises(RuntimeError, match="previous error"):
        graph.capture_end()
    assert open_windows() == []


def test_a_capture_that_is_lost_before_it_can_be_asked_has_a_window_all_the_same(graph_class, cuda, monkeypatch):
    """Another thread can break a capture as soon as it has begun."""
    explained = []
    graph = graph_class()
    monkeypatch.setattr(capture, "explain", lambda window, error: explained.append(str(window)))
    monkeypatch.setattr(cuda, "capture_state", lambda handle: CaptureState(0, valid=False))
    graph.end_raises = True
    graph.capture_begin()
    (window,) = open_windows()
    assert window.id < 0
    with pytest.raises(RuntimeError, match="previous error"):
        graph.capture_end()
    assert open_windows() == []
    assert explained == [f"a capture on stream 0x7f0010 of cuda:1, begun at {window.site}, thread MainThread"]


def test_a_lost_capture_is_explained_while_its_window_is_open(graph_class, monkeypatch):
    """Another thread's capture, begun just then, must not make the guards forget what they know of it."""
    seen = []
    monkeypatch.setattr(capture, "explain", lambda window, error: seen.append(capture.window(window.id)))
    graph = graph_class()
    graph.end_raises = True
    graph.capture_begin()
    with pytest.raises(RuntimeError, match="previous error"):
        graph.capture_end()
    assert [window.id for window in seen] == [7]
    assert open_windows() == []


def test_after_a_loss_the_process_is_settled_once_nothing_is_open(graph_class, cuda, monkeypatch, caplog):
    """With the error of the user's own on its way, whatever becomes of it."""
    seen = []

    def settle(device):
        seen.append((device, open_windows()))
        raise RuntimeError("no luck")

    monkeypatch.setattr(capture, "after_loss", [settle])
    other = 0x7F0020
    first, second = graph_class(), graph_class()
    first.end_raises = second.end_raises = True
    first.capture_begin()
    cuda.current = other
    second.capture_begin()
    with pytest.raises(RuntimeError, match="previous error"):
        second.capture_end()
    assert seen == []
    cuda.current = STREAM
    with pytest.raises(RuntimeError, match="previous error"):
        first.capture_end()
    assert seen == [(1, [])]
    assert "may not be able to capture again" in caplog.text
    third = graph_class()
    third.capture_begin()
    third.capture_end()
    assert len(seen) == 1


def test_what_a_loss_leaves_is_settled_when_another_capture_has_ended_well(graph_class, cuda, monkeypatch):
    seen, other = [], 0x7F0020
    monkeypatch.setattr(capture, "after_loss", [seen.append])
    lost, good = graph_class(), graph_class()
    lost.end_raises = True
    good.capture_begin()
    cuda.current = other
    lost.capture_begin()
    with pytest.raises(RuntimeError, match="previous error"):
        lost.capture_end()
    assert seen == []
    cuda.current = STREAM
    good.capture_end()
    assert seen == [1]


def test_ctrl_c_while_the_graph_is_read_ends_the_capture_all_the_same(graph_class, cuda, monkeypatch):
    """A global capture that nobody ends keeps the whole process from using CUDA."""

    def read(graph, window):
        raise KeyboardInterrupt

    monkeypatch.setattr(capture, "readers", [read])
    for lost in (False, True):
        graph = graph_class()
        graph.end_raises = lost
        graph.capture_begin()
        with pytest.raises(KeyboardInterrupt):
            graph.capture_end()
        assert graph.calls[-1] == ("end",)
        assert (cuda.captures, open_windows()) == ({}, [])


def test_an_end_that_is_refused_leaves_the_capture_open(graph_class, cuda):
    """torch refuses to end a capture under another current stream than it began on; it goes on then."""
    graph = graph_class()
    graph.capture_begin()
    cuda.current = 0x7F0020
    with pytest.raises(RuntimeError, match="same stream"):
        graph.capture_end()
    assert [w.id for w in open_windows()] == [7]
    cuda.current = STREAM
    graph.capture_end()
    assert open_windows() == []


def test_an_uninstall_while_capturing_leaves_no_window_behind(graph_class, cuda):
    """Capture ids are never used twice, so a window that is left would be listed as open for ever."""
    installer.install()
    graph = graph_class()
    graph.capture_begin()
    installer.uninstall()
    graph.capture_end()
    assert installer.status().captures == []


def test_several_captures_are_listed_oldest_first(graph_class, cuda):
    first, second = graph_class(), graph_class()
    first.capture_begin()
    cuda.current = 0x7F0020
    second.capture_begin()
    assert [(w.id, w.stream) for w in open_windows()] == [(7, STREAM), (8, 0x7F0020)]
    second.capture_end()
    assert [w.id for w in open_windows()] == [7]


def test_a_graph_can_capture_again_and_again(graph_class):
    """Breakable graphs end and begin captures many times inside one ``with`` block; each is another capture."""
    graph = graph_class()
    for expected in (7, 8, 9):
        graph.capture_begin()
        assert [w.id for w in open_windows()] == [expected]
        graph.capture_end()
    assert open_windows() == []


def test_a_capture_that_torch_began_may_be_ended_by_another_library(graph_class, cuda):
    """cuda-python ends it, runs something eagerly, and begins the next one on the same stream, which torch ends."""
    told = []
    capture.guards[:] = [SimpleNamespace(opened=lambda w: told.append(w.id), closing=lambda w: told.append(-w.id))]
    try:
        graph = graph_class()
        graph.capture_begin()
        capture.ending(STREAM)
        cuda.captures.pop(STREAM)
        capture.ended(STREAM)
        assert open_windows() == []
        cuda.captures[STREAM] = CaptureState(8)
        capture.begun(STREAM, 1, "global")
        graph.capture_end()
    finally:
        capture.guards.clear()
    assert open_windows() == []
    assert told == [7, -7, 8, -8]


def test_a_capture_that_was_ended_below_python_is_closed_by_the_next_on_its_stream(graph_class, cuda):
    told = []
    capture.guards[:] = [SimpleNamespace(opened=lambda w: told.append(w.id), closing=lambda w: told.append(-w.id))]
    try:
        for _ in range(3):
            graph_class().capture_begin()
            assert len(open_windows()) == 1
    finally:
        capture.guards.clear()
    assert told == [7, -7, 8, -8, 9]


def test_the_thread_is_known(graph_class):
    thread = threading.Thread(target=graph_class().capture_begin, name="capturer")
    thread.start()
    thread.join()
    assert [w.thread for w in open_windows()] == ["capturer"]


def test_nothing_is_done_while_disabled(graph_class, cuda):
    capture.enabled = False
    capture.before_begin.append(lambda: pytest.fail("called although disabled"))
    graph = graph_class()
    assert graph.capture_begin("pool") == "begun"
    assert (open_windows(), cuda.asked) == ([], [])
    assert graph.capture_end() == "ended"
    assert graph_class.calls == [("begin", "pool", "global", False), ("end",)]
    assert cuda.asked == []


def test_what_objects_before_the_begin_keeps_it_from_beginning(graph_class):
    def object_to_it():
        raise RuntimeError("not today")

    capture.before_begin.append(object_to_it)
    with pytest.raises(RuntimeError, match="not today"):
        graph_class().capture_begin()
    assert graph_class.calls == []
    assert open_windows() == []


def test_the_patched_methods_look_like_the_originals(graph_class):
    assert graph_class.capture_begin.__doc__ == "Begin capturing."
    assert graph_class.capture_begin.__name__ == "capture_begin"
    assert graph_class.capture_end.__doc__ == "End capturing."


def test_a_subclass_is_covered(graph_class):
    class Mine(graph_class):
        def capture_begin(self, **kwargs):
            return super().capture_begin(**kwargs)

    graph = Mine()
    graph.capture_begin(capture_error_mode="relaxed")
    assert [w.error_mode for w in open_windows()] == ["relaxed"]
    graph.capture_end()
    assert open_windows() == []


@pytest.mark.parametrize(
    ("id_", "text"),
    [
        (0, "nothing"),
        (5, "capture 5 (begun before install(), or below Python)"),
        (7, "capture 7 on stream 0x7f0010 of cuda:1, begun at serve.py:12 in capture_model, thread worker"),
    ],
)
def test_a_capture_in_words(id_, text):
    capture._windows[7] = Window(7, STREAM, 1, Site("serve.py", 12, "capture_model"), "worker", "global")
    assert describe(id_) == text


def test_a_window_cannot_be_changed():
    with pytest.raises(AttributeError):
        Window(7, STREAM, 1, Site("f.py", 1, "f"), "worker", "global").id = 8


def test_what_was_handled_is_not_formatted_with_a_window():
    """It may hold a tensor, which would be waited for."""

    class Tensor:
        def __repr__(self):
            pytest.fail("formatted")

    site = Site("f.py", 1, "f")
    window = Window(7, STREAM, 1, site, "worker", "global", handled=ValueError(Tensor()))
    assert "capture 7" in repr(window)
    assert "capture 7" in f"{window}"


def test_a_guard_that_fails_does_not_keep_the_user_from_the_end_of_the_capture(graph_class, cuda, caplog):
    class Broken:
        def opened(self, window):
            raise KeyError("out of order")

        closing = opened

    capture.guards[:] = [Broken()]
    try:
        graph = graph_class()
        graph.capture_begin()
        graph.capture_end()
    finally:
        capture.guards.clear()
    assert open_windows() == []
    assert [r.getMessage() for r in caplog.records] == ["streamshim: guard Broken failed"] * 2
