"""A capture that was lost all the same: which call did it, as far as is known."""

from __future__ import annotations

import traceback

from .. import ledger, log
from ..callsite import Site, is_in_traceback, site_of_traceback
from ..capture import Window
from ..errors import CaptureInvalidatedError
from ..findings import LostCaptureReport
from . import forks
from .codes import code_of


def explained(window: Window, error: BaseException) -> CaptureInvalidatedError | None:
    """What is raised instead of torch's error at the end of a capture; None if that is about something else."""
    code = code_of(error)
    if code is None:
        return None
    first = _first(error.__context__, window.handled)
    culprits = list(
        dict.fromkeys(
            f"{event.what}, at {event.site}, {_CULPRITS[event.kind]}"
            for event in ledger.events()
            if event.capture == window.id and event.kind in _CULPRITS
        )
    )
    remedy = [code.remedy]
    site: Site | None = None
    # What comes after the first error only says that it is too late.
    inner = code_of(first) if first is not None else None
    is_cause = first is not None and (inner is None or inner.name != "Invalidated")
    if first is not None:
        site = site_of_traceback(first)
    if first is not None and is_cause:
        culprits.insert(0, f"{type(first).__name__}: {_headline(first)}")
        if inner is not None:
            culprits[0] += f"\nCUDA error {inner.number}: {inner.meaning}"
            remedy = [inner.remedy]
        if inner is not None and inner.name == "Implicit" and is_in_traceback(first, "torch.autograd"):
            culprits[0] += f"\n{_AUTOGRAD}"
            remedy = [*_AUTOGRAD_REMEDY]
    if code.name == "Unjoined":
        culprits += [f"stream {hex(handle)} was forked into the capture at {line}" for handle, line in forks.of(window)]
    report = LostCaptureReport(code.number, code.meaning, tuple(culprits), site, is_cause, str(window), tuple(remedy))
    log.error("%s", report)
    return CaptureInvalidatedError(report)


_CULPRITS = {
    "allowed sync": "which streamshim.allow let through",
    "failed sync": "which CUDA refused because of this capture",
}
_AUTOGRAD = (
    "It came out of a backward pass: a node of the autograd graph belongs to the default stream, since it was made "
    "there, by a warm-up, an earlier forward pass or DDP"
)
_AUTOGRAD_REMEDY = (
    "Warm up on a side stream: with torch.cuda.stream(torch.cuda.Stream()); torch.cuda.make_graphed_callables does so.",
    "Before the capture, delete or detach what holds the old nodes: the loss and the outputs of earlier passes. A "
    "parameter's own node lives as long as they do.",
)


def _first(error: BaseException | None, before: BaseException | None) -> BaseException | None:
    """The error that started it: the innermost of a chain, as far as that was raised inside the capture."""
    first: BaseException | None = None
    seen: set[int] = set()
    while error is not None and error is not before and id(error) not in seen:
        seen.add(id(error))
        first, error = error, error.__cause__ or error.__context__
    return first


def _headline(error: BaseException) -> str:
    lines = [line for line in "".join(traceback.format_exception_only(type(error), error)).splitlines() if line.strip()]
    text = lines[0] if lines else ""
    return text.partition(": ")[2] or text
