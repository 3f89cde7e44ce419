"""A capture that was lost all the same: which call did it, as far as is known, and what CUDA's codes mean."""

from __future__ import annotations

import logging
import traceback
from dataclasses import dataclass

from .. import ledger
from ..callsite import Site, is_in_traceback, site_of_traceback
from ..capture import Window
from ..errors import CaptureInvalidatedError, LostCaptureReport
from . import forks

logger = logging.getLogger("streamshim")


@dataclass(frozen=True)
class Code:
    """One of CUDA's capture errors (cudaError_t; https://docs.nvidia.com/cuda/cuda-runtime-api, section 6.36).

    Attributes:
        number: the value of cudaError_t.
        name: its name without ``cudaErrorStreamCapture``.
        text: what ``cudaGetErrorString`` says.
        meaning: what it means for whoever captures.
        remedy: what to do.
    """

    number: int
    name: str
    text: str
    meaning: str
    remedy: str


CODES: tuple[Code, ...] = (
    Code(900, "Unsupported", "operation not permitted when stream is capturing",
         "a call was made that CUDA does not allow while a stream captures: a synchronisation, an allocation with "
         "cudaMalloc, a query of an event or stream, loading a module",
         "Make that call before the capture (warm up), or leave it out."),
    Code(901, "Invalidated", "operation failed due to a previous error during capture",
         "the capture was lost earlier; this error only says that it is too late",
         "Look for the first error, or for a call that waits, allocates or loads inside the capture."),
    Code(902, "Merge", "operation would result in a merge of separate capture sequences",
         "a stream of this capture waited for an event of another capture",
         "Record the event in the same capture, or before both."),
    Code(903, "Unmatched", "capture was not ended in the same stream as it began",
         "the capture ended under another current stream than it began on",
         "End it under the stream that it began on: torch.cuda.graph does so."),
    Code(904, "Unjoined", "capturing stream has unjoined work",
         "a side stream was forked into the capture and not joined before its end",
         "Before the capture ends: main_stream.wait_stream(side_stream)."),
    Code(905, "Isolation", "dependency created on uncaptured work in another stream",
         "work in the capture was made to wait for work outside it",
         "Wait for that work before the capture begins, not inside."),
    Code(906, "Implicit", "operation would make the legacy stream depend on a capturing blocking stream",
         "the default stream was made to wait for a stream of this capture, or was used while a blocking stream "
         "captures",
         "Let the default stream wait after the capture, and capture on a torch stream (they are non-blocking)."),
    Code(907, "CapturedEvent", "operation not permitted on an event last recorded in a capturing stream",
         "an event that was recorded in a capture was queried or waited for on the host",
         "Use another event for what happens outside the graph."),
    Code(908, "WrongThread", "attempt to terminate a thread-local capture sequence from another thread",
         "a thread_local capture was ended by another thread than began it",
         "End it in the thread that began it."),
)  # fmt: skip


def code_of(error: BaseException) -> Code | None:
    """The capture error that an exception of torch, cuda-python or CuTe DSL is about."""
    text = str(error)
    for code in CODES:
        if f"cudaErrorStreamCapture{code.name}" in text or code.text in text or f"error code: {code.number}" in text:
            return code
    return None


def explained(window: Window, error: BaseException) -> CaptureInvalidatedError | None:
    """What is raised instead of torch's error at the end of a capture; None if that is about something else."""
    code = code_of(error)
    if code is None:
        return None
    first = _first(error.__context__, window.handled)
    culprits = [
        f"{event.what}, at {event.site}, which streamshim.allow let through"
        for event in ledger.events()
        if event.capture == window.id and event.kind == "allowed sync"
    ]
    remedy = [code.remedy]
    site: Site | None = None
    if first is not None:
        site = site_of_traceback(first)
        inner = code_of(first)
        culprits.insert(0, f"{type(first).__name__}: {_headline(first)}")
        if inner is not None and inner is not code:
            # What comes after the first error, this one for instance, only says that it is too late.
            culprits[0] += f"\nCUDA error {inner.number}: {inner.meaning}"
            remedy = [inner.remedy]
        if inner is not None and inner.name == "Implicit" and is_in_traceback(first, "torch.autograd"):
            culprits[0] += f"\n{_AUTOGRAD}"
            remedy = [*_AUTOGRAD_REMEDY]
    if code.name == "Unjoined":
        culprits += [f"stream {hex(handle)} was forked into the capture at {line}" for handle, line in forks.of(window)]
    report = LostCaptureReport(code.number, code.meaning, tuple(culprits), site, str(window), tuple(remedy))
    logger.error("%s", report)
    return CaptureInvalidatedError(report)


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
