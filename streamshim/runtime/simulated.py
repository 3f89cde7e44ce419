"""A model of CUDA streams, events and graph captures, for machines without a GPU.

Small and slow, with one lock, it does what CUDA does about streams and captures: a launch outside a capture escapes it
without a word, a host sync ends it, eager work on two streams races (`simulated_queue`). Names are torch's where torch
has one. What is said of CUDA has one of two sources: *driver* is the CUDA driver API's stream management
(https://docs.nvidia.com/cuda/cuda-driver-api/group__CUDA__STREAM.html) with the programming guide's section on stream
capture; *measured* was run on an H200, see ``docs/``.

    sim = Simulator()
    x, graph = sim.buffer([1.0]), sim.graph()
    with sim.capture(graph):
        sim.launch(add_one, x, stream=0, name="add_one")  # the bug: it runs now, and graph.nodes stays empty
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NoReturn

from . import NOT_CAPTURING, CaptureState, Runtime
from .simulated_queue import Entry, Queue, Timeline, Work

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
# For the life of the process, as the driver's are.
_handles = itertools.count(0x5A000000, 0x100)
_capture_ids = itertools.count(1)


class SimulatedCudaError(RuntimeError):
    """What CUDA would have answered: the number of its ``cudaError_t`` as ``code``, and that error's ``name``."""

    def __init__(self, code: int, name: str) -> None:
        super().__init__(f"simulated CUDA error {code} ({name}): {_ERRORS.get(code, ('', 'unknown error'))[1]}")
        self.code = code
        self.name = name


def _error(code: int) -> SimulatedCudaError:
    return SimulatedCudaError(code, _ERRORS[code][0])


@dataclass(eq=False)
class _Capture:
    """A capture in progress. Its first stream is where it began; the others joined by waiting for its events.

    ``nodes`` are pairs: the work, and the positions of the nodes that it depends on.
    """

    id: int
    error_mode: str
    thread: int
    streams: list[Stream]
    nodes: list[tuple[Work, frozenset[int]]] = field(default_factory=list)
    valid: bool = True

    def check(self) -> None:
        """Driver: what comes after the error that invalidated a capture is 901."""
        if not self.valid:
            raise _error(901)

    def joined(self) -> bool:
        """Whether all nodes come before the end of the first stream. A fork without nodes counts as joined."""
        reached: set[int] = set()
        ahead = set(self.streams[0]._tips)
        while ahead:
            node = ahead.pop()
            reached.add(node)
            ahead |= self.nodes[node][1] - reached
        return len(reached) == len(self.nodes)


def _fail(code: int, captures: Iterable[_Capture]) -> NoReturn:
    """Driver: an operation that a capture forbids fails, and every capture that it touches is lost."""
    for capture in captures:
        capture.valid = False
    raise _error(code)


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
        self._capture: _Capture | None = None
        self._tips: frozenset[int] = frozenset()

    @property
    def cuda_stream(self) -> int:
        return self._handle

    def record_event(self, event: Event | None = None) -> Event:
        """Record an event, a new one if None. In a capture it marks a place in the graph, and belongs to the capture."""
        event = event if event is not None else Event(self._sim)
        with self._sim._lock:
            if self._capture is not None:
                self._capture.check()
                event._recorded, event._captured = None, (self._capture, self._tips)
            else:
                event._recorded, event._captured = self._sim._timeline.add(self._queue), None
        return event

    def wait_event(self, event: Event) -> None:
        """Let everything that comes here from now on wait for the event; nothing if it was never recorded.

        Driver: a stream that waits for a captured event joins that capture. It cannot if it is in another one (902
        for both) or is the legacy stream (906), and a capturing stream cannot wait for eager work (905).
        """
        with self._sim._lock:
            mine = self._capture
            if event._captured is not None:
                theirs, tips = event._captured
                if theirs not in self._sim._captures:
                    raise _error(907)
                theirs.check()
                if mine is not None and mine is not theirs:
                    _fail(902, [mine, theirs])
                if self._sim._is_legacy(self):
                    _fail(906, [theirs])
                if mine is None:
                    self._capture = theirs
                    theirs.streams.append(self)
                self._tips |= tips
            elif event._recorded is not None:
                if mine is not None:
                    _fail(905, [mine])
                self._sim._timeline.add(self._queue, after=event._recorded)

    def wait_stream(self, stream: Stream) -> None:
        """Let everything that comes here from now on wait for what is on the other stream now."""
        self.wait_event(stream.record_event())

    def synchronize(self) -> None:
        """Let the host wait for what is here. While it captures: 900, and the capture is lost (measured)."""
        with self._sim._lock:
            if self._capture is not None:
                _fail(900, [self._capture])
            self._sim._refuse_unsafe()
            self._sim._timeline.run_until(lambda: not self._queue.pending)


