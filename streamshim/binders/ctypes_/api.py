"""`bind`, `unbind` and `load`: what a user says about functions that are reached through ctypes."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from . import registry, tables
from .hooks import is_function
from .labels import label_of
from .specs import Spec, Syncs, Wish, spec_of, specs_of

_T = TypeVar("_T")
_Library = TypeVar("_Library", bound=ctypes.CDLL)


class _Last:
    """The default of ``stream``: the last argument of a function, the table of CUDA's own functions for a library."""

    def __repr__(self) -> str:
        return "-1"


_LAST: Any = _Last()

_TARGETS = "a ctypes function pointer, a ctypes.CDLL or PyDLL object, or a file name pattern such as 'libscale-*.so'"


def bind(
    target: _T,
    stream: int | str | Syncs | Mapping[str, Wish] | None = _LAST,
    nargs: int | None = None,
    *,
    argnames: Sequence[str] | None = None,
    device: str | int = "current",
    tensors: str | None = None,
) -> _T:
    """Let functions that are called through ctypes follow torch's current stream.

    A shared object does not say which of its functions launch kernels, so they are named here. May be called before
    or after `install`: what is bound takes effect while streamshim is installed. A bound function stays the ctypes
    object that it was. Its callers may leave the stream out where the number of arguments is known, or pass None, an
    int, ``c_void_p``, a torch stream, anything with ``__cuda_stream__``: the rule decides. The number is known from
    ``argtypes``, looked up at each call, from ``nargs`` or from ``argnames``.

    Args:
        target: a function pointer; a library (functions fetched before and after are bound); or a pattern for the file
            names of libraries, for code that cannot be edited: every library that ctypes loads and that matches is
            bound, whether it is loaded before or after.
        stream: for a function pointer the index of the stream argument (negative counts from the end), its name out
            of ``argnames``, None for a function that launches and takes no stream, or `SYNCS` for one that waits for
            the device, which is refused where that would break a capture. For a library or pattern a map from names to
            that, or to a dict of these keywords; without a map, the functions of CUDA's driver and runtime.
        nargs: how many arguments a function pointer takes.
        argnames: the names of a function pointer's arguments; those made with paramflags are called by name.
        device: where it launches: on the "current" device, on that of the torch "tensors" among the arguments, or on
            the one with this index. Other than the current one, it is made current for the call.
        tensors: "data_ptr" if torch tensors are to be passed as their address; None leaves them to ctypes.

    Returns:
        The target.

    Raises:
        TypeError, ValueError: for a wrong argument, naming it and what is accepted, or if the same is bound already in
            another way. Binding it again in the same way does nothing.
        AttributeError: if a library has no function of a name in the map. For a pattern, ``status()`` says so.

    Example:
        >>> streamshim.bind(lib, {"scale_on": -1, "scale": None})
        >>> streamshim.bind("libscale-*.so", {"scale_on": -1})
    """
    if is_function(target):
        if isinstance(stream, Mapping):
            raise TypeError("stream: got a map; accepted for a function pointer: an index, a name or None")
        registry.add_pointer(target, spec_of(-1 if stream is _LAST else stream, nargs, argnames, device, tensors))
        return target
    if not isinstance(target, (ctypes.CDLL, str)):
        raise _wrong_target(target)
    for name, value in (("nargs", nargs), ("argnames", argnames)):
        if value is not None:
            raise TypeError(
                f"{name} says something about one function; for a library, say it in the map: "
                f"{{'scale_on': {{'stream': -1, {name!r}: {value!r}}}}}"
            )
    if isinstance(target, str):
        if not target or "/" in target:
            raise ValueError(f"target is {target!r}; accepted: a pattern for file names, without a folder")
        registry.add_pattern(target, _functions(stream, device, tensors, {}))
    else:
        registry.add_library(target, _functions(stream, device, tensors, tables.functions_of(target), target))
    return target


def unbind(target: object) -> None:
    """Forget what `bind` was told about this function pointer, library or pattern; it is as it was before.

    Args:
        target: what was bound.

    Raises:
        TypeError: if this is nothing that can be bound.
        ValueError: if it is not bound.
    """
    if is_function(target):
        registry.remove_pointer(target)
    elif isinstance(target, ctypes.CDLL):
        registry.remove_library(target)
    elif isinstance(target, str):
        registry.remove_pattern(target)
    else:
        raise _wrong_target(target)


def load(
    path: str | os.PathLike[str],
    functions: Mapping[str, Wish],
    *,
    device: str | int = "current",
    tensors: str | None = None,
    loader: type[_Library] = ctypes.CDLL,  # type: ignore[assignment]  # mypy knows no default for a type variable
) -> _Library:
    """Load a library and bind functions of it.

    Args:
        path: the library, as `ctypes.CDLL` takes it.
        functions: as `bind` takes it for a library.
        device: as in `bind`.
        tensors: as in `bind`.
        loader: `ctypes.CDLL`, `ctypes.PyDLL`, or a class derived from them.

    Returns:
        The library.

    Raises:
        OSError: if it cannot be loaded.
        AttributeError, TypeError, ValueError: as `bind`.
    """
    if not isinstance(path, (str, os.PathLike)):
        raise TypeError(f"path: got {type(path).__qualname__}; accepted: the library's path, as text or os.PathLike")
    if not isinstance(loader, type) or not issubclass(loader, ctypes.CDLL):
        raise TypeError(f"loader is {loader!r}; accepted: ctypes.CDLL, ctypes.PyDLL, or a class derived from them")
    checked = specs_of(functions, device, tensors, "functions")
    library = loader(os.fspath(path))
    registry.add_library(library, checked)
    return library


def _functions(stream: Any, device: Any, tensors: Any, table: dict[str, Spec], library: Any = None) -> dict[str, Spec]:
    if stream is not _LAST:
        return specs_of(stream, device, tensors)
    if device != "current" or tensors is not None:
        raise TypeError("device and tensors go with a map of functions; CUDA's own are bound as they are")
    if library is not None and not table:
        raise ValueError(
            f"stream: {label_of(library)} has none of CUDA's own functions, so name those that launch: "
            "bind(lib, {'scale_on': -1, 'scale': None})"
        )
    return table


def _wrong_target(target: object) -> TypeError:
    kind = target if isinstance(target, type) else type(target)
    got = f"the type {kind.__name__}" if isinstance(target, type) else f"{kind.__module__}.{kind.__qualname__}"
    hint = "; a type is shared by all pointers of its signature: bind these one by one"
    return TypeError(f"target: got {got}; accepted: {_TARGETS}{hint if isinstance(target, type) else ''}")
