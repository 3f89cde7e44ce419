"""Launches into a capture, held against the nodes of its graph; and a profiler that starts in the middle."""

from __future__ import annotations

import pytest
from fake_cupti import FORK, KERNEL, OTHER, OUTSIDE, STREAM, installed_watch

import streamshim
from streamshim import EscapedLaunchWarning, MissingFromGraphError, capture
from streamshim.callsite import Site
from streamshim.findings import Missing, MissingReport
from streamshim.guards import profiler, recorded
from streamshim.patching import PatchSet
from streamshim.runtime import CaptureState
from streamshim.runtime.graphs import Node
from streamshim.streams import PER_THREAD

COPY, SET, COPY_2D = 306, 216, 289


@pytest.fixture
def graph(watched, monkeypatch):
    """The nodes that the graph of a capture is said to have."""
    nodes = []
    monkeypatch.setattr(capture, "readers", [lambda graph, window: watched.guard.compare(window, nodes)])
    return nodes


def kernels(*names):
    return [Node("kernel", name) for name in names]


def missing(watched, body, mode="strict"):
    """What is told to be missing from a capture."""
    with pytest.raises(MissingFromGraphError) as error:
        watched(body, mode)
    return error.value.report.kernels


def test_a_graph_with_all_nodes_is_fine(watched, cupti, cuda, graph):
    graph += kernels("add", "add", "void gate<float>(float*)", "add")

    def body():
        cuda.captures[FORK] = CaptureState(7)
        for stream in (STREAM, STREAM, FORK):
            cupti.launch(KERNEL, stream, b"add")
        cupti.launch(KERNEL, STREAM, b"_Z4gateIfEvPT_")

    watched(body)
    assert watched.guard._recorded._counts == {}


@pytest.mark.parametrize("mode", ["strict", "check"])
def test_a_kernel_without_a_node_is_missing(watched, cupti, graph, mode):
    graph += kernels("add", "gate")

    def body():
        for name in (b"add", b"gate", b"gate", b"add"):
            cupti.launch(KERNEL, STREAM, name)

    add, gate = missing(watched, body, mode)
    assert (add.what, add.launched, add.nodes) == ("kernel 'add'", 2, 1)
    assert (gate.what, gate.launched, gate.nodes) == ("kernel 'gate'", 2, 1)
    assert add.site.file.endswith("test_watch_recorded.py")
    assert add.site.function == "body"


def test_what_left_the_capture_is_told_before(watched, cupti, graph):
    def body():
        cupti.launch(KERNEL, OUTSIDE, b"own_stream")
        cupti.launch(KERNEL, STREAM, b"add")

    with pytest.raises(streamshim.WrongStreamError, match="own_stream"):
        watched(body)
    graph += kernels("add")
    watched(lambda: cupti.launch(KERNEL, STREAM, b"add"))


def test_what_did_not_go_into_the_capture_or_failed_is_not_counted(watched, cupti, cuda, graph):
    def body():
        cupti.launch(KERNEL, STREAM, b"refused", status=1)
        cuda.current = OTHER
        cupti.launch(KERNEL, 0, b"elsewhere")
        cupti.launch(KERNEL, OTHER, b"elsewhere")
        cuda.current = STREAM

    watched(body)


def test_a_name_that_the_driver_does_not_tell_may_be_any(watched, cupti, graph):
    graph += kernels("?", "add")

    def body():
        cupti.launch(KERNEL, STREAM, b"add")
        cupti.launch(KERNEL, STREAM, b"gate")

    watched(body)
    (gate,) = missing(watched, lambda: (body(), cupti.launch(KERNEL, STREAM, b"gate")))
    assert (gate.what, gate.launched, gate.nodes) == ("kernel 'gate'", 2, 0)


def test_a_launch_whose_kernel_cupti_does_not_name_is_not_counted(watched, cupti, graph):
    """Its node has a name, which may be any."""
    graph += kernels("add")
    watched(lambda: cupti.launch(KERNEL, STREAM))


def test_a_capture_that_was_ended_below_python_is_not_compared(watched, cupti, cuda, graph):
    """And another one was begun on its stream, so that the nodes at the end are those of the other."""
    graph += kernels("after")

    def body():
        cupti.launch(KERNEL, STREAM, b"before")
        cuda.captures.pop(STREAM)
        cupti.launch(KERNEL, STREAM, b"eager")
        cuda.captures[STREAM] = CaptureState(8)
        cupti.launch(KERNEL, STREAM, b"after")

    watched(body)
    assert watched.guard._recorded._counts == {}


def test_a_threads_own_stream_is_another_one_in_each_thread(watched, cupti, cuda, graph, monkeypatch):
    """One captures its own, and has the same handle for it as the thread that launches."""
    window = capture.Window(9, PER_THREAD, 0, Site("a.py", 1, "a"), "Thread-1", "thread_local")
    monkeypatch.setitem(capture._windows, 9, window)
    monkeypatch.setitem(capture._captured_on, PER_THREAD, 9)
    watched.guard.opened(window)
    cuda.current = PER_THREAD
    cupti.launch(KERNEL, PER_THREAD, b"eager")
    assert watched.guard._recorded._counts == {}
    cuda.captures[PER_THREAD] = CaptureState(9)
    cupti.launch(KERNEL, PER_THREAD, b"add")
    assert list(watched.guard._recorded._counts) == [(9, "kernel", b"add")]


