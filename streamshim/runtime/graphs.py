"""The nodes of a CUDA graph, read from the driver: what is in it, before it is instantiated.

A graph that is being captured can be read like any other, through the handle that ``cuStreamGetCaptureInfo`` gives
(https://docs.nvidia.com/cuda/cuda-driver-api/group__CUDA__GRAPH.html).
"""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass
from typing import Any

from ..errors import NoCudaError, StreamShimError

#: ``CUgraphNodeType`` -> its name here.
KINDS = (
    "kernel", "copy", "set", "host function", "child graph", "empty", "event wait", "event record", "semaphore signal",
    "semaphore wait", "allocation", "free", "batch memory operation", "conditional",
)  # fmt: skip


@dataclass(frozen=True)
class Node:
    """A node of a graph.

    Attributes:
        kind: one of `KINDS`.
        name: for a kernel its name, demangled; else an empty string.
    """

    kind: str
    name: str = ""


class _KernelParameters(ctypes.Structure):
    """``CUDA_KERNEL_NODE_PARAMS_v2`` of cuda.h (CUDA 12 and 13)."""

    _fields_ = [
        ("func", ctypes.c_void_p),
        ("gridDim", ctypes.c_uint * 3),
        ("blockDim", ctypes.c_uint * 3),
        ("sharedMemBytes", ctypes.c_uint),
        ("kernelParams", ctypes.c_void_p),
        ("extra", ctypes.c_void_p),
        ("kern", ctypes.c_void_p),
        ("ctx", ctypes.c_void_p),
    ]


def read(graph: int, driver: Any = None) -> tuple[list[Node], list[tuple[int, int]]]:
    """The nodes of a graph and its edges.

    Args:
        graph: the handle of the graph (``CUgraph``).
        driver: the driver's library; None: the one of this machine.

    Returns:
        The nodes, and the edges as pairs of positions among them: (earlier, later).

    Raises:
        NoCudaError: if there is no driver.
        StreamShimError: if the driver refuses.
    """
    driver = driver if driver is not None else _driver()
    nodes = _list(driver.cuGraphGetNodes, "cuGraphGetNodes", ctypes.c_void_p(graph))
    place = {node: i for i, node in enumerate(nodes)}
    return [_node(driver, node) for node in nodes], _edges(driver, graph, place)


def _node(driver: Any, node: int) -> Node:
    kind = ctypes.c_int(-1)
    _check(driver.cuGraphNodeGetType(ctypes.c_void_p(node), ctypes.byref(kind)), "cuGraphNodeGetType")
    name = KINDS[kind.value] if 0 <= kind.value < len(KINDS) else f"type {kind.value}"
    return Node(name, _kernel_name(driver, node) if name == "kernel" else "")


def _kernel_name(driver: Any, node: int) -> str:
    found = _KernelParameters()
    _check(
        driver.cuGraphKernelNodeGetParams_v2(ctypes.c_void_p(node), ctypes.byref(found)), "cuGraphKernelNodeGetParams"
    )
    name = ctypes.c_char_p()
    # A kernel is a function of a module, or a kernel of a library.
    for handle, function in ((found.func, "cuFuncGetName"), (found.kern, "cuKernelGetName")):
        ask = getattr(driver, function, None)  # CUDA 12.3 and later
        if handle and ask is not None and ask(ctypes.byref(name), ctypes.c_void_p(handle)) == 0 and name.value:
            return demangled(name.value.decode(errors="replace"))
    return "?"


def _edges(driver: Any, graph: int, place: dict[int, int]) -> list[tuple[int, int]]:
    count = ctypes.c_size_t()
    # The second version tells of programmatic edges too, which the first one refuses to.
    ask, extra = (
        (driver.cuGraphGetEdges_v2, 1) if hasattr(driver, "cuGraphGetEdges_v2") else (driver.cuGraphGetEdges, 0)
    )
    nothing = [None] * (2 + extra)
    _check(ask(ctypes.c_void_p(graph), *nothing, ctypes.byref(count)), "cuGraphGetEdges")
    if not count.value:
        return []
    first, then = (ctypes.c_void_p * count.value)(), (ctypes.c_void_p * count.value)()
    data = [(ctypes.c_uint64 * count.value)()] * extra  # CUgraphEdgeData has eight bytes
    _check(ask(ctypes.c_void_p(graph), first, then, *data, ctypes.byref(count)), "cuGraphGetEdges")
    return [(place[a or 0], place[b or 0]) for a, b in zip(first, then, strict=True)]


def _list(ask: Any, name: str, graph: ctypes.c_void_p) -> list[int]:
    count = ctypes.c_size_t()
    _check(ask(graph, None, ctypes.byref(count)), name)
    if not count.value:
        return []
    found = (ctypes.c_void_p * count.value)()
    _check(ask(graph, found, ctypes.byref(count)), name)
    return [node or 0 for node in found[: count.value]]


@functools.lru_cache(maxsize=4096)
def demangled(name: str) -> str:
    """A C++ name as it was written; other names as they are."""
    library = _cpp() if name.startswith("_Z") else None
    if library is None:
        return name
    demangle = library.__cxa_demangle
    demangle.restype = ctypes.c_void_p
    status = ctypes.c_int()
    address = demangle(name.encode(), None, None, ctypes.byref(status))
    if not address or status.value != 0:
        return name
    try:
        return ctypes.string_at(address).decode(errors="replace")
    finally:
        library.free(ctypes.c_void_p(address))


@functools.cache
def _cpp() -> Any:
    """The C++ library, which has the demangler; None if it is not here."""
    try:
        return ctypes.CDLL("libstdc++.so.6")
    except OSError:
        return None


def _driver() -> Any:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise NoCudaError(f"there is no CUDA driver here ({error}), so no graph can be read") from error


def _check(result: int, name: str) -> None:
    if result != 0:
        raise StreamShimError(f"{name} failed with CUDA error {result}; is this a graph that has been captured?")
