"""What is counted for one call site and one set of shapes."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from .. import fork
from ..callsite import Site
from .compare import Tolerance
from .stats import Position, Slot, arena


@dataclass
class Output:
    """The counters of one output.

    Attributes:
        name: for instance "output[0]", or the name of an argument that is written to.
        shape: None where calls of many shapes are counted together.
        dtype, device: the tensor's.
        tolerance: what counts as equal.
        eager: the slots of eager calls, by stream.
        captured: the slots of captured calls, each with the driver's id of its capture.
    """

    name: str
    shape: tuple[int, ...] | None
    dtype: torch.dtype
    device: torch.device
    tolerance: Tolerance
    eager: dict[int, Slot] = field(default_factory=dict)
    captured: list[tuple[int, Slot]] = field(default_factory=list)

    def slot(self, position: Position) -> Slot:
        """Where a call at this position is counted."""
        if position.capture:
            (slot,) = arena(self.device).take(1, is_capturing=True)
            self.captured.append((position.capture, slot))
            return slot
        known = self.eager.get(position.stream)
        if known is None:
            (known,) = arena(self.device).take(1, is_capturing=False)
            self.eager[position.stream] = known
        return known


@dataclass
class Entry:
    """One call site with one set of shapes.

    Attributes:
        site: the user's line; None where calls are counted together.
        inputs: the shapes and types of the input tensors, in words.
        outputs: one for each output.
        calls: how many eager calls were compared.
        captured: how many calls were captured.
        lock: held while a call's counting is enqueued, so that two threads on one stream do not mix theirs.
    """

    site: Site | None
    inputs: str
    outputs: list[Output]
    calls: int = 0
    captured: int = 0
    lock: fork.Lock = field(default_factory=fork.Lock, repr=False)
