"""The rule for host synchronisation: a call that would break a capture is refused before CUDA is touched.

    what the call waits for               a "global" capture    "thread_local"              "relaxed"
    the capture's own work, its device    any thread: breaks    any thread: breaks          any thread: breaks
    another device as a whole             fine                  fine                        fine
    anything else                         any thread: breaks    the thread that captures    fine

As measured, and as the driver's documentation of ``cuThreadExchangeStreamCaptureMode`` has it, by which a thread can
excuse itself from the last row (https://docs.nvidia.com/cuda/cuda-driver-api/group__CUDA__STREAM.html). Whoever
patches a waiting call (`torch_calls`, `libraries`, the binders) comes here with what it waits for.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from .. import allowance, capture, gate, ledger, log, runtime
from ..callsite import UNKNOWN as NO_LINE
from ..callsite import Site, user_site
from ..capture import Window, windows
from ..errors import HostSyncError
from ..findings import SyncReport
from ..streams import LEGACY
from .codes import code_of
from .sync_table import WAIT, Kind, Operation

#: What can be broken only by a capture whose begin was seen: the mode of others cannot be asked, so of them only what
#: waits for their work or their device is known to break them. An enum's members are slow to get at before Python 3.12.
ONLY_SEEN = (Kind.EVENT, Kind.MEMORY)
_DEVICE, _STREAM, _VALUE, _UNKNOWN = Kind.DEVICE, Kind.STREAM, Kind.VALUE, Kind.UNKNOWN
#: The mode of a capture that was begun below Python: it cannot be asked.
_NOT_KNOWN = "?"
_logged: set[Site] = set()


def breaks(mode: str, waits_for_it: bool, my_capture: bool, thread_mode: str = "global") -> bool:
    """The rule.

    Args:
        mode: the mode of the capture.
        waits_for_it: the call waits for a stream of this capture, or for its whole device.
        my_capture: the calling thread has begun this capture, or its current stream is part of it.
        thread_mode: how the calling thread interacts with captures.
    """
    if waits_for_it:
        return True
    if mode not in ("global", "thread_local") or thread_mode == "relaxed":
        return False
    return my_capture or (mode == "global" and thread_mode == "global")


def check(operation: Operation, target: int = 0, device: int | None = None) -> None:
    """Refuse a call of this thread if it would break a capture.

    Args:
        operation: the call.
        target: for `Kind.STREAM` and `Kind.VALUE` the handle of the stream that is waited for; 0 if it is a default
            stream, or not known.
        device: for `Kind.DEVICE` the index of the device that is waited for; None: the current one.

    Raises:
        HostSyncError: naming the operation, the user's line, the capture and what to do.
    """
    window = broken_by(operation.kind, target, device)
    if window is not None:
        refuse(operation, window)


def run(
    operation: Operation,
    target: int,
    original: Callable[..., Any],
    args: Any,
    kwargs: Any,
    device: int | None = None,
) -> Any:
    """`check`, then the call itself; remembered as a culprit if CUDA refuses it because of a capture.

    Another thread may begin a capture between the two.

    Raises:
        HostSyncError: as `check`.
    """
    window = broken_by(operation.kind, target, device)
    if window is not None:
        refuse(operation, window)
    try:
        return original(*args, **kwargs)
    except Exception as error:
        blame(operation, error)
        raise


def blame(operation: Operation, error: BaseException) -> None:
    """Remember a call that has failed, if CUDA's error is about a capture: the call has broken that."""
    if not windows or code_of(error) is None:
        return
    site, thread = user_site(), threading.current_thread().name
    for window in capture.open_windows():
        ledger.add(ledger.Event("failed sync", f"{operation.words} in thread {thread}", site, 0, 0, window.id))


def broken_by(kind: Kind, target: int = 0, device: int | None = None) -> Window | None:
    """The capture that a call of this thread would break, its own before others; None if there is none."""
    if not windows:
        return _begun_elsewhere(kind, target, device)
    asked = runtime.get()
    device = asked.current_device() if device is None else device
    current, state = asked.current_handle(device), asked.capture_state
    mine = state(current).id if current > LEGACY else 0
    waited_for = mine if target == current else state(target).id if target > LEGACY else 0
    open_ones = capture.open_windows()
    for handle, id_ in ((current, mine), (target, waited_for)):
        if id_ and capture.window(id_) is None:
            open_ones.append(_unseen(id_, handle, device))
    if kind in (_DEVICE, _UNKNOWN):
        # What is not known, in a thread whose current stream captures, is taken to wait for that.
        waited_for = waited_for or mine
    me, thread_mode = threading.get_ident(), asked.thread_mode()
    for window in sorted(open_ones, key=lambda window: window.id != mine):
        waits = window.id == waited_for or (kind is _DEVICE and window.device == device)
        is_mine = window.id == mine or window.ident == me
        if kind is _DEVICE and not waits:
            continue
        # A window may be left over from a capture that was ended below Python.
        if breaks(window.error_mode, waits, is_mine, thread_mode) and state(window.stream).id == window.id:
            return window
    return None


