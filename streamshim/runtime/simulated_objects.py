"""What a simulator hands out: memory, streams, events and graphs, with the methods that torch's have.

*Driver* and *measured* in what is said of CUDA here mean what `simulated_capture` says.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import TYPE_CHECKING

from .simulated_capture import Branch, Capture, Node, error, fail
from .simulated_queue import Entry, Queue, Work

if TYPE_CHECKING:
    from .simulated import Simulator


class Buffer:
    """Device memory: some floats. Kernels change its ``values``; a host reads them with `Simulator.read`."""

    def __init__(self, sim: Simulator, values: Iterable[float], device: int) -> None:
        self._sim, self.device = sim, device
        self.values = [float(value) for value in values]

    def fill(self, value: float) -> None:
        """Set all values, on the current stream of the buffer's device."""

        def run() -> None:
            self.values[:] = [float(value)] * len(self.values)

        self._sim._submit(self._sim.current_stream(self.device), Work("fill", run))


class Stream:
    """A stream; `Simulator.new_stream` makes them. Its handle is ``cuda_stream``."""

    def __init__(self, sim: Simulator, device: int, handle: int, queue: Queue) -> None:
        self._sim, self.device, self._handle, self._queue = sim, device, handle, queue
        self._last_branch: Branch | None = None

    @property
    def cuda_stream(self) -> int:
        return self._handle

    @property
    def _branch(self) -> Branch | None:
        """Its part in the capture that it is in, if any."""
        branch = self._last_branch
        return branch if branch is not None and branch.capture.open else None

    @property
    def _is_legacy(self) -> bool:
        return self._handle == 0

    def record_event(self, event: Event | None = None) -> Event:
        """Record an event, a new one if None; in a capture it marks a place in the graph (driver: captured event)."""
        event = event if event is not None else Event(self._sim)
        with self._sim._lock:
            if self._branch is not None:
                self._branch.capture.check()
                event._recorded, event._captured = None, (self._branch.capture, self._branch.tips)
            else:
                event._recorded, event._captured = self._sim._timeline.add(self._queue), None
        return event

    def wait_event(self, event: Event) -> None:
        """Let everything that comes here from now on wait for the event; nothing if it was never recorded.

        Driver: a stream that waits for a captured event joins that capture. It cannot if it is in another one (902
        for both) or is the legacy stream (906), and a capturing stream cannot wait for eager work (905).
        """
        with self._sim._lock:
            if event._captured is not None:
                self._join(*event._captured)
            elif event._recorded is not None:
                if self._branch is not None:
                    fail(905, [self._branch.capture])
                self._sim._timeline.add(self._queue, after=event._recorded)

    def _join(self, capture: Capture, tips: frozenset[int]) -> None:
        if not capture.open:
            raise error(907)
        capture.check()
        if self._is_legacy:
            fail(906, [capture])
        if self._branch is None:
            self._last_branch = capture.branch(self.device, self._queue.legacy is not None)
        elif self._branch.capture is not capture:
            fail(902, [self._branch.capture, capture])
        assert self._branch is not None
        self._branch.tips |= tips

    def wait_stream(self, stream: Stream) -> None:
        """Let everything that comes here from now on wait for what is on the other stream now."""
        self.wait_event(stream.record_event())

    def synchronize(self) -> None:
        """Let the host wait for what is here. While it captures: 900, and the capture is lost (measured)."""
        with self._sim._lock:
            self._refuse()
            self._sim._timeline.run_until(lambda: not self._queue.pending)

    def query(self) -> bool:
        """Whether nothing is left here. As unsafe as waiting (measured)."""
        with self._sim._lock:
            self._refuse()
            self._sim._timeline.run_without_delay()
            return not self._queue.pending

    def _refuse(self) -> None:
        if self._branch is not None:
            fail(900, [self._branch.capture])
        self._sim._captures.refuse_unsafe()


class Event:
    """An event; `Simulator.event` and `Stream.record_event` make them."""

    def __init__(self, sim: Simulator) -> None:
        self._sim = sim
        self._recorded: Entry | None = None
        self._captured: tuple[Capture, frozenset[int]] | None = None

    @property
    def cuda_event(self) -> int:
        """A handle, as torch has it: 0 until it is recorded for the first time."""
        return 0 if self._recorded is None and self._captured is None else id(self)

    def query(self) -> bool:
        """Whether it has been reached. An unsafe call while something captures (measured)."""
        with self._sim._lock:
            self._refuse()
            self._sim._timeline.run_without_delay()
            return self._recorded is None or self._recorded.done

    def synchronize(self) -> None:
        """Let the host wait for it. Unsafe too, but nothing at all if it was never recorded (measured)."""
        with self._sim._lock:
            recorded = self._recorded
            if recorded is not None or self._captured is not None:
                self._refuse()
                self._sim._timeline.run_until(lambda: recorded is None or recorded.done)

    def _refuse(self) -> None:
        if self._captured is not None:
            # Driver: the host cannot ask about an event that was last recorded in a capture.
            fail(907, [self._captured[0]])
        self._sim._captures.refuse_unsafe()


class Graph:
    """A CUDA graph, with the methods of ``torch.cuda.CUDAGraph``."""

    def __init__(self, sim: Simulator) -> None:
        self._sim = sim
        self._stream: Stream | None = None
        self._capture: Capture | None = None
        self._nodes: list[Node] | None = None

    def capture_begin(self, pool: object = None, capture_error_mode: str = "global") -> None:
        """Capture the current stream from now on. Driver: the legacy stream cannot be captured (900)."""
        with self._sim._lock:
            stream = self._sim.current_stream()
            if stream._is_legacy:
                raise error(900)
            if stream._branch is not None or self._capture is not None:
                raise error(401)
            self._stream, self._capture = stream, self._sim._captures.begin(capture_error_mode)
            stream._last_branch = self._capture.branch(stream.device, stream._queue.legacy is not None)

    def capture_end(self) -> None:
        """End the capture: on the stream where it began (903), on its thread unless it is relaxed (908).

        Driver: an unjoined fork is 904. A capture that was invalidated must be ended too, with 901. Its streams are
        free again after either.
        """
        with self._sim._lock:
            capture = self._capture
            if capture is None or not capture.open:
                raise error(401)
            if capture.error_mode != "relaxed" and capture.thread != threading.get_ident():
                raise error(908)
            if self._sim.current_stream() is not self._stream:
                fail(903, [capture])
            self._sim._captures.end(capture)
            self._nodes = capture.nodes

    def replay(self) -> None:
        """Run the nodes on the current stream, in the order in which they were recorded."""
        if self._stream is None or self._nodes is None:
            raise error(1)
        with self._sim._lock:
            for node in self._nodes:
                self._sim._submit(self._sim.current_stream(self._stream.device), node.work)

    def reset(self) -> None:
        """Forget everything; the graph can be captured again then."""
        self._stream, self._capture, self._nodes = None, None, None

    @property
    def nodes(self) -> list[str]:
        """The names of the nodes, in the order in which they were recorded."""
        return [node.work.name for node in self._nodes or ()]

    @property
    def edges(self) -> list[tuple[int, int]]:
        """The dependencies between nodes, as pairs of positions: (earlier, later)."""
        return [(need, later) for later, node in enumerate(self._nodes or ()) for need in sorted(node.needs)]
