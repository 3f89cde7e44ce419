"""What a kernel and its reference return, or take: tensors, alone or in tuples, lists and dicts, and plain values."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ..errors import ValidationError

#: What may be beside tensors.
PLAIN = (type(None), bool, int, float, complex, str, torch.dtype, torch.device)


def leaves(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Everything in a value that is no tuple, list or dict, each with its name: ``name[0]['key']``."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from leaves(item, f"{name}[{key!r}]")
    elif isinstance(value, (tuple, list)):
        for index, item in enumerate(value):
            yield from leaves(item, f"{name}[{index}]")
    else:
        yield name, value


def tensors(value: Any, name: str) -> list[tuple[str, torch.Tensor]]:
    """The tensors in a value, each with its name."""
    return [(where, leaf) for where, leaf in leaves(value, name) if isinstance(leaf, torch.Tensor)]


def tensor_words(dtype: torch.dtype, shape: Sequence[int] | None, device: torch.device) -> str:
    """A tensor in words; without its shape, if that is None."""
    dimensions = "" if shape is None else f"[{', '.join(map(str, shape))}]"
    return f"{str(dtype).removeprefix('torch.')}{dimensions} on {device}"


def described(value: Any) -> str:
    """A value in words, without its numbers: ``(float16[2, 8] on cuda:0, None)``."""
    if isinstance(value, torch.Tensor):
        layout = "" if value.layout is torch.strided and not value.is_quantized else " (not a plain strided tensor)"
        return tensor_words(value.dtype, value.shape, value.device) + layout
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key!r}: {described(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(described, value)) + "]"
    if isinstance(value, tuple):
        inner = ", ".join(map(described, value)) + ("," if len(value) == 1 else "")
        return f"({inner})"
    return repr(value) if isinstance(value, PLAIN) else f"a {type(value).__module__}.{type(value).__qualname__}"


def pairs(actual: Any, expected: Any, name: str, who: str) -> list[tuple[str, torch.Tensor, torch.Tensor]]:
    """The tensors of two values that have the same structure, side by side, each with its name.

    Args:
        actual: the kernel's.
        expected: the reference's.
        name: what they are, for instance "output".
        who: the name of the validated function.

    Raises:
        ValidationError: if structures, or shapes, types or devices of the tensors differ, with both in full.
    """
    found: list[tuple[str, torch.Tensor, torch.Tensor]] = []
    why = _walk(actual, expected, name, found)
    if why:
        raise ValidationError(
            f"{who}: the kernel and the reference cannot be compared: {why}.\n"
            f"  the kernel gives     {described(actual)}\n"
            f"  the reference gives  {described(expected)}\n"
            "Both must give the same structure, with tensors of the same shape, dtype and device."
        )
    return found


def _walk(actual: Any, expected: Any, name: str, found: list[tuple[str, torch.Tensor, torch.Tensor]]) -> str:
    """Add the pairs to ``found``; returns the first difference, or an empty string."""
    if isinstance(actual, torch.Tensor) and isinstance(expected, torch.Tensor):
        found.append((name, actual, expected))
        return _unlike(actual, expected, name)
    if isinstance(actual, dict) and isinstance(expected, dict):
        if actual.keys() != expected.keys():
            return f"{name} has different keys"
        inner = [(actual[key], expected[key], f"{name}[{key!r}]") for key in actual]
    elif isinstance(actual, (tuple, list)) and type(actual) is type(expected):
        if len(actual) != len(expected):
            return f"{name} has {len(actual)} items and {len(expected)}"
        inner = [(a, e, f"{name}[{i}]") for i, (a, e) in enumerate(zip(actual, expected, strict=True))]
    elif type(actual) is type(expected) and isinstance(actual, PLAIN):
        return ""
    else:
        return f"{name} is of different types, or of one that cannot be compared"
    for item in inner:
        why = _walk(*item, found)
        if why:
            return why
    return ""


def _unlike(actual: torch.Tensor, expected: torch.Tensor, name: str) -> str:
    if actual.shape != expected.shape:
        return f"{name} differs in shape"
    if actual.dtype != expected.dtype:
        return f"{name} differs in dtype"
    if actual.device != expected.device:
        return f"{name} is on different devices"
    if actual.device.type == "meta":
        return f"{name} is on the meta device, where there are no values"
    if any(tensor.layout is not torch.strided or tensor.is_quantized for tensor in (actual, expected)):
        return f"{name} is not a plain strided tensor"
    return ""


@dataclass
class Packed:
    """What `pack` took out of a value."""

    tensors: list[torch.Tensor] = field(default_factory=list)
    ints: list[int] = field(default_factory=list)
    floats: list[float] = field(default_factory=list)


def pack(value: Any, into: Packed) -> Any:
    """Take the tensors and numbers out of a value; returns its structure, from which `unpack` builds it again.

    A structure is made of tuples, so that torch.compile can trace this and take the result as a constant. Numbers are
    taken out since torch.compile makes symbols of those that change.
    """
    if isinstance(value, torch.Tensor):
        into.tensors.append(value)
        return ("tensor", len(into.tensors) - 1)
    if isinstance(value, (tuple, list)):
        kind = "list" if isinstance(value, list) else "tuple"
        return (kind, tuple([pack(item, into) for item in value]))
    if isinstance(value, dict):
        return ("dict", tuple([(key, pack(item, into)) for key, item in value.items()]))
    if isinstance(value, int) and not isinstance(value, bool):
        into.ints.append(value)
        return ("int", len(into.ints) - 1)
    if isinstance(value, float):
        into.floats.append(value)
        return ("float", len(into.floats) - 1)
    return ("plain", value)


def without_objects(structure: Any) -> Any:
    """The same with what is not plain replaced by the names of its types: to print an object may print its tensors."""
    kind, content = structure
    if kind in ("tuple", "list"):
        return (kind, tuple(without_objects(item) for item in content))
    if kind == "dict":
        return (kind, tuple((key, without_objects(item)) for key, item in content))
    if kind == "plain" and not isinstance(content, PLAIN):
        return ("object", f"{type(content).__module__}.{type(content).__qualname__}")
    return structure


def unpack(structure: Any, packed: Packed) -> Any:
    """The value that `pack` took apart; a namedtuple has become a plain tuple."""
    kind, content = structure
    if kind == "tensor":
        return packed.tensors[content]
    if kind == "int":
        return packed.ints[content]
    if kind == "float":
        return packed.floats[content]
    if kind == "dict":
        return {key: unpack(item, packed) for key, item in content}
    if kind == "list":
        return [unpack(item, packed) for item in content]
    if kind == "tuple":
        return tuple([unpack(item, packed) for item in content])
    return content
