"""What is in a captured graph: `audit`, and `assert_captured` for tests."""

from __future__ import annotations

import re
import weakref
from collections import Counter
from dataclasses import dataclass
from typing import Any

from . import runtime
from .capture import Window
from .errors import StreamShimError
from .runtime import graphs
from .runtime.graphs import Node

__all__ = ["GraphAudit", "Node", "assert_captured", "audit"]


@dataclass(frozen=True)
class GraphAudit:
    """The nodes of a CUDA graph.

    Attributes:
        nodes: in the driver's order.
        edges: the dependencies, as pairs of positions among the nodes: (earlier, later).
    """

    nodes: tuple[Node, ...]
    edges: tuple[tuple[int, int], ...]

    @property
    def kernels(self) -> list[str]:
        """The names of the kernels, one for each node."""
        return [node.name for node in self.nodes if node.kind == "kernel"]

    def count(self, pattern: str) -> int:
        """How many kernel nodes have a name in which this regular expression is found."""
        return sum(bool(re.search(pattern, name)) for name in self.kernels)

    def __str__(self) -> str:
        kinds = Counter(node.kind for node in self.nodes)
        lines = [", ".join(f"{count} {kind}" for kind, count in kinds.most_common()) or "no nodes"]
        lines += [f"  {count:>5} x {name}" for name, count in Counter(self.kernels).most_common()]
        return "\n".join(lines)


#: ``torch.cuda.CUDAGraph`` -> what was read of it while it was captured.
_read: weakref.WeakKeyDictionary[Any, GraphAudit] = weakref.WeakKeyDictionary()


def read(graph: Any, window: Window) -> GraphAudit | None:
    """Read a graph just before its capture ends, since torch keeps only what it makes of it (`capture.readers`).

    Args:
        graph: torch's graph object, for `audit` later; None if it is not torch that captures.
        window: its capture.

    Returns:
        What is in it; None if it cannot be read, because the capture is lost, say.
    """
    if graph is not None:
        _read.pop(graph, None)  # of an earlier capture
    handle = runtime.get().captured_graph(window.stream)
    if not handle:
        return None
    nodes, edges = graphs.read(handle)
    found = GraphAudit(tuple(nodes), tuple(edges))
    if graph is not None:
        _read[graph] = found
    return found


def audit(graph: Any) -> GraphAudit:
    """What is in a captured graph.

    Args:
        graph: a ``torch.cuda.CUDAGraph``: captured in strict or check mode, or made with ``keep_graph=True``
            (torch 2.9 and later), since torch throws the graph away that it makes the executable one from.

    Raises:
        TypeError: if it is something else.
        StreamShimError: if nothing is known of it, saying what to do.
    """
    raw = getattr(graph, "raw_cuda_graph", None)
    if isinstance(graph, type) or (raw is None and not hasattr(graph, "capture_end")):
        kind = graph if isinstance(graph, type) else type(graph)
        got = f"{'the class ' if kind is graph else ''}{kind.__module__}.{kind.__qualname__}"
        raise TypeError(f"graph: got {got}; accepted: a torch.cuda.CUDAGraph")
    known = _read.get(graph) if hasattr(type(graph), "capture_end") else None
    try:
        # A graph that torch keeps is asked itself: it may have been captured anew since it was read.
        handle = int(raw()) if raw is not None else 0
    except RuntimeError as error:
        if known is not None:
            return known
        raise StreamShimError(f"{_HOW} torch says: {error}") from error
    if not handle and known is not None:
        return known
    if not handle:
        raise StreamShimError(_HOW)
    nodes, edges = graphs.read(handle)
    return GraphAudit(tuple(nodes), tuple(edges))


_HOW = (
    "Nothing is known of the nodes of this graph. Capture it under streamshim in strict or check mode, or make it with "
    "torch.cuda.CUDAGraph(keep_graph=True)."
)


def assert_captured(graph: Any, kernel: str, count: int | None = None) -> None:
    """Assert that a kernel is in a graph, for tests.

    Args:
        graph: as `audit` takes it.
        kernel: a regular expression that is looked for in the names of the kernels.
        count: how many nodes there must be; None: at least one.

    Raises:
        AssertionError: with the nodes that there are.
        TypeError, StreamShimError: as `audit`.
    """
    found = audit(graph)
    number = found.count(kernel)
    if (number == 0) if count is None else (number != count):
        wanted = "at least one kernel" if count is None else f"{count} kernels"
        raise AssertionError(f"The graph should have {wanted} matching {kernel!r}, and has {number}. It has {found}")
