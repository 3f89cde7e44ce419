"""What was noticed while capturing: refusals, rescues and allowed exceptions, with the user's line."""

from __future__ import annotations

from collections import Counter, deque
from typing import NamedTuple

from .callsite import Site

#: How many events are kept; the counts go on.
KEPT = 1000


class Event(NamedTuple):
    """One thing that was noticed.

    Attributes:
        kind: "rescued launch", "refused launch", "allowed launch", "compile in capture", "refused sync",
            "allowed sync", "failed sync" (CUDA refused it), "escaped launch" and "moved launch" (below Python).
        what: what was launched or compiled.
        site: the user's line.
        given: the handle that the caller passed.
        current: the handle of torch's current stream.
        capture: the driver's id of the capture.
    """

    kind: str
    what: str
    site: Site
    given: int
    current: int
    capture: int


_events: deque[Event] = deque(maxlen=KEPT)
_counts: Counter[str] = Counter()


def add(event: Event) -> None:
    """Record an event."""
    _events.append(event)
    _counts[event.kind] += 1


def count(kind: str) -> None:
    """Count an event of which nothing more is kept."""
    _counts[kind] += 1


def events() -> list[Event]:
    """The last `KEPT` events, oldest first."""
    return list(_events)


def counts() -> dict[str, int]:
    """How many events of each kind there have been."""
    return dict(_counts)


def clear() -> None:
    """Forget everything."""
    _events.clear()
    _counts.clear()
