"""What is in a graph: read from a stand-in for the driver that answers as cuda.h says."""

from __future__ import annotations

import ctypes

import pytest

import streamshim
from streamshim import capture, graph_audit
from streamshim.errors import StreamShimError
from streamshim.patching import PatchSet
from streamshim.runtime import CaptureState, graphs
from streamshim.runtime.graphs import Node

STREAM, GRAPH = 0x7F0010, 0x5500
MANGLED = b"_ZN3foo7add_oneIfEEvPT_i"


class Driver:
    """A graph of five nodes: two kernels (one of a module, one of a library), a copy, and two of other types."""

    kinds: dict = {0x100: 0, 0x200: 1, 0x300: 0, 0x400: 4, 0x500: 99}  # noqa: RUF012
    edges = ((0x100, 0x200), (0x200, 0x300))

    def __init__(self, second_version=True):
        self.freed = []
        if second_version:
            self.cuGraphGetEdges_v2 = lambda graph, a, b, data, count: self._edges(a, b, count)
        else:
            self.cuGraphGetEdges = lambda graph, a, b, count: self._edges(a, b, count)

    def cuGraphGetNodes(self, graph, found, count):
        if graph.value != GRAPH:
            return 1
        for i, node in enumerate(self.kinds if found is not None else ()):
            found[i] = node
        count._obj.value = len(self.kinds)
        return 0

    def _edges(self, first, then, count):
        for i, (a, b) in enumerate(self.edges if first is not None else ()):
            first[i], then[i] = a, b
        count._obj.value = len(self.edges)
        return 0

    def cuGraphNodeGetType(self, node, kind):
        kind._obj.value = self.kinds[node]
        return 0

    def cuGraphKernelNodeGetParams_v2(self, node, found):
        assert (found._obj.func, found._obj.kern) == (None, None)
        if node == 0x100:
            found._obj.func = 0xF1
        else:
            found._obj.kern = 0xF2
        return 0

    def cuFuncGetName(self, name, function):
        assert function.value == 0xF1
        name._obj.value = MANGLED
        return 0

    def cuKernelGetName(self, name, kernel):
        assert kernel.value == 0xF2
        name._obj.value = b"kernel_cutlass_gate"
        return 0


NODES = [
    Node("kernel", "void foo::add_one<float>(float*, int)"), Node("copy"), Node("kernel", "kernel_cutlass_gate"),
    Node("child graph"), Node("type 99"),
]  # fmt: skip


@pytest.fixture
def driver(monkeypatch):
    """The driver of this machine is the stand-in."""
    made = Driver()
    monkeypatch.setattr(graphs, "_driver", lambda: made)
    return made


@pytest.mark.parametrize("second_version", [True, False])
def test_nodes_and_edges(second_version):
    assert graphs.read(GRAPH, Driver(second_version)) == (NODES, [(0, 1), (1, 2)])


def test_a_kernel_is_asked_for_its_name_once_in_a_reading():
    """And again in the next one: by then its handle may be another kernel's."""
    driver, asked = Driver(), []
    driver.kinds, driver.edges = {0x100 + 0x10 * i: 0 for i in range(6)}, ()
    names = {0xF1: b"one", 0xF2: b"two"}

    def parameters(node, found):
        found._obj.func = 0xF1 + node // 0x10 % 2
        return 0

    def name_of(name, function):
        asked.append(function.value)
        name._obj.value = names[function.value]
        return 0

    driver.cuGraphKernelNodeGetParams_v2, driver.cuFuncGetName = parameters, name_of
    assert graphs.read(GRAPH, driver)[0] == [Node("kernel", "one"), Node("kernel", "two")] * 3
    names[0xF1] = b"three"
    assert graphs.read(GRAPH, driver)[0][0] == Node("kernel", "three")
    assert asked == [0xF1, 0xF2] * 2


def test_a_graph_without_nodes(monkeypatch):
    driver = Driver()
    driver.kinds, driver.edges = {}, ()
    assert graphs.read(GRAPH, driver) == ([], [])


def test_a_refusal_is_told():
    with pytest.raises(StreamShimError, match="cuGraphGetNodes failed with CUDA error 1; is this a graph"):
        graphs.read(0x1, Driver())


def test_the_layout_of_a_kernels_parameters():
    """As in cuda.h: a pointer, seven unsigned ints (and four bytes of padding), four pointers."""
    assert ctypes.sizeof(graphs._KernelParameters) == 72
    assert (graphs._KernelParameters.kernelParams.offset, graphs._KernelParameters.kern.offset) == (40, 56)


@pytest.mark.parametrize("name", ["plain", "_Znonsense", "kernel_cutlass_gate"])
def test_names_that_are_not_mangled_stay(name):
    assert graphs.demangled(name) == name


class CUDAGraph:
    """A stand-in for torch's."""

    def __init__(self, keep_graph=False):
        self._keep = keep_graph

    def capture_begin(self):
        self.cuda.captures[STREAM] = CaptureState(7)

    def capture_end(self):
        self.cuda.captures.pop(STREAM)

    def raw_cuda_graph(self):
        if not self._keep:
            raise RuntimeError("You cannot access the raw cudaGraph_t instance unless keep_graph was set to true")
        return GRAPH


