"""Which device a launch runs on: that of its tensors, not the current one."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterable
from typing import Any

from ... import runtime

_CUDA = 2  # kDLCUDA of dlpack.h


class _NoTensor:
    """Stands for torch's tensor type while torch is not imported."""


#: ``torch.Tensor`` once torch is there; read on the launch path.
tensor_type: Any = _NoTensor


def device_of(values: Iterable[Any]) -> int:
    """The index of the device of the first GPU tensor; the current device if there is none, or only one device."""
    global tensor_type
    if tensor_type is _NoTensor and "torch" in sys.modules:
        tensor_type = sys.modules["torch"].Tensor
    asked = runtime.get()
    if asked.device_count() > 1:
        for value in values:
            device = _device(value)
            if device is not None:
                return device
    return asked.current_device()


def _device(value: Any) -> int | None:
    """The device's index if the value is, or contains, a tensor on a GPU."""
    if isinstance(value, tensor_type):
        return int(value.get_device()) if value.is_cuda else None
    if isinstance(value, (tuple, list)):
        return next((d for item in value if (d := _device(item)) is not None), None)
    kind = type(value)
    if kind.__module__.startswith("cutlass") and hasattr(value, "_dlpack_data"):
        # Reading the capsule takes microseconds, and such tensors are made once and passed many times.
        known: int | None = getattr(value, "_streamshim_device", -1)
        if known == -1:
            known = value._streamshim_device = _of_capsule(value._dlpack_data)
        return known
    if kind.__module__.startswith("tvm_ffi") and hasattr(value, "__dlpack_device__"):
        device_type, index = value.__dlpack_device__()
        return int(index) if device_type == _CUDA else None
    return None


class _DLTensorHead(ctypes.Structure):
    """The first fields of DLPack's DLTensor, with which a DLManagedTensor begins (dlpack.h)."""

    _fields_ = [("data", ctypes.c_void_p), ("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32)]


_capsule_name = ctypes.pythonapi.PyCapsule_GetName
_capsule_name.argtypes, _capsule_name.restype = [ctypes.py_object], ctypes.c_char_p
_capsule_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_capsule_pointer.argtypes, _capsule_pointer.restype = [ctypes.py_object, ctypes.c_char_p], ctypes.c_void_p


def _of_capsule(capsule: Any) -> int | None:
    if type(capsule).__name__ != "PyCapsule" or _capsule_name(capsule) not in (b"dltensor", b"used_dltensor"):
        return None
    head = _DLTensorHead.from_address(_capsule_pointer(capsule, _capsule_name(capsule)))
    return int(head.device_id) if head.device_type == _CUDA else None
