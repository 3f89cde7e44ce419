"""One call of a bound function: from what was passed to the rule, and from its answer to the C function.

A `Path` is made once for each bound function. It is called with the function pointer and what the caller passed, asks
`gate.resolve` once, and calls the C function. No lock is taken and nothing is kept.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from typing import Any

from ... import gate, runtime
from ...gate import Launch
from ...streams import LAST_DEFAULT
from . import config_structs, devices
from .specs import Spec
from .values import as_argument, given_handle, tensor_type
from .waits import waiting

#: ``path(original, call, kwargs)``; ``original`` is the ``__call__`` below ours, and ``call`` is what that takes: the
#: function pointer and the arguments in one tuple, which saves building it again.
Path = Callable[[Callable[..., Any], tuple[Any, ...], Mapping[str, Any]], Any]

_holder = runtime._holder


def path_of(spec: Spec, label: str) -> Path:
    """The way a function's calls take.

    Args:
        spec: what the user said about the function.
        label: the function for messages, for instance "libscale.so: scale_on".
    """
    if spec.waits is not None:
        return _waiting(spec, label)
    if spec.stream is None:
        return _without_stream(spec, label)
    plain = spec.device == "current" and spec.tensors is None and spec.field < 0
    return _quick(spec, label) if plain else _general(spec, label)


def launch_of(spec: Spec, label: str) -> Launch:
    """What is launched, for messages."""
    if spec.stream is not None:
        return Launch(label, note=f"bound through ctypes with {spec.said}")
    symbol = label.rpartition(": ")[2]
    if symbol.startswith("0x"):
        symbol = "the function"
    return Launch(
        label,
        can_bind=False,
        can_move=True,
        note="bound through ctypes with stream=None: it takes no stream",
        remedy=(
            f"Give {symbol} a cudaStream_t parameter that every launch inside it uses, and bind it by that parameter's "
            f"place: {{{symbol!r}: -1}} if it is the last.",
        ),
    )


def _quick(spec: Spec, label: str) -> Path:
    """For functions with a stream argument and nothing unusual; whatever is unusual in a call is left to `_general`."""
    launch, general = launch_of(spec, label), _general(spec, label)
    stream, argument = spec.stream, spec.name or "stream"
    assert stream is not None
    index = stream + 1 if stream >= 0 else stream  # in `call`, whose first element is the function
    # The last argtypes for which the stream is a c_void_p at that place. What ctypes made of it when it was set does
    # not change with the list, so its identity will do.
    plain: Any = ()

    def path(original: Callable[..., Any], call: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        nonlocal plain
        types = call[0].argtypes
        if types is not plain:
            if not types or not _is_plain(spec, types):
                return general(original, call, kwargs)
            plain = types
        last = len(types)
        if len(call) == last and not kwargs and index in (-1, last):
            device = 0 if _holder._runtime is devices.single else devices.current_device()
            return original(*call, gate.resolve(0, device, launch, argument))
        if len(call) == last + 1 and not kwargs:
            given = call[index]
            handle = 0 if given is None else given
            if type(handle) is int and not handle >> 64:
                device = 0 if _holder._runtime is devices.single else devices.current_device()
                handle = gate.resolve(handle, device, launch, argument)
                if handle == given:
                    return original(*call)
                if index == -1:
                    return original(*call[:-1], handle)
                return original(*call[:index], handle, *call[index + 1 :])
        return general(original, call, kwargs)

    quick: Any = path
    quick.spec, quick.launch, quick.argument = spec, launch, argument
    return path


def quick_place(path: Path, types: Any) -> int:
    """The place of the stream, for the path of `_quick` and argtypes that pass it as a c_void_p; else -1."""
    spec: Spec | None = getattr(path, "spec", None)
    if spec is None or spec.stream is None or not types or not _is_plain(spec, types):
        return -1
    return spec.stream % len(types)


def _is_plain(spec: Spec, types: Any) -> bool:
    """Whether the stream is passed as a c_void_p, at the place that was said."""
    stream, count = spec.stream, len(types)
    assert stream is not None
    return spec.count in (0, count) and -count <= stream < count and types[stream] is ctypes.c_void_p


def _general(spec: Spec, label: str) -> Path:
    """For every call with a stream argument."""
    launch, argument = launch_of(spec, label), spec.name or "stream"

    def path(original: Callable[..., Any], call: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        function, args = call[0], call[1:]
        device = devices.device_of(spec.device, (*args, *kwargs.values()), label)
        types = function.argtypes
        place, is_passed = _place(spec, label, types, args, kwargs)
        by_name = spec.name if place >= len(args) and kwargs else ""
        given = args[place] if is_passed else kwargs.get(by_name)
        where = f"{label}, argument {spec.name or place}"
        kind = _kind(spec, types, place)
        keep = None
        if spec.field >= 0:
            passed, keep = config_structs.with_stream(
                given, spec.field, kind, where, lambda handle: gate.resolve(handle, device, launch, argument)
            )
        else:
            handle = gate.resolve(given_handle(given, where), device, launch, argument)
            passed = as_argument(kind, handle, where)
        if by_name:
            kwargs = {**kwargs, by_name: passed}
        else:
            args = (*args[:place], passed, *args[place + 1 if is_passed else place :])
        if spec.tensors is not None:
            args, kwargs = _with_addresses(label, types, args, kwargs)
        try:
            if spec.device == "current":
                return original(function, *args, **kwargs)
            with runtime.on_device(device):
                return original(function, *args, **kwargs)
        finally:
            del keep  # the structure that CUDA reads during the call

    return path


def _without_stream(spec: Spec, label: str) -> Path:
    """For functions that launch on the NULL stream whatever they are given."""
    launch = launch_of(spec, label)
    gate.needs_mover = True

    def path(original: Callable[..., Any], call: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        function, args = call[0], call[1:]
        device = devices.device_of(spec.device, (*args, *kwargs.values()), label)
        moved = gate.resolve(0, device, launch) != 0
        if spec.tensors is not None:
            args, kwargs = _with_addresses(label, function.argtypes, args, kwargs)
        launched = in_capture if moved else in_order
        if spec.device == "current":
            return launched(device, original, function, args, kwargs)
        with runtime.on_device(device):
            return launched(device, original, function, args, kwargs)

    def in_capture(device: int, original: Any, function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        assert gate.mover is not None
        with gate.mover.calling():
            return original(function, *args, **kwargs)

    def in_order(device: int, original: Any, function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        # In a capture (where the call was allowed) an event would tie the NULL stream to it, which CUDA refuses.
        current = gate.current_handle(device)
        if current <= LAST_DEFAULT or not gate.binds() or runtime.get().capture_state(current):
            return original(function, *args, **kwargs)
        order = runtime.get().order
        order(current, 0, device)
        try:
            return original(function, *args, **kwargs)
        finally:
            order(0, current, device)

    return path


def _waiting(spec: Spec, label: str) -> Path:
    """For functions that let the host wait."""
    wait = waiting(spec, label)
    if spec.device == "current" and spec.tensors is None:
        return wait

    def path(original: Callable[..., Any], call: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        function, args = call[0], call[1:]
        given = (*args, *kwargs.values())
        if spec.tensors is not None:
            args, kwargs = _with_addresses(label, function.argtypes, args, kwargs)
        if spec.device == "current":
            return wait(original, (function, *args), kwargs)
        with runtime.on_device(devices.device_of(spec.device, given, label)):
            return wait(original, (function, *args), kwargs)

    return path


def _place(spec: Spec, label: str, types: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[int, bool]:
    """The place of the stream in this call, and whether the caller has passed something there.

    How many arguments there are is looked up here, since ``argtypes`` is often set after binding.

    Raises:
        TypeError: for a wrong number of arguments, or if the place is not known.
    """
    stream, count, given = spec.stream, spec.count or len(types or ()), len(args)
    assert stream is not None
    if kwargs:
        return _place_among_keywords(spec, label, types, count, given)
    if not count:
        if 0 <= stream < given:
            return stream, True
        problem = "counted from the end, but" if stream < 0 else f"but {given} arguments were given, and"
        remedy = "" if stream < 0 else "Pass something in the stream's place (None will do), or: "
        raise TypeError(
            f"{label}: its stream is argument {stream}, {problem} how many arguments it takes is not known. {remedy}"
            "set its argtypes, or bind it with nargs=N or argnames=(...)"
        )
    place = stream + count if stream < 0 else stream
    if not 0 <= place < count:
        raise TypeError(f"{label}: its stream is argument {stream}, but its argtypes has {count} types")
    if given == count or (given == count - 1 and spec.field < 0):
        return place, given == count
    expected = f"{count} arguments" + (f", or {count - 1} without its stream" if spec.field < 0 else "")
    name = f"{spec.name!r}, " if spec.name else ""
    raise TypeError(f"{label} takes {expected} ({name}argument {place}), but {given} were given")


def _place_among_keywords(spec: Spec, label: str, types: Any, count: int, given: int) -> tuple[int, bool]:
    """ctypes takes keywords only for functions made with paramflags, and drops them silently for all others."""
    if types is None:
        raise TypeError(
            f"{label} was called with keyword arguments; ctypes takes them only for functions that were made by a "
            "prototype with paramflags"
        )
    assert spec.stream is not None
    place = spec.stream + count if spec.stream < 0 else spec.stream
    if place >= given and not spec.name:
        raise TypeError(
            f"{label} was called with keyword arguments, so the place of its stream is not known; bind it with "
            "stream='NAME' and argnames=(...)"
        )
    return place, place < given


def _kind(spec: Spec, types: Any, place: int) -> Any:
    """The declared type of the stream argument, or None."""
    if not types or place >= len(types):
        return None
    # With outputs among the paramflags, what the caller passes has other places than the types; an int fits most.
    return ctypes.c_size_t if 0 < spec.count < len(types) else types[place]


def _with_addresses(
    label: str, types: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
    """The arguments with torch tensors replaced by their addresses."""
    tensor = tensor_type()

    def converted(value: Any, place: int, name: int | str) -> Any:
        if not isinstance(value, tensor):
            return value
        kind = types[place] if types and 0 <= place < len(types) else ctypes.c_size_t if types else None
        return as_argument(kind, value.data_ptr(), f"{label}, argument {name}")

    return (
        tuple(converted(value, place, place) for place, value in enumerate(args)),
        {name: converted(value, -1, name) for name, value in kwargs.items()},
    )