def _begun_elsewhere(kind: Kind, target: int, device: int | None) -> Window | None:
    """The same while no window is open, which is nearly always: there can be a capture that was begun below Python."""
    if kind in ONLY_SEEN:
        return None
    asked = runtime.found()
    if asked is None:
        # Other libraries wait in processes without torch's CUDA, too.
        return None
    if kind is _STREAM or kind is _VALUE:
        handle = target
    else:
        handle = asked.current_handle(asked.current_device() if device is None else device)
    id_ = asked.capture_state(handle).id if handle > LEGACY else 0
    if not id_:
        return None
    return _unseen(id_, handle, asked.current_device() if device is None else device)


def captures(handle: int) -> bool:
    """Whether a stream captures: the same for a call that waits for this one, where it is known that torch has CUDA."""
    return handle > LEGACY and gate.capture_state(handle).id != 0


def _unseen(id_: int, handle: int, device: int) -> Window:
    """A stand-in for the window of a capture whose beginning nobody saw."""
    return Window(id_, handle, device, NO_LINE, "?", _NOT_KNOWN)


def refuse(operation: Operation, window: Window, cause: BaseException | None = None) -> None:
    """Raise `HostSyncError` for an operation of the calling thread, unless a region allows it.

    Args:
        operation: the call.
        window: the capture that it would break.
        cause: torch's own refusal, if that came first; it cannot be allowed any more.

    Raises:
        HostSyncError: naming the operation, the user's line, the capture and what to do.
    """
    site = user_site()
    if cause is None and allowance.covers("sync", site):
        ledger.add(ledger.Event("allowed sync", operation.words, site, 0, 0, window.id))
        return
    report = _report(operation, window, site)
    ledger.add(ledger.Event("refused sync", operation.words, site, 0, 0, window.id))
    if site not in _logged:
        # An engine that does collective work on its way out of the block may hang, and the exception with it.
        _logged.add(site)
        log.error("%s", report)
    raise HostSyncError(report) from cause


def _report(operation: Operation, window: Window, site: Site) -> SyncReport:
    thread, remedy = threading.current_thread(), operation.remedy
    is_other = window.ident not in (0, thread.ident)
    if not is_other:
        why = _WHY_MEMORY if operation.kind is Kind.MEMORY else _WHY
    elif window.id == _own_capture():
        why = _WHY_SHARED.format(window.thread)
        remedy = (*remedy, _OWN_STREAMS)
    elif window.error_mode == "global":
        why = _WHY_GLOBAL.format(window.thread)
        remedy = _THREAD_LOCAL
    elif operation.kind is Kind.DEVICE:
        why = _WHY_DEVICE.format(window.device, window.thread)
        remedy = _NOT_THE_DEVICE if operation.remedy is WAIT else operation.remedy
    else:
        why = _WHY_TARGET.format(window.thread)
        remedy = ("Wait for it after the capture.", _OWN_STREAMS)
    return SyncReport(
        operation=operation.words,
        site=site,
        thread=thread.name if is_other else "",
        # Its window may be closed by now, by the thread that captures.
        capture=str(window) if window.error_mode != _NOT_KNOWN else capture.describe(window.id),
        mode=str(gate.mode()),
        why=why,
        remedy=remedy,
    )


def _own_capture() -> int:
    asked = runtime.get()
    current = asked.current_handle(asked.current_device())
    return asked.capture_state(current).id if current > LEGACY else 0


_WHY = "The host would wait for work that is only being recorded, which CUDA does not allow: the capture would be lost."
_WHY_MEMORY = "The call may have to wait for the device, so CUDA does not allow it here: the capture would be lost."
_WHY_GLOBAL = (
    "Thread {} captures in mode 'global', in which CUDA refuses such calls to every thread of the process, and drops "
    "the capture."
)
_WHY_DEVICE = "CUDA does not wait for cuda:{} while thread {} captures on it: the call would fail, and end the capture."
_WHY_TARGET = "What it waits for is part of the capture of thread {}: the call would fail, and end the capture."
_WHY_SHARED = (
    "This thread's current stream is part of the capture that thread {} has begun, so the host would wait for work "
    "that is only being recorded: the capture would be lost."
)
_OWN_STREAMS = (
    "If the two threads should not share a stream: torch.cuda.Stream() hands out the same 32 streams in turn, so make "
    "them once and keep them."
)
_NOT_THE_DEVICE = ("Wait for a stream or an event instead of the device, or after the capture.",)
_THREAD_LOCAL = (
    "Begin the capture with capture_error_mode='thread_local': it then concerns its own thread only.",
    "Or let this thread do without until the capture is over.",
)
