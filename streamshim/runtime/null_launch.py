"""A launch on NULL in a capture of our own: is it in the graph (`guards.redirect`), or did it run once, outside?"""

from __future__ import annotations

import ctypes
from typing import Any

from .. import allowance

#: A kernel that adds 1 to an integer, for the test. Any GPU since 2014 can run it; the driver translates it.
_PTX = b"""
.version 6.0
.target sm_52
.address_size 64
.visible .entry streamshim_add_one(.param .u64 p)
{
    .reg .u64 %a;
    .reg .u32 %v;
    ld.param.u64 %a, [p];
    cvta.to.global.u64 %a, %a;
    ld.global.u32 %v, [%a];
    add.u32 %v, %v, 1;
    st.global.u32 [%a], %v;
    ret;
}
"""


def self_test() -> None:
    """Launch a kernel on NULL in a capture, and replay it. The caller moves launches meanwhile, and watches.

    Raises:
        RuntimeError: if it is missing from the graph, or CUDA refuses something.
    """
    import torch

    driver = ctypes.CDLL("libcuda.so.1")
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    value = torch.zeros(1, dtype=torch.int32, device="cuda")
    _check(driver.cuModuleLoadData(ctypes.byref(module), _PTX), "cuModuleLoadData")
    _check(driver.cuModuleGetFunction(ctypes.byref(function), module, b"streamshim_add_one"), "cuModuleGetFunction")
    address = ctypes.c_uint64(value.data_ptr())
    parameters = (ctypes.c_void_p * 1)(ctypes.addressof(address))
    cuda: Any = torch.cuda  # partly untyped
    one, graph, stream = ctypes.c_uint(1), cuda.CUDAGraph(), cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            # Where it is not moved, that is told here, and no finding of the watch.
            with allowance.allow("launch", reason="shows whether it is moved"):
                status = driver.cuLaunchKernel(
                    function, one, one, one, one, one, one, ctypes.c_uint(0), None, parameters, None
                )
        finally:
            graph.capture_end()
        _check(status, "cuLaunchKernel")
        stream.synchronize()
        seen = [int(value.item())]
        for _ in range(2):
            graph.replay()
            seen.append(int(value.item()))
    if seen != [0, 1, 2]:
        raise RuntimeError(f"a launch on NULL was not moved: the value was {seen} instead of [0, 1, 2]")


def _check(status: Any, name: str) -> None:
    if status != 0:
        raise RuntimeError(f"{name} failed with CUDA error {status}")
