"""The one place that knows CUDA: a small protocol, and a holder for the implementation in use.

`torch_cuda` asks torch and the driver; `simulated` is a model of both for machines without a GPU. Scenarios run
unchanged on either; where they disagree, the simulator is wrong.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple, Protocol

from ..errors import NoCudaError


class CaptureState(NamedTuple):
    """What the driver says of a stream: whether it captures, and which capture it belongs to.

    Attributes:
        id: the driver's capture id, unique for the life of the process; 0 when the stream does not capture.
        valid: False once the capture has been invalidated.
    """

    id: int = 0
    valid: bool = True

    def __bool__(self) -> bool:
        return self.id != 0


NOT_CAPTURING = CaptureState()


class Runtime(Protocol):
    """The questions that streamshim asks. Every method is legal while any thread captures, in every capture mode."""

    name: str

    def current_handle(self, device: int) -> int:
        """The handle of torch's current stream of the device, for the calling thread."""

    def current_device(self) -> int:
        """The index of the current device of the calling thread."""

    def device_count(self) -> int:
        """How many devices this process sees."""

    def set_device(self, device: int) -> None:
        """Make the device current for the calling thread."""

    def order(self, first: int, then: int, device: int) -> None:
        """Make one stream wait for all that has been launched on another so far, as an event between them does.

        Args:
            first: the handle of the stream that is waited for.
            then: the handle of the stream that waits.
            device: the index of the device of both.
        """

    def capture_state(self, handle: int) -> CaptureState:
        """Whether the stream captures. The handle must belong to a living stream."""

    def captured_graph(self, handle: int) -> int:
        """The handle of the graph that a capturing stream is being captured into; 0 if there is none to be read."""

    def thread_mode(self) -> str:
        """How the calling thread interacts with captures: "global" unless it said otherwise, to CUDA
        (``cuThreadExchangeStreamCaptureMode``); "thread_local" or "relaxed" then."""


class _Holder:
    """Holds the runtime in use; `torch_cuda` is made at the first question, since torch may be imported late."""

    def __init__(self) -> None:
        self._runtime: Runtime | None = None

    def get(self) -> Runtime:
        if self._runtime is None:
            from .torch_cuda import TorchCuda

            self._runtime = TorchCuda()
        return self._runtime

    def use(self, runtime: Runtime | None) -> Runtime | None:
        """Put another runtime in place (None: `torch_cuda` at the next question); returns the one before."""
        previous, self._runtime = self._runtime, runtime
        return previous


_holder = _Holder()
get = _holder.get
use = _holder.use


def found() -> Runtime | None:
    """The runtime; None where torch has no streams: it is not imported, or has no CUDA. Imports nothing."""
    known = _holder._runtime
    if known is not None:
        return known
    if "torch" not in sys.modules:
        return None
    try:
        return get()
    except NoCudaError:
        return None


@contextmanager
def on_device(device: int) -> Iterator[bool]:
    """Make the device current for a block, and the one before again afterwards; yields whether that was a change."""
    asked = get()
    before = asked.current_device()
    if before == device:
        yield False
        return
    asked.set_device(device)
    try:
        yield True
    finally:
        asked.set_device(before)
