"""Calls of bound functions that wait: where the guards of captures look (`guards.syncs`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ... import gate, runtime
from ...capture import windows
from ...guards import syncs
from ...guards.sync_table import ALLOCATE, WAIT, Kind, Operation
from ...streams import LAST_DEFAULT
from .specs import Spec
from .values import as_argument, given_handle

_OUTSIDE = (
    "Call it before or after the capture: nothing on the host runs at replay.",
    "If it only has to order streams, do that with stream.wait_event or stream.wait_stream.",
)


def waiting(spec: Spec, label: str) -> Callable[[Callable[..., Any], tuple[Any, ...], Mapping[str, Any]], Any]:
    """The way the calls of a function take that waits; see `calls.path_of`.

    Args:
        spec: what was said about the function; its ``waits`` is not None.
        label: the function for messages.
    """
    assert spec.waits is not None
    remedy = {Kind.UNKNOWN: _OUTSIDE, Kind.MEMORY: ALLOCATE}.get(spec.waits, WAIT)
    operation = Operation(f"{label}, called through ctypes", remedy, spec.waits)
    follows = label.endswith("StreamSynchronize")
    on_stream, only_seen = operation.kind is Kind.STREAM, operation.kind in syncs.ONLY_SEEN

    def path(original: Callable[..., Any], call: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        if not on_stream or len(call) != 2 or kwargs:
            if windows or not only_seen:
                syncs.check(operation)
            return original(*call, **kwargs)
        if runtime.found() is None:
            return original(*call)
        function, value = call
        handle = given_handle(value, f"{label}, argument 0")
        # Launches with a default-class stream go to torch's current one, so a wait for it means that too.
        current = gate.current_handle(gate.current_device()) if follows and handle <= LAST_DEFAULT else 0
        bound = current > LAST_DEFAULT and gate.binds()
        target = current if bound else handle
        asks = bool(windows) or syncs.captures(target)
        if asks:
            syncs.check(operation, target)
        if bound and not (asks and syncs.captures(current)):
            types = function.argtypes
            status = original(function, as_argument(types[0] if types else None, current, f"{label}, argument 0"))
            if status:
                return status
        return original(*call)

    return path
