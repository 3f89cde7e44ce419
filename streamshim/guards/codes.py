"""CUDA's capture errors, 900 to 908: what each means and what to do, and how to find one in another error's words."""

from __future__ import annotations

from dataclasses import dataclass


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
