"""Two worlds with the same interface, so that a scenario is written once: the simulator, and CUDA through torch.

Streams and graphs are the world's own objects; both kinds have torch's methods (``wait_stream``, ``record_event``,
``wait_event``, ``cuda_stream``; ``replay``). The kernel adds 1 to a buffer in place and belongs to a library that knows
nothing of torch: the stream is what the caller says, or NULL.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from types import TracebackType
from typing import Any, Protocol, TypeVar

import streamshim
from streamshim import capture, gate, ledger
from streamshim.guards import lost, sync_table, syncs, torch_calls
from streamshim.patching import Patch, PatchSet
from streamshim.runtime import Runtime
from streamshim.runtime.simulated import Buffer, Event, Graph, Simulator, Stream
from streamshim.settings import Mode
from streamshim.streams import handle_of

#: The stream argument that was not given.
ABSENT = None

T = TypeVar("T")


class World(Protocol):
    """What a scenario can do."""

    name: str
    runtime: Runtime | None

    def installed(self, mode: str) -> AbstractContextManager[None]:
        """streamshim in this mode, for a block."""

    def buffer(self, values: list[float], device: int = 0) -> Any:
        """Device memory with these values; the writing is over when this returns."""

    def fill(self, buffer: Any, value: float) -> None:
        """Set all values, on the current stream of the buffer's device."""

    def read(self, buffer: Any) -> list[float]:
        """Wait for the current stream of the buffer's device, and return the values."""

    def launch(self, buffer: Any, stream: Any = ABSENT) -> None:
        """Call the foreign kernel with a stream: None, a handle, or a stream of this world."""

    def launch_without_stream(self, buffer: Any) -> None:
        """Call a foreign kernel that takes no stream and is fixed to NULL."""

    def delay(self) -> None:
        """Work on the current stream that takes long."""

    def synchronize(self, device: int = 0) -> None:
        """Wait for the device."""

    def value(self, buffer: Any) -> float:
        """Wait for the current stream of the buffer's device, and return its first value."""

    def event(self) -> Any:
        """An event that has not been recorded."""

    def malloc(self) -> None:
        """Allocate from CUDA itself, past torch's allocator."""

    def new_stream(self, device: int = 0) -> Any:
        """A stream that this scenario has not seen yet."""

    def current_stream(self, device: int = 0) -> Any:
        """The current stream of the calling thread."""

    def on(self, stream: Any) -> AbstractContextManager[object]:
        """Make a stream current, and its device too."""

    def device(self, device: int) -> AbstractContextManager[object]:
        """Make a device current."""

    def graph(self) -> Any:
        """An empty graph."""

    def capture(self, graph: Any, error_mode: str = "global", stream: Any = None) -> AbstractContextManager[None]:
        """Capture a block, on a new stream of device 0 if none is given."""

    def tidy(self) -> None:
        """After a scenario: leave nothing behind for the next."""


class SimulatedWorld:
    """The simulator, with a tiny library and a tiny binder for it."""

    name = "simulated"

    def __init__(self, devices: int = 1) -> None:
        self._sim = Simulator(devices)
        self.runtime = self._sim
        self.delay, self.event = self._sim.delay, self._sim.event
        self.current_stream, self.on, self.device = self._sim.current_stream, self._sim.stream, self._sim.device
        self.new_stream, self.graph, self.read = self._sim.new_stream, self._sim.graph, self._sim.read

    @contextmanager
    def installed(self, mode: str) -> Iterator[None]:
        patches = PatchSet([*capture.patches(Graph), *_waits()])
        patches.apply()
        ledger.clear()
        gate.set_mode(Mode(mode))
        capture.enabled, capture.explain = True, lost.explained
        try:
            yield
        finally:
            capture.enabled, capture.explain = False, None
            gate.set_mode(Mode.OFF)
            patches.undo()

    def buffer(self, values: list[float], device: int = 0) -> Buffer:
        return self._sim.buffer(values, device)

    def fill(self, buffer: Buffer, value: float) -> None:
        buffer.fill(value)

    def launch(self, buffer: Buffer, stream: Any = ABSENT) -> None:
        launch = gate.Launch("simulated kernel 'add_one'")
        handle = gate.resolve(handle_of(stream), buffer.device, launch, "stream")
        self._launch(buffer, handle)

    def launch_without_stream(self, buffer: Buffer) -> None:
        remedy = ("Give the kernel a stream parameter.",)
        launch = gate.Launch("simulated kernel 'add_one'", can_bind=False, remedy=remedy)
        self._launch(buffer, gate.resolve(0, buffer.device, launch))

    def synchronize(self, device: int = 0) -> None:
        with self._sim.device(device):
            self._sim.synchronize()

    def value(self, buffer: Buffer) -> float:
        if gate.active:
            syncs.check(sync_table.METHODS["item"], self._sim.current_handle(buffer.device))
        return self._sim.read(buffer)[0]

    def malloc(self) -> None:
        if gate.active:
            syncs.check(sync_table.Operation("simulated malloc", sync_table.ALLOCATE, sync_table.Kind.MEMORY))
        self._sim.malloc()

    def _launch(self, buffer: Buffer, handle: int) -> None:
        with self._sim.device(buffer.device):
            self._sim.launch(_add_one, buffer, stream=handle, name="add_one")

    @contextmanager
    def capture(self, graph: Graph, error_mode: str = "global", stream: Any = None) -> Iterator[None]:
        with self._sim.capture(graph, stream if stream is not None else self.new_stream(0), error_mode):
            yield

    def tidy(self) -> None:
        for device in range(self._sim.device_count()):
            self._sim.synchronize(device)


