"""torch's own refusals inside a capture: one that says nothing is replaced, one that is right gets a note.

torch's sync check raises "called a synchronizing CUDA operation", which names no operation: `HostSyncError` takes its
place, with it as the cause. Its refusal of copies from and to memory that is not pinned keeps its text and type.
"""

from __future__ import annotations

import sys

from .. import capture
from ..callsite import site_of_traceback, user_site
from ..capture import Window
from . import syncs
from .codes import text_of
from .sync_table import COPY, Kind, Operation

#: How torch's own check begins its message (c10/cuda/CUDAFunctions.h).
CHECK_SAYS = "called a synchronizing CUDA operation"
#: Part of what torch says of a copy that it refuses (aten/src/ATen/native/cuda/Copy.cu, torch 2.7 and later).
COPY_SAYS = "during CUDA graph capture"

_UNNAMED = Operation("a copy between host and device", COPY)


class Refusals:
    """The guard that adds the note to a refusal on its way out of the capture, where nothing else has seen it."""

    def opened(self, window: Window) -> None:
        """Nothing to do."""

    def closing(self, window: Window) -> None:
        error = sys.exc_info()[1]
        if isinstance(error, RuntimeError) and error is not window.handled and COPY_SAYS in text_of(error):
            _add_note(error, _UNNAMED, window)


def explain(error: RuntimeError, operation: Operation) -> None:
    """Explain an error of torch's that an operation has ended with, if it is such a refusal; blame others on it.

    Args:
        error: torch's error.
        operation: what was called.

    Raises:
        HostSyncError: in place of the error of torch's sync check.
    """
    text = text_of(error)
    if CHECK_SAYS not in text and COPY_SAYS not in text:
        syncs.blame(operation, error)
        return
    window = syncs.broken_by(Kind.UNKNOWN)
    if window is None:
        return
    if CHECK_SAYS in text:
        syncs.refuse(operation, window, error)
    _add_note(error, operation, window)


def _add_note(error: BaseException, operation: Operation, window: Window) -> None:
    if getattr(error, "__notes__", None) or not hasattr(error, "add_note"):  # Python 3.10 shows none
        return
    site = site_of_traceback(error) or user_site()
    steps = "".join(f"\n  * {step}" for step in operation.remedy)
    error.add_note(
        f"streamshim: {operation.words}, at {site}, while capturing: {capture.describe(window.id)}.\n"
        f"torch has refused it before CUDA was touched; the capture is still valid. What to do:{steps}"
    )
