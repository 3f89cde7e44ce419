"""Which captures are open, and who opened them.

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
    """A capture that torch opened and has not closed yet.

    Attributes:
        id: the driver's capture id.
        stream: the handle of the capturing stream.
        device: the device's index.
        site: the line that opened it.
        thread: the name of the thread that opened it.
        error_mode: "global", "thread_local" or "relaxed".
        handled: the exception that was being handled when it began; not a cause of what happens in the capture.
    """

    id: int
    stream: int
    device: int
    site: Site
    thread: str
    error_mode: str
    handled: BaseException | None = field(default=None, compare=False, repr=False)


_windows: dict[int, Window] = {}
#: The graph object's ``id`` -> the id of the capture that it has open. The driver does not tell the id of a capture
#: that has been invalidated, so at the end of one it cannot be asked.
_captured_by: dict[int, int] = {}
#: False while nothing is installed; the patches pass through then.
enabled = False
#: Called before a capture begins; an exception keeps it from beginning.
before_begin: list[Callable[[], None]] = []
#: Told when a capture has begun, and before it ends (see `guards`).
guards: list[Any] = []
#: Given the window and torch's error when a capture has failed; returns what is raised instead, or None.
explain: Callable[[Window, BaseException], BaseException | None] | None = None


def any_open() -> bool:
    """Whether torch has a capture open in this process."""
    return bool(_windows)


def window(capture: int) -> Window | None:
    """The window of a capture that torch has open, by the driver's id."""
    return _windows.get(capture)


def open_windows() -> list[Window]:
    """The captures that torch has open in this process, oldest first."""
    return list(_windows.values())


def describe(capture: int) -> str:
    """A capture in words, for messages; 0 means that nothing captures."""
    if capture == 0:
        return "nothing"
    window = _windows.get(capture)
    if window is None:
        return f"capture {capture} (not begun through torch.cuda.CUDAGraph)"
    return (
        f"capture {capture} on stream {describe_handle(window.stream)} of cuda:{window.device}, begun at "
        f"{window.site}, thread {window.thread}"
    )


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
        stream = asked.current_handle(device)
        state = asked.capture_state(stream)
        if state:
            mode = kwargs.get("capture_error_mode") or (args[1] if len(args) > 1 else "global")
            _captured_by[id(self)] = state.id
            thread = threading.current_thread().name
            handled = sys.exc_info()[1]
            opened = Window(state.id, stream, device, user_site(), thread, str(mode), handled)
            _windows[state.id] = opened
            _tell(guards, "opened", opened)
        return result

    return capture_begin


def _capture_end(original: Callable[..., Any]) -> Callable[..., Any]:
    def capture_end(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not enabled:
            return original(self, *args, **kwargs)
        closing = _windows.get(_captured_by.get(id(self), 0))
        if closing is not None:
            _tell(guards[::-1], "closing", closing)
        try:
            result = original(self, *args, **kwargs)
        except BaseException as error:
            # torch refuses to end a capture under another current stream; the capture goes on then.
            if closing is None or runtime.get().capture_state(closing.stream).id != closing.id:
                _close(self)
                explained = explain(closing, error) if explain is not None and closing is not None else None
                if explained is not None:
                    raise explained from error
            else:
                _tell(guards, "opened", closing)
            raise
        _close(self)
        return result

    return capture_end


def _tell(whom: list[Any], what: str, window: Window) -> None:
    for guard in whom:
        try:
            getattr(guard, what)(window)
        except Exception:
            # A capture that has begun must be ended by its user; a fault of ours must not keep them from it.
            logger.exception("streamshim: guard %s failed", type(guard).__name__)


def _close(graph: Any) -> None:
    _windows.pop(_captured_by.pop(id(graph), 0), None)


def forget_windows() -> None:
    """Forget every capture; for `uninstall`, after which nobody tells when one ends."""
    for left in list(_windows.values()):
        _tell(guards[::-1], "closing", left)
    _windows.clear()
    _captured_by.clear()
