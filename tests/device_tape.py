"""A stand-in for a CUDA graph on the CPU: a tape of torch operations that runs again over the same memory.

Like a capture it keeps what the device would do, and none of the Python. What needs a value on the host, and so would
break a capture, is refused while it records.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

#: Operations that copy a value to the host, or whose result has a size that only the device knows.
SYNCING = {
    "aten::_local_scalar_dense",
    "aten::item",
    "aten::is_nonzero",
    "aten::equal",
    "aten::nonzero",
    "aten::masked_select",
    "aten::_unique",
    "aten::_unique2",
    "aten::unique_dim",
    "aten::repeat_interleave.Tensor",
    "aten::allclose",
    # Not a sync, but a copy from the host on a GPU.
    "aten::lift_fresh",
    "aten::scalar_tensor",
}
MASKS = {torch.bool, torch.uint8}


class HostValueNeeded(AssertionError):
    """An operation that a CUDA graph capture would not survive."""


class Tape(TorchDispatchMode):
    """Records what is done in a ``with`` block; `replay` does it again."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[tuple[Any, tuple[Any, ...], dict[str, Any], Any]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        _refuse(func, args)
        out = func(*args, **kwargs)
        self.operations.append((func, args, kwargs, out))
        return out

    @property
    def names(self) -> list[str]:
        """The names of the recorded operations."""
        return [func._schema.name for func, *_ in self.operations]

    def replay(self) -> None:
        """Run all of it again; every result goes to where it was."""
        for func, args, kwargs, out in self.operations:
            again = func(*args, **kwargs)
            for result, new, place in zip(func._schema.returns, _listed(again), _listed(out), strict=True):
                if result.alias_info is None and isinstance(place, torch.Tensor):
                    place.copy_(new)


def _listed(value: Any) -> list[Any]:
    if value is None:
        return []
    return list(value) if isinstance(value, (tuple, list)) else [value]


def _refuse(func: Any, args: tuple[Any, ...]) -> None:
    name = func._schema.name
    full = f"{name}.{func._schema.overload_name}"
    has_mask = name in ("aten::index", "aten::index_put_", "aten::index_put") and any(
        index is not None and index.dtype in MASKS for index in args[1]
    )
    if name in SYNCING or full in SYNCING or has_mask:
        raise HostValueNeeded(f"{full} needs a value on the host")
