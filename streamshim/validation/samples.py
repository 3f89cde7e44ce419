"""The inputs and outputs of the first bad calls, kept on the device.

Which call is bad is known on the device only, so its tensors are copied at every call: into the next free row if it was
bad, and else into a last row that nobody reads. That costs one copy of all inputs and both outputs for each call, and
memory for ``keep + 1`` of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .stats import outside_pools
from .structure import Packed


class Samples:
    """The first bad calls with tensors of one shape; all streams and captures share the rows.

    Should two streams find a bad call at the very same time, their tensors may end up in one row.
    """

    def __init__(
        self, keep: int, like: Sequence[torch.Tensor], structure: Any, numbers: Packed, outputs: Sequence[str]
    ) -> None:
        """Make the memory for ``keep`` calls; not inside a capture.

        Args:
            keep: how many.
            like: the tensors of one call, all on one device: its inputs, and two for each output, the kernel's and the
                reference's. Only their shapes and types are looked at.
            structure, numbers: positional and keyword arguments, as `structure.pack` takes them apart.
            outputs: the names of the outputs.
        """
        self.keep, self.structure, self.numbers, self.outputs = keep, structure, numbers, list(outputs)
        self._like = [(tensor.shape, tensor.dtype) for tensor in like]
        device, sizes = like[0].device, [tensor.numel() * tensor.element_size() for tensor in like]
        self._count, *self._rows = outside_pools(
            lambda: [
                torch.zeros((), dtype=torch.int64, device=device),
                *(torch.zeros(keep + 1, size, dtype=torch.uint8, device=device) for size in sizes),
            ]
        )

    def record(self, bad: torch.Tensor, values: Sequence[torch.Tensor]) -> None:
        """Keep these tensors if ``bad`` is not 0 and there is room, decided on the device.

        Args:
            bad: an int64 tensor without dimensions.
            values: as many as there were, with the same shapes and types.
        """
        kept = (bad > 0) & (self._count < self.keep)
        row = self._count.masked_fill(~kept, self.keep).view(1)
        for rows, value in zip(self._rows, values, strict=True):
            if value.numel():
                rows.index_copy_(0, row, _bytes(value).view(1, -1))
        self._count.add_(kept)

    def full(self) -> int:
        """How many bad calls are kept. Waits for the device."""
        return int(self._count)

    def read(self) -> list[list[torch.Tensor]]:
        """The tensors of each call that was kept, on the CPU. Waits for the device."""
        return [
            [
                rows[number].cpu().view(dtype).view(shape).clone()
                for rows, (shape, dtype) in zip(self._rows, self._like, strict=True)
            ]
            for number in range(self.full())
        ]


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The elements in row-major order as bytes, which torch can copy whatever their type."""
    return tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)
