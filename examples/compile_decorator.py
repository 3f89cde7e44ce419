"""`@streamshim.compile`: a CuTe DSL function that takes torch tensors as they are. Needs a GPU and CuTe DSL:

pip install '.[cute]'
python examples/compile_decorator.py
"""

import sys

import torch

import streamshim

try:
    import cuda.bindings.driver as cuda
    import cutlass
    import cutlass.cute as cute
except ImportError as error:
    print(f"This example needs CuTe DSL ({error}): pip install '.[cute]'")
    sys.exit(0)
if not torch.cuda.is_available():
    print("This example needs a GPU.")
    sys.exit(0)

THREADS = 128


@cute.kernel
def scale_kernel(x: cute.Tensor, out: cute.Tensor, factor: cutlass.Float32):
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    i = block * THREADS + thread
    if i < cute.size(x):
        out[i] = x[i] * factor


@streamshim.compile
@cute.jit
def scale(x: cute.Tensor, out: cute.Tensor, factor: cutlass.Float32, stream: cuda.CUstream):
    blocks = cute.ceil_div(cute.size(x), THREADS)
    scale_kernel(x, out, factor).launch(grid=[blocks, 1, 1], block=[THREADS, 1, 1], stream=stream)


x = torch.arange(1000, dtype=torch.float32, device="cuda")
out = torch.empty_like(x)

scale(x, out, 2.0)  # compiled here; the stream is filled in, and is torch's current one
print("eager     ", out[:5].tolist())

graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    scale(x, out, 3.0)  # the same signature, so it is not compiled again; a node of the graph
x += 1
graph.replay()
print("in a graph", out[:5].tolist())

scale(x[:10], out[:10], 4.0)  # another length is the same signature too
print("signatures", scale.signatures)
