"""A launch that takes no stream is moved into the capture: the handle is written over NULL at the driver's entry.

CUPTI shows the parameters of a call before the driver reads them (`watch`). Writing them is no documented use, so it
has to be shown to work in this process first, once, with a kernel and a capture of our own (`runtime.null_launch`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from .. import capture, fork, log


class _Thread(threading.local):
    """How many calls of the thread are on their way whose launches are to be moved, and whether it runs the test."""

    calls = 0
    tests = False


class Redirect:
    """Whether launches can be moved in this process, and which are to be.

    Args:
        test: shows that it works, or raises an exception that says why not; called once, outside captures.

    Attributes:
        everything: move every default-class launch of a capturing thread, not only those of calls that ask for it.
        off: why it cannot be used, in words; an empty string if it can, or has not been tried.
    """

    def __init__(self, test: Callable[[], None], everything: bool = False) -> None:
        self.everything = everything
        self.off = ""
        self._test, self._tried, self._works = test, False, False
        self._lock = fork.Lock()
        self._thread = _Thread()

    def prepare(self, unwatched: Callable[[], str] = str) -> None:
        """Try it, if it has not been tried; before a capture begins. Nothing is done while one is open.

        Others that are about to begin one wait meanwhile, since the test would break theirs.

        Args:
            unwatched: says after a failure why captures are not watched, if that is so: without it nothing moves.
        """
        with self._lock:
            if self._tried or capture.any_open():
                return
            self._tried = self._thread.tests = True
            try:
                self._test()
                self._works = True
            except Exception as error:  # noqa: BLE001, whatever it is, launches are refused then as before
                self.off = unwatched() or f"{type(error).__name__}: {error}"
                log.warning("streamshim: launches without a stream cannot be moved into captures: %s", self.off)
            finally:
                self._thread.tests = False
                # An interrupt says nothing about it: the next capture tries again.
                self._tried = self._works or bool(self.off)

    @property
    def available(self) -> bool:
        """Whether it was tried and works."""
        return self._works

    @contextmanager
    def calling(self) -> Iterator[None]:
        """Move the default-class launches of this thread during a block."""
        self._thread.calls += 1
        try:
            yield
        finally:
            self._thread.calls -= 1

    @property
    def is_wanted(self) -> bool:
        """Whether a default-class launch of the calling thread is to be moved right now."""
        return (self._works and (self.everything or self._thread.calls > 0)) or self._thread.tests