def _waits() -> list[Patch]:
    """The guards' patches on the simulator's waiting calls."""
    make_event, make_stream = torch_calls.waiting_for_an_event, torch_calls.waiting_for_a_stream
    events = [Patch(Event, name, make_event(sync_table.EVENT_METHODS[name])) for name in ("synchronize", "query")]
    streams = [Patch(Stream, name, make_stream(sync_table.STREAM_METHODS[name])) for name in ("synchronize", "query")]
    return [Patch(Simulator, "synchronize", torch_calls.waiting_for_the_device), *events, *streams]


def _add_one(buffer: Buffer) -> None:
    buffer.values[:] = [value + 1.0 for value in buffer.values]


class CudaWorld:
    """CUDA through torch; the library is CuTe DSL, whose binder does the binding."""

    name = "cuda"
    runtime = None
    #: Some milliseconds: longer than it takes a host to launch a few kernels, short enough for 200 rounds.
    DELAY_CYCLES = 10_000_000

    def __init__(self) -> None:
        import cute_kernels
        import torch
        from cuda.bindings.driver import CUstream
        from cutlass.cute.runtime import make_fake_stream

        assert not streamshim.status().installed, "the kernel without a stream must be compiled without streamshim"
        self._torch, self._handle_type = torch, CUstream
        self._compile = lambda: cute_kernels.compile_fake(cute_kernels.with_stream, make_fake_stream())
        self._without_stream = cute_kernels.compile_fake(cute_kernels.no_stream)
        # A kernel that was compiled with the shim follows torch also without it, so each mode has its own.
        self._with_stream: dict[Mode, Any] = {}
        self._open = 0
        self._seen: set[int] = set()
        self.graph, self.on, self.device = torch.cuda.CUDAGraph, torch.cuda.stream, torch.cuda.device
        self.current_stream, self.synchronize = torch.cuda.current_stream, torch.cuda.synchronize
        self.event = torch.cuda.Event
        self._prepare()

    def _prepare(self) -> None:
        """Compile and load what this mode needs, so that scenarios do not do it in a capture or behind a delay."""
        if gate.mode() not in self._with_stream:
            self._with_stream[gate.mode()] = self._compile()
            for device in range(self._torch.cuda.device_count()):
                with self.device(device):
                    scratch = self.buffer([0.0], device)
                    self.launch(scratch, self.current_stream())
                    self.launch_without_stream(scratch)
                    self.synchronize(device)

    @contextmanager
    def installed(self, mode: str) -> Iterator[None]:
        with streamshim.install(mode):
            self._prepare()
            yield

    def buffer(self, values: list[float], device: int = 0) -> Any:
        buffer = self._torch.tensor(values, dtype=self._torch.float32, device=f"cuda:{device}")
        self.synchronize(device)
        return buffer

    def fill(self, buffer: Any, value: float) -> None:
        buffer.fill_(value)

    def read(self, buffer: Any) -> list[float]:
        return [float(value) for value in buffer.tolist()]

    def value(self, buffer: Any) -> float:
        return float(buffer[0].item())

    def malloc(self) -> None:
        from cuda.bindings import runtime

        error, pointer = runtime.cudaMalloc(1024)
        if int(error) != 0:
            raise RuntimeError(repr(error))
        runtime.cudaFree(pointer)

    def launch(self, buffer: Any, stream: Any = ABSENT) -> None:
        given = None if stream is None else self._handle_type(handle_of(stream))
        self._with_stream[gate.mode()](buffer, buffer, given)

    def launch_without_stream(self, buffer: Any) -> None:
        self._without_stream(buffer, buffer)

    def delay(self) -> None:
        self._torch.cuda._sleep(self.DELAY_CYCLES)

    def new_stream(self, device: int = 0) -> Any:
        # torch hands out the same 32 streams in turn.
        while (stream := self._torch.cuda.Stream(device)).cuda_stream in self._seen:
            assert len(self._seen) < 32, "a scenario uses too many streams"
        self._seen.add(stream.cuda_stream)
        return stream

    @contextmanager
    def capture(self, graph: Any, error_mode: str = "global", stream: Any = None) -> Iterator[None]:
        stream = stream if stream is not None else self.new_stream()
        # torch.cuda.graph waits for the device first, which no capture survives that is open already.
        begin = self._begin_only if self._open else self._torch.cuda.graph
        # Collected in a capture, what is left of earlier scenarios would unload its kernels and break the capture.
        gc.collect()
        self._open += 1
        try:
            # It does not put the stream back either, if the capture fails at its end.
            with self.on(self.current_stream()), begin(graph, stream=stream, capture_error_mode=error_mode):
                yield
        finally:
            self._open -= 1

    @contextmanager
    def _begin_only(self, graph: Any, stream: Any, capture_error_mode: str) -> Iterator[None]:
        with self.on(stream):
            graph.capture_begin(capture_error_mode=capture_error_mode)
            try:
                yield
            finally:
                graph.capture_end()

    def tidy(self) -> None:
        self._seen.clear()
        for device in range(self._torch.cuda.device_count()):
            self.synchronize(device)


class Worker:
    """A second thread that does what it is told, one thing after the other."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="second")

    def __call__(self, function: Callable[..., T], *args: Any) -> T:
        """Call a function in the thread; returns what it returns, and raises what it raises."""
        assert threading.current_thread() is threading.main_thread()
        return self._thread.submit(function, *args).result(timeout=60)

    @contextmanager
    def inside(self, region: AbstractContextManager[Any]) -> Iterator[None]:
        """Keep the thread in a region during a block of this one."""
        self(region.__enter__)
        try:
            yield
        finally:
            self(region.__exit__, None, None, None)

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._thread.shutdown(wait=True)
