"""Which captures are open, and who opened them: torch, or cuda-python (`binders.cuda_waits`).

The driver's capture id is the identity of a capture, never a Python ``with`` block: breakable graphs end and begin
captures many times inside one block. What is kept here is only what the driver cannot tell: the line and the thread.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from . import runtime
from .callsite import Site, user_site
from .patching import Patch
from .streams import describe as describe_handle

logger = logging.getLogger("streamshim")


@dataclass(frozen=True)
class Window:
    """A capture that was opened from Python and has not been closed yet.

    Attributes:
        id: the driver's capture id.
        stream: the handle of the capturing stream.
        device: the device's index.
        site: the line that opened it.
        thread: the name of the thread that opened it.
        error_mode: "global", "thread_local" or "relaxed".
        ident: the identity of that thread, as `threading.get_ident` gives it.
        handled: the exception that was being handled when it began; not a cause of what happens in the capture.
    """

    id: int
    stream: int
    device: int
    site: Site
    thread: str
    error_mode: str
    ident: int = field(default=0, compare=False)
    handled: BaseException | None = field(default=None, compare=False, repr=False)

    def __str__(self) -> str:
        return (
            f"capture {self.id} on stream {describe_handle(self.stream)} of cuda:{self.device}, begun at {self.site}, "
            f"thread {self.thread}"
        )


_windows: dict[int, Window] = {}
#: Who has a capture open, a graph object or a stream, as a key -> the capture's id. The driver does not tell the id of
#: a capture that has been invalidated, so at the end of one it cannot be asked.
_captured_by: dict[object, int] = {}
#: False while nothing is installed; the patches pass through then.
enabled = False
#: Called before a capture begins; an exception keeps it from beginning.
before_begin: list[Callable[[], None]] = []
#: Told when a capture has begun, and before it ends (see `guards`).
guards: list[Any] = []
#: Given the window and torch's error when a capture has failed; returns what is raised instead, or None.
explain: Callable[[Window, BaseException], BaseException | None] | None = None


def any_open() -> bool:
    """Whether a capture was opened from Python in this process, and not closed."""
    return bool(_windows)


def window(capture: int) -> Window | None:
    """The window of an open capture, by the driver's id."""
    return _windows.get(capture)


def open_windows() -> list[Window]:
    """The captures that are open in this process, oldest first."""
    return list(_windows.values())


def describe(capture: int) -> str:
    """A capture in words, for messages; 0 means that nothing captures."""
    if capture == 0:
        return "nothing"
    window = _windows.get(capture)
    return str(window) if window is not None else f"capture {capture} (begun before install(), or below Python)"


def begun(by: object, handle: int, device: int, error_mode: str) -> None:
    """Open the window of a capture that has just begun on this thread; nothing if the stream does not capture.

    Args:
        by: a key for who will end it.
        handle: the capturing stream.
        device: the index of its device.
        error_mode: "global", "thread_local" or "relaxed".
    """
    state = runtime.get().capture_state(handle)
    if not state:
        return
    thread = threading.current_thread()
    opened = Window(
        state.id, handle, device, user_site(), thread.name, error_mode, threading.get_ident(), sys.exc_info()[1]
    )
    _captured_by[by] = state.id
    _windows[state.id] = opened
    _tell(guards, "opened", opened)


def ending(by: object) -> Window | None:
    """Tell the guards that a capture is about to end; returns its window, which stays open until `ended`."""
    closing = _windows.get(_captured_by.get(by, 0))
    if closing is not None:
        _tell(guards[::-1], "closing", closing)
    return closing


def ended(by: object) -> None:
    """Close the window of a capture that is over."""
    _windows.pop(_captured_by.pop(by, 0), None)


def goes_on(window: Window) -> None:
    """A capture could not be ended, and is still there: its guards watch on."""
    _tell(guards, "opened", window)


def patches(cuda_graph: type) -> list[Patch]:
    """The patches on ``torch.cuda.CUDAGraph`` that keep the windows.

    Target: ``CUDAGraph.capture_begin`` and ``capture_end`` (Python methods; torch 2.6 to 2.13). Needed because the
    driver knows neither the line nor the thread. ``torch.cuda.graph``, make_graphed_callables, cudagraph trees and
    the engines' breakable graphs all go through them. Ends when torch gives every graph a begin hook.
    """
    return [
        Patch(cuda_graph, "capture_begin", _capture_begin),
        Patch(cuda_graph, "capture_end", _capture_end),
    ]


def _capture_begin(original: Callable[..., Any]) -> Callable[..., Any]:
    def capture_begin(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not enabled:
            return original(self, *args, **kwargs)
        for check in before_begin:
            check()
        result = original(self, *args, **kwargs)
        asked = runtime.get()
        device = asked.current_device()
        mode = kwargs.get("capture_error_mode") or (args[1] if len(args) > 1 else "global")
        begun(id(self), asked.current_handle(device), device, str(mode))
        return result

    return capture_begin


def _capture_end(original: Callable[..., Any]) -> Callable[..., Any]:
    def capture_end(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not enabled:
            return original(self, *args, **kwargs)
        closing = ending(id(self))
        try:
            result = original(self, *args, **kwargs)
        except BaseException as error:
            # torch refuses to end a capture under another current stream; the capture goes on then.
            if closing is not None and runtime.get().capture_state(closing.stream).id == closing.id:
                goes_on(closing)
                raise
            ended(id(self))
            explained = explain(closing, error) if explain is not None and closing is not None else None
            if explained is not None:
                raise explained from error
            raise
        ended(id(self))
        return result

    return capture_end


def _tell(whom: list[Any], what: str, window: Window) -> None:
    for guard in whom:
        try:
            getattr(guard, what)(window)
        except Exception:
            # A capture that has begun must be ended by its user; a fault of ours must not keep them from it.
            logger.exception("streamshim: guard %s failed", type(guard).__name__)


def forget_windows() -> None:
    """Forget every capture; for `uninstall`, after which nobody tells when one ends."""
    for left in list(_windows.values()):
        _tell(guards[::-1], "closing", left)
    _windows.clear()
    _captured_by.clear()
