"""A model of CUDA streams, events and graph captures, for machines without a GPU.

Small and slow, with one lock, it does what CUDA does about streams and captures: a launch outside a capture escapes it
without a word, a host sync ends it, eager work on two streams races. Names are torch's where torch has one. Eager work
is in `simulated_queue`, what it hands out in `simulated_objects`, captures are in `simulated_capture`, which also says
what *driver* and *measured* mean.

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

from . import NOT_CAPTURING, CaptureState, Runtime
from .simulated_capture import Captures, SimulatedCudaError, error
from .simulated_objects import Buffer, Event, Graph, Stream
from .simulated_queue import Timeline, Work

__all__ = ["Buffer", "Event", "Graph", "SimulatedCudaError", "Simulator", "Stream"]

_handles = itertools.count(0x5A000000, 0x100)  # unique in the process, as the driver's are


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
        self._captures = Captures()
        self._legacy = [Stream(self, device, 0, self._timeline.new_queue(device)) for device in range(devices)]
        self._streams: dict[int, Stream] = {}
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

    def order(self, first: int, then: int, device: int) -> None:
        self._at(then).wait_stream(self._at(first))

    def capture_state(self, handle: int) -> CaptureState:
        """Whether the stream captures. The legacy stream does not, and asking does no harm (measured).

        Driver: the id is only there while the capture is valid; an invalidated one answers with 0.
        """
        with self._lock:
            branch = self._at(handle)._branch
            if branch is None:
                return NOT_CAPTURING
            valid = branch.capture.valid
            return CaptureState(branch.capture.id if valid else 0, valid)

    def captured_graph(self, handle: int) -> int:
        return 0  # a graph of the simulator has no handle; see `Graph.nodes`

    def thread_mode(self) -> str:
        return "global"  # nobody can say otherwise here

    # Streams, events, memory

    def new_stream(self, device: int | None = None, blocking: bool = False) -> Stream:
        """A stream of the device (None: the current one), in order with the legacy stream only if ``blocking``."""
        device = self._known(device)
        with self._lock:
            queue = self._timeline.new_queue(device, self._legacy[device]._queue if blocking else None)
            stream = Stream(self, device, next(_handles), queue)
            self._streams[stream.cuda_stream] = stream
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
                raise error(700)
            self._submit(target, Work(name, lambda: kernel(*buffers)))

    def delay(self) -> None:
        """Work that takes very long, on the current stream."""
        self._submit(self.current_stream(), Work("delay", lambda: None, is_delay=True))

    # The host waits, or does something else that a capture may not allow

    def synchronize(self, device: int | None = None) -> None:
        """Let the host wait for all work of the device (None: the current one); no capture on it survives that."""
        device = self._known(device)
        with self._lock:
            self._captures.refuse_unsafe(synced_device=device)
            self._timeline.run_until(lambda: not self._timeline.busy(device))

    def read(self, buffer: Buffer) -> list[float]:
        """The buffer's values, after waiting for the current stream of its device: ``tensor.tolist()``."""
        with self._lock:
            self.current_stream(buffer.device).synchronize()
            return list(buffer.values)

    def malloc(self) -> None:
        """An unsafe call that does nothing else: ``cudaMalloc``, pinning memory, a pageable copy."""
        with self._lock:
            self._captures.refuse_unsafe()

    # Graphs

    def graph(self) -> Graph:
        """An empty graph."""
        return Graph(self)

    @contextmanager
    def capture(self, graph: Graph, stream: Stream | None = None, error_mode: str = "global") -> Iterator[Graph]:
        """Capture a block on a stream (None: a new one).

        As with ``torch.cuda.graph`` the capture is ended whatever happened in the block, and what `Graph.capture_end`
        raises comes last. Unlike there, nothing is synchronised at the beginning.
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
            raise error(101)
        return device

    def _at(self, handle: int) -> Stream:
        """The stream of a handle. A driver may crash on a handle that it does not know; here it is 400."""
        device, own = self._thread.device, self._thread.own
        if handle in (0, 1):
            return self._legacy[device]
        if handle == 2:
            if device not in own:
                own[device] = Stream(self, device, 2, self._timeline.new_queue(device, self._legacy[device]._queue))
            return own[device]
        if handle not in self._streams:
            raise error(400)
        return self._streams[handle]

    def _submit(self, stream: Stream, work: Work) -> None:
        """Add work to a stream: to the graph if it captures, else to its queue."""
        with self._lock:
            if stream._branch is not None:
                stream._branch.add(work)
                return
            if stream._is_legacy:
                self._captures.refuse_legacy(stream.device)
            self._timeline.add(stream._queue, work)
