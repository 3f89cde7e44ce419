"""Which device a call launches on."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ... import runtime
from .values import tensor_type

#: The runtime that was found to have one device; read on the launch path. No runtime is this object.
single: Any = object()


def current_device() -> int:
    """The index of the current device; not asked for where there is only one."""
    global single
    asked = runtime.get()
    if asked.device_count() == 1:
        single = asked
        return 0
    return asked.current_device()


def device_of(wish: int | str, values: Iterable[Any], where: str) -> int:
    """The index of the device of a call.

    Args:
        wish: what the user said: "current", "tensors" or an index.
        values: the arguments of the call.
        where: the function, for messages.

    Raises:
        ValueError: for "tensors", if there are GPU tensors on several devices; the text lists them.
    """
    if isinstance(wish, int):
        return wish
    if wish == "tensors" and runtime.get().device_count() > 1:
        tensor = tensor_type()
        on = {place: v.get_device() for place, v in enumerate(values) if isinstance(v, tensor) and v.is_cuda}
        if len(set(on.values())) > 1:
            listed = ", ".join(f"argument {place} on cuda:{device}" for place, device in on.items())
            raise ValueError(
                f"{where} was called with tensors on several devices, so it is not known which of them launches: "
                f"{listed}; bind it with device='current' or with the index of the device"
            )
        for device in on.values():
            return int(device)
    return current_device()
