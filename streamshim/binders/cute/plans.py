"""What is known about each compiled function: found when it is compiled, or, for older ones, at its first call."""

from __future__ import annotations

import gc
import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any

from ... import gate, log
from ...gate import Launch
from ...settings import Mode
from . import slots, tracing
from .slots import NO_DEFAULT, Plan, Slot

#: The attribute that holds an object's plan. Plain attributes: a WeakKeyDictionary would cost as much as the gate.
ATTRIBUTE = "_streamshim_plan"

_INSTALL_FIRST = (
    "Call streamshim.install() before the kernel is compiled, or compile it again, so that its launch takes torch's "
    "stream."
)
_PASS_STREAM = (
    "Run with streamshim in bind mode, or give the @cute.jit function a stream parameter and pass it on: "
    ".launch(..., stream=stream)."
)
_NEEDS_TVM_FFI = "Install apache-tvm-ffi (pip install 'streamshim[cute]'), which supplies the stream at launch."


def plan_after_compile(original: Callable[..., Any]) -> Callable[..., Any]:
    """For ``JitCompiledFunction.__init__``: the one place where the compile-time arguments of every kind meet."""
    parameters = inspect.signature(original)

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        trace = tracing.current()
        execution_args = execution_args_of(self)
        if not gate.active:
            return
        if trace is None or execution_args is None:
            plan_of(self)  # loaded, not compiled
            return
        given = parameters.bind(self, *args, **kwargs).arguments
        values = [*(given.get("dynamic_args") or ()), *(given.get("dynamic_kwargs") or {}).values()]
        found = tuple(_slots(execution_args, values, _is_tvm_ffi(self)))
        environment = bool(trace.null_launches) or any(map(slots.is_environment_stream, values))
        tensor = _place_of_tensor(values) if _is_direct(self, execution_args) else -1
        _attach(self, execution_args, Plan(found, _launch(self, trace), environment, tensor))

    return __init__


def plan_of(compiled: Any) -> Plan:
    """The plan of a compiled function; made now for one that was compiled or loaded without the shim."""
    plan: Plan | None = getattr(compiled, ATTRIBUTE, None)
    if plan is None:
        execution_args = execution_args_of(compiled)
        found = () if execution_args is None else tuple(_slots(execution_args, None, _is_tvm_ffi(compiled), compiled))
        launch = Launch(f"CuTe kernel {_name(compiled)!r} ({_flavour(compiled)})")
        if not found and _launches_on_null(compiled):
            launch = Launch(
                launch.what, False, "it was compiled before streamshim.install(), without a stream", (_INSTALL_FIRST,)
            )
        plan = Plan(found, launch, tensor=_annotated_tensor(compiled, execution_args))
        _attach(compiled, execution_args, plan)
    return plan


def plan_what_exists(compiled_function: type) -> None:
    """Give a plan to every function that was compiled before `install`; a cold path, as long as the heap is large."""
    kinds = [compiled_function]
    for kind in kinds:
        kinds += kind.__subclasses__()
    # An object refers to its class. To look at every object's class from here would take three times as long.
    for candidate in gc.get_referrers(*kinds):
        if type(candidate) in kinds:
            try:
                plan_of(candidate)
            except Exception:
                log.debug("streamshim: no plan for a compiled function of unknown shape", exc_info=True)


def _annotated_tensor(compiled: Any, execution_args: Any) -> int:
    """The place of a first argument annotated as a tensor; -1 if there is none, or the DSL's ``__call__`` does more."""
    if execution_args is None or not _is_direct(compiled, execution_args):
        return -1
    types = execution_args._meta.annotated_types
    return 0 if types and getattr(types[0], "__name__", "") == "Tensor" else -1


def _place_of_tensor(values: list[Any]) -> int:
    """The place of the first argument that was compiled as a tensor on a GPU; -1 if there is none.

    TVM-FFI refuses a tensor of another kind of device there, so that at a call its type says enough.
    """
    for place, value in enumerate(values):
        memspace = str(getattr(value, "memspace", ""))
        if "gmem" in memspace or (type(value).__module__ == "torch" and getattr(value, "is_cuda", False) is True):
            return place - sum(map(slots.is_environment_stream, values[:place]))
    return -1


