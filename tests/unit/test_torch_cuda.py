"""The runtime over torch, where it cannot work."""

from __future__ import annotations

import ctypes

import pytest
import torch

from streamshim.errors import NoCudaError
from streamshim.runtime.torch_cuda import TorchCuda


def test_a_cuda_build_of_torch_without_a_driver_says_so(monkeypatch):
    for name in ("_cuda_getCurrentRawStream", "_cuda_getDevice", "_cuda_setDevice"):
        monkeypatch.setattr(torch._C, name, lambda *args: 0, raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)

    def no_driver(name):
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", no_driver)
    with pytest.raises(NoCudaError, match=r"no CUDA driver here \(libcuda\.so\.1: cannot open"):
        TorchCuda()