@pytest.fixture
def captured(cuda, monkeypatch, driver):
    """``captured(mode)`` is a graph that was captured under streamshim in that mode."""
    cuda.current = STREAM
    monkeypatch.setattr(CUDAGraph, "cuda", cuda, raising=False)
    monkeypatch.setattr(cuda, "captured_graph", lambda handle: GRAPH if handle in cuda.captures else 0, raising=False)
    patches = PatchSet(capture.patches(CUDAGraph))
    patches.apply()

    def run(mode, **kwargs):
        streamshim.install(mode, watch=False)
        graph = CUDAGraph(**kwargs)
        graph.capture_begin()
        graph.capture_end()
        streamshim.uninstall()
        return graph

    yield run
    patches.undo()


@pytest.mark.parametrize("mode", ["strict", "check"])
def test_a_graph_is_read_before_torch_throws_it_away(captured, mode):
    audit = streamshim.audit(captured(mode))
    assert list(audit.nodes) == NODES
    assert audit.edges == ((0, 1), (1, 2))
    assert audit.kernels == ["void foo::add_one<float>(float*, int)", "kernel_cutlass_gate"]
    assert (audit.count("add_one"), audit.count("^kernel_"), audit.count("nothing")) == (1, 1, 0)
    assert str(audit).splitlines() == [
        "2 kernel, 1 copy, 1 child graph, 1 type 99",
        "      1 x void foo::add_one<float>(float*, int)",
        "      1 x kernel_cutlass_gate",
    ]


def test_in_bind_mode_nothing_is_read_and_it_is_said_how(captured):
    with pytest.raises(StreamShimError, match=r"strict or check mode, or make it with torch\.cuda\.CUDAGraph\(keep_"):
        streamshim.audit(captured("bind"))


def test_a_kept_graph_can_be_read_at_any_time(captured):
    assert list(streamshim.audit(captured("bind", keep_graph=True)).nodes) == NODES


def test_a_graph_of_an_older_torch(driver):
    class Old:
        def capture_end(self):
            pass

    with pytest.raises(StreamShimError, match="Nothing is known of the nodes"):
        streamshim.audit(Old())


@pytest.mark.parametrize("value", [None, 5, "graph"])
def test_something_else(value):
    with pytest.raises(TypeError, match=r"graph: got builtins.*accepted: a torch\.cuda\.CUDAGraph"):
        streamshim.audit(value)


def test_a_class_of_graphs(captured):
    with pytest.raises(TypeError, match=r"graph: got the class .*; accepted: a torch\.cuda\.CUDAGraph"):
        streamshim.audit(type(captured))


def test_a_fault_while_reading_does_not_keep_anybody_from_the_end_of_the_capture(captured, driver, caplog):
    driver.cuGraphGetNodes = lambda *args: 700
    graph = captured("strict")
    assert "the graph could not be read" in caplog.records[0].getMessage()
    with pytest.raises(StreamShimError):
        streamshim.audit(graph)


def test_what_was_read_is_forgotten_with_the_graph(captured):
    graph = captured("strict")
    assert len(graph_audit._read) == 1
    del graph
    assert len(graph_audit._read) == 0


def test_a_kept_graph_that_was_captured_anew_is_read_anew(captured, driver):
    graph = captured("strict", keep_graph=True)
    driver.kinds, driver.edges = {0x200: 1}, ()
    assert list(streamshim.audit(graph).nodes) == [Node("copy")]


def test_what_was_read_of_an_earlier_capture_is_not_told_of_a_later_one(captured, driver):
    streamshim.install("strict", watch=False)
    graph = CUDAGraph()
    for works in (True, False):
        if not works:
            driver.cuGraphGetNodes = lambda *args: 700
        graph.capture_begin()
        graph.capture_end()
    with pytest.raises(StreamShimError, match="Nothing is known"):
        streamshim.audit(graph)


def test_a_driver_that_tells_no_names(monkeypatch):
    """Before CUDA 12.3."""
    monkeypatch.delattr(Driver, "cuFuncGetName")
    monkeypatch.delattr(Driver, "cuKernelGetName")
    nodes, _ = graphs.read(GRAPH, Driver())
    assert nodes[0] == Node("kernel", "?")


def test_assert_captured(captured):
    graph = captured("strict")
    streamshim.assert_captured(graph, "add_one")
    streamshim.assert_captured(graph, r"add_one|gate", count=2)
    with pytest.raises(AssertionError, match=r"at least one kernel matching 'relu', and has 0. It has 2 kernel"):
        streamshim.assert_captured(graph, "relu")
    with pytest.raises(AssertionError, match="should have 3 kernels matching 'add_one', and has 1"):
        streamshim.assert_captured(graph, "add_one", count=3)
    streamshim.assert_captured(graph, "relu", count=0)
