"""Waiting calls of other Python libraries for GPUs: CuPy, Numba, Warp, and the autotuners of Triton and Inductor.

Each is patched when its module is imported, and asks `syncs` first. Tested with CuPy 14.2, numba-cuda 0.30 and Warp
1.19, without a GPU, and Triton 3.6, with one. What a version does not have is left out. Needed because these libraries
call CUDA from below Python, so a capture is lost without a line. Not reachable from Python, since the type cannot be
patched: ``cupy.cuda.Device.synchronize``. Ends when CUDA's own error names the call.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from types import MappingProxyType, ModuleType
from typing import Any, NamedTuple

from .. import gate
from ..binders.holders import Holders
from ..capture import windows
from ..patching import Patch
from . import syncs
from .sync_table import COPY, VALUE, WAIT, WARM_UP, Kind, Operation


def _handle(stream: Any = 0) -> int:
    return int(stream)


def _cupy_stream(stream: Any) -> int:
    return int(stream.ptr)


def _cupy_current(array: Any, *args: Any) -> int:
    return int(sys.modules["cupy.cuda.stream"].get_current_stream().ptr)


def _cupy_get(array: Any, stream: Any = None, order: Any = "C", out: Any = None, blocking: bool = True) -> int | None:
    if not blocking:
        return None
    return _cupy_current(array) if stream is None else _cupy_stream(stream)


def _numba_stream(stream: Any) -> int:
    handle = stream.handle
    return int(getattr(handle, "value", handle) or 0)


def _warp_device_of(device: Any) -> Any:
    home = sys.modules.get("warp._src.context") or sys.modules["warp.context"]
    return home.runtime.get_device(device)


def _warp_device(device: Any = None) -> int | None:
    found = _warp_device_of(device)
    return int(found.ordinal) if found.is_cuda else None


def _warp_stream(stream_or_device: Any = None) -> int | None:
    if hasattr(stream_or_device, "cuda_stream"):
        return int(stream_or_device.cuda_stream or 0)
    found = _warp_device_of(stream_or_device)
    return int(found.stream.cuda_stream or 0) if found.is_cuda else None


class Call(NamedTuple):
    """A call that waits.

    Attributes:
        owner: the class in the module, or an empty string for a function of the module.
        name: the attribute.
        operation: what is said of it.
        target: from the arguments: the handle that is waited for, the index of a device, or None if it does not wait.
        getter: it is a property.
    """

    owner: str
    name: str
    operation: Operation
    target: Callable[..., int | None] | None = None
    getter: bool = False


def _device(owner: str, name: str, words: str, target: Callable[..., int | None] | None = None) -> Call:
    return Call(owner, name, Operation(words, WAIT, Kind.DEVICE), target)


def _event(owner: str, name: str, words: str, getter: bool = False) -> Call:
    return Call(owner, name, Operation(words, WAIT, Kind.EVENT), getter=getter)


def _stream(owner: str, name: str, words: str, target: Callable[..., int | None], getter: bool = False) -> Call:
    return Call(owner, name, Operation(words, WAIT, Kind.STREAM), target, getter)


def _choice(owner: str, name: str, words: str) -> Call:
    # Timing waits for the device again and again.
    return Call(owner, name, Operation(words, WARM_UP, Kind.DEVICE))


_CUPY_VALUES = ("item", "tolist", "__bool__", "__int__", "__float__", "__index__", "__complex__")
_WARP = (
    _device("", "synchronize", "warp.synchronize()"),
    _device("", "synchronize_device", "warp.synchronize_device()", _warp_device),
    _stream("", "synchronize_stream", "warp.synchronize_stream()", _warp_stream),
    _event("", "synchronize_event", "warp.synchronize_event()"),
)

#: Module -> its calls.
CALLS: Mapping[str, tuple[Call, ...]] = MappingProxyType(
    {
        "cupy.cuda.stream": (
            _stream("_BaseStream", "synchronize", "cupy.cuda.Stream.synchronize()", _cupy_stream),
            _stream("_BaseStream", "done", "cupy.cuda.Stream.done", _cupy_stream, getter=True),
            _event("Event", "synchronize", "cupy.cuda.Event.synchronize()"),
            _event("Event", "done", "cupy.cuda.Event.done", getter=True),
        ),
        "cupy_backends.cuda.api.runtime": (
            _device("", "deviceSynchronize", "cupy.cuda.runtime.deviceSynchronize()"),
            _stream("", "streamSynchronize", "cupy.cuda.runtime.streamSynchronize()", _handle),
            _stream("", "streamQuery", "cupy.cuda.runtime.streamQuery()", _handle),
            _event("", "eventSynchronize", "cupy.cuda.runtime.eventSynchronize()"),
            _event("", "eventQuery", "cupy.cuda.runtime.eventQuery()"),
        ),
        "cupy": (
            Call("ndarray", "get", Operation(".get() of a CuPy array (cupy.asnumpy, print)", COPY), _cupy_get),
            *(
                Call("ndarray", name, Operation(f"{name}() of a CuPy array", VALUE), _cupy_current)
                for name in _CUPY_VALUES
            ),
        ),
        "numba.cuda.cudadrv.driver": (
            _device("Context", "synchronize", "numba.cuda.synchronize()"),
            _stream("Stream", "synchronize", "numba.cuda stream.synchronize()", _numba_stream),
            _event("Event", "synchronize", "numba.cuda event.synchronize()"),
            _event("Event", "query", "numba.cuda event.query()"),
        ),
        "warp._src.context": _WARP,
        "warp.context": _WARP,
        "triton.runtime.autotuner": (
            _choice("Autotuner", "_bench", "autotuning a Triton kernel (its configurations are timed)"),
        ),
        "torch._inductor.runtime.triton_heuristics": (
            _choice("CachingAutotuner", "benchmark_all_configs", "autotuning a kernel that torch.compile has made"),
        ),
    }
)

_holders = Holders()


def patches(module: ModuleType) -> list[Patch]:
    """One patch for each call of a module that it has; none where the function is another module's."""
    found = []
    for call in CALLS[module.__name__]:
        owner: Any = getattr(module, call.owner, None) if call.owner else module
        if not hasattr(owner, call.name):
            continue
        if owner is module and getattr(getattr(owner, call.name), "__module__", module.__name__) != module.__name__:
            continue
        found.append(Patch(owner, call.name, _maker(call), getter=call.getter))
    return found


def applied(module: ModuleType) -> None:
    """Replace the functions that were copied by name, ``warp.synchronize`` for instance."""
    names = [call.name for call in CALLS[module.__name__] if not call.owner]
    _holders.take(module, [vars(module)[name] for name in names if name in vars(module)])


def removed() -> None:
    """Give the originals back."""
    _holders.give_back()


def _maker(call: Call) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    operation, target = call.operation, call.target
    on_device, only_seen = operation.kind is Kind.DEVICE, operation.kind in syncs.ONLY_SEEN

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def waiting(*args: Any, **kwargs: Any) -> Any:
            if not gate.active:
                return original(*args, **kwargs)
            if only_seen and not windows:
                try:
                    return original(*args, **kwargs)
                except Exception as error:
                    syncs.blame(operation, error)
                    raise
            if target is None:
                return syncs.run(operation, 0, original, args, kwargs)
            found = target(*args, **kwargs)
            if found is None:
                return original(*args, **kwargs)
            handle, device = (0, found) if on_device else (found, None)
            return syncs.run(operation, handle, original, args, kwargs, device)

        return waiting

    return make
