"""Which captures are open, and who opened them: torch, or cuda-python (`binders.cuda_waits`).

The driver's capture id is the identity of a capture, never a Python ``with`` block: breakable graphs end and begin
captures many times inside one block. What is kept here is only what the driver cannot tell: the line and the thread.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
import threading
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from . import log, runtime
from .callsite import Site, user_site
from .patching import Patch
from .streams import describe as describe_handle


class Window(NamedTuple):
    """A capture that was opened from Python and has not been closed yet.

    Attributes:
        id: the driver's capture id; a negative number for a capture that was lost before it could be asked.
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
    ident: int = 0
    handled: BaseException | None = None

    def __str__(self) -> str:
        name = f"capture {self.id}" if self.id > 0 else "a capture"
        where = f"stream {describe_handle(self.stream)} of cuda:{self.device}"
        return f"{name} on {where}, begun at {self.site}, thread {self.thread}"

    def __repr__(self) -> str:
        # Not with what was handled, which may hold a tensor: to format one is to wait for it.
        return f"<{self}>"


_windows: dict[int, Window] = {}
#: The same for those who only want to know whether there are any, at every wait: changed in place, never replaced.
windows: Mapping[int, Window] = _windows
#: The stream on which a capture was begun, which is where it must end, whoever ends it -> the capture's id. The driver
#: does not tell the id of a capture that has been invalidated, so at the end of one it cannot be asked.
_captured_on: dict[int, int] = {}
_lost = itertools.count(1)
#: False while nothing is installed; the patches pass through then.
enabled = False
#: Called before a capture begins; an exception keeps it from beginning.
before_begin: list[Callable[[], None]] = []
#: Told when a capture has begun, and before it ends (see `guards`).
guards: list[Any] = []
#: Given torch's graph (None for a capture of cuda-python's) and the window just before its capture ends, to read the
#: graph.
readers: list[Callable[[Any, Window], None]] = []
#: Given the window of a capture that has ended well; what they return is raised, before the graph can be used.
judges: list[Callable[[Window], BaseException | None]] = []
#: Given the window and torch's error when a capture has failed; returns what is raised instead, or None.
explain: Callable[[Window, BaseException], BaseException | None] | None = None
#: Called with the index of a device on which a capture of torch's was lost, once no capture is open.
after_loss: list[Callable[[int], None]] = []
#: The devices of which that is still to be done.
_lost_on: set[int] = set()


def any_open() -> bool:
    """Whether a capture was opened from Python in this process, and not closed."""
    return bool(_windows)


def window(capture: int) -> Window | None:
    """The window of an open capture, by the driver's id."""
    return _windows.get(capture)


def on(handle: int) -> int:
    """The id of the open capture that was begun on this stream; 0 if there is none."""
    return _captured_on.get(handle, 0)


def open_windows() -> list[Window]:
    """The captures that are open in this process, oldest first."""
    return list(_windows.values())


def describe(capture: int) -> str:
    """A capture in words, for messages; 0 means that nothing captures."""
    if capture == 0:
        return "nothing"
    window = _windows.get(capture)
    return str(window) if window is not None else f"capture {capture} (begun before install(), or below Python)"


def begun(handle: int, device: int, error_mode: str) -> None:
    """Open the window of a capture that has just begun on this thread; nothing if the stream does not capture.

    Args:
        handle: the capturing stream.
        device: the index of its device.
        error_mode: "global", "thread_local" or "relaxed".
    """
    state = runtime.get().capture_state(handle)
    if not state and state.valid:
        return
    # Another thread can break a capture as soon as it has begun; its id is not to be had then.
    id_ = state.id or -next(_lost)
    thread = threading.current_thread()
    opened = Window(id_, handle, device, user_site(), thread.name, error_mode, threading.get_ident(), sys.exc_info()[1])
    # A stream is in one capture at a time: what is left here was ended below Python.
    left = _windows.pop(_captured_on.get(handle, 0), None)
    if left is not None and left.id != id_:
        _tell(guards[::-1], "closing", left)
    _captured_on[handle] = id_
    _windows[id_] = opened
    if id_ > 0:
        _tell(guards, "opened", opened)


def ending(handle: int, graph: Any = None) -> Window | None:
    """Tell the guards that the capture on a stream is about to end, and let its graph be read.

    Args:
        handle: the stream.
        graph: torch's graph; None if it is not torch that captures.

    Returns:
        Its window, which is open until `ended`; None if there is none.
    """
    closing = _windows.get(_captured_on.get(handle, 0))
    if closing is not None:
        _tell(guards[::-1], "closing", closing)
        _read(graph, closing)
    return closing


def ended(handle: int) -> None:
    """Close the window of the capture on a stream, which is over."""
    _windows.pop(_captured_on.pop(handle, 0), None)
    if _lost_on and not _windows:
        # While another capture was open, nothing could be tried out.
        _settle()


def judged(window: Window) -> None:
    """Raise what the judges say of a capture that has ended well; its window is open until `ended`."""
    for judge in judges:
        verdict = judge(window)
        if verdict is not None:
            raise verdict


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
        begun(asked.current_handle(device), device, str(mode))
        return result

    return capture_begin


def _capture_end(original: Callable[..., Any]) -> Callable[..., Any]:
    def capture_end(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not enabled or not any_open():
            return original(self, *args, **kwargs)
        # Under another current stream torch refuses, and the capture goes on.
        asked = runtime.get()
        handle = asked.current_handle(asked.current_device())
        try:
            closing = ending(handle, self)
        except BaseException:
            # Ctrl-C, since a large graph is read for a while: a capture that nobody ends would block the process.
            with contextlib.suppress(Exception):
                original(self, *args, **kwargs)
            ended(handle)
            raise
        try:
            result = original(self, *args, **kwargs)
        except BaseException as error:
            # torch refuses to end another graph's capture; that goes on then.
            if closing is not None and asked.capture_state(handle).id == closing.id:
                goes_on(closing)
                raise
            try:
                # Its window is open still, so that a capture of another thread forgets nothing of it.
                explained = explain(closing, error) if explain is not None and closing is not None else None
            finally:
                if closing is not None:
                    _lost_on.add(closing.device)
                ended(handle)
            if explained is not None:
                raise explained from error
            raise
        try:
            if closing is not None:
                judged(closing)
        finally:
            ended(handle)
        return result

    return capture_end


def _settle() -> None:
    while _lost_on:
        device = _lost_on.pop()
        for settle in after_loss:
            try:
                settle(device)
            except Exception:
                log.exception("streamshim: the process may not be able to capture again")


def _read(graph: Any, window: Window) -> None:
    for reader in readers:
        try:
            reader(graph, window)
        except Exception:
            log.exception("streamshim: the graph could not be read")


def _tell(whom: list[Any], what: str, window: Window) -> None:
    for guard in whom:
        try:
            getattr(guard, what)(window)
        except Exception:
            # A capture that has begun must be ended by its user; a fault of ours must not keep them from it.
            log.exception("streamshim: guard %s failed", type(guard).__name__)


def forget_windows() -> None:
    """Forget every capture; for `uninstall`, after which nobody tells when one ends."""
    for left in list(_windows.values()):
        _tell(guards[::-1], "closing", left)
    _windows.clear()
    _captured_on.clear()
    _lost_on.clear()
