"""The functions of the CUDA driver that a capture's watch looks at: CUPTI's numbers, and where each has its stream.

The numbers are from cupti_driver_cbid.h and the offsets from generated_cuda_meta.h of CUPTI 12.8 and 13.0, which agree
wherever both have a function. They are checked by name against the library at hand (`Cupti.name_of`) before use.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple


class Call(NamedTuple):
    """A function that puts work on a stream.

    Attributes:
        name: the function.
        kind: "kernel", "graph", "host function", "copy", "set" or "memory".
        stream: the offset of the stream among its parameters, in bytes; -1: it has none, and works at once.
        in_config: the parameter at that offset points to a ``CUlaunchConfig``, which has the stream.
    """

    name: str
    kind: str
    stream: int
    in_config: bool = False


#: The offset of ``hStream`` in ``CUlaunchConfig``.
CONFIG_STREAM = 32


def _launches() -> dict[int, Call]:
    rows: list[tuple[str, str, int, tuple[int, ...]]] = [
        ("cuLaunchKernel", "kernel", 40, (307, 442)),
        ("cuLaunchCooperativeKernel", "kernel", 40, (477, 478)),
        ("cuGraphLaunch", "graph", 8, (514, 515)),
        ("cuLaunchHostFunc", "host function", 0, (527, 528)),
        ("cuMemcpyAsync", "copy", 24, (306, 418)),
        ("cuMemcpyHtoDAsync_v2", "copy", 24, (277, 421)),
        ("cuMemcpyDtoHAsync_v2", "copy", 24, (279, 422)),
        ("cuMemcpyDtoDAsync_v2", "copy", 24, (281, 423)),
        ("cuMemcpyPeerAsync", "copy", 40, (319, 426)),
        ("cuMemcpy2DAsync_v2", "copy", 8, (289, 424)),
        ("cuMemcpy3DAsync_v2", "copy", 8, (291, 425)),
        ("cuMemcpy3DPeerAsync", "copy", 8, (321, 427)),
        ("cuMemcpyHtoAAsync_v2", "copy", 32, (293, 419)),
        ("cuMemcpyAtoHAsync_v2", "copy", 32, (283, 420)),
        ("cuMemcpyBatchAsync", "copy", 64, (776, 777)),
        ("cuMemcpy3DBatchAsync", "copy", 32, (778, 779)),
        ("cuMemcpyBatchAsync_v2", "copy", 56, (796, 797)),
        ("cuMemcpy3DBatchAsync_v2", "copy", 24, (798, 799)),
        ("cuMemsetD8Async", "set", 24, (216, 428)),
        ("cuMemsetD16Async", "set", 24, (218, 429)),
        ("cuMemsetD32Async", "set", 24, (220, 430)),
        ("cuMemsetD2D8Async", "set", 40, (222, 431)),
        ("cuMemsetD2D16Async", "set", 40, (224, 432)),
        ("cuMemsetD2D32Async", "set", 40, (226, 433)),
    ]
    calls = {}
    for name, kind, stream, (plain, per_thread) in rows:
        calls[plain] = Call(name, kind, stream)
        calls[per_thread] = Call(f"{name}_ptsz", kind, stream)
    for number, name in ((652, "cuLaunchKernelEx"), (653, "cuLaunchKernelEx_ptsz")):
        calls[number] = Call(name, "kernel", 0, in_config=True)
    for number, name, kind in (
        (305, "cuMemcpy", "copy"), (276, "cuMemcpyHtoD_v2", "copy"), (278, "cuMemcpyDtoH_v2", "copy"),
        (280, "cuMemcpyDtoD_v2", "copy"), (249, "cuMemsetD8_v2", "set"), (251, "cuMemsetD32_v2", "set"),
    ):  # fmt: skip
        calls[number] = Call(name, kind, -1)
    return calls


#: CUPTI's number -> what puts work on a stream.
LAUNCHES: Mapping[int, Call] = MappingProxyType(_launches())

#: CUPTI's number -> what CUDA may refuse in a capture, and lose that: waits and allocations.
#:
#: Not what torch's allocators call with their lock held: cuMemAlloc_v2, cuMemFree_v2, cuMemFreeHost, cuEventQuery and
#: cuEventSynchronize. To be told takes the GIL, and a thread that has it may wait for that lock, to free a tensor.
#: Nor the loading and unloading of modules, which CUDA's runtime does at a first launch with locks of its own.
BREAKING: Mapping[int, str] = MappingProxyType({
    17: "cuCtxSynchronize", 800: "cuCtxSynchronize_v2", 126: "cuStreamSynchronize", 440: "cuStreamSynchronize_ptsz",
    125: "cuStreamQuery", 439: "cuStreamQuery_ptsz", 371: "cuMemAllocManaged", 39: "cuMemHostAlloc",
    294: "cuMemAllocHost_v2", 379: "cuMemHostRegister_v2",
})  # fmt: skip
