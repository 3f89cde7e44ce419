"""CUDA's own functions, for ``bind(libcuda)`` and ``bind(libcudart)``: where each has its stream, and which ones wait.

Copies without a stream, and the recording and waiting of events, are not here: an event's record and wait are the edges
of a fork, and go where they are sent. From cuda.h and cuda_runtime_api.h of CUDA 12 and 13
(https://docs.nvidia.com/cuda/cuda-driver-api, https://docs.nvidia.com/cuda/cuda-runtime-api). The
runtime's batched copies are left out: under one name they have another number of arguments in CUDA 13 than in 12.
"""

from __future__ import annotations

from typing import Any

from ...guards.sync_table import Kind
from .config_structs import STREAM_OFFSET
from .labels import has
from .specs import Spec

#: Function -> (place of the stream, number of arguments).
PLACES: dict[str, tuple[int, int]] = {
    "cuLaunchKernel": (8, 11),
    "cuLaunchCooperativeKernel": (8, 10),
    "cuLaunchHostFunc": (0, 3),
    "cuGraphLaunch": (1, 2),
    "cuMemcpyAsync": (3, 4),
    "cuMemcpyPeerAsync": (5, 6),
    "cuMemcpyHtoDAsync": (3, 4),
    "cuMemcpyHtoDAsync_v2": (3, 4),
    "cuMemcpyDtoHAsync": (3, 4),
    "cuMemcpyDtoHAsync_v2": (3, 4),
    "cuMemcpyDtoDAsync": (3, 4),
    "cuMemcpyDtoDAsync_v2": (3, 4),
    "cuMemcpyHtoAAsync": (4, 5),
    "cuMemcpyHtoAAsync_v2": (4, 5),
    "cuMemcpyAtoHAsync": (4, 5),
    "cuMemcpyAtoHAsync_v2": (4, 5),
    "cuMemcpy2DAsync": (1, 2),
    "cuMemcpy2DAsync_v2": (1, 2),
    "cuMemcpy3DAsync": (1, 2),
    "cuMemcpy3DAsync_v2": (1, 2),
    "cuMemcpy3DPeerAsync": (1, 2),
    "cuMemcpyBatchAsync": (8, 9),
    "cuMemcpyBatchAsync_v2": (7, 8),
    "cuMemcpy3DBatchAsync": (4, 5),
    "cuMemcpy3DBatchAsync_v2": (3, 4),
    "cuMemsetD8Async": (3, 4),
    "cuMemsetD16Async": (3, 4),
    "cuMemsetD32Async": (3, 4),
    "cuMemsetD2D8Async": (5, 6),
    "cuMemsetD2D16Async": (5, 6),
    "cuMemsetD2D32Async": (5, 6),
    "cudaLaunchKernel": (5, 6),
    "cudaLaunchCooperativeKernel": (5, 6),
    "cudaLaunchHostFunc": (0, 3),
    "cudaGraphLaunch": (1, 2),
    "cudaMemcpyAsync": (4, 5),
    "cudaMemcpyPeerAsync": (5, 6),
    "cudaMemcpyToSymbolAsync": (5, 6),
    "cudaMemcpyFromSymbolAsync": (5, 6),
    "cudaMemcpyToArrayAsync": (6, 7),
    "cudaMemcpyFromArrayAsync": (6, 7),
    "cudaMemcpy2DAsync": (7, 8),
    "cudaMemcpy2DToArrayAsync": (8, 9),
    "cudaMemcpy2DFromArrayAsync": (8, 9),
    "cudaMemcpy3DAsync": (1, 2),
    "cudaMemcpy3DPeerAsync": (1, 2),
    "cudaMemsetAsync": (3, 4),
    "cudaMemset2DAsync": (5, 6),
    "cudaMemset3DAsync": (3, 4),
}

#: Functions whose first argument points to a structure that holds the stream -> number of arguments.
CONFIGURED: dict[str, int] = {"cuLaunchKernelEx": 4, "cudaLaunchKernelExC": 3}

#: Functions that let the host wait, or that may -> what for. A stream is the first argument.
WAITING: dict[str, Kind] = {
    **dict.fromkeys(("cuCtxSynchronize", "cuCtxSynchronize_v2", "cudaDeviceSynchronize"), Kind.DEVICE),
    "cudaExecutionCtxSynchronize": Kind.DEVICE,
    **dict.fromkeys(("cuStreamSynchronize", "cuStreamQuery"), Kind.STREAM),
    **dict.fromkeys(("cudaStreamSynchronize", "cudaStreamQuery"), Kind.STREAM),
    **dict.fromkeys(("cuEventSynchronize", "cuEventQuery"), Kind.EVENT),
    **dict.fromkeys(("cudaEventSynchronize", "cudaEventQuery"), Kind.EVENT),
    **dict.fromkeys(("cuMemAlloc", "cuMemAlloc_v2", "cuMemAllocManaged", "cuMemHostAlloc"), Kind.MEMORY),
    **dict.fromkeys(("cuMemAllocHost", "cuMemAllocHost_v2", "cuMemFree", "cuMemFree_v2", "cuMemFreeHost"), Kind.MEMORY),
    **dict.fromkeys(
        ("cuMemAllocPitch", "cuMemAllocPitch_v2", "cuMemHostRegister", "cuMemHostRegister_v2"), Kind.MEMORY
    ),
    "cuMemHostUnregister": Kind.MEMORY,
    **dict.fromkeys(("cudaMalloc", "cudaMallocManaged", "cudaMallocHost", "cudaHostAlloc"), Kind.MEMORY),
    **dict.fromkeys(("cudaMallocPitch", "cudaMalloc3D", "cudaHostRegister", "cudaHostUnregister"), Kind.MEMORY),
    **dict.fromkeys(("cudaFree", "cudaFreeHost"), Kind.MEMORY),
}

#: What the same functions are called in code built with ``--default-stream per-thread``.
PER_THREAD = "_ptsz"


def functions_of(library: Any) -> dict[str, Spec]:
    """Those functions of the table that the library has."""
    return {name: spec for name, spec in SPECS.items() if has(library, name)}


def _specs() -> dict[str, Spec]:
    specs = {name: Spec(place, count) for name, (place, count) in PLACES.items()}
    specs |= {name: Spec(0, count, field=STREAM_OFFSET) for name, count in CONFIGURED.items()}
    specs |= {name: Spec(0 if kind is Kind.STREAM else None, waits=kind) for name, kind in WAITING.items()}
    return specs | {f"{name}{PER_THREAD}": spec for name, spec in specs.items()}


SPECS = _specs()
