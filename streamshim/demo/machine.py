"""What the story needs of a machine: a model with one foreign layer, CUDA graphs, and streamshim."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

#: A foreign kernel, called as ``kernel(*buffers)``, or ``kernel(*buffers, stream)`` if it takes a stream.
Kernel = Callable[..., Any]
#: The model's custom layer; launches the kernel.
Layer = Callable[[], None]
#: One decode step, or the replay of one.
Step = Callable[[], None]


class Machine(Protocol):
    """A GPU, or the simulator.

    Attributes:
        buffers: the kernel's arguments: x, h, a, b, c, y.
    """

    buffers: tuple[Any, ...]

    def kernel(self) -> Kernel:
        """The kernel without a stream parameter, compiled now: with streamshim if it is installed now."""

    def kernel_with_stream(self) -> Kernel:
        """The kernel with a stream parameter, compiled now."""

    def current_stream(self) -> Any:
        """torch's current stream, in the form that the kernel takes."""

    def shim(self, mode: str) -> AbstractContextManager[object]:
        """streamshim in this mode, for a block."""

    def reset(self) -> None:
        """Forget the state, and go back to the prompt."""

    def step(self, layer: Layer) -> None:
        """Read the last token, call the layer, write the next token; all on the device, so it can be captured."""

    def token(self) -> int:
        """The last token. Waits for the device."""

    def poison(self) -> None:
        """Fill the kernel's output with NaN, on the current stream and outside every graph."""

    def poisoned(self) -> bool:
        """Whether the kernel's output is still NaN, so whether the kernel has not run since. Waits for the device."""

    def warm_up(self, step: Step) -> None:
        """Run a step some times on a side stream, as one does before a capture."""

    def capture(self, step: Step) -> Step:
        """Capture a step in a CUDA graph and wait for the device; returns the graph's replay."""
