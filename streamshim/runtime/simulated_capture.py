"""Captures in the simulator: what becomes of work on a capturing stream, what a capture forbids, and the errors.

What is said of CUDA here and in `simulated` has one of two sources. *Driver*: the stream management of the CUDA driver
API (https://docs.nvidia.com/cuda/cuda-driver-api/group__CUDA__STREAM.html) and the programming guide's section on
stream capture. *Measured*: run on an H200, see ``docs/``.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NoReturn

from .simulated_queue import Work

_ERRORS = {
    1: ("cudaErrorInvalidValue", "invalid argument"),
    101: ("cudaErrorInvalidDevice", "invalid device ordinal"),
    400: ("cudaErrorInvalidResourceHandle", "invalid resource handle"),
    401: ("cudaErrorIllegalState", "the operation cannot be performed in the present state"),
    700: ("cudaErrorIllegalAddress", "an illegal memory access was encountered"),
    900: ("cudaErrorStreamCaptureUnsupported", "operation not permitted when stream is capturing"),
    901: ("cudaErrorStreamCaptureInvalidated", "operation failed due to a previous error during capture"),
    902: ("cudaErrorStreamCaptureMerge", "operation would result in a merge of separate capture sequences"),
    903: ("cudaErrorStreamCaptureUnmatched", "capture was not ended in the same stream as it began"),
    904: ("cudaErrorStreamCaptureUnjoined", "capturing stream has unjoined work"),
    905: ("cudaErrorStreamCaptureIsolation", "dependency created on uncaptured work in another stream"),
    906: ("cudaErrorStreamCaptureImplicit", "operation would make the legacy stream depend on a capture"),
    907: ("cudaErrorCapturedEvent", "operation not permitted on an event last recorded in a capturing stream"),
    908: ("cudaErrorStreamCaptureWrongThread", "attempt to end a capture from another thread than began it"),
}


class SimulatedCudaError(RuntimeError):
    """What CUDA would have answered: the number of its ``cudaError_t`` as ``code``, and that error's ``name``."""

    def __init__(self, code: int, name: str) -> None:
        super().__init__(f"simulated CUDA error {code} ({name}): {_ERRORS.get(code, ('', 'unknown error'))[1]}")
        self.code = code
        self.name = name


def error(code: int) -> SimulatedCudaError:
    """The error of this number."""
    return SimulatedCudaError(code, _ERRORS[code][0])


def fail(code: int, captures: Iterable[Capture]) -> NoReturn:
    """Driver: an operation that a capture forbids fails, and every capture that it touches is lost."""
    for capture in captures:
        capture.valid = False
    raise error(code)


@dataclass(frozen=True, eq=False)
class Node:
    """A node of a graph, with the positions of the nodes that it depends on."""

    work: Work
    needs: frozenset[int]


@dataclass(eq=False)
class Branch:
    """A stream's part in a capture; ``tips`` are the positions of the nodes that its next node depends on."""

    capture: Capture
    device: int
    blocking: bool
    tips: frozenset[int] = frozenset()

    def add(self, work: Work) -> None:
        """Make a node of this work."""
        self.capture.check()
        self.capture.nodes.append(Node(work, self.tips))
        self.tips = frozenset({len(self.capture.nodes) - 1})


@dataclass(eq=False)
class Capture:
    """A capture. Its first branch is the stream where it began; others joined by waiting for one of its events."""

    id: int
    error_mode: str
    thread: int
    branches: list[Branch] = field(default_factory=list)
    nodes: list[Node] = field(default_factory=list)
    valid: bool = True
    open: bool = True

    def branch(self, device: int, blocking: bool) -> Branch:
        """Take a stream in."""
        self.branches.append(Branch(self, device, blocking))
        return self.branches[-1]

    def check(self) -> None:
        """Driver: after the error that invalidated a capture, what is done with its streams and events is 901."""
        if not self.valid:
            raise error(901)

    def joined(self) -> bool:
        """Whether all nodes come before the end of the first branch. A branch without nodes counts as joined."""
        reached: set[int] = set()
        ahead = set(self.branches[0].tips)
        while ahead:
            node = ahead.pop()
            reached.add(node)
            ahead |= self.nodes[node].needs - reached
        return len(reached) == len(self.nodes)


class Captures:
    """The open captures of a simulator."""

    _ids = itertools.count(1)  # for the life of the process, as the driver's are

    def __init__(self) -> None:
        self._open: list[Capture] = []

    def begin(self, error_mode: str) -> Capture:
        """Open a capture for the calling thread."""
        if error_mode not in ("global", "thread_local", "relaxed"):
            raise ValueError(f"capture_error_mode is {error_mode!r}; it is global, thread_local or relaxed")
        self._open.append(Capture(next(self._ids), error_mode, threading.get_ident()))
        return self._open[-1]

    def end(self, capture: Capture) -> None:
        """Close a capture. Driver: it is over also if this raises: 901 if it was invalidated, 904 if not joined."""
        self._open.remove(capture)
        capture.open = False
        capture.check()
        if not capture.joined():
            raise error(904)

    def refuse_unsafe(self, synced_device: int | None = None) -> None:
        """Refuse (900) what may be unsafe during a capture; with a device, a wait for the whole device.

        Driver (``cuThreadExchangeStreamCaptureMode``), measured: an unsafe call is refused to every thread while a
        "global" capture runs, to the capturing thread during a "thread_local" one, to nobody during a "relaxed" one.
        A wait for a device is refused while anything on it captures, in every mode and on whatever thread, and fine
        otherwise.
        """
        me = threading.get_ident()
        if synced_device is not None:
            lost = [c for c in self._open if any(branch.device == synced_device for branch in c.branches)]
        else:
            lost = [
                c for c in self._open if c.error_mode == "global" or (c.error_mode == "thread_local" and c.thread == me)
            ]
        if lost:
            fail(900, lost)

    def refuse_legacy(self, device: int) -> None:
        """Driver: eager work on the legacy stream is 906 while a *blocking* stream of its device captures."""
        lost = [c for c in self._open if any(b.blocking and b.device == device for b in c.branches)]
        if lost:
            fail(906, lost)
