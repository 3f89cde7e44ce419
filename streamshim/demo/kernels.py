"""The demo's CuTe DSL kernel: ``h = a*h + b*x; y = c*h``, one thread for each channel.

In a module of its own: importing it imports the DSL, which reads the source of what it compiles.
"""

# The bodies of @cute.jit and @cute.kernel functions are the DSL's language: operators and attributes that exist only
# while it traces them, which a type checker cannot follow.
# No postponed annotations here, since the DSL reads them.
# mypy: ignore-errors

from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream

THREADS = 64
FFI = "--enable-tvm-ffi"


@cute.kernel
def state_update(x: cute.Tensor, h: cute.Tensor, a: cute.Tensor, b: cute.Tensor, c: cute.Tensor, y: cute.Tensor):
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    i = block * THREADS + thread
    if i < cute.size(x):
        state = a[i] * h[i] + b[i] * x[i]
        h[i] = state
        y[i] = c[i] * state


@cute.jit
def update(x: cute.Tensor, h: cute.Tensor, a: cute.Tensor, b: cute.Tensor, c: cute.Tensor, y: cute.Tensor):
    blocks = cute.ceil_div(cute.size(x), THREADS)
    state_update(x, h, a, b, c, y).launch(grid=[blocks, 1, 1], block=[THREADS, 1, 1])


@cute.jit
def update_with_stream(
    x: cute.Tensor,
    h: cute.Tensor,
    a: cute.Tensor,
    b: cute.Tensor,
    c: cute.Tensor,
    y: cute.Tensor,
    stream: cuda.CUstream,
):
    blocks = cute.ceil_div(cute.size(x), THREADS)
    state_update(x, h, a, b, c, y).launch(grid=[blocks, 1, 1], block=[THREADS, 1, 1], stream=stream)


def compile_update(**options: Any) -> Any:
    """Compile `update` for six vectors of one length; more options go to ``cute.compile``."""
    return cute.compile(update, *_vectors(), options=FFI, **options)


def compile_update_with_stream() -> Any:
    """Compile `update_with_stream`."""
    return cute.compile(update_with_stream, *_vectors(), make_fake_stream(), options=FFI)


def _vectors() -> list[Any]:
    length = cute.sym_int()
    return [make_fake_compact_tensor(cutlass.Float32, (length,), stride_order=(0,)) for _ in range(6)]
