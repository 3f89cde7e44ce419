"""Tracing: what streamshim does while the DSL turns a host function into code.

A ``.launch()`` without a stream gets a constant NULL from the DSL, and one with a stream gets whatever handle the
caller passes. Here the stream operand of every launch goes through a small function that is added to the traced
module: a default-class handle (NULL, legacy, per-thread) becomes the TVM-FFI environment stream of the current
device, every other handle stays. TVM-FFI sets the environment stream to torch's current stream at each call with a
torch tensor, so a TVM-FFI kernel follows torch with no Python on its launch path, and goes on doing so after
``export_to_c`` and ``load_module``. The module's text differs from what the DSL alone would trace, so the DSL's caches,
which hash it, keep the two apart.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ... import gate, runtime
from ...callsite import Site, user_site
from ...settings import Mode
from .. import tvm_ffi_environment as environment
from . import devices, slots

#: ``_cudaGetDevice`` is the DSL runtime's own and is there in every engine; ``TVMFFIEnvGetStream`` is libtvm_ffi's
#: public C interface (tvm/ffi/extra/c_env_api.h), where 2 is kDLCUDA.
HELPER = """
llvm.func @_cudaGetDevice(!llvm.ptr) -> i32
llvm.func @TVMFFIEnvGetStream(i32, i32) -> !llvm.ptr
llvm.func internal @streamshim_stream(%given: !llvm.ptr) -> !llvm.ptr {
  %first_explicit = llvm.mlir.constant(3 : i64) : i64
  %bits = llvm.ptrtoint %given : !llvm.ptr to i64
  %is_default = llvm.icmp "ult" %bits, %first_explicit : i64
  llvm.cond_br %is_default, ^follow, ^keep
^keep:
  llvm.return %given : !llvm.ptr
^follow:
  %one = llvm.mlir.constant(1 : i32) : i32
  %zero = llvm.mlir.constant(0 : i32) : i32
  %cuda = llvm.mlir.constant(2 : i32) : i32
  %slot = llvm.alloca %one x i32 : (i32) -> !llvm.ptr
  llvm.store %zero, %slot : i32, !llvm.ptr
  %error = llvm.call @_cudaGetDevice(%slot) : (!llvm.ptr) -> i32
  %device = llvm.load %slot : !llvm.ptr -> i32
  %stream = llvm.call @TVMFFIEnvGetStream(%cuda, %device) : (i32, i32) -> !llvm.ptr
  llvm.return %stream : !llvm.ptr
}
"""
_NAME = "streamshim_stream"


@dataclass
class Trace:
    """The host function that this thread is tracing.

    Attributes:
        name: the function's name as the user wrote it.
        null_launches: where it launches without a stream.
        followed: whether such launches were made to follow torch.
    """

    name: str
    null_launches: list[Site] = field(default_factory=list)
    followed: bool = False


_local = threading.local()


def current() -> Trace | None:
    """The trace that is open on this thread."""
    return getattr(_local, "trace", None)


def trace_function(original: Callable[..., Any]) -> Callable[..., Any]:
    """For ``BaseDSL._func``, which every compile and every direct call of a ``@cute.jit`` function goes through."""

    def _func(self: Any, function: Any, *args: Any, **kwargs: Any) -> Any:
        if not gate.active or current() is not None:
            return original(self, function, *args, **kwargs)
        args, kwargs = slots.normalise_for_trace(function, args, kwargs)
        _local.trace = Trace(getattr(function, "__qualname__", "?").rpartition("<locals>.")[2])
        try:
            if kwargs.get("compile_only") or runtime.get().device_count() == 1:
                return original(self, function, *args, **kwargs)
            with runtime.on_device(devices.device_of((*args, *kwargs.values()))):
                return original(self, function, *args, **kwargs)
        finally:
            _local.trace = None

    return _func


def mangle_without_handles(original: Callable[..., Any]) -> Callable[..., Any]:
    """For ``BaseDSL.mangle_name``: the name, which is part of the cache's key, must not depend on a stream's value."""

    def mangle_name(self: Any, function_name: str, args: Any, *rest: Any) -> Any:
        if gate.active:
            args = tuple(slots.replace_streams(arg, lambda handle: 0) for arg in args)
        return original(self, function_name, args, *rest)

    return mangle_name


def launch_on_torch_stream(original: Callable[..., Any]) -> Callable[..., Any]:
    """For ``CutlassBaseDSL.cuda_launch_func``, which emits the code of a launch."""

    def cuda_launch_func(stream: Any, *args: Any, **kwargs: Any) -> Any:
        trace = current()
        if trace is None or not gate.active:
            return original(stream, *args, **kwargs)
        if len(stream) == 0:
            trace.null_launches.append(user_site())
        if gate.mode() is not Mode.CHECK and environment.available():
            stream = [_following(stream, kwargs.get("loc"))]
            trace.followed = True
        return original(stream, *args, **kwargs)

    return cuda_launch_func


def _following(stream: Any, loc: Any) -> Any:
    """Emit ``streamshim_stream(given)`` and return its result as a ``!cuda.stream``."""
    from cutlass._mlir import ir
    from cutlass._mlir.dialects import cuda, llvm

    pointer, i64 = llvm.PointerType.get(), ir.IntegerType.get_signless(64)
    _declare(ir)
    if len(stream) == 0:
        given = llvm.ZeroOp(pointer, loc=loc).result
    else:
        # The DSL has no cast from a stream to a pointer; the two are the same once lowered, and then this vanishes.
        cast = ir.Operation.create(
            "builtin.unrealized_conversion_cast", results=[pointer], operands=[stream[0]], loc=loc
        )
        given = cast.result
    followed = llvm.call(
        result=pointer, callee=_NAME, callee_operands=[given], op_bundle_sizes=[], op_bundle_operands=[], loc=loc
    )
    bits = llvm.PtrToIntOp(i64, followed, loc=loc).result
    return cuda.CastOp(src=bits, dst=cuda.StreamType.get(), loc=loc).result


def _declare(ir: Any) -> None:
    """Add the helper and what it calls to the module being traced, unless they are there."""
    module = ir.InsertionPoint.current.block.owner.operation
    while module.name != "builtin.module":
        module = module.parent.operation
    body = module.regions[0].blocks[0]
    known = {_symbol(op) for op in body.operations}
    if _NAME not in known:
        for op in ir.Module.parse(HELPER).body.operations:
            if _symbol(op) not in known:
                body.append(op.operation.clone())


def _symbol(op: Any) -> str:
    attributes = op.operation.attributes
    return str(attributes["sym_name"].value) if "sym_name" in attributes else ""