class Event:
    """An event; `Simulator.event` and `Stream.record_event` make them."""

    def __init__(self, sim: Simulator) -> None:
        self._sim = sim
        self._recorded: Entry | None = None
        self._captured: tuple[_Capture, frozenset[int]] | None = None

    def query(self) -> bool:
        """Whether it has been reached. An unsafe call while something captures."""
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
        # Driver: the host cannot ask about an event that was last recorded in a capture.
        if self._captured is not None:
            _fail(907, [self._captured[0]])
        self._sim._refuse_unsafe()


class Graph:
    """A CUDA graph, with the methods of ``torch.cuda.CUDAGraph``."""

    def __init__(self, sim: Simulator) -> None:
        self._sim = sim
        self._device = 0
        self._capture: _Capture | None = None
        self._nodes: list[tuple[Work, frozenset[int]]] | None = None

    def capture_begin(self, pool: object = None, capture_error_mode: str = "global") -> None:
        """Capture the current stream from now on. Driver: the legacy stream cannot be captured (900)."""
        sim = self._sim
        if capture_error_mode not in ("global", "thread_local", "relaxed"):
            raise ValueError(f"capture_error_mode is {capture_error_mode!r}")
        with sim._lock:
            stream = sim.current_stream()
            if sim._is_legacy(stream):
                raise _error(900)
            if stream._capture is not None or self._capture is not None or self._nodes is not None:
                raise _error(401)
            self._device = stream.device
            self._capture = _Capture(next(_capture_ids), capture_error_mode, threading.get_ident(), [stream])
            stream._capture = self._capture
            sim._captures.append(self._capture)

    def capture_end(self) -> None:
        """End the capture: on the stream where it began (903), on its thread unless it is relaxed (908).

        Driver: an unjoined fork is 904. A capture that was invalidated must be ended too, with 901. After either the
        streams are free again.
        """
        sim = self._sim
        with sim._lock:
            capture = self._capture
            if capture is None:
                raise _error(401)
            if capture.error_mode != "relaxed" and capture.thread != threading.get_ident():
                raise _error(908)
            if sim.current_stream() is not capture.streams[0]:
                _fail(903, [capture])
            joined = capture.joined()
            self._capture = None
            sim._captures.remove(capture)
            for stream in capture.streams:
                stream._capture, stream._tips = None, frozenset()
            capture.check()
            if not joined:
                raise _error(904)
            self._nodes = capture.nodes

    def replay(self) -> None:
        """Run the nodes on the current stream, in the order in which they were recorded."""
        if self._nodes is None:
            raise _error(1)
        with self._sim._lock:
            for work, _ in self._nodes:
                self._sim._submit(self._sim.current_stream(self._device), work)

    def reset(self) -> None:
        """Forget the nodes; the graph can be captured again then."""
        self._nodes = None

    @property
    def nodes(self) -> list[str]:
        """The names of the nodes, in the order in which they were recorded."""
        return [work.name for work, _ in self._nodes or ()]

    @property
    def edges(self) -> list[tuple[int, int]]:
        """The dependencies between nodes, as pairs of positions: (earlier, later)."""
        return [(need, i) for i, (_, needs) in enumerate(self._nodes or ()) for need in sorted(needs)]