@pytest.mark.parametrize(("function", "kind"), [(COPY, "copy"), (SET, "set")])
def test_copies_and_sets_count_when_they_were_moved(watched, cupti, graph, function, kind):
    watched.redirect.everything = True
    watched.redirect.prepare()
    watched(lambda: cupti.launch(function, STREAM))
    watched(lambda: cupti.launch(function, 0, size=0))
    (found,) = missing(watched, lambda: (cupti.launch(function, 0), cupti.launch(function, STREAM)))
    assert (found.what, found.launched, found.nodes) == (kind, 1, 0)
    graph.append(Node(kind))
    watched(lambda: cupti.launch(function, 0))


def test_a_copy_whose_size_is_not_known_is_not_counted(watched, cupti, graph):
    watched.redirect.everything = True
    watched.redirect.prepare()
    watched(lambda: cupti.launch(COPY_2D, 0))


def test_memory_is_bounded(watched, cupti, graph, monkeypatch):
    monkeypatch.setattr(recorded, "KEPT", 10)

    def body():
        for i in range(50):
            cupti.launch(KERNEL, STREAM, f"kernel_{i}".encode())

    assert len(missing(watched, body)) == 10


def test_a_lost_capture_leaves_nothing_behind(watched, cupti, monkeypatch):
    def end(self):
        raise RuntimeError("lost")

    watched(lambda: cupti.launch(KERNEL, STREAM, b"add"))
    assert len(watched.guard._recorded._counts) == 1
    # The next capture has another id.
    monkeypatch.setattr(watched.graph, "id", 8)
    watched()
    assert watched.guard._recorded._counts == {}


def test_what_a_lost_capture_lacks_is_forgotten(watched, cupti, cuda, graph, monkeypatch):
    """Its graph was read, and then CUDA refused to make an executable one of it."""

    def body():
        cupti.launch(KERNEL, STREAM, b"add")
        monkeypatch.setattr(cuda, "captures", _Refusing(cuda.captures))

    with pytest.raises(RuntimeError, match="out of memory"):
        watched(body)
    cuda.captures = {}
    watched.graph.id = 8
    watched()
    assert watched.guard._missing == {}


class _Refusing(dict):
    def pop(self, *args):
        super().pop(*args)
        raise RuntimeError("out of memory")


def test_nothing_is_counted_where_no_graph_is_read(cuda):
    streamshim.install("bind", watch=True)
    guard = installed_watch()
    assert guard._recorded is None
    streamshim.uninstall()
    streamshim.install("check")
    guard = installed_watch()
    assert guard._recorded is not None


def test_another_exception_is_not_hidden(watched, cupti, graph, caplog):
    def body():
        cupti.launch(KERNEL, STREAM, b"add")
        raise KeyError("the user's")

    with pytest.raises(KeyError, match="the user's"):
        watched(body)
    assert "lacks launches of kernel 'add'" in caplog.records[-1].getMessage()


def test_the_text(at_root):
    one = Missing("kernel 'gate'", 2, 1, Site("model.py", 40, "forward"))
    assert (
        str(MissingReport((one,), "capture 7", "strict"))
        == """\
The captured CUDA graph lacks launches of kernel 'gate', which was launched first at model.py:40 in forward.

  missing          kernel 'gate'
  launched         2 times; the graph has 1 nodes for it
  first at         model.py:40 in forward
  captured         capture 7
  streamshim mode  strict

They were made on a stream of the capture, without an error, and the graph has fewer nodes for them than that:
every replay would be wrong.
What to do:
  * If they were moved into the capture below Python (redirect, or bind with None), the driver did not take
    that: give the function a stream parameter, and do without (STREAMSHIM_REDIRECT=0).
  * Otherwise tell us of it, with this text and the output of `streamshim doctor`."""
    )
    many = str(MissingReport((one,) * 8, "capture 7", "strict"))
    assert many.count("  missing ") == 5
    assert "and              3 more" in many


def test_a_profiler_that_starts_in_a_capture_has_cupti(watched, cupti, caplog):
    seen = []

    class profile:
        def _prepare_trace(self):
            seen.append((cupti.told, cupti.left))

    patches = PatchSet(profiler.patches(profile, watched.guard.give_way))
    patches.apply()
    try:
        watched(lambda: (profile()._prepare_trace(), profile()._prepare_trace()))
        profile()._prepare_trace()
    finally:
        patches.undo()
    # Also after the capture, since CUPTI stays subscribed to.
    assert seen == [(None, 1), (None, 2), (None, 3)]
    (record,) = caplog.records
    assert "the rest of this capture is not watched: torch.profiler was started inside a capture" in record.getMessage()
    assert watched.guard.off.startswith("torch.profiler was started inside a capture")
    assert profiler.patches(None, watched.guard.give_way) == []
    # The next capture tries again.
    with pytest.warns(EscapedLaunchWarning):
        watched(lambda: cupti.launch(KERNEL, OUTSIDE), "bind")
    assert watched.guard.off == ""


def test_install_patches_the_profiler_of_torch():
    profile = pytest.importorskip("torch.autograd.profiler").profile
    original = profile._prepare_trace
    with streamshim.install():
        assert profile._prepare_trace is not original
        with profile(use_kineto=True) as seen:
            pass
        assert seen.entered
    assert profile._prepare_trace is original
