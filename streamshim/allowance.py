"""`allow`: a region in which what would be refused inside a capture is let through."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import ContextDecorator

KINDS = ("launch", "sync")

_open = threading.local()
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

    Raises:
        ValueError: if ``what`` is something else, or ``reason`` is empty.

    Example:
        >>> with streamshim.allow("launch", reason="telemetry, not part of the model"):
        ...     telemetry_kernel(x, telemetry_stream)
    """

    def __init__(self, what: str, *, reason: str) -> None:
        if what not in KINDS:
            raise ValueError(f"what is {what!r}; allowed values: {', '.join(map(repr, KINDS))}")
        if not isinstance(reason, str) or not reason.strip():
            raise ValueError("reason is empty; say in a few words why this is right")
        self.what = what
        self.reason = reason

    def __enter__(self) -> allow:
        setattr(_open, self.what, getattr(_open, self.what, 0) + 1)
        if self.what in on_change:
            on_change[self.what](True)
        return self

    def __exit__(self, *exc: object) -> None:
        setattr(_open, self.what, getattr(_open, self.what) - 1)
        if self.what in on_change:
            on_change[self.what](False)


def covers(what: str) -> bool:
    """Whether the calling thread is inside a region that allows this."""
    return getattr(_open, what, 0) > 0
