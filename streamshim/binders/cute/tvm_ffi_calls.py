"""Calls of functions compiled with ``--enable-tvm-ffi``.

A function without a stream parameter whose first argument is a torch tensor on a GPU needs nothing here: TVM-FFI sets
the environment stream by itself. All others get their stream arguments resolved, and the environment stream set.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ... import gate
from ...streams import LAST_DEFAULT, handle_of
from .. import stream_objects
from .. import tvm_ffi_environment as environment
from ..stream_objects import by_handle
from . import devices
from .plans import plan_of
from .slots import Plan

#: A compiled function's attribute with its way: the place of its stream, the DSL's wrapper of its arguments, its plan.
#: Read on the launch path, where each look-up counts, so these three are one.
_WAY = "_streamshim_way"
#: In the place's stead: there is no stream, and a tensor comes first; the way is longer.
_NO_STREAM, _LONGER = -1, 1 << 30


def call_with_wrapper(original: Callable[..., Any]) -> Callable[..., Any]:
    """For ``TVMFFIJitCompiledFunctionWithKwargs.__call__``, which does no more than call ``_kwargs_wrapper``."""
    # Doing the same instead of calling it would leave out whoever has wrapped the method before us.
    code = getattr(original, "__code__", None)
    if code is None or not code.co_filename.endswith("tvm_ffi_provider.py"):
        return call_bare(original)

    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            place, run, plan = self._streamshim_way
        except AttributeError:
            if not gate.active:
                return original(self, *args, **kwargs)
            place, run, plan = _way_of(self)
        if place < 0:
            if args and type(args[0]) is devices.tensor_type:
                return run(*args, **kwargs)
        elif place < len(args) and gate.active:
            if gate.one_device and not plan.environment:
                device = 0
            elif plan.tensor < len(args) and type(args[plan.tensor]) is devices.tensor_type:
                device = args[plan.tensor].get_device()
            else:
                return _call(original, self, plan, args, kwargs)
            value = args[place]
            handle = gate.current_handle(device)
            if type(value) is stream_objects.stream_type:
                given = int(value)
                if given == handle:
                    return run(*args, **kwargs)
            else:
                given = 0 if value is None else handle_of(value, plan.slots[0].name)
            # `gate.resolve` spelt out, as far as it needs no question to the driver.
            if given != handle and not (gate._binds and given <= LAST_DEFAULT):
                handle = gate.resolve(given, device, plan.launch, plan.slots[0].name)
            filled = [*args]
            filled[place] = by_handle.get(handle) or stream_objects.stream_object(handle)
            return run(*filled, **kwargs)
        elif plan.simple and 0 <= plan.tensor < len(args) and type(args[plan.tensor]) is devices.tensor_type and run:
            return run(*args, **kwargs)
        return _call(original, self, plan, args, kwargs)

    return __call__


def _way_of(compiled: Any) -> tuple[int, Any, Plan]:
    """What `_WAY` holds; kept there once the DSL has made its wrapper."""
    plan, run = plan_of(compiled), compiled._kwargs_wrapper
    if run is None:
        return _LONGER, None, plan
    place = _NO_STREAM if plan.simple_first else plan.direct if plan.direct >= 0 else _LONGER
    setattr(compiled, _WAY, (place, run, plan))
    return place, run, plan


def call_bare(original: Callable[..., Any]) -> Callable[..., Any]:
    """For ``TVMFFIJitCompiledFunction.__call__``: functions without arguments, and in 4.4 all without defaults."""

    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not gate.active:
            return original(self, *args, **kwargs)
        return _call(original, self, plan_of(self), args, kwargs)

    return __call__


def _call(original: Callable[..., Any], self: Any, plan: Plan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The calls that need more: stream arguments, other tensors than torch's, kernels that are fixed to NULL."""
    if not gate.active:
        return original(self, *args, **kwargs)
    device = devices.device_of((*args, *kwargs.values()))
    launch = plan.launch
    if not launch.can_bind:
        gate.resolve(0, device, launch)
    if plan.slots:
        args, kwargs = plan.bind(args, kwargs, lambda given, label: gate.resolve(given, device, launch, label))
    if not plan.environment or (args and type(args[0]) is devices.tensor_type and args[0].is_cuda):
        return original(self, *args, **kwargs)
    return environment.following(launch, device, original, self, *args, **kwargs)
