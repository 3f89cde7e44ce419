"""What a forked child must not inherit: locks that a thread of the parent held, and captures that only the parent has.

A child has one thread, a copy of the one that forked. A lock that any other thread held would stay locked for ever.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable

from . import log

_locks: weakref.WeakSet[Lock] = weakref.WeakSet()
_resets: list[Callable[[], None]] = []


class Lock:
    """A re-entrant lock for ``with`` blocks that is free in a forked child, whoever held it in the parent."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        _locks.add(self)

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *exc: object) -> None:
        try:
            self._lock.release()
        except RuntimeError:
            # This is a child that was forked inside the block: its lock is a new one, which nobody holds.
            log.debug("streamshim: a block that was entered before a fork has ended in the child")

    def enter_at_once(self) -> bool:
        """Enter if that needs no waiting; whether it did. Left by ``__exit__``, as a block is."""
        return self._lock.acquire(blocking=False)

    def renew(self) -> None:
        """Make it free."""
        self._lock = threading.RLock()


def in_child(reset: Callable[[], None]) -> Callable[[], None]:
    """Decorator: call this in every forked child, when all locks are free, in the order of registration."""
    _resets.append(reset)
    return reset


def _after_fork() -> None:
    for lock in list(_locks):
        lock.renew()
    for reset in _resets:
        try:
            reset()
        except Exception:
            # The child is the user's, and goes on without.
            log.exception("streamshim: %s failed in a forked child", reset.__qualname__)


os.register_at_fork(after_in_child=_after_fork)
