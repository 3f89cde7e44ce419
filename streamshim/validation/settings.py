"""The arguments of `validate`, checked."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ..errors import ValidationError
from .compare import Tolerance, defaults

#: A number for all outputs, or one for each of some outputs or types.
Bound = float | Mapping[str | torch.dtype, float] | None

KERNEL, REFERENCE = "kernel", "reference"
RECORD, WARN, RAISE = "record", "warn", "raise"


@dataclass(frozen=True)
class Place:
    """An argument that is written to.

    Attributes:
        name: its name; "argument 2" if it was given as a position.
        position: its position; None if it can only be passed by keyword.
        keyword: its keyword; None if it can only be passed by position.
    """

    name: str
    position: int | None
    keyword: str | None

    def is_in(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        """Whether the argument was given in a call."""
        return (self.position is not None and len(args) > self.position) or self.keyword in kwargs

    def get(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """The argument of a call; None if it was left out."""
        if self.position is not None and len(args) > self.position:
            return args[self.position]
        return kwargs.get(self.keyword) if self.keyword is not None else None


@dataclass(frozen=True)
class Settings:
    """How a kernel is validated; see `validate` for each."""

    name: str
    rtol: Bound
    atol: Bound
    equal_nan: bool
    equal_inf: bool
    use: str
    inplace: tuple[Place, ...]
    sample: int
    on_mismatch: str
    keep: int

    def tolerance(self, output: str, dtype: torch.dtype) -> Tolerance:
        """The tolerance of an output: its own, else that of its type, else `torch.testing`'s."""
        rtol, atol = (
            _bound(bound, output, dtype, default)
            for bound, default in zip((self.rtol, self.atol), defaults(dtype), strict=True)
        )
        return Tolerance(rtol, atol, self.equal_nan, self.equal_inf)

    def ensure_known(self, outputs: Iterable[str]) -> None:
        """Ensure that every output that a tolerance names is there; ValidationError if not."""
        names = list(outputs)
        for argument, bound in (("rtol", self.rtol), ("atol", self.atol)):
            unknown = [k for k in bound if isinstance(k, str) and k not in names] if isinstance(bound, Mapping) else []
            if unknown:
                raise ValidationError(
                    f"{self.name}: {argument} names {', '.join(unknown)}; the outputs are {', '.join(names)}"
                )


def _bound(bound: Bound, output: str, dtype: torch.dtype, default: float) -> float:
    if isinstance(bound, Mapping):
        return float(bound.get(output, bound.get(dtype, default)))
    return default if bound is None else float(bound)


def check_bounds(rtol: Bound, atol: Bound) -> None:
    """Ensure that tolerances make sense.

    Raises:
        TypeError, ValueError: naming the argument, what came and what is accepted.
    """
    if (rtol is None) != (atol is None):
        raise ValueError("rtol and atol: give both or neither, as for torch.testing.assert_close")
    for argument, bound in (("rtol", rtol), ("atol", atol)):
        for key, number in bound.items() if isinstance(bound, Mapping) else [("", bound)]:
            if not isinstance(key, (str, torch.dtype)):
                raise TypeError(f"{argument} has the key {key!r}; accepted: the name of an output, or a torch.dtype")
            if number is None and not isinstance(bound, Mapping):
                continue
            if isinstance(number, bool) or not isinstance(number, (int, float)):
                raise TypeError(f"{argument} is {number!r}; accepted: a number, or a dict of numbers")
            if not number >= 0:
                raise ValueError(f"{argument} is {number!r}; it must not be negative")


def check_type(argument: str, value: object, allowed: tuple[type, ...]) -> None:
    """TypeError, with what is accepted, if the value is of another type."""
    if not isinstance(value, allowed):
        accepted = " or ".join("None" if kind is type(None) else f"a {kind.__name__}" for kind in allowed)
        raise TypeError(f"{argument} is {value!r}; accepted: {accepted}")


def check_choice(argument: str, value: str, allowed: tuple[str, ...]) -> None:
    """ValueError, with what is allowed, if the value is something else."""
    if value not in allowed:
        raise ValueError(f"{argument} is {value!r}; allowed values: {', '.join(map(repr, allowed))}")


def check_count(argument: str, value: int, least: int) -> None:
    """TypeError or ValueError if the value is no int, or less than this."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{argument} is {value!r}; accepted: an int")
    if value < least:
        raise ValueError(f"{argument} is {value}; it must be at least {least}")


def places(inplace: Iterable[str | int] | str | int, kernel: Callable[..., Any]) -> tuple[Place, ...]:
    """The arguments that ``inplace`` names.

    Raises:
        ValueError: if the kernel's signature can be read and has no such parameter, or one is named twice.
        TypeError: if something else than names and positions is given.
    """
    if not isinstance(inplace, (str, Iterable)):
        inplace = (inplace,)
    wanted = [inplace] if isinstance(inplace, str) else list(inplace)
    try:
        parameters = list(inspect.signature(kernel).parameters.values()) if wanted else []
    except (TypeError, ValueError):
        parameters = []  # a ctypes function, or another one of C: a name is a keyword then
    by_position = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    kinds = {p.kind for p in parameters}
    found: list[Place] = []
    for key in wanted:
        if isinstance(key, bool) or not isinstance(key, (str, int)) or (isinstance(key, int) and key < 0):
            raise TypeError(f"inplace has {key!r}; accepted: names and positions (from 0) of arguments")
        if isinstance(key, int):
            keyword = by_position[key] if key < len(by_position) else None
            if parameters and keyword is None and inspect.Parameter.VAR_POSITIONAL not in kinds:
                listed = ", ".join(map(repr, by_position))
                raise ValueError(
                    f"inplace names position {key} (from 0); the kernel's positional parameters are {listed}"
                )
            found.append(Place(keyword or f"argument {key}", key, keyword))
            continue
        named = [p.name for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
        if parameters and key not in named and inspect.Parameter.VAR_KEYWORD not in kinds:
            raise ValueError(f"inplace names {key!r}; the kernel's parameters are {', '.join(map(repr, named))}")
        found.append(Place(key, by_position.index(key) if key in by_position else None, key))
    for place in found:
        if found.count(place) > 1:
            raise ValueError(f"inplace names {place.name!r} twice")
    return tuple(found)
