"""The operator that torch.compile puts into its graph for a call of a validated function.

The operator is opaque: it runs `Validated.call`, and so counts on the device whatever runs it, Inductor's code or a
graph that cudagraph trees have captured. It does **not** declare the counters as arguments that it writes to. They
would become inputs of the compiled graph, and cudagraph trees do not capture graphs that write to their inputs; and
functionalisation may hand the operator a copy of them, so that the graph would count in a place that nobody reads. Left
undeclared, all that the compiler may do is to merge two calls with the same arguments, or to drop a call whose result
nobody uses; then the kernel runs less often too, and what is counted is what ran.

The call is described by a string, so that a process that loads compiled code from a cache, without tracing, knows it
too. Numbers are arguments of their own, since they may be symbols.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from .. import imports
from ..callsite import Site, short
from ..errors import ValidationError
from .structure import Packed, pack, unpack

if TYPE_CHECKING:
    from .calls import Validated

_Tensors = list[torch.Tensor]
#: What an operator's arguments may be, also in tuples, lists and dicts.
ACCEPTED = (torch.Tensor, type(None), bool, int, float, str, torch.dtype, torch.device)
#: A call's description -> the structure of what it returns. A tensor is (0, index) among the operator's results, or
#: (1, index) among the arguments that are written to.
_returns: dict[str, Any] = {}


def call(function: Validated, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What torch.compile traces instead of a call; plain Python that Dynamo can follow."""
    if not _fits((args, kwargs)):
        return call_with_objects(function, args, kwargs)
    packed, written = Packed(), Packed()
    positions = [place.position for place in function.settings.inplace]
    keywords = [place.keyword for place in function.settings.inplace]
    positional = [pack(arg, written if index in positions else packed) for index, arg in enumerate(args)]
    named = [(key, pack(arg, written if key in keywords else packed)) for key, arg in kwargs.items()]
    # Which of them are written to is told by their place, as it is here.
    about = _encode(
        function.name,
        tuple([("written" if index in positions else "read", part) for index, part in enumerate(positional)]),
        tuple([(key, "written" if key in keywords else "read", part) for key, part in named]),
    )
    if positions:
        torch.ops.streamshim.validated_(written.tensors, packed.tensors, packed.ints, packed.floats, about)
        made: _Tensors = []
    else:
        made = torch.ops.streamshim.validated(packed.tensors, packed.ints, packed.floats, about)
    return _build(_structure_of(about), (made, written.tensors))


def _fits(value: Any) -> bool:
    """Whether an operator can take this as an argument."""
    if isinstance(value, (tuple, list)):
        return all(_fits(item) for item in value)
    if isinstance(value, dict):
        return all(isinstance(key, (str, int)) and _fits(item) for key, item in value.items())
    return isinstance(value, ACCEPTED)