class _Thread(threading.local):
    """The current device of a thread, its current streams, and its own default streams (handle 2), by device."""

    def __init__(self) -> None:
        self.device = 0
        self.current: dict[int, Stream] = {}
        self.own: dict[int, Stream] = {}


class Simulator(Runtime):
    """Some devices, and one process's work on them. As a `Runtime` it answers streamshim's questions."""

    name = "simulated"

    def __init__(self, devices: int = 1) -> None:
        self._lock = threading.RLock()
        self._timeline = Timeline()
        self._legacy = [Stream(self, device, 0, self._timeline.new_queue()) for device in range(devices)]
        self._by_handle: dict[int, Stream] = {}
        self._captures: list[_Capture] = []
        self._thread = _Thread()

    # The questions of `Runtime`

    def current_handle(self, device: int) -> int:
        return self.current_stream(device).cuda_stream

    def current_device(self) -> int:
        return self._thread.device

    def device_count(self) -> int:
        return len(self._legacy)

    def set_device(self, device: int) -> None:
        self._thread.device = self._known(device)

    def capture_state(self, handle: int) -> CaptureState:
        """Whether the stream captures. The legacy stream does not, and asking does no harm (measured).

        Driver: the id is only there while the capture is valid; an invalidated one answers with 0.
        """
        with self._lock:
            capture = self._at(handle)._capture
            if capture is None:
                return NOT_CAPTURING
            return CaptureState(capture.id) if capture.valid else CaptureState(0, valid=False)

    # Streams, events, memory

    def new_stream(self, device: int | None = None, blocking: bool = False) -> Stream:
        """A stream of the device (None: the current one), in order with the legacy stream only if ``blocking``."""
        with self._lock:
            device = self._known(device)
            queue = self._timeline.new_queue(self._legacy[device]._queue if blocking else None)
            stream = Stream(self, device, next(_handles), queue)
            self._by_handle[stream.cuda_stream] = stream
            return stream

    def current_stream(self, device: int | None = None) -> Stream:
        """The calling thread's current stream of the device (None: the current one); at first the legacy stream."""
        device = self._known(device)
        return self._thread.current.get(device, self._legacy[device])

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[Stream]:
        """Make a stream current for the calling thread, and its device too."""
        before = self.current_stream(stream.device)
        with self.device(stream.device):
            self._thread.current[stream.device] = stream
            try:
                yield stream
            finally:
                self._thread.current[stream.device] = before

    @contextmanager
    def device(self, device: int) -> Iterator[None]:
        """Make a device current for the calling thread."""
        before = self.current_device()
        self.set_device(device)
        try:
            yield
        finally:
            self.set_device(before)

    def event(self) -> Event:
        """An event that has not been recorded."""
        return Event(self)

    def buffer(self, values: Iterable[float], device: int | None = None) -> Buffer:
        """Memory on the device (None: the current one). Legal in a capture, since torch has its memory at hand."""
        return Buffer(self, values, self._known(device))

    # Work

    def launch(self, kernel: Callable[..., object], *buffers: Buffer, stream: int = 0, name: str = "kernel") -> None:
        """The raw launch of ``kernel(*buffers)`` at a handle, as the driver does it.

        Driver: 0 and 1 are the legacy stream of the current device, 2 the thread's own default stream. On a stream
        that captures the launch becomes a node. On any other, whatever else captures, it is eager work: no error, and
        no trace of it in any graph (measured).
        """
        with self._lock:
            target = self._at(stream)
            if any(buffer.device != target.device for buffer in buffers):
                raise _error(700)
            self._submit(target, Work(name, lambda: kernel(*buffers)))

    def delay(self) -> None:
        """Work that takes very long, on the current stream."""
        self._submit(self.current_stream(), Work("delay", lambda: None, is_delay=True))

    # The host waits, or does something else that a capture may not allow

    def synchronize(self, device: int | None = None) -> None:
        """Let the host wait for the device (None: the current one).

        Measured: while anything on it captures it is 900 in every error mode, on whatever thread, and that is lost.
        """
        device = self._known(device)
        with self._lock:
            self._refuse_unsafe(device)
            streams = [self._legacy[device], *self._by_handle.values(), *self._thread.own.values()]
            queues = [stream._queue for stream in streams if stream.device == device]
            self._timeline.run_until(lambda: not any(queue.pending for queue in queues))

    def read(self, buffer: Buffer) -> list[float]:
        """The buffer's values, after waiting for the current stream of its device: ``tensor.tolist()``."""
        with self._lock:
            self.current_stream(buffer.device).synchronize()
            return list(buffer.values)

    def malloc(self) -> None:
        """An unsafe call that does nothing else: ``cudaMalloc``, pinning memory, a pageable copy."""
        with self._lock:
            self._refuse_unsafe()

    # Graphs

    def graph(self) -> Graph:
        """An empty graph."""
        return Graph(self)

    @contextmanager
    def capture(self, graph: Graph, stream: Stream | None = None, error_mode: str = "global") -> Iterator[Graph]:
        """Capture a block on a stream (None: a new one).

        As with ``torch.cuda.graph``, the capture is ended whatever happened in the block, and what `capture_end` raises
        comes last. Unlike there, nothing is synchronised at the beginning.
        """
        with self.stream(stream if stream is not None else self.new_stream()):
            graph.capture_begin(capture_error_mode=error_mode)
            try:
                yield graph
            finally:
                graph.capture_end()

    # Inside

    def _known(self, device: int | None) -> int:
        device = self._thread.device if device is None else device
        if not 0 <= device < len(self._legacy):
            raise _error(101)
        return device

    def _is_legacy(self, stream: Stream) -> bool:
        return stream is self._legacy[stream.device]

    def _at(self, handle: int) -> Stream:
        """The stream of a handle. A driver may crash on a handle that it does not know; here it is 400."""
        device, own = self._thread.device, self._thread.own
        if handle in (0, 1):
            return self._legacy[device]
        if handle == 2:
            if device not in own:
                own[device] = Stream(self, device, 2, self._timeline.new_queue(self._legacy[device]._queue))
            return own[device]
        if handle not in self._by_handle:
            raise _error(400)
        return self._by_handle[handle]

    def _submit(self, stream: Stream, work: Work) -> None:
        """Add work to a stream: to the graph if it captures, else to its queue.

        Driver: eager work on the legacy stream is 906 while a *blocking* stream of the device captures.
        """
        with self._lock:
            capture = stream._capture
            if capture is not None:
                capture.check()
                capture.nodes.append((work, stream._tips))
                stream._tips = frozenset({len(capture.nodes) - 1})
                return
            mixed = [c for c in self._captures if any(s._queue.legacy is stream._queue for s in c.streams)]
            if mixed:
                _fail(906, mixed)
            self._timeline.add(stream._queue, work)

    def _refuse_unsafe(self, device: int | None = None) -> None:
        """Refuse what may be unsafe during a capture; with a device: what no capture on that device allows.

        Driver (``cuThreadExchangeStreamCaptureMode``), measured: an unsafe call is 900 for every thread while a
        "global" capture runs, for the capturing thread during a "thread_local" one, for nobody during a "relaxed" one.
        """
        me = threading.get_ident()
        lost = [
            capture
            for capture in self._captures
            if capture.error_mode == "global"
            or (capture.error_mode == "thread_local" and capture.thread == me)
            or any(stream.device == device for stream in capture.streams)
        ]
        if lost:
            _fail(900, lost)
