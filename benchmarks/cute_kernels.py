"""The CuTe kernels that are launched, compiled in every way; imported only where the DSL is installed."""

from __future__ import annotations

import ctypes
import os
from typing import Any

import torch

if not torch.cuda.is_available():
    # The DSL asks the GPU for its architecture unless it is told.
    os.environ.setdefault("CUTE_DSL_ARCH", "sm_90a")

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass.base_dsl.jit_executor import JitExecutor
from cutlass.cute.runtime import from_dlpack, make_fake_compact_tensor, make_fake_stream

from .machine import Machine

_THREADS = 128


@cute.kernel
def _add_one(x: cute.Tensor, out: cute.Tensor):
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    i = block * _THREADS + thread
    if i < cute.size(x):
        out[i] = x[i] + 1.0


@cute.jit
def _no_stream(x: cute.Tensor, out: cute.Tensor):
    _add_one(x, out).launch(grid=[cute.ceil_div(cute.size(x), _THREADS), 1, 1], block=[_THREADS, 1, 1])


@cute.jit
def _with_stream(x: cute.Tensor, out: cute.Tensor, stream: cuda.CUstream):
    _add_one(x, out).launch(grid=[cute.ceil_div(cute.size(x), _THREADS), 1, 1], block=[_THREADS, 1, 1], stream=stream)


def _fake() -> Any:
    return make_fake_compact_tensor(cutlass.Float32, (cute.sym_int(),), stride_order=(0,))


def tvm_ffi_kernel(machine: Machine, stream: str) -> Any:
    """Compiled with ``--enable-tvm-ffi``.

    Args:
        stream: "none": without a stream parameter; "environment": takes the environment stream; "argument".
    """
    streams = {
        "none": [],
        "environment": [make_fake_stream(use_tvm_ffi_env_stream=True)],
        "argument": [make_fake_stream()],
    }
    function = _no_stream if stream == "none" else _with_stream
    compiled = cute.compile(function, _fake(), _fake(), *streams[stream], options="--enable-tvm-ffi")
    if not machine.gpu:
        from tvm_ffi.utils.kwargs_wrapper import make_kwargs_wrapper

        # What the DSL does itself, over a function that launches nothing.
        names = ["x", "out", "stream"] if stream == "argument" else ["x", "out"]
        compiled._kwargs_wrapper = make_kwargs_wrapper(machine.tvm_ffi_function("ffi_tensors"), arg_names=names)
    return compiled


def plain_kernel(machine: Machine) -> Any:
    """Compiled without TVM-FFI, with a stream parameter."""
    compiled = cute.compile(_with_stream, _fake(), _fake(), make_fake_stream(), options="")
    if not machine.gpu:
        # An executor over a C function that launches nothing; its constructor would load the kernel.
        nothing = machine.library.launch
        compiled.capi_func = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(ctypes.cast(nothing, ctypes.c_void_p).value)
        compiled._default_executor = JitExecutor(compiled, None, False)
        compiled.to = lambda device=None: compiled._default_executor
    return compiled


def cute_tensors(machine: Machine) -> tuple[Any, Any]:
    """The machine's tensors as the DSL's own."""
    return tuple(from_dlpack(tensor).mark_layout_dynamic() for tensor in (machine.x, machine.out))  # type: ignore[return-value]