def execution_args_of(compiled: Any) -> Any:
    """The DSL's argument binder of a compiled function or JIT module: ``execution_args``, before 4.5 ``args_spec``."""
    return getattr(compiled, "execution_args", None) or getattr(compiled, "args_spec", None)


def _attach(compiled: Any, execution_args: Any, plan: Plan) -> None:
    setattr(compiled, ATTRIBUTE, plan)
    if execution_args is not None:
        setattr(execution_args, ATTRIBUTE, plan)


def _slots(execution_args: Any, values: list[Any] | None, tvm_ffi: bool, compiled: Any = None) -> Iterator[Slot]:
    meta = execution_args._meta
    defaults = [*meta.pos_defaults, *meta.kwonly_defaults]
    known = values if values is not None and len(values) == len(meta.all_names) else [NO_DEFAULT] * len(meta.all_names)
    visible = _tvm_ffi_names(compiled) if tvm_ffi and compiled is not None else None
    index = 0
    for i, name in enumerate(meta.all_names):
        # A TVM-FFI function does not have its environment streams as parameters, so later ones move up.
        if tvm_ffi and (slots.is_environment_stream(known[i]) or (visible is not None and name not in visible)):
            continue
        positional = i < len(meta.pos_names)
        default = NO_DEFAULT if defaults[i] is execution_args._missing else defaults[i]
        yield from slots.find(name, index if positional else -1, known[i], meta.annotated_types[i], default)
        index += positional


def _tvm_ffi_names(compiled: Any) -> set[str] | None:
    wrapper = getattr(compiled, "_kwargs_wrapper", None)
    return set(inspect.signature(wrapper).parameters) if inspect.isfunction(wrapper) else None


def _launch(compiled: Any, trace: tracing.Trace) -> Launch:
    what = f"CuTe kernel {trace.name!r} ({_flavour(compiled)})"
    if not trace.null_launches or trace.followed:
        return Launch(what)
    where = ", ".join(dict.fromkeys(str(site) for site in trace.null_launches))
    remedy = _PASS_STREAM if gate.mode() is Mode.CHECK else _NEEDS_TVM_FFI
    return Launch(what, False, f"it launches without a stream at {where}", (remedy,))


def _launches_on_null(compiled: Any) -> bool:
    """Whether a function without a stream parameter launches on NULL, so far as its module tells."""
    module = getattr(compiled, "ir_module", None)
    if module is None:
        return False  # A reloaded object has no module: what it does cannot be known, so nothing is claimed.
    from cutlass._mlir import ir

    used = False

    def visit(op: Any) -> Any:
        nonlocal used
        if op.name == "llvm.call" and "TVMFFIEnvGetStream" in str(op.attributes["callee"]):
            # Every TVM-FFI function asks for the environment stream; only some use the answer.
            used = used or any(True for _ in op.results[0].uses)
        return ir.WalkResult.ADVANCE

    module.operation.walk(visit)
    return not used


def _is_tvm_ffi(compiled: Any) -> bool:
    return any(c.__name__ == "TVMFFIJitCompiledFunctionBase" for c in type(compiled).__mro__)


def _is_direct(compiled: Any, execution_args: Any) -> bool:
    return _is_tvm_ffi(compiled) and not getattr(execution_args, "has_pointer_address_arg_specs", False)


def _flavour(compiled: Any) -> str:
    return "TVM-FFI" if _is_tvm_ffi(compiled) else "plain"


def _name(compiled: Any) -> str:
    """The function's own name out of the DSL's mangled one: ``cutlass_NAME_FakeTensor...``, with prefixes if loaded."""
    mangled = str(getattr(compiled, "function_name", "?"))
    return re.split(r"_(?:Fake)?Tensor", mangled.rpartition("cutlass_")[2])[0]
