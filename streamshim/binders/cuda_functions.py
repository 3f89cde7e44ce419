"""Which functions of ``cuda.bindings`` take a stream, and where: data for the binder `cuda_bindings`.

Read from cuda-bindings 13.4.4; 12.8 to 13.3 say the same, and lack a few. What the installed version says of its own
parameters wins over the numbers here.

Left out on purpose: events, waits and semaphores, which are the edges between streams (``cuEventRecord``,
``cuStreamWaitEvent``, ``cuStreamWaitValue32``, ``cuStreamBatchMemOp``, ``cuSignalExternalSemaphoresAsync`` ...); what
cannot be part of a graph and does no harm outside of one (``cuMemPrefetchAsync``, ``cuMemDiscardBatchAsync``,
``cuMemMapArrayAsync``, ``cuGraphUpload``); what gives the NULL stream a meaning of its own
(``cuStreamAttachMemAsync``); and ``cuLaunchCooperativeKernelMultiDevice``, which needs one explicit stream a device.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType


class Kind(Enum):
    """What a function puts on its stream."""

    KERNEL = "kernel"
    GRAPH = "graph"
    HOST = "host function"
    COPY = "copy"
    SET = "set"
    #: Allocations and frees in stream order. A buffer that is freed on another stream than that of its kernels is
    #: freed under them, so they go where the kernels go.
    MEMORY = "memory"


@dataclass(frozen=True)
class Function:
    """A function that takes a stream.

    Attributes:
        argument: the name of the parameter that is, or holds, the stream.
        place: its position.
        count: how many parameters there are.
        kind: what it puts on the stream.
    """

    argument: str
    place: int
    count: int
    kind: Kind


def _table(rows: Mapping[str, tuple[str, int, int, Kind]]) -> Mapping[str, Function]:
    return MappingProxyType({name: Function(*row) for name, row in rows.items()})


_K, _G, _H, _C, _S, _M = Kind.KERNEL, Kind.GRAPH, Kind.HOST, Kind.COPY, Kind.SET, Kind.MEMORY

#: The functions without which a module is not what this was written for.
ESSENTIAL = frozenset({"cuLaunchKernel", "cuLaunchKernelEx", "cuMemcpyAsync", "cudaMemcpyAsync", "cudaMemsetAsync"})

#: The stream of this one is a field of its first argument.
BY_CONFIG = "cuLaunchKernelEx"

DRIVER = _table({
    "cuLaunchKernel": ("hStream", 8, 11, _K),
    "cuLaunchKernelEx": ("config", 0, 4, _K),
    "cuLaunchCooperativeKernel": ("hStream", 8, 10, _K),
    "cuLaunchGridAsync": ("hStream", 3, 4, _K),
    "cuGraphLaunch": ("hStream", 1, 2, _G),
    "cuLaunchHostFunc": ("hStream", 0, 3, _H),
    "cuLaunchHostFunc_v2": ("hStream", 0, 4, _H),
    "cuMemcpyAsync": ("hStream", 3, 4, _C),
    "cuMemcpyDtoDAsync": ("hStream", 3, 4, _C),
    "cuMemcpyDtoHAsync": ("hStream", 3, 4, _C),
    "cuMemcpyHtoDAsync": ("hStream", 3, 4, _C),
    "cuMemcpyAtoHAsync": ("hStream", 4, 5, _C),
    "cuMemcpyHtoAAsync": ("hStream", 4, 5, _C),
    "cuMemcpyPeerAsync": ("hStream", 5, 6, _C),
    "cuMemcpy2DAsync": ("hStream", 1, 2, _C),
    "cuMemcpy3DAsync": ("hStream", 1, 2, _C),
    "cuMemcpy3DPeerAsync": ("hStream", 1, 2, _C),
    "cuMemcpyBatchAsync": ("hStream", 7, 8, _C),
    "cuMemcpy3DBatchAsync": ("hStream", 3, 4, _C),
    "cuMemcpyWithAttributesAsync": ("hStream", 4, 5, _C),
    "cuMemcpy3DWithAttributesAsync": ("hStream", 2, 3, _C),
    "cuMemBatchDecompressAsync": ("stream", 3, 4, _C),
    "cuMemsetD8Async": ("hStream", 3, 4, _S),
    "cuMemsetD16Async": ("hStream", 3, 4, _S),
    "cuMemsetD32Async": ("hStream", 3, 4, _S),
    "cuMemsetD2D8Async": ("hStream", 5, 6, _S),
    "cuMemsetD2D16Async": ("hStream", 5, 6, _S),
    "cuMemsetD2D32Async": ("hStream", 5, 6, _S),
    "cuMemAllocAsync": ("hStream", 1, 2, _M),
    "cuMemAllocFromPoolAsync": ("hStream", 2, 3, _M),
    "cuMemFreeAsync": ("hStream", 1, 2, _M),
})  # fmt: skip

RUNTIME = _table({
    "cudaGraphLaunch": ("stream", 1, 2, _G),
    "cudaLaunchHostFunc": ("stream", 0, 3, _H),
    "cudaLaunchHostFunc_v2": ("stream", 0, 4, _H),
    "cudaMemcpyAsync": ("stream", 4, 5, _C),
    "cudaMemcpyPeerAsync": ("stream", 5, 6, _C),
    "cudaMemcpyFromArrayAsync": ("stream", 6, 7, _C),
    "cudaMemcpyToArrayAsync": ("stream", 6, 7, _C),
    "cudaMemcpy2DAsync": ("stream", 7, 8, _C),
    "cudaMemcpy2DFromArrayAsync": ("stream", 8, 9, _C),
    "cudaMemcpy2DToArrayAsync": ("stream", 8, 9, _C),
    "cudaMemcpy3DAsync": ("stream", 1, 2, _C),
    "cudaMemcpy3DPeerAsync": ("stream", 1, 2, _C),
    "cudaMemcpyBatchAsync": ("stream", 7, 8, _C),
    "cudaMemcpy3DBatchAsync": ("stream", 3, 4, _C),
    "cudaMemcpyWithAttributesAsync": ("stream", 4, 5, _C),
    "cudaMemcpy3DWithAttributesAsync": ("stream", 2, 3, _C),
    "cudaMemsetAsync": ("stream", 3, 4, _S),
    "cudaMemset2DAsync": ("stream", 5, 6, _S),
    "cudaMemset3DAsync": ("stream", 3, 4, _S),
    "cudaMallocAsync": ("hStream", 1, 2, _M),
    "cudaMallocFromPoolAsync": ("stream", 2, 3, _M),
    "cudaFreeAsync": ("hStream", 1, 2, _M),
})  # fmt: skip

#: The functions of each patched module.
TABLES: Mapping[str, Mapping[str, Function]] = MappingProxyType(
    {"cuda.bindings.driver": DRIVER, "cuda.bindings.runtime": RUNTIME}
)

_D, _R = TABLES  # the names of the modules

#: The functions that wait for one stream, their only argument. Who copies on stream 0 and then waits for stream 0 must
#: get the copy, also where that was bound to another stream.
WAITS: Mapping[str, str] = MappingProxyType({_D: "cuStreamSynchronize", _R: "cudaStreamSynchronize"})

#: The functions that let the host wait, or ask whether it would have to; with what for: the "device", the "stream" that
#: is their first argument, or an "event". ``cuEventElapsedTime`` does no harm in any capture (measured).
WAITING: Mapping[str, Mapping[str, str]] = MappingProxyType({
    _D: {
        "cuCtxSynchronize": "device", "cuCtxSynchronize_v2": "device", "cuStreamSynchronize": "stream",
        "cuStreamQuery": "stream", "cuEventSynchronize": "event", "cuEventQuery": "event",
    },
    _R: {
        "cudaDeviceSynchronize": "device", "cudaExecutionCtxSynchronize": "device", "cudaStreamSynchronize": "stream",
        "cudaStreamQuery": "stream", "cudaEventSynchronize": "event", "cudaEventQuery": "event",
    },
})  # fmt: skip

#: The copies and sets that take no stream: they run on the legacy stream, at once.
AT_ONCE: Mapping[str, tuple[str, ...]] = MappingProxyType({
    _D: (
        "cuMemcpy", "cuMemcpyPeer", "cuMemcpyHtoD", "cuMemcpyDtoH", "cuMemcpyDtoD", "cuMemcpyDtoA", "cuMemcpyAtoD",
        "cuMemcpyHtoA", "cuMemcpyAtoH", "cuMemcpyAtoA", "cuMemcpy2D", "cuMemcpy2DUnaligned", "cuMemcpy3D",
        "cuMemcpy3DPeer", "cuMemsetD8", "cuMemsetD16", "cuMemsetD32", "cuMemsetD2D8", "cuMemsetD2D16", "cuMemsetD2D32",
    ),
    _R: (
        "cudaMemcpy", "cudaMemcpyPeer", "cudaMemcpyFromArray", "cudaMemcpyToArray", "cudaMemcpyArrayToArray",
        "cudaMemcpy2D", "cudaMemcpy2DFromArray", "cudaMemcpy2DToArray", "cudaMemcpy2DArrayToArray", "cudaMemcpy3D",
        "cudaMemcpy3DPeer", "cudaMemset", "cudaMemset2D", "cudaMemset3D",
    ),
})  # fmt: skip

#: The functions that allocate, free or pin memory in a way that may wait for the device.
ALLOCATING: Mapping[str, tuple[str, ...]] = MappingProxyType({
    _D: (
        "cuMemAlloc", "cuMemAllocPitch", "cuMemAllocManaged", "cuMemAllocHost", "cuMemHostAlloc", "cuMemHostRegister",
        "cuMemHostUnregister", "cuMemFree", "cuMemFreeHost",
    ),
    _R: (
        "cudaMalloc", "cudaMallocPitch", "cudaMalloc3D", "cudaMallocManaged", "cudaMallocHost", "cudaHostAlloc",
        "cudaHostRegister", "cudaHostUnregister", "cudaFree", "cudaFreeHost",
    ),
})  # fmt: skip

#: The functions that begin a capture on the stream that is their first argument -> the place of the mode.
BEGINS: Mapping[str, Mapping[str, int]] = MappingProxyType(
    {
        _D: {"cuStreamBeginCapture": 1, "cuStreamBeginCaptureToGraph": 5},
        _R: {"cudaStreamBeginCapture": 1, "cudaStreamBeginCaptureToGraph": 5},
    }
)
#: The function that ends it; the stream is its only argument.
ENDS: Mapping[str, str] = MappingProxyType({_D: "cuStreamEndCapture", _R: "cudaStreamEndCapture"})
