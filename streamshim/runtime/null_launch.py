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


class _Config(ctypes.Structure):
    """``CUlaunchConfig`` of cuda.h."""

    _fields_ = [
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("sharedMemBytes", ctypes.c_uint),
        ("hStream", ctypes.c_void_p),
        ("attrs", ctypes.c_void_p),
        ("numAttrs", ctypes.c_uint),
    ]


def self_test() -> None:
    """Launch on NULL in a capture, in each way that is moved, and replay it.

    A kernel through ``cuLaunchKernel``, one through ``cuLaunchKernelEx``, a copy and a set, each on a number of its
    own. The caller moves launches meanwhile, and watches.

    Raises:
        RuntimeError: if something is missing from the graph, or CUDA refuses it.
    """
    import torch

    driver = ctypes.CDLL("libcuda.so.1")
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    _check(driver.cuModuleLoadData(ctypes.byref(module), _PTX), "cuModuleLoadData")
    _check(driver.cuModuleGetFunction(ctypes.byref(function), module, b"streamshim_add_one"), "cuModuleGetFunction")
    values = torch.zeros(4, dtype=torch.int32, device="cuda")
    cuda: Any = torch.cuda  # partly untyped
    graph, stream = cuda.CUDAGraph(), cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            # Where one is not moved, that is told here, and no finding of the watch.
            with allowance.allow("launch", reason="shows whether it is moved"):
                statuses = _launch(driver, function, values.data_ptr())
        finally:
            graph.capture_end()
        for name, status in statuses.items():
            _check(status, name)
        stream.synchronize()
        seen = [values.tolist()]
        for _ in range(2):
            values[3] = 0
            graph.replay()
            seen.append(values.tolist())
    wanted = [[0, 0, 0, 0], [1, 1, 1, 7], [2, 2, 2, 7]]
    if seen != wanted:
        raise RuntimeError(f"a launch on NULL was not moved: the values were {seen} instead of {wanted}")


def _launch(driver: Any, function: ctypes.c_void_p, values: int) -> dict[str, int]:
    """Add 1 to the first two of four numbers, copy the first to the third, and set the fourth to 7, all on NULL."""
    first, second, third, fourth = (ctypes.c_uint64(values + 4 * i) for i in range(4))
    one, none = ctypes.c_uint(1), ctypes.c_uint(0)
    of_first = (ctypes.c_void_p * 1)(ctypes.addressof(first))
    of_second = (ctypes.c_void_p * 1)(ctypes.addressof(second))
    config = _Config((1, 1, 1), (1, 1, 1), 0, None, None, 0)
    return {
        "cuLaunchKernel": driver.cuLaunchKernel(function, one, one, one, one, one, one, none, None, of_first, None),
        "cuLaunchKernelEx": driver.cuLaunchKernelEx(ctypes.byref(config), function, of_second, None),
        "cuMemcpyDtoDAsync": driver.cuMemcpyDtoDAsync_v2(third, first, ctypes.c_size_t(4), None),
        "cuMemsetD32Async": driver.cuMemsetD32Async(fourth, ctypes.c_uint(7), ctypes.c_size_t(1), None),
    }


def _check(status: Any, name: str) -> None:
    if status != 0:
        raise RuntimeError(f"{name} failed with CUDA error {status}")
