"""`allow`: a region in which what would be refused inside a capture is let through."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import ContextDecorator
from typing import Any, TypeVar

from .callsite import Site, user_site

_Function = TypeVar("_Function", bound=Callable[..., Any])

KINDS = ("launch", "sync")


class _Thread(threading.local):
    """The regions that are open on this thread, outermost first."""

    def __init__(self) -> None:
        self.regions: list[allow] = []
        #: The line of the launch that the gate has let through last, while a region is open.
        self.launched: Site | None = None


_thread = _Thread()
#: The lines that regions with ``first_only`` have let through already, in this process.
_used: set[tuple[str, Site]] = set()
#: Called when a region of a kind is entered (True) and left (False); the guards of captures put themselves here.
on_change: dict[str, Callable[[bool], None]] = {}


class allow(ContextDecorator):
    """A way out, as context manager and decorator; per thread, and it can be nested.

    Inside ``allow("launch")``, a launch that the rule would refuse or rescue is left alone: it goes to the stream that
    the caller gave. What the rule binds (a default-class stream outside check mode) is still bound. Inside
    ``allow("sync")``, a host synchronisation in a capture is not refused; whether CUDA allows it is another question.
    What was let through is counted in `status`.

    Args:
        what: "launch" or "sync".
        reason: why this is right; shown by whoever reads the code, and required so that somebody thinks about it.
        first_only: let each line through once in the life of the process (say, for a lazy initialisation); the second
            time it is refused.

    Raises:
        ValueError: if ``what`` is something else, or ``reason`` is empty or no text.

    Example:
        >>> with streamshim.allow("launch", reason="telemetry, not part of the model"):
        ...     telemetry_kernel(x, telemetry_stream)
    """

    def __init__(self, what: str, *, reason: str, first_only: bool = False) -> None:
        if what not in KINDS:
            raise ValueError(f"what is {what!r}; allowed values: {', '.join(map(repr, KINDS))}")
        if not isinstance(reason, str) or not reason.strip():
            raise ValueError(f"reason is {reason!r}; say in a few words why this is right")
        self.what = what
        self.reason = reason
        self.first_only = first_only
        #: Thread -> the regions of that thread, and who was told, once for each entry: a decorator is entered by many.
        self._entered: dict[int, list[tuple[list[allow], Callable[[bool], None] | None]]] = {}

    def __call__(self, function: _Function) -> _Function:
        """Allow this whenever the function runs.

        Raises:
            TypeError: for a coroutine or generator function, whose call only makes an object that runs later, and for a
                class, which would become a function.
        """
        import inspect  # here, since `install` needs no more of this file than regions that are not open

        if isinstance(function, type):
            raise TypeError(f"{function.__qualname__} is a class; decorate its methods")
        later = (inspect.iscoroutinefunction, inspect.isgeneratorfunction, inspect.isasyncgenfunction)
        if any(is_one(function) for is_one in later):
            name = getattr(function, "__qualname__", repr(function))
            raise TypeError(f"{name} runs after its call has returned; use `with streamshim.allow(...)` inside it")
        return super().__call__(function)

    def __enter__(self) -> allow:
        tell = on_change.get(self.what)
        # Who heard of the entry hears of the end, though streamshim be installed or uninstalled in between.
        self._entered.setdefault(threading.get_ident(), []).append((_thread.regions, tell))
        _thread.regions.append(self)
        if tell is not None:
            tell(True)
        return self

    def __exit__(self, *exc: object) -> None:
        # A generator with a region inside may be finished by another thread than the one that began it.
        mine = self._entered.get(threading.get_ident())
        regions, tell = (mine or next(entries for entries in self._entered.values() if entries)).pop()
        regions.remove(self)
        _thread.launched = None
        if tell is not None:
            tell(False)


def depth(what: str) -> int:
    """How many regions of this kind are open on the calling thread."""
    return sum(region.what == what for region in _thread.regions)


def let_through(site: Site) -> None:
    """The gate lets a launch of this line go where the caller sent it; for `was_let_through`."""
    _thread.launched = site


def was_let_through(site: Site) -> bool:
    """Whether the gate has let a launch of this line through already, which is seen again below Python."""
    return _thread.launched == site


def covers(what: str, site: Site | None = None) -> bool:
    """Whether the calling thread is inside a region that allows this, for a line of the user's.

    Args:
        what: "launch" or "sync".
        site: the user's line, which a region with ``first_only`` lets through once; found out if it is needed.
    """
    for region in _thread.regions:
        if region.what == what:
            if not region.first_only:
                return True
            line = (what, site or user_site())
            if line not in _used:
                _used.add(line)
                return True
    return False
