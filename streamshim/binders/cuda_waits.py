"""cuda-python's calls that wait, copy at once, allocate, or begin and end a capture: where the guards of captures look.

Which functions these are is data in `cuda_functions`. Waiting calls and allocations are refused where they would break
a capture (`guards.syncs`). Copies and sets without a stream run at once, outside the graph, so they are launches that
cannot be bound (`gate`). A capture that begins here opens a window like one of torch's.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType, NoneType
from typing import Any

from .. import capture, gate, runtime
from ..capture import windows
from ..gate import Launch
from ..guards import syncs
from ..guards.sync_table import ALLOCATE, WAIT, Kind, Operation
from ..patching import Patch
from ..streams import LAST_DEFAULT, LEGACY
from .cuda_functions import ALLOCATING, AT_ONCE, BEGINS, ENDS, WAITING, WAITS
from .stream_objects import stream_object

_KINDS = {"device": Kind.DEVICE, "stream": Kind.STREAM, "event": Kind.EVENT}


_Maker = Callable[[Callable[..., Any]], Callable[..., Any]]


def names(module: str) -> list[str]:
    """The functions of a module, by its name, that are replaced here."""
    return list(_makers(module))


def patches(module: ModuleType) -> list[Patch]:
    """One patch for each function of the tables that the module has."""
    return [Patch(module, name, make) for name, make in _makers(module.__name__).items() if hasattr(module, name)]


def _makers(module: str) -> dict[str, _Maker]:
    makers: dict[str, _Maker] = {}
    for name, kind in WAITING[module].items():
        makers[name] = _waiting(Operation(f"{module}.{name}", WAIT, _KINDS[kind]), name == WAITS[module])
    for name in ALLOCATING[module]:
        makers[name] = _allocating(Operation(f"{module}.{name}", ALLOCATE, Kind.MEMORY))
    for name in AT_ONCE[module]:
        makers[name] = _at_once(Launch(f"{module}.{name}", can_bind=False, remedy=_AT_ONCE_REMEDY))
    makers |= {name: _begin(place) for name, place in BEGINS[module].items()}
    makers[ENDS[module]] = _end
    return makers


_AT_ONCE_REMEDY = (
    "Use the call that ends in Async and pass torch's current stream, or None and let streamshim fill it in.",
    "Or do this once before the capture, if it only prepares something.",
)


def _waiting(operation: Operation, follows: bool) -> _Maker:
    """Makes the replacement of a call that waits.

    Args:
        operation: the call.
        follows: it waits for a stream: with a default-class one, for torch's current stream too, to which launches
            with the same argument go.
    """

    on_stream = operation.kind is Kind.STREAM

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        if operation.kind in syncs.ONLY_SEEN:
            return _watching_windows(operation, original)

        def replacement(*args: Any, **kwargs: Any) -> Any:
            if not gate.active or runtime.found() is None:
                return original(*args, **kwargs)
            value = args[0] if args else next(iter(kwargs.values()), None)
            handle = _handle(value) if on_stream else 0
            current = gate.current_handle(gate.current_device()) if follows and 0 <= handle <= LAST_DEFAULT else 0
            bound = current > LAST_DEFAULT and gate.binds()
            target = current if bound else handle if handle > 0 else 0
            asks = bool(windows) or not on_stream or syncs.captures(target)
            if asks:
                syncs.check(operation, target)
            if bound and not (asks and syncs.captures(current)):
                result = original(stream_object(current))
                if int(result[0]) != 0:
                    return _blamed(operation, result) if windows else result
            result = original(*args, **kwargs)
            return _blamed(operation, result) if windows else result

        return replacement

    return make


def _watching_windows(operation: Operation, original: Callable[..., Any]) -> Callable[..., Any]:
    """The replacement of a call that only captures whose begin was seen have to be kept from."""

    def replacement(*args: Any, **kwargs: Any) -> Any:
        if windows and gate.active:
            syncs.check(operation)
        result = original(*args, **kwargs)
        return _blamed(operation, result) if windows and gate.active else result

    return replacement


#: Types of stream arguments. Those of ``cuda.bindings`` are added when they are met first.
_stream_types: set[type] = {int, NoneType}


def _handle(value: Any) -> int:
    """The handle of a stream argument; -1 for what is none, of which the original complains."""
    kind = type(value)
    if kind in _stream_types or _is_stream_type(kind):
        return int(value or 0)
    return -1


def _is_stream_type(kind: type) -> bool:
    modules = {"cuda.bindings.driver": "CUstream", "cuda.bindings.runtime": "cudaStream_t"}
    if kind not in [getattr(sys.modules[m], name) for m, name in modules.items() if m in sys.modules]:
        return False
    _stream_types.add(kind)
    return True


def _allocating(operation: Operation) -> _Maker:
    """Makes the replacement of a call that allocates, frees or pins memory."""

    return lambda original: _watching_windows(operation, original)


def _blamed(operation: Operation, result: Any) -> Any:
    """A result, after noting a status that says that the call has broken a capture."""
    if isinstance(result, tuple) and int(result[0]) != 0:
        syncs.blame(operation, RuntimeError(f"{result[0]!r} (error code: {int(result[0])})"))
    return result


def _at_once(launch: Launch) -> _Maker:
    """Makes the replacement of a copy or set that takes no stream and is over when it returns."""

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def replacement(*args: Any, **kwargs: Any) -> Any:
            # Where torch has no streams there is no capture of torch's, and such a copy is what it was.
            if gate.active and runtime.found() is not None:
                gate.resolve(0, gate.current_device(), launch)
            return original(*args, **kwargs)

        return replacement

    return make


def _begin(place: int) -> _Maker:
    """Makes the replacement of a call that begins a capture; ``place`` is that of the mode among its arguments."""

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def replacement(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            if gate.active and capture.enabled and int(result[0]) == 0 and runtime.found() is not None:
                values = (*args, *kwargs.values())
                handle = int(next((v for n, v in kwargs.items() if n in ("hStream", "stream")), values[0]))
                mode = next((v for n, v in kwargs.items() if n == "mode"), values[place])
                modes = ("global", "thread_local", "relaxed")
                capture.begun(handle, gate.current_device(), modes[int(mode)])
            return result

        return replacement

    return make


def _end(original: Callable[..., Any]) -> Callable[..., Any]:
    """The replacement of a call that ends a capture. An error is a status here, so what explains it is only logged.

    What the judges of a capture say (`capture.judges`) is raised all the same: to CUDA nothing is wrong with it.
    """

    def replacement(*args: Any, **kwargs: Any) -> Any:
        values = (*args, *kwargs.values())
        handle = _handle(values[0]) if len(values) == 1 else -1
        closing = capture.ending(handle) if handle > LEGACY and capture.enabled else None
        result = original(*args, **kwargs)
        if closing is None:
            return result
        if int(result[0]) != 0 and runtime.get().capture_state(closing.stream).id == closing.id:
            capture.goes_on(closing)
            return result
        try:
            if int(result[0]) == 0:
                capture.judged(closing)
            elif capture.explain is not None:
                # It logs what it finds; there is nothing to raise in a call that returns its errors.
                capture.explain(closing, RuntimeError(f"{result[0]!r} (error code: {int(result[0])})"))
        finally:
            capture.ended(handle)
        return result

    return replacement
