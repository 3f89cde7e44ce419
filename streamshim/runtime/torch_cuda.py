"""The runtime over torch and the CUDA driver.

The current stream is asked from ``torch._C._cuda_getCurrentRawStream`` (56 to 60 ns), never from
``torch.cuda.current_stream()`` (4 µs). The capture state comes from ``cuStreamGetCaptureInfo_v2`` of the driver
(https://docs.nvidia.com/cuda/cuda-driver-api/group__CUDA__STREAM.html), which is legal during every capture and does
not invalidate it.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch

from ..errors import NoCudaError
from . import NOT_CAPTURING, CaptureState

_ACTIVE, _INVALIDATED = 1, 2
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
        self._capture_info = driver.cuStreamGetCaptureInfo_v2
        self._capture_info.argtypes = [ctypes.c_void_p] * 6
        self._capture_info.restype = ctypes.c_int
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
        status, capture = ctypes.c_int(0), ctypes.c_uint64(0)
        result = self._capture_info(handle, ctypes.byref(status), ctypes.byref(capture), None, None, None)
        # A non-zero result means that the driver does not know the stream (it was destroyed, or the thread has no
        # context): whatever is wrong with it, it is not part of a capture.
        if result != 0 or status.value not in (_ACTIVE, _INVALIDATED):
            return NOT_CAPTURING
        return CaptureState(capture.value, status.value == _ACTIVE)

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
