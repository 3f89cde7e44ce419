"""CUDA's capture errors, 900 to 908: what each means and what to do, and how to find one in another error's words."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum
from types import NoneType


@dataclass(frozen=True)
class Code:
    """One of CUDA's capture errors (cudaError_t; https://docs.nvidia.com/cuda/cuda-runtime-api, section 6.36).

    Attributes:
        number: the value of cudaError_t.
        name: its name without ``cudaErrorStreamCapture`` or ``cudaError``.
        text: what ``cudaGetErrorString`` says.
        meaning: what it means for whoever captures.
        remedy: what to do.
    """

    number: int
    name: str
    text: str
    meaning: str
    remedy: str

    @property
    def symbol(self) -> str:
        """Its name in the runtime: ``cudaErrorStreamCaptureInvalidated``, ``cudaErrorCapturedEvent``."""
        return f"cudaError{'' if self.name == 'CapturedEvent' else 'StreamCapture'}{self.name}"

    @property
    def driver_symbol(self) -> str:
        """Its name in the driver: ``CUDA_ERROR_STREAM_CAPTURE_INVALIDATED``, ``CUDA_ERROR_CAPTURED_EVENT``."""
        words = re.findall("[A-Z][a-z]+", self.symbol.removeprefix("cudaError"))
        return "_".join(["CUDA_ERROR", *(word.upper() for word in words)])


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


#: What the arguments of an exception may be for it to be formatted: to format a tensor is to wait for it.
_PLAIN = (str, bytes, int, float, NoneType, Enum)


def text_of(error: BaseException) -> str:
    """What an exception says; of one that holds other things than words and numbers, its words only."""
    if all(isinstance(value, _PLAIN) for value in error.args):
        try:
            return str(error)
        except Exception:  # noqa: BLE001, it is the user's class
            return ""
    return " ".join(value for value in error.args if isinstance(value, str))


def code_of(error: BaseException) -> Code | None:
    """The capture error that an exception of torch, cuda-python, CuPy, Numba or CuTe DSL is about."""
    text = text_of(error)
    for code in CODES:
        said = (code.symbol, code.driver_symbol, code.text, f"error code: {code.number}")
        if any(words in text for words in said):
            return code
    return None
