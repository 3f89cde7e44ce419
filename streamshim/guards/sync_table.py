"""Which calls make the host wait for the device, in the user's words, and what to do instead: data for the guards.

``ALWAYS`` means that a method of a tensor waits for every CUDA tensor; ``SOMETIMES`` that it depends on the arguments:
then ``needs`` decides where it can, and torch's own check (`sync_mode`) in a global capture, whose error is explained.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

ALWAYS, SOMETIMES = "always", "sometimes"


class Kind(Enum):
    """What a call waits for, which decides what it does to a capture (`syncs.breaks`)."""

    DEVICE = "all work of the current device"
    STREAM = "the work of one stream"
    EVENT = "an event"
    VALUE = "the current stream, whose result the host wants"
    #: Not a wait by itself, but CUDA treats it like one, since it may wait: allocating, freeing, pinning.
    MEMORY = "whatever still uses the memory"
    UNKNOWN = "something that it does not say"


VALUE = (
    "Keep the value on the device: torch.where, a masked operation, or a flag tensor that is read after the replay.",
    "Or do this before or after the capture: nothing on the host runs at replay, so it would check nothing there.",
)
SIZE = (
    "Use a form whose result has a fixed size: torch.where(mask, a, b), masked_fill, nonzero_static(size=...), "
    "repeat_interleave(..., output_size=...).",
    "Or do this outside the capture.",
)
COPY = (
    "Copy into a pinned tensor with non_blocking=True and read it after the replay.",
    "Or do this outside the capture.",
)
SHOW = ("Print shape, dtype and device, which need no copy, or print after the replay.",)
COMPARE = (
    "Compare with device operations only, and read the verdict after the replay.",
    "Or compare outside the capture: Python does not run at replay.",
)
WAIT = (
    "Nothing needs to be waited for while capturing: order streams with stream.wait_event or stream.wait_stream.",
    "Or do this before or after the capture.",
)
ALLOCATE = (
    "Allocate before the capture, or take memory from torch (torch.empty), whose allocator knows captures.",
    "Or allocate in stream order (cuMemAllocAsync, cudaMallocAsync) on torch's current stream.",
)
WARM_UP = (
    "Run it once before the capture, with arguments of the same shapes and types, so that its choice is made by then.",
)


@dataclass(frozen=True)
class Operation:
    """A call that makes the host wait.

    Attributes:
        words: what it is, as the user knows it.
        remedy: what to do, one line each.
        kind: what it waits for.
        when: `ALWAYS` or `SOMETIMES`.
        needs: for `SOMETIMES`: whether a call with these arguments is known to wait.
    """

    words: str
    remedy: tuple[str, ...]
    kind: Kind = Kind.VALUE
    when: str = ALWAYS
    needs: Callable[[tuple[Any, ...], dict[str, Any]], bool] | None = None


def is_plain(value: Any) -> bool:
    """Whether a value is a tensor without a behaviour of its own: a subclass (a fake tensor, say) may not wait."""
    torch: Any = sys.modules.get("torch")
    return torch is not None and type(value) in (torch.Tensor, torch.nn.Parameter)


def on_device(value: Any) -> bool:
    """Whether a value is a plain tensor on a CUDA device."""
    return is_plain(value) and value.is_cuda is True


def _is_number(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    # Of any other number of elements torch complains, without waiting.
    return bool(args) and on_device(args[0]) and args[0].numel() == 1


def _is_whole_number(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return _is_number(args, kwargs) and not (args[0].is_floating_point() or args[0].is_complex())


def _has_elements(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return bool(args) and on_device(args[0]) and args[0].numel() > 0


def _is_mask(index: Any) -> bool:
    """Whether an index is, or contains, a mask on the device."""
    if isinstance(index, tuple):
        return any(map(_is_mask, index))
    return on_device(index) and str(index.dtype) in ("torch.bool", "torch.uint8")


def _gets_by_mask(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return len(args) == 2 and on_device(args[0]) and _is_mask(args[1])


def _sets_by_mask(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    # One number is filled in without looking at the mask's size, unless it is on the device.
    return (
        len(args) == 3
        and _is_mask(args[1])
        and on_device(args[0])
        and (getattr(args[2], "ndim", 0) > 0 or on_device(args[2]))
    )


def _compares(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    # Of other shapes, or without elements, nothing has to be looked at.
    other = args[1] if len(args) > 1 else kwargs.get("other")
    return bool(args) and on_device(args[0]) and args[0].numel() > 0 and args[0].shape == getattr(other, "shape", None)


def _repeats_by_tensor(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    repeats = args[1] if len(args) > 1 else kwargs.get("repeats", args[0] if args else None)
    return on_device(repeats) and kwargs.get("output_size") is None


#: Methods of ``torch.Tensor``.
METHODS: Mapping[str, Operation] = {
    "item": Operation(".item() on a CUDA tensor", VALUE, when=SOMETIMES, needs=_is_number),
    "tolist": Operation(".tolist() on a CUDA tensor", COPY, when=SOMETIMES, needs=_has_elements),
    "__bool__": Operation(
        "the truth value of a CUDA tensor (if, while, and, or, not)", VALUE, when=SOMETIMES, needs=_is_number
    ),
    "__int__": Operation("int() of a CUDA tensor", VALUE, when=SOMETIMES, needs=_is_number),
    "__float__": Operation("float() of a CUDA tensor", VALUE, when=SOMETIMES, needs=_is_number),
    "__complex__": Operation("complex() of a CUDA tensor", VALUE, when=SOMETIMES, needs=_is_number),
    "__index__": Operation("a CUDA tensor used as an index or a size", VALUE, when=SOMETIMES, needs=_is_whole_number),
    "__contains__": Operation("`in` on a CUDA tensor", VALUE),
    "__repr__": Operation("print or repr of a CUDA tensor", SHOW, when=SOMETIMES, needs=_has_elements),
    "__format__": Operation("formatting a CUDA tensor", SHOW, when=SOMETIMES),
    "cpu": Operation(".cpu() of a CUDA tensor", COPY, when=SOMETIMES),
    "to": Operation(".to() from or to the host", COPY, when=SOMETIMES),
    "cuda": Operation(".cuda() of a tensor on the host", COPY, when=SOMETIMES),
    "copy_": Operation(".copy_() between host and device", COPY, when=SOMETIMES),
    "nonzero": Operation("nonzero: its result's size must reach the host", SIZE),
    "argwhere": Operation("argwhere: its result's size must reach the host", SIZE),
    "masked_select": Operation("masked_select: its result's size must reach the host", SIZE),
    "unique": Operation("unique: its result's size must reach the host", SIZE),
    "unique_consecutive": Operation("unique_consecutive: its result's size must reach the host", SIZE),
    "bincount": Operation("bincount: its result's size must reach the host", SIZE),
    "repeat_interleave": Operation(
        "repeat_interleave without output_size", SIZE, when=SOMETIMES, needs=_repeats_by_tensor
    ),
    "__getitem__": Operation(
        "boolean-mask index: its result's size must reach the host", SIZE, when=SOMETIMES, needs=_gets_by_mask
    ),
    "__setitem__": Operation("assignment through a boolean mask", SIZE, when=SOMETIMES, needs=_sets_by_mask),
    "index_put_": Operation("index_put_ with a boolean mask", SIZE, when=SOMETIMES),
    "equal": Operation("torch.equal of CUDA tensors", COMPARE, when=SOMETIMES, needs=_compares),
    "allclose": Operation("torch.allclose of CUDA tensors", COMPARE),
    "is_nonzero": Operation("is_nonzero of a CUDA tensor", VALUE, when=SOMETIMES, needs=_is_number),
    "multinomial": Operation("multinomial: its arguments are checked on the host", VALUE, when=SOMETIMES),
}

#: Functions of ``torch`` that nobody calls but for a result on the host. The others stay untouched, since compiled code
#: holds them: Dynamo guards on their identity and would compile anew inside the capture, and ``with torch.device(...)``
#: keeps a table of those that make tensors.
FUNCTIONS: Mapping[str, Operation] = {
    name: METHODS[name]
    for name in (
        "nonzero", "argwhere", "masked_select", "unique", "unique_consecutive", "bincount", "equal", "allclose",
        "is_nonzero",
    )
}  # fmt: skip

#: Waiting calls of torch.
SYNCHRONIZE = Operation("torch.cuda.synchronize() or torch.accelerator.synchronize()", WAIT, Kind.DEVICE)
EVENT_METHODS: Mapping[str, Operation] = {
    name: Operation(f"Event.{name}()", WAIT, Kind.EVENT) for name in ("synchronize", "query", "elapsed_time")
}
STREAM_METHODS: Mapping[str, Operation] = {
    name: Operation(f"Stream.{name}()", WAIT, Kind.STREAM) for name in ("synchronize", "query")
}
