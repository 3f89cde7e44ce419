"""torch's own check: ``torch.cuda.set_sync_debug_mode("error")``, armed while a *global* capture is open.

torch raises before CUDA is touched, also for calls from C++. Its switch is one for the process, so it may only be on
while no thread may synchronise anyway: that is so while a capture of mode "global" is open, in which CUDA itself
refuses such calls from every thread. In thread_local and relaxed captures other threads synchronise legally, and it
stays off.
"""

from __future__ import annotations

import re
import sys
import warnings
from typing import Any

from .. import allowance, fork
from ..capture import Window

_ERROR = 2
_PROTOTYPE = "Synchronization debug mode is a prototype"
#: The filter as `warnings.filterwarnings` keeps it.
_FILTER = ("ignore", re.compile(_PROTOTYPE, re.IGNORECASE), Warning, None, 0)

_lock = fork.Lock()
_armed_for: set[int] = set()
_paused = 0
_before = 0


class SyncMode:
    """The guard that arms and disarms; the mode that was set before is back before the capture ends."""

    def opened(self, window: Window) -> None:
        if window.error_mode != "global" or _torch_c() is None:
            return
        global _before
        with _lock:
            if not _armed_for:
                _before = _torch_c()._cuda_get_sync_debug_mode()
            _armed_for.add(window.id)
            _apply()

    def closing(self, window: Window) -> None:
        with _lock:
            if window.id in _armed_for:
                _armed_for.discard(window.id)
                # What somebody has set meanwhile is theirs.
                if _armed_for or _torch_c()._cuda_get_sync_debug_mode() == _ERROR:
                    _apply()


def on_allow(entered: bool) -> None:
    """For ``allow("sync")`` regions."""
    if entered:
        pause()
    else:
        resume()


def pause() -> None:
    """Let synchronising calls pass until `resume`; for the length of an ``allow("sync")`` region."""
    global _paused
    with _lock:
        _paused += 1
        if _armed_for:
            _apply()


def resume() -> None:
    """End one `pause`."""
    global _paused
    with _lock:
        _paused -= 1
        if _armed_for:
            _apply()


@fork.in_child
def _forget_other_threads() -> None:
    """Regions of threads that a forked child does not have end nowhere."""
    global _paused
    _paused = allowance.depth("sync")


def _apply() -> None:
    # torch warns that its check is a prototype; who has asked for no more than install() need not know. The filter
    # stays, since catch_warnings is not safe while other threads use it too. To add one makes Python forget which
    # warnings it has shown, so that is done once.
    if _FILTER not in warnings.filters:
        warnings.filterwarnings("ignore", message=_PROTOTYPE)
    _torch_c()._cuda_set_sync_debug_mode(_ERROR if _armed_for and not _paused else _before)


def _torch_c() -> Any:
    """``torch._C`` if torch is there, and knows CUDA."""
    found = getattr(sys.modules.get("torch"), "_C", None)
    return found if hasattr(found, "_cuda_set_sync_debug_mode") else None
