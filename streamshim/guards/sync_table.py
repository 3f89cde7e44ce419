"""Which of torch's Python functions make the host wait for the device, in the user's words, and what to do instead.

``ALWAYS`` means that the call waits for every CUDA tensor; ``SOMETIMES`` that it depends on the arguments: then
``waits`` decides where it can, and torch's own check (`sync_mode`) in a global capture, whose error is explained.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

ALWAYS, SOMETIMES = "always", "sometimes"

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


@dataclass(frozen=True)
class Operation:
    """A call that makes the host wait.

    Attributes:
        words: what it is, as the user knows it.
        when: `ALWAYS` or `SOMETIMES`.
        remedy: what to do, one line each.
        waits: for `SOMETIMES`: whether a call with these arguments is known to wait.
    """

    words: str
    when: str
    remedy: tuple[str, ...]
    waits: Callable[[tuple[Any, ...], dict[str, Any]], bool] | None = None


def is_plain(value: Any) -> bool:
    """Whether a value is a tensor without a behaviour of its own: a subclass (a fake tensor, say) may not wait."""
    torch: Any = sys.modules.get("torch")
    return torch is not None and type(value) in (torch.Tensor, torch.nn.Parameter)


def on_device(value: Any) -> bool:
    """Whether a value is a plain tensor on a CUDA device."""
    return is_plain(value) and value.is_cuda is True


def _is_mask(index: Any) -> bool:
    """Whether an index is, or contains, a mask on the device."""
    if isinstance(index, tuple):
        return any(map(_is_mask, index))
    return on_device(index) and str(index.dtype) in ("torch.bool", "torch.uint8")


def _gets_by_mask(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return len(args) == 2 and on_device(args[0]) and _is_mask(args[1])


def _sets_by_mask(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    # A number is filled in without looking at the mask's size.
    return len(args) == 3 and _is_mask(args[1]) and getattr(args[2], "ndim", 0) > 0 and on_device(args[0])


def _repeats_by_tensor(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    repeats = args[1] if len(args) > 1 else kwargs.get("repeats", args[0] if args else None)
    return on_device(repeats) and kwargs.get("output_size") is None


#: Methods of ``torch.Tensor``.
METHODS: Mapping[str, Operation] = {
    "item": Operation(".item() on a CUDA tensor", ALWAYS, VALUE),
    "tolist": Operation(".tolist() on a CUDA tensor", ALWAYS, COPY),
    "__bool__": Operation("the truth value of a CUDA tensor (if, while, and, or, not)", ALWAYS, VALUE),
    "__int__": Operation("int() of a CUDA tensor", ALWAYS, VALUE),
    "__float__": Operation("float() of a CUDA tensor", ALWAYS, VALUE),
    "__complex__": Operation("complex() of a CUDA tensor", ALWAYS, VALUE),
    "__index__": Operation("a CUDA tensor used as an index or a size", ALWAYS, VALUE),
    "__contains__": Operation("`in` on a CUDA tensor", ALWAYS, VALUE),
    "__repr__": Operation("print or repr of a CUDA tensor", ALWAYS, SHOW),
    "__format__": Operation("formatting a CUDA tensor", SOMETIMES, SHOW),
    "cpu": Operation(".cpu() of a CUDA tensor", SOMETIMES, COPY),
    "to": Operation(".to() from or to the host", SOMETIMES, COPY),
    "cuda": Operation(".cuda() of a tensor on the host", SOMETIMES, COPY),
    "copy_": Operation(".copy_() between host and device", SOMETIMES, COPY),
    "nonzero": Operation("nonzero: its result's size must reach the host", ALWAYS, SIZE),
    "argwhere": Operation("argwhere: its result's size must reach the host", ALWAYS, SIZE),
    "masked_select": Operation("masked_select: its result's size must reach the host", ALWAYS, SIZE),
    "unique": Operation("unique: its result's size must reach the host", ALWAYS, SIZE),
    "unique_consecutive": Operation("unique_consecutive: its result's size must reach the host", ALWAYS, SIZE),
    "bincount": Operation("bincount: its result's size must reach the host", ALWAYS, SIZE),
    "repeat_interleave": Operation("repeat_interleave without output_size", SOMETIMES, SIZE, _repeats_by_tensor),
    "__getitem__": Operation(
        "boolean-mask index: its result's size must reach the host", SOMETIMES, SIZE, _gets_by_mask
    ),
    "__setitem__": Operation("assignment through a boolean mask", SOMETIMES, SIZE, _sets_by_mask),
    "index_put_": Operation("index_put_ with a boolean mask", SOMETIMES, SIZE),
    "equal": Operation("torch.equal of CUDA tensors", ALWAYS, COMPARE),
    "allclose": Operation("torch.allclose of CUDA tensors", ALWAYS, COMPARE),
    "is_nonzero": Operation("is_nonzero of a CUDA tensor", ALWAYS, VALUE),
    "multinomial": Operation("multinomial: its arguments are checked on the host", SOMETIMES, VALUE),
}

#: Functions of ``torch`` that wait whatever their arguments are. The others stay untouched, since compiled code holds
#: them: Dynamo guards on their identity and would compile anew inside the capture, and ``with torch.device(...)`` keeps
#: a table of those that make tensors.
FUNCTIONS: Mapping[str, Operation] = {
    name: METHODS[name]
    for name in (
        "nonzero", "argwhere", "masked_select", "unique", "unique_consecutive", "bincount", "equal", "allclose",
        "is_nonzero",
    )
}  # fmt: skip

#: Waiting calls, by the words for the user.
SYNCHRONIZE = Operation("torch.cuda.synchronize() or torch.accelerator.synchronize()", ALWAYS, WAIT)
EVENT_METHODS: Mapping[str, Operation] = {
    "synchronize": Operation("Event.synchronize()", ALWAYS, WAIT),
    "query": Operation("Event.query()", ALWAYS, WAIT),
    "elapsed_time": Operation("Event.elapsed_time()", ALWAYS, WAIT),
}
STREAM_METHODS: Mapping[str, Operation] = {
    "synchronize": Operation("Stream.synchronize()", ALWAYS, WAIT),
    "query": Operation("Stream.query()", ALWAYS, WAIT),
}
