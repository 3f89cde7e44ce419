"""`allow`: a region in which launches that the rule would refuse or rescue go where the caller sent them."""

from __future__ import annotations

import threading
from contextlib import ContextDecorator

KINDS = ("launch",)

_open = threading.local()


class allow(ContextDecorator):
    """A way out, as context manager and decorator; per thread, and it can be nested.

    Inside, a launch that the rule would refuse or rescue is left alone: it goes to the stream that the caller gave,
    and is counted in `status`. What the rule binds (a default-class stream outside check mode) is still bound.

    Args:
        what: "launch".
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
            raise ValueError("reason is empty; say in a few words why this launch may stay outside the graph")
        self.what = what
        self.reason = reason

    def __enter__(self) -> allow:
        setattr(_open, self.what, getattr(_open, self.what, 0) + 1)
        return self

    def __exit__(self, *exc: object) -> None:
        setattr(_open, self.what, getattr(_open, self.what) - 1)


def covers(what: str) -> bool:
    """Whether the calling thread is inside a region that allows this."""
    return getattr(_open, what, 0) > 0
