"""Calls of functions compiled without TVM-FFI, and of ``@cute.jit`` functions directly.

Arguments become a list of addresses (`generate_execution_args`), and the list is run (`run_compiled_program`); users
call the two steps separately and keep the list. So streams are normalised in the first step, and the rule is applied
in the second, where every way to a launch comes by: a kept list follows torch at each run.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ... import gate, runtime
from .. import stream_objects
from .. import tvm_ffi_environment as environment
from ..stream_objects import address_of, by_address
from . import devices
from .plans import ATTRIBUTE, execution_args_of, plan_of
from .slots import Plan

_ABSENT: Any = object()


class DeviceArgs(list[Any]):
    """Execution arguments of tensors on a device that was not current; only made where there are several devices."""

    device: int = 0


def normalise_arguments(original: Callable[..., Any]) -> Callable[..., Any]:
    """For ``ExecutionArgs.generate_execution_args``, the funnel of every plain call that is not traced."""

    def generate_execution_args(self: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not gate.active:
            return original(self, args, kwargs)
        plan = getattr(self, ATTRIBUTE, None)
        if plan is not None and plan.slots:
            place = plan.only
            value = args[place] if 0 <= place < len(args) else _ABSENT
            # `Plan.bind` spelt out for the usual values.
            if value is None or type(value) is stream_objects.stream_type:
                filled = [*args]
                filled[place] = stream_objects.stream_object(0 if value is None else int(value))
                args = tuple(filled)
            else:
                args, kwargs = plan.bind(args, kwargs, _as_given)
        if gate.one_device or runtime.get().device_count() == 1:
            return original(self, args, kwargs)
        device = devices.device_of((*args, *kwargs.values()))
        # torch exports a tensor through DLPack only while its device is current.
        with runtime.on_device(device) as switched:
            exe_args, adapted = original(self, args, kwargs)
        if switched:
            exe_args = DeviceArgs(exe_args)
            exe_args.device = device
        return exe_args, adapted

    return generate_execution_args


def _as_given(handle: int, label: str) -> int:
    return handle


def run_on_torch_stream(original: Callable[..., Any]) -> Callable[..., Any]:
    """For ``JitExecutor.run_compiled_program``, the last step before every plain launch."""

    def run_compiled_program(self: Any, exe_args: list[Any]) -> Any:
        if not gate.active:
            return original(self, exe_args)
        current = 0 if gate.one_device else gate.current_device()
        device = exe_args.device if type(exe_args) is DeviceArgs else current
        plan = getattr(self.jit_module, ATTRIBUTE, None) or _plan_of(self.jit_module)
        launch = plan.launch
        if not launch.can_bind:
            gate.resolve(0, device, launch)
        bound = None
        for i, address in enumerate(exe_args):
            if address in by_address:
                given = by_address[address]
                handle = gate.resolve(given, device, launch, "stream")
                if handle != given:
                    # A copy: the list may be run by several threads at a time, each with its own current stream.
                    bound = bound if bound is not None else list(exe_args)
                    bound[i] = address_of(handle)
        if bound is not None:
            exe_args = bound
        if device != current:
            with runtime.on_device(device):
                return _run(original, plan, device, self, exe_args)
        return _run(original, plan, device, self, exe_args) if plan.environment else original(self, exe_args)

    return run_compiled_program


def _plan_of(jit_module: Any) -> Plan:
    """The plan of what an executor runs, which is the compiled function or only shares its argument binder."""
    return getattr(execution_args_of(jit_module), ATTRIBUTE, None) or plan_of(jit_module)


def _run(original: Callable[..., Any], plan: Plan, device: int, executor: Any, exe_args: list[Any]) -> Any:
    if plan.environment:
        return environment.following(plan.launch, device, original, executor, exe_args)
    return original(executor, exe_args)
