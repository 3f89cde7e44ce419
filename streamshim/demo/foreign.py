"""A foreign kernel library for the simulator, and the binder for it.

It knows nothing of torch: a kernel goes to the stream that the caller passes, or to NULL. With streamshim installed,
the stream takes the way of every other binder: what the caller passed goes to `gate.resolve`, and what that answers is
used.
"""

from __future__ import annotations

from .. import gate
from ..runtime.simulated import Buffer, Simulator
from ..settings import Mode

_LAUNCH = gate.Launch("simulated kernel 'state_update'")


class ForeignKernel:
    """``h = a*h + b*x; y = c*h``, in place on the state."""

    def __init__(self, sim: Simulator) -> None:
        self._sim = sim

    def __call__(
        self, x: Buffer, h: Buffer, a: Buffer, b: Buffer, c: Buffer, y: Buffer, stream: int | None = None
    ) -> None:
        handle = stream or 0
        if gate.mode() is not Mode.OFF:
            handle = gate.resolve(handle, x.device, _LAUNCH, "stream")
        self._sim.launch(_state_update, x, h, a, b, c, y, stream=handle, name="state_update")


def _state_update(x: Buffer, h: Buffer, a: Buffer, b: Buffer, c: Buffer, y: Buffer) -> None:
    for i, state in enumerate(h.values):
        h.values[i] = a.values[i] * state + b.values[i] * x.values[i]
        y.values[i] = c.values[i] * h.values[i]
