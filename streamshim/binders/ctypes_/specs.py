"""What a user says about a function: which argument is its stream. Checked here, so that nothing later is guessed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from ...guards.sync_table import Kind


class Syncs:
    """The type of `SYNCS`."""

    def __repr__(self) -> str:
        return "streamshim.SYNCS"


#: Says of a function that it lets the host wait for the device: it is refused where that would break a capture.
SYNCS: Final = Syncs()

#: What stands for the stream of one function: a place, a name, no stream at all, `SYNCS`, or the keywords of `spec_of`.
Wish = int | str | None | Syncs | Mapping[str, Any]

_OPTIONS = ("stream", "nargs", "argnames", "device", "tensors")
_STREAMS = (
    "an index (negative counts from the end), a name out of argnames, None for a function without a stream, or "
    "streamshim.SYNCS for one that waits"
)
_MAP = (
    "a map from each function's name to its stream's index, to None where it takes no stream, to streamshim.SYNCS "
    f"where it waits, or to a dict with {', '.join(_OPTIONS)}; for instance {{'scale_on': -1, 'scale': None}}"
)


@dataclass(frozen=True)
class Spec:
    """How one function is to be called. Two that are equal ask for the same.

    Attributes:
        stream: the place of the stream among the arguments, negative from the end; None if the function takes none.
        count: how many arguments there are; 0 if that is known from ``argtypes`` at best.
        names: the arguments' names, or nothing.
        device: "current", "tensors", or the device's index.
        tensors: "data_ptr" if torch tensors are to be passed as their address.
        field: where the stream is in the structure that the argument points to; -1: the argument is the stream.
        waits: what the function waits for, if it is one that waits.
    """

    stream: int | None
    count: int = 0
    names: tuple[str, ...] = ()
    device: int | str = "current"
    tensors: str | None = None
    field: int = -1
    waits: Kind | None = None

    @property
    def name(self) -> str:
        """The name of the stream argument, or an empty string."""
        return self.names[self.stream] if self.names and self.stream is not None else ""

    @property
    def said(self) -> str:
        """What was asked for, in words, for messages."""
        stream = self.name or (SYNCS if self.waits is not None else self.stream)
        extra = f", nargs={self.count}" if self.count and not self.names else ""
        extra += "" if self.device == "current" else f", device={self.device!r}"
        return f"stream={stream!r}{extra}" + (f", tensors={self.tensors!r}" if self.tensors else "")


def spec_of(
    stream: Any,
    nargs: Any = None,
    argnames: Any = None,
    device: Any = "current",
    tensors: Any = None,
    where: str = "",
) -> Spec:
    """Check what was said about one function.

    Args:
        stream: an index, a name out of ``argnames``, None, or `SYNCS`.
        nargs: how many arguments there are, or None.
        argnames: the names of all arguments, or None.
        device: "current", "tensors", or an index.
        tensors: None or "data_ptr".
        where: put before the argument's name in messages, for instance "functions['scale'], ".

    Raises:
        TypeError, ValueError: for anything else, naming the argument, what came and what is accepted.
    """
    names = _names(argnames, where)
    count = _count(nargs, names, where)
    if device not in ("current", "tensors") and (not _is_int(device) or device < 0):
        raise ValueError(f"{where}device is {device!r}; accepted: 'current', 'tensors', or the index of a device")
    if tensors not in (None, "data_ptr"):
        raise ValueError(f"{where}tensors is {tensors!r}; accepted: None or 'data_ptr'")
    waits = Kind.UNKNOWN if stream is SYNCS else None
    place = None if stream is SYNCS else _place(stream, count, names, where)
    return Spec(place, count, names, device, tensors, waits=waits)


def specs_of(functions: Any, device: Any = "current", tensors: Any = None, where: str = "stream") -> dict[str, Spec]:
    """Check a map of functions.

    Args:
        functions: from names to `Wish`.
        device: for the functions that do not say.
        tensors: for the functions that do not say.
        where: the name of the argument, for messages.

    Raises:
        TypeError, ValueError: as `spec_of`.
    """
    if not isinstance(functions, Mapping):
        raise TypeError(f"{where}: got {_kind(functions)}; accepted for a library: {_MAP}")
    if not functions:
        raise ValueError(f"{where} is empty; accepted: {_MAP}")
    specs = {}
    for name, wish in functions.items():
        if not isinstance(name, str) or not name:
            raise TypeError(f"{where}: a function's name is {name!r}; accepted: {_MAP}")
        here = f"{where}[{name!r}]"
        options: dict[str, Any] = {"device": device, "tensors": tensors}
        if isinstance(wish, Mapping):
            unknown = sorted(str(option) for option in wish if option not in _OPTIONS)
            if unknown or "stream" not in wish:
                problem = f"has {', '.join(map(repr, unknown))}" if unknown else "has no 'stream'"
                raise ValueError(f"{here} {problem}; accepted keys: {', '.join(_OPTIONS)}; 'stream' is required")
            options.update(wish)
        else:
            options["stream"] = wish
        specs[name] = spec_of(**options, where=f"{here}, ")
    return specs


def _place(stream: Any, count: int, names: tuple[str, ...], where: str) -> int | None:
    if stream is None:
        return None
    if isinstance(stream, str):
        if stream not in names:
            known = f"argnames has {', '.join(names)}" if names else "argnames is not given"
            raise ValueError(f"{where}stream is {stream!r}, but {known}; accepted: {_STREAMS}")
        return names.index(stream)
    if not _is_int(stream):
        raise TypeError(f"{where}stream: got {_kind(stream)}; accepted: {_STREAMS}")
    if count and not -count <= stream < count:
        raise ValueError(f"{where}stream is {stream}, but there are {count} arguments; accepted: {_STREAMS}")
    return int(stream) % count if count else int(stream)


def _names(argnames: Any, where: str) -> tuple[str, ...]:
    if argnames is None:
        return ()
    if isinstance(argnames, str) or not isinstance(argnames, Sequence) or not all(isinstance(n, str) for n in argnames):
        raise TypeError(f"{where}argnames: got {_kind(argnames)}; accepted: the names of all arguments, as strings")
    if not argnames or len(set(argnames)) != len(argnames):
        raise ValueError(f"{where}argnames is {tuple(argnames)!r}; accepted: the names of all arguments, each once")
    return tuple(argnames)


def _count(nargs: Any, names: tuple[str, ...], where: str) -> int:
    if nargs is None:
        return len(names)
    if not _is_int(nargs) or nargs < 1:
        raise ValueError(f"{where}nargs is {nargs!r}; accepted: how many arguments there are, from 1")
    if names and nargs != len(names):
        raise ValueError(f"{where}nargs is {nargs}, but argnames has {len(names)} names; leave one of them out")
    return int(nargs)


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _kind(value: Any) -> str:
    kind = type(value)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
