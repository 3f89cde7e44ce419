"""The functions of the CUDA driver that a capture's watch looks at: CUPTI's numbers, and where each has its stream.

The numbers are from cupti_driver_cbid.h and the offsets from generated_cuda_meta.h of CUPTI 12.8 and 13.0, which agree
wherever both have a function. They are checked by name against the library at hand (`Cupti.name_of`) before use.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import NamedTuple

from ..streams import PER_THREAD


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

#: CUPTI's number -> name, of all functions that are looked at.
NAMES: dict[int, str] = {**{number: call.name for number, call in LAUNCHES.items()}, **BREAKING}

#: Where the stream is in the parameters of copies and sets that have their size just before it.
_AFTER_SIZE = 24


def known(name_of: Callable[[int], str]) -> list[int]:
    """The numbers that a version of CUPTI has.

    Args:
        name_of: the name of the function with this number, or an empty string.

    Raises:
        LookupError: if a number means another function than it should.
    """
    said = {number: name_of(number) for number in NAMES}
    for number, name in said.items():
        if name and name != NAMES[number]:
            raise LookupError(f"CUPTI's number {number} is {name}, not {NAMES[number]}: its version is not known")
    return [number for number, name in said.items() if name]


def has_size(call: Call, parameters: int) -> bool:
    """Whether a copy or set is known to be of some bytes; one of none makes no node. Arguments as `stream_of`."""
    return call.stream == _AFTER_SIZE and bool(ctypes.c_size_t.from_address(parameters + _AFTER_SIZE - 8).value)


def stream_of(call: Call, parameters: int) -> int:
    """The stream of a launch, from its parameters.

    Args:
        call: the function.
        parameters: the address of the structure of its parameters.

    Returns:
        The handle; 0 if it takes none. To the forms for per-thread default streams, NULL is the thread's own.
    """
    address = stream_address(call, parameters)
    if not address:
        return 0
    return ctypes.c_void_p.from_address(address).value or (PER_THREAD if call.name.endswith("_ptsz") else 0)


def stream_address(call: Call, parameters: int) -> int:
    """Where the stream of a launch is; 0 if it takes none. Arguments as `stream_of`."""
    if call.stream < 0 or not parameters:
        return 0
    address = parameters + call.stream
    if not call.in_config:
        return address
    config = ctypes.c_void_p.from_address(address).value
    return config + CONFIG_STREAM if config else 0
