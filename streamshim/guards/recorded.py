"""What CUDA took into the open captures, by its own word, to be held against the nodes of their graphs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from ..callsite import Site, user_site
from ..findings import Missing
from ..runtime.graphs import Node, demangled

#: How many different kernels are counted in all captures that are open.
KEPT = 10_000


class Recorded:
    """Launches into captures, counted when the driver has returned from them without an error.

    A launch can be counted too seldom, where threads of the process count at the same moment, but never too often: what
    is told to be missing was launched.
    """

    def __init__(self) -> None:
        #: Capture, kind of node, name of the kernel -> how often, and the line that did it first.
        self._counts: dict[tuple[int, str, bytes], int] = {}
        self._sites: dict[tuple[int, str, bytes], Site] = {}

    def launched(self, capture: int, kind: str, name: bytes = b"") -> None:
        """Count one launch.

        Args:
            capture: the driver's id of the capture.
            kind: "kernel", "copy" or "set".
            name: the kernel's name, as it is in the binary.
        """
        key = (capture, kind, name)
        count = self._counts.get(key)
        if count is None:
            if len(self._counts) >= KEPT:
                return
            self._sites[key] = user_site()
        self._counts[key] = (count or 0) + 1

    def missing(self, capture: int, nodes: Iterable[Node]) -> list[Missing]:
        """What was launched more often than the graph has nodes for it; the capture is forgotten with this.

        Args:
            capture: the driver's id of the capture.
            nodes: of its graph.
        """
        there = Counter((node.kind, node.name) for node in nodes)
        mine = {key: self._counts.pop(key) for key in list(self._counts) if key[0] == capture}
        # By their number first: a kernel may have another name in the graph, or none.
        of_kernels = sum(count for (_, kind, _), count in mine.items() if kind == "kernel")
        lacks_kernels = of_kernels > sum(count for (kind, _), count in there.items() if kind == "kernel")
        found = []
        for key, count in mine.items():
            kind, name, site = key[1], demangled(key[2].decode(errors="replace")), self._sites.pop(key)
            if count > there[kind, name] and (lacks_kernels or kind != "kernel"):
                what = f"kernel {name!r}" if kind == "kernel" else kind
                found.append(Missing(what, count, there[kind, name], site))
        return found

    def forget_all_but(self, captures: set[int]) -> None:
        """Forget captures that are over, of which nobody has asked."""
        for key in [key for key in list(self._counts) if key[0] not in captures]:
            self._counts.pop(key, None)
            self._sites.pop(key, None)
