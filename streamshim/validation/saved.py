"""Bad calls in a file: written by a process that has them on its device, run again by another one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from .._version import __version__
from ..errors import ValidationError
from .compare import Tolerance, compare
from .settings import Place
from .structure import Packed, tensors, unpack

if TYPE_CHECKING:
    from .calls import Validated


def save(function: Validated, path: str | Path) -> int:
    """Write the bad calls that a function has kept; returns how many. Waits for the device."""
    found = []
    for samples in list(function.samples.values()):
        number = 2 * len(samples.outputs)
        for values in samples.read():
            given, results = values[: len(values) - number], values[len(values) - number :]
            found.append(
                {
                    "structure": samples.structure,
                    "tensors": given,
                    "ints": samples.numbers.ints,
                    "floats": samples.numbers.floats,
                    "outputs": [
                        {"name": name, "kernel": actual, "reference": expected, **_tolerance(function, name, actual)}
                        for name, actual, expected in zip(samples.outputs, results[::2], results[1::2], strict=True)
                    ],
                }
            )
    places = [(place.name, place.position, place.keyword) for place in function.settings.inplace]
    content = {
        "streamshim": __version__,
        "function": function.name,
        "kernel": _name(function.kernel),
        "reference": _name(function.reference),
        "inplace": places,
        "calls": found,
    }
    torch.save(content, path)
    return len(found)


def _tolerance(function: Validated, name: str, tensor: torch.Tensor) -> dict[str, Any]:
    return vars(function.settings.tolerance(name, tensor.dtype))


def _name(function: Any) -> str:
    named = function if hasattr(function, "__qualname__") else type(function)
    return f"{named.__module__}:{named.__qualname__}"


@dataclass(frozen=True)
class Outcome:
    """One output of one saved call.

    Attributes:
        call: the number of the call, from 1.
        output: its name.
        what: which two were compared, in words.
        bad: how many elements differ.
        elements: of how many.
        index: the first that differs, in row-major order.
        max_abs, max_rel: the greatest errors.
    """

    call: int
    output: str
    what: str
    bad: int
    elements: int
    index: int
    max_abs: float
    max_rel: float


def load(path: str | Path) -> dict[str, Any]:
    """Read a file that `save` has written.

    Raises:
        ValidationError: if it is none.
    """
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises many types for a file that is not its own
        # Of torch's text only the beginning: the rest is advice for other files, to load them unsafely among it.
        why = str(error).partition("\n")[0].partition(". ")[0]
        raise ValidationError(f"{path} is no file of save_samples(): {type(error).__name__}: {why}") from error
    if not isinstance(content, dict) or "streamshim" not in content or "calls" not in content:
        raise ValidationError(f"{path} was written by torch.save, but not by save_samples()")
    return content


def again(
    content: Mapping[str, Any],
    kernel: Callable[..., Any] | None,
    reference: Callable[..., Any] | None,
    device: str,
) -> list[Outcome]:
    """Compare what was saved, and what the two functions give now for the same inputs.

    Args:
        content: from `load`.
        kernel, reference: the functions to call; None: what was saved is taken instead.
        device: where to call them.

    Raises:
        ValidationError: if an argument was not saved, or a function gives other outputs than were saved.
    """
    outcomes = []
    for number, call in enumerate(content["calls"], 1):
        sides = []
        for side, function in (("kernel", kernel), ("reference", reference)):
            if function is None:
                sides.append((f"the saved {side}", {out["name"]: out[side].to(device) for out in call["outputs"]}))
            else:
                sides.append((f"the {side} now", _called(function, call, content["inplace"], device)))
        (first, actual), (second, expected) = sides
        for out in call["outputs"]:
            name = out["name"]
            missing = [words for words, found in sides if name not in found]
            if missing:
                raise ValidationError(
                    f"call {number}: {missing[0]} gives no {name}, which was compared when it was saved"
                )
            tolerance = Tolerance(out["rtol"], out["atol"], out["equal_nan"], out["equal_inf"])
            found = compare(actual[name], expected[name], tolerance)
            numbers = (0, 0, 0.0, 0.0)
            if found is not None:
                numbers = (int(found.bad), int(found.index), *found.errors.tolist())
            bad, index, max_abs, max_rel = numbers
            what = f"{first} and {second}"
            outcomes.append(Outcome(number, name, what, bad, actual[name].numel(), index, max_abs, max_rel))
    return outcomes


def _called(
    function: Callable[..., Any], call: Mapping[str, Any], inplace: list[Any], device: str
) -> dict[str, torch.Tensor]:
    packed = Packed([tensor.to(device, copy=True) for tensor in call["tensors"]], call["ints"], call["floats"])
    args, kwargs = unpack(_checked(call["structure"]), packed)
    with torch.no_grad():
        result = function(*args, **kwargs)
    found = dict(tensors(result, "output"))
    for name, position, keyword in inplace:
        found[name] = Place(name, position, keyword).get(args, kwargs)
    return found


def _checked(structure: Any) -> Any:
    kind, content = structure
    if kind == "object":
        raise ValidationError(f"An argument of type {content} could not be saved, so the call cannot be made again")
    if kind in ("tuple", "list"):
        for item in content:
            _checked(item)
    elif kind == "dict":
        for _, item in content:
            _checked(item)
    return structure
