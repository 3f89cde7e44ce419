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
_KERNEL = KINDS.index("kernel")


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
    handles = _handles(driver, graph)
    place = {handle: i for i, handle in enumerate(handles)}
    return _nodes(driver, handles), _edges(driver, graph, place)


def _nodes(driver: Any, handles: list[int]) -> list[Node]:
    # A capture waits for this, and may have thousands of nodes: nothing is made for each that can be made once.
    kind, parameters = ctypes.c_int(), _KernelParameters()
    to_kind, to_parameters = ctypes.byref(kind), ctypes.byref(parameters)
    kind_of, parameters_of = driver.cuGraphNodeGetType, driver.cuGraphKernelNodeGetParams_v2
    # Of this reading only: when a module is unloaded, another kernel may get its handle.
    kernels: dict[tuple[int | None, int | None], Node] = {}
    others: dict[int, Node] = {}
    nodes = []
    for handle in handles:
        _check(kind_of(handle, to_kind), "cuGraphNodeGetType")
        number = kind.value
        if number != _KERNEL:
            nodes.append(others.get(number) or others.setdefault(number, Node(_kind(number))))
            continue
        parameters.func = parameters.kern = None
        _check(parameters_of(handle, to_parameters), "cuGraphKernelNodeGetParams")
        key = parameters.func, parameters.kern
        nodes.append(kernels.get(key) or kernels.setdefault(key, Node("kernel", _kernel_name(driver, *key))))
    return nodes


def _kind(number: int) -> str:
    return KINDS[number] if 0 <= number < len(KINDS) else f"type {number}"


def _kernel_name(driver: Any, func: int | None, kern: int | None) -> str:
    name = ctypes.c_char_p()
    # A kernel is a function of a module, or a kernel of a library.
    for handle, function in ((func, "cuFuncGetName"), (kern, "cuKernelGetName")):
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
    first, then = (ctypes.c_uint64 * count.value)(), (ctypes.c_uint64 * count.value)()
    data = [(ctypes.c_uint64 * count.value)()] * extra  # CUgraphEdgeData has eight bytes
    _check(ask(ctypes.c_void_p(graph), first, then, *data, ctypes.byref(count)), "cuGraphGetEdges")
    return list(zip(map(place.__getitem__, first[:]), map(place.__getitem__, then[:]), strict=True))


def _handles(driver: Any, graph: int) -> list[int]:
    count = ctypes.c_size_t()
    _check(driver.cuGraphGetNodes(ctypes.c_void_p(graph), None, ctypes.byref(count)), "cuGraphGetNodes")
    if not count.value:
        return []
    found = (ctypes.c_uint64 * count.value)()
    _check(driver.cuGraphGetNodes(ctypes.c_void_p(graph), found, ctypes.byref(count)), "cuGraphGetNodes")
    return found[: count.value]


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


@functools.cache
def _driver() -> Any:
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise NoCudaError(f"there is no CUDA driver here ({error}), so no graph can be read") from error
    for name in ("cuGraphNodeGetType", "cuGraphKernelNodeGetParams_v2"):
        # Nodes are passed as ints; of a reference ctypes knows what it is.
        getattr(driver, name).argtypes = [ctypes.c_void_p]
    return driver


def _check(result: int, name: str) -> None:
    if result != 0:
        raise StreamShimError(f"{name} failed with CUDA error {result}; is this a graph that has been captured?")