def call_with_objects(function: Validated, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A call that no operator can make: torch.compile's graph ends before it, and begins again behind it."""
    return function.call(args, kwargs)


def _encode(name: str, positional: Any, named: Any) -> str:
    return json.dumps([name, _traced_site(), positional, named], default=_as_json)


def _traced_site() -> tuple[str, int, str]:
    """The user's line that is being traced, which is on nobody's stack when the compiled code runs."""
    # Not public; there since torch 2.0.
    context: Any = torch._guards.TracingContext
    for frame in reversed(context.extract_stack()):
        if Path(frame.filename).parent != Path(__file__).parent:
            return (short(frame.filename), frame.lineno or 0, frame.name)
    return ("<code compiled by torch>", 0, "?")


def _as_json(value: Any) -> Any:
    # What is neither of these was told apart by `_fits`.
    return {type(value).__name__: str(value).removeprefix("torch.")}


def _from_json(value: dict[str, Any]) -> Any:
    if list(value) == ["dtype"]:
        return getattr(torch, value["dtype"])
    return torch.device(value["device"])


def _build(structure: Any, groups: tuple[_Tensors, _Tensors]) -> Any:
    kind, content = structure
    if kind == "tensor":
        return groups[content[0]][content[1]]
    if kind == "dict":
        return {key: _build(item, groups) for key, item in content}
    if kind == "list":
        return [_build(item, groups) for item in content]
    if kind == "tuple":
        return tuple([_build(item, groups) for item in content])
    return content


def _structure_of(about: str) -> Any:
    return _returns[about]


@functools.lru_cache(maxsize=4096)
def _decode(about: str) -> Any:
    return json.loads(about, object_hook=_from_json)


def _arguments(about: str, read: Packed, written: _Tensors) -> tuple[Validated, tuple[Any, ...], dict[str, Any]]:
    from .calls import functions

    name, _, positional, named = _decode(about)
    function = functions.get(name)
    if function is None:
        raise ValidationError(
            f"Compiled code calls the validated function {name!r}, which this process has not: call "
            f"streamshim.validate(..., name={name!r}) before the code is loaded"
        )
    groups = {"read": read, "written": Packed(written)}
    args = tuple([unpack(part, groups[group]) for group, part in positional])
    return function, args, {key: unpack(part, groups[group]) for key, group, part in named}


def _taken_apart(value: Any, written: _Tensors, new: _Tensors) -> Any:
    """The structure of what a call returns. Tensors that are not among those written to are added to ``new``."""
    if isinstance(value, torch.Tensor):
        for index, member in enumerate(written):
            if value is member:
                return ("tensor", (1, index))
        new.append(value)
        return ("tensor", (0, len(new) - 1))
    if isinstance(value, (tuple, list)):
        kind = "list" if isinstance(value, list) else "tuple"
        return (kind, tuple([_taken_apart(item, written, new) for item in value]))
    if isinstance(value, dict):
        return ("dict", tuple([(key, _taken_apart(item, written, new)) for key, item in value.items()]))
    return ("plain", value)


def _run(read: Packed, written: _Tensors, about: str) -> _Tensors:
    function, args, kwargs = _arguments(about, read, written)
    new: _Tensors = []
    structure = _taken_apart(function.call(args, kwargs, Site(*_decode(about)[1])), written, new)
    # While one thread compiles, torch says so to all of them, and then this may be called without any tracing before.
    _returns.setdefault(about, structure)
    taken = {tensor.untyped_storage().data_ptr() for tensor in read.tensors + written}
    # An operator must not return memory that it was given.
    return [tensor.clone() if tensor.untyped_storage().data_ptr() in taken else tensor for tensor in new]


def _fake(read: Packed, written: _Tensors, about: str) -> _Tensors:
    function, args, kwargs = _arguments(about, read, written)
    new: _Tensors = []
    try:
        result = function.fake(*args, **kwargs)
    except Exception as error:
        raise ValidationError(
            f"{function.name}: torch.compile calls the reference with tensors that have no values, to learn the shapes "
            f"of what it returns, and that failed: {type(error).__name__}: {error}\nGive streamshim.validate(..., "
            "fake=function), which returns empty tensors of the right shapes."
        ) from error
    _returns[about] = _taken_apart(result, written, new)
    return [tensor.clone() if any(tensor is given for given in read.tensors) else tensor for tensor in new]


def _validated(tensors: list[torch.Tensor], ints: list[int], floats: list[float], about: str) -> list[torch.Tensor]:
    return _run(Packed(tensors, ints, floats), [], about)


def _validated_inplace(
    written: list[torch.Tensor], tensors: list[torch.Tensor], ints: list[int], floats: list[float], about: str
) -> None:
    if _run(Packed(tensors, ints, floats), written, about):
        raise ValidationError(_NEW_OUTPUTS.format(_decode(about)[0]))


def _fake_inplace(
    written: list[torch.Tensor], tensors: list[torch.Tensor], ints: list[int], floats: list[float], about: str
) -> None:
    if _fake(Packed(tensors, ints, floats), written, about):
        raise ValidationError(_NEW_OUTPUTS.format(_decode(about)[0]))


_NEW_OUTPUTS = (
    "{}: under torch.compile a function with `inplace` may return its arguments or nothing, since an operator "
    "cannot both write to a list of tensors and return another one. Let it write all of its outputs."
)

_SCHEMA = "(Tensor[] tensors, SymInt[] ints, float[] floats, str about) -> Tensor[]"
_SCHEMA_INPLACE = "(Tensor(a!)[] written, Tensor[] tensors, SymInt[] ints, float[] floats, str about) -> ()"


@functools.cache
def define() -> None:
    """Define the two operators ``streamshim::validated`` and ``streamshim::validated_``, once in a process."""
    new = torch.library.custom_op("streamshim::validated", _validated, mutates_args=(), schema=_SCHEMA)
    new.register_fake(lambda tensors, ints, floats, about: _fake(Packed(tensors, ints, floats), [], about))
    written = torch.library.custom_op(
        "streamshim::validated_", _validated_inplace, mutates_args=("written",), schema=_SCHEMA_INPLACE
    )
    written.register_fake(_fake_inplace)
    # torch.compiler.assume_constant_result would import all of Dynamo, which takes seconds.
    imports.when_imported("torch._dynamo", _mark)


def _mark(dynamo: Any) -> None:
    global call_with_objects
    call_with_objects = dynamo.disable(call_with_objects)
    for function in (_encode, _structure_of):
        dynamo.assume_constant_result(function)
