"""The runtime over torch and the CUDA driver.

The current stream is asked from ``torch._C._cuda_getCurrentRawStream`` (56 to 60 ns), never from
``torch.cuda.current_stream()`` (4 µs). The capture state comes from ``cuStreamIsCapturing`` of the driver and, for a
stream that captures, ``cuStreamGetCaptureInfo_v2`` (https://docs.nvidia.com/cuda/cuda-driver-api/group__CUDA__STREAM.html).
Both are legal during every capture and do not invalidate it.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch

from ..errors import NoCudaError
from . import NOT_CAPTURING, CaptureState

_NONE, _ACTIVE = 0, 1
#: What the driver writes an answer to. An array is made and handed over faster than a number and a reference to it; one
#: for each question, since ctypes lets other threads run while it is in C.
_Status, _Id = ctypes.c_int * 1, ctypes.c_uint64 * 1
#: CUstreamCaptureMode.
_GLOBAL = 0
_MODES = ("global", "thread_local", "relaxed")
_cuda: Any = torch.cuda  # partly untyped


class TorchCuda:
    """`Runtime` over torch; raises `NoCudaError` where torch was built without CUDA, or there is no driver."""

    name = "torch"

    def __init__(self) -> None:
        if not hasattr(getattr(torch, "_C", None), "_cuda_getCurrentRawStream"):
            raise NoCudaError(
                f"torch {torch.__version__} was built without CUDA, so there is no current stream. Install a CUDA "
                "build of torch, or use streamshim.runtime.simulated for tests."
            )
        self.current_handle = torch._C._cuda_getCurrentRawStream
        self.current_device = torch._C._cuda_getDevice
        # Fixed for the life of a process, but torch takes more than a microsecond to tell.
        self._devices = torch.cuda.device_count()
        self.set_device = torch._C._cuda_setDevice
        try:
            driver = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise NoCudaError(
                f"torch {torch.__version__} was built with CUDA, but there is no CUDA driver here ({error})."
            ) from error
        self._is_capturing = driver.cuStreamIsCapturing
        # Of arrays and None ctypes knows what they are; a declared type would be looked up at each call.
        self._is_capturing.argtypes = [ctypes.c_void_p]
        self._is_capturing.restype = ctypes.c_int
        self._capture_info = driver.cuStreamGetCaptureInfo_v2
        self._capture_info.argtypes = [ctypes.c_void_p]
        self._capture_info.restype = ctypes.c_int
        self._last = NOT_CAPTURING
        self._exchange_mode = driver.cuThreadExchangeStreamCaptureMode
        self._exchange_mode.argtypes = [ctypes.c_void_p]
        self._exchange_mode.restype = ctypes.c_int

    def device_count(self) -> int:
        return self._devices

    def order(self, first: int, then: int, device: int) -> None:
        event = _cuda.Event()
        with torch.cuda.device(device):
            event.record(_stream(first, device))
            event.wait(_stream(then, device))

    def capture_state(self, handle: int) -> CaptureState:
        # Nearly always nothing captures, and engines that poll their streams come by here each time: that question
        # first, which costs a third. A non-zero result means that the driver does not know the stream (it was
        # destroyed, or the thread has no context): whatever is wrong with it, it is not part of a capture.
        answer = _Status()
        if self._is_capturing(handle, answer) != 0 or answer[0] == _NONE:
            return NOT_CAPTURING
        capture = _Id()
        if self._capture_info(handle, answer, capture, None, None, None) != 0 or answer[0] == _NONE:
            return NOT_CAPTURING
        id_, valid, last = capture[0], answer[0] == _ACTIVE, self._last
        if last.id != id_ or last.valid is not valid:
            # Kept, since in a capture the same is asked over and over, and it takes longer to make than to ask.
            last = self._last = CaptureState(id_, valid)
        return last

    def captured_graph(self, handle: int) -> int:
        status, graph = ctypes.c_int(0), ctypes.c_void_p()
        result = self._capture_info(handle, ctypes.byref(status), None, ctypes.byref(graph), None, None)
        return (graph.value or 0) if result == 0 and status.value == _ACTIVE else 0

    def thread_mode(self) -> str:
        # The driver tells the mode only in exchange for another one, so this is done twice.
        mode = ctypes.c_int(_GLOBAL)
        if self._exchange_mode(ctypes.byref(mode)) != 0:
            return _MODES[_GLOBAL]
        found = mode.value
        self._exchange_mode(ctypes.byref(mode))
        return _MODES[found]


def _stream(handle: int, device: int) -> Any:
    # torch.cuda.ExternalStream(0) hands out a new stream of the pool before torch 2.13.
    return _cuda.ExternalStream(handle, device) if handle else _cuda.default_stream(device)
