"""Where the streams are among a CuTe function's arguments, and how such an argument is converted.

A stream parameter can stand anywhere, have any name, lack an annotation, and sit in a NamedTuple or a dataclass. It is
found by the *value* that was there when the function was compiled; for functions that were not compiled under the shim,
by annotation.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from ...gate import Launch
from ...streams import handle_of, is_stream_like
from ..stream_objects import stream_object

_STREAM_TYPES = ("CUstream", "cudaStream_t")
#: Distinguishes "no default" from a default of None.
NO_DEFAULT: Any = object()


@dataclass(frozen=True)
class Slot:
    """One stream among the runtime arguments of a compiled function.

    Attributes:
        index: the argument's place among the positional runtime arguments; -1 if it is keyword-only.
        name: the parameter's name.
        path: field names or indices inside the argument, empty for a plain parameter.
        default: the parameter's default, or `NO_DEFAULT`.
    """

    index: int
    name: str
    path: tuple[str | int, ...] = ()
    default: Any = NO_DEFAULT

    @property
    def label(self) -> str:
        """The slot as the user would write it, for instance ``params.stream``."""
        return self.name + "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in self.path)


@dataclass(frozen=True)
class Plan:
    """What is known about one compiled function.

    Attributes:
        slots: its streams.
        launch: what it launches, for the gate.
        environment: some launch takes the TVM-FFI environment stream.
        tensor: for TVM-FFI: the place of an argument that can only be a tensor on a GPU; -1 if that is not known, or
            if the DSL's own ``__call__`` does more than call its argument wrapper.
        simple: no stream is passed at a call, and the launch can be bound: TVM-FFI does all that is needed.
        simple_first: the same, and the tensor is the first argument.
        only: the place of the stream if there is one, plain and positional; else -1.
        direct: the same, if `tensor` is known; else -1.
    """

    slots: tuple[Slot, ...]
    launch: Launch
    environment: bool = True
    tensor: int = -1
    simple: bool = field(init=False)
    simple_first: bool = field(init=False)
    only: int = field(init=False, default=-1)
    direct: int = field(init=False, default=-1)

    def __post_init__(self) -> None:
        object.__setattr__(self, "simple", not self.slots and self.launch.can_bind)
        object.__setattr__(self, "simple_first", self.simple and self.tensor == 0)
        if len(self.slots) == 1 and not self.slots[0].path and self.launch.can_bind:
            object.__setattr__(self, "only", self.slots[0].index)
            if self.tensor >= 0:
                object.__setattr__(self, "direct", self.only)

    def bind(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], convert: Callable[[int, str], int]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments with every stream replaced by the exact ``CUstream`` of ``convert(handle, label)``.

        Raises:
            TypeError: for a value that is no stream.
        """
        for slot in self.slots:
            if 0 <= slot.index < len(args):
                value = args[slot.index]
                bound = _convert(value, slot, convert)
                if bound is not value:
                    args = (*args[: slot.index], bound, *args[slot.index + 1 :])
            elif slot.name in kwargs:
                kwargs = {**kwargs, slot.name: _convert(kwargs[slot.name], slot, convert)}
            elif slot.default is not NO_DEFAULT:
                kwargs = {**kwargs, slot.name: _convert(slot.default, slot, convert)}
        return args, kwargs


def _convert(value: Any, slot: Slot, convert: Callable[[int, str], int]) -> Any:
    if slot.path:
        return _replaced(value, slot.path, lambda leaf: stream_object(convert(handle_of(leaf, slot.label), slot.label)))
    return stream_object(convert(handle_of(value, slot.name), slot.name))


def _replaced(value: Any, path: tuple[str | int, ...], convert: Callable[[Any], Any]) -> Any:
    """A copy of a tuple, NamedTuple or dataclass with one leaf converted."""
    if not path:
        return convert(value)
    step, rest = path[0], path[1:]
    if isinstance(step, int):
        items = list(value)
        items[step] = _replaced(items[step], rest, convert)
        return value._make(items) if hasattr(value, "_make") else type(value)(items)
    # copy + object.__setattr__ rather than dataclasses.replace, which would run the user's __post_init__ again.
    twin = copy.copy(value)
    object.__setattr__(twin, step, _replaced(getattr(value, step), rest, convert))
    return twin


def find(name: str, index: int, value: Any, annotation: Any, default: Any = NO_DEFAULT) -> Iterator[Slot]:
    """The slots inside one argument, by its compile-time value, or by its annotation if there is no value."""
    if value is not NO_DEFAULT and value is not None:
        yield from (Slot(index, name, path, default) for path in _paths(value))
    elif is_stream_annotation(annotation):
        yield Slot(index, name, (), default)


def _paths(value: Any, prefix: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    if is_stream_like(value):
        yield prefix
    elif isinstance(value, (tuple, list)):
        for i, item in enumerate(value):
            yield from _paths(item, (*prefix, i))
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for f in dataclasses.fields(value):
            yield from _paths(getattr(value, f.name, None), (*prefix, f.name))


def is_stream_annotation(annotation: Any) -> bool:
    """Whether a parameter's annotation says that it is a stream; strings and ``X | None`` count."""
    if isinstance(annotation, str):
        return any(name in annotation for name in _STREAM_TYPES)
    if getattr(annotation, "__name__", "") in _STREAM_TYPES:
        return True
    return any(is_stream_annotation(a) for a in getattr(annotation, "__args__", ()) or ())


def is_environment_stream(value: Any) -> bool:
    """Whether this is a fake stream that a TVM-FFI function replaces by its environment stream."""
    return getattr(value, "use_tvm_ffi_env_stream", False) is True


def replace_streams(value: Any, convert: Callable[[int], int]) -> Any:
    """The value with every stream in it replaced by the ``CUstream`` of ``convert(handle)``; fake streams stay."""
    for path in _paths(value):
        value = _replaced(value, path, lambda leaf: leaf if _is_fake(leaf) else stream_object(convert(handle_of(leaf))))
    return value


def normalise_for_trace(
    function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a trace with each stream as the exact ``CUstream`` that the DSL knows.

    Values that can only be streams are converted wherever they stand; None, ints and omitted defaults where the
    parameter is annotated as a stream.

    Raises:
        TypeError: if a parameter annotated as a stream got something that is no stream.
    """
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        parameters = []
    args = tuple(replace_streams(arg, lambda handle: handle) for arg in args)
    kwargs = {name: replace_streams(arg, lambda handle: handle) for name, arg in kwargs.items()}
    for i, p in enumerate(parameters):
        if not is_stream_annotation(p.annotation) or p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD):
            continue
        if p.kind is not p.KEYWORD_ONLY and i < len(args):
            args = (*args[:i], _as_traced(args[i], p.name), *args[i + 1 :])
        elif p.name in kwargs or p.default is not p.empty:
            kwargs[p.name] = _as_traced(kwargs.get(p.name, p.default), p.name)
    return args, kwargs


def _as_traced(value: Any, name: str) -> Any:
    return value if _is_fake(value) else stream_object(handle_of(value, name))


def _is_fake(value: Any) -> bool:
    return hasattr(value, "use_tvm_ffi_env_stream")
