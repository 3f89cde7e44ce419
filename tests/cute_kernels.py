"""CuTe DSL host functions in every form that people write; all compute ``out = x + 1`` over one-dimensional tensors."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream

THREADS = 32
FFI = "--enable-tvm-ffi"


@cute.kernel
def add_one(x: cute.Tensor, out: cute.Tensor):
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    i = block * THREADS + thread
    if i < cute.size(x):
        out[i] = x[i] + 1.0


@cute.jit
def no_stream(x: cute.Tensor, out: cute.Tensor):
    add_one(x, out).launch(grid=[cute.ceil_div(cute.size(x), THREADS), 1, 1], block=[THREADS, 1, 1])


@cute.jit
def with_stream(x: cute.Tensor, out: cute.Tensor, stream: cuda.CUstream):
    add_one(x, out).launch(grid=[cute.ceil_div(cute.size(x), THREADS), 1, 1], block=[THREADS, 1, 1], stream=stream)


@cute.jit
def stream_first(queue: cuda.CUstream, x: cute.Tensor, out: cute.Tensor):
    add_one(x, out).launch(grid=[cute.ceil_div(cute.size(x), THREADS), 1, 1], block=[THREADS, 1, 1], stream=queue)


@cute.jit
def default_none(x: cute.Tensor, out: cute.Tensor, stream: cuda.CUstream = None):
    add_one(x, out).launch(grid=[cute.ceil_div(cute.size(x), THREADS), 1, 1], block=[THREADS, 1, 1], stream=stream)


@cute.jit
def keyword_only(x: cute.Tensor, out: cute.Tensor, *, stream):
    add_one(x, out).launch(grid=[cute.ceil_div(cute.size(x), THREADS), 1, 1], block=[THREADS, 1, 1], stream=stream)


@cute.jit
def forwards_in_part(x: cute.Tensor, middle: cute.Tensor, out: cute.Tensor, stream: cuda.CUstream):
    add_one(x, middle).launch(grid=[cute.ceil_div(cute.size(x), THREADS), 1, 1], block=[THREADS, 1, 1])
    add_one(middle, out).launch(grid=[cute.ceil_div(cute.size(x), THREADS), 1, 1], block=[THREADS, 1, 1], stream=stream)


class Layer:
    """An instance with a ``@cute.jit __call__``; the stream parameter has no annotation."""

    @cute.jit
    def __call__(self, x: cute.Tensor, out: cute.Tensor, stream):
        add_one(x, out).launch(grid=[cute.ceil_div(cute.size(x), THREADS), 1, 1], block=[THREADS, 1, 1], stream=stream)


class NamedParams(NamedTuple):
    out: cute.Tensor
    stream: cuda.CUstream


@cute.jit
def in_named_tuple(x: cute.Tensor, params: NamedParams):
    add_one(x, params.out).launch(
        grid=[cute.ceil_div(cute.size(x), THREADS), 1, 1], block=[THREADS, 1, 1], stream=params.stream
    )


@dataclass
class DataParams:
    out: cute.Tensor
    stream: cuda.CUstream


@cute.jit
def in_dataclass(x: cute.Tensor, params: DataParams):
    add_one(x, params.out).launch(
        grid=[cute.ceil_div(cute.size(x), THREADS), 1, 1], block=[THREADS, 1, 1], stream=params.stream
    )


def fake() -> Any:
    """A fake one-dimensional float32 tensor of any length."""
    return make_fake_compact_tensor(cutlass.Float32, (cute.sym_int(),), stride_order=(0,))


def env_stream() -> Any:
    """The fake stream that makes a TVM-FFI function take its environment stream."""
    return make_fake_stream(use_tvm_ffi_env_stream=True)


def compile_fake(function: Any, *streams: Any, options: str = FFI, tensors: int = 2, **kwargs: Any) -> Any:
    """Compile for fake tensors followed by the given streams."""
    return cute.compile(function, *(fake() for _ in range(tensors)), *streams, options=options, **kwargs)
