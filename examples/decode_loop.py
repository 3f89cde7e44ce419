"""A custom kernel in a captured decode step, without and with streamshim. Needs a GPU and CuTe DSL:

    pip install '.[cute]'
    python examples/decode_loop.py

The kernel is a state-space layer, ``h = 0.75*h + x``, in a language model of three lines: look up the last token,
update the state, take the token that fits the state best. `python -m streamshim demo` tells this story at more length.
"""

import sys

import torch

import streamshim

try:
    import cutlass
    import cutlass.cute as cute
    import tvm_ffi  # noqa: F401  (what --enable-tvm-ffi needs)
    from cutlass.cute.runtime import make_fake_compact_tensor
except ImportError as error:
    print(f"This example needs CuTe DSL ({error}): pip install '.[cute]'")
    sys.exit(0)
if not torch.cuda.is_available():
    print("This example needs a GPU; `python -m streamshim demo` tells the same story on a simulator.")
    sys.exit(0)

WIDTH, WORDS, TOKENS = 64, 32, 12


@cute.kernel
def state_kernel(x: cute.Tensor, h: cute.Tensor):
    i, _, _ = cute.arch.thread_idx()
    h[i] = 0.75 * h[i] + x[i]


@cute.jit
def state_update(x: cute.Tensor, h: cute.Tensor):
    # No stream here: the launch goes to the NULL stream, whatever torch's current stream is.
    state_kernel(x, h).launch(grid=[1, 1, 1], block=[WIDTH, 1, 1])


def compile_kernel():
    vectors = [make_fake_compact_tensor(cutlass.Float32, (WIDTH,), stride_order=(0,)) for _ in range(2)]
    return cute.compile(state_update, *vectors, options="--enable-tvm-ffi")


generator = torch.Generator().manual_seed(42)
embedding = torch.randn(WORDS, WIDTH, generator=generator).cuda()
readout = torch.randn(WORDS, WIDTH, generator=generator).cuda()
token = torch.zeros(1, dtype=torch.int64, device="cuda")
x = torch.zeros(1, WIDTH, device="cuda")
h = torch.zeros(WIDTH, device="cuda")


def decode(kernel, graphs: bool) -> list[int]:
    """Write some tokens: eagerly, or by replaying one captured step."""

    def step() -> None:
        torch.index_select(embedding, 0, token, out=x)
        kernel(x[0], h)
        token.copy_((readout @ h).argmax(dim=0, keepdim=True))

    run = step
    if graphs:
        warm_up = torch.cuda.Stream()
        warm_up.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(warm_up):
            step()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        run = graph.replay
    torch.cuda.synchronize()
    token.zero_()
    h.zero_()
    written = []
    for i in range(TOKENS):
        # The first step is the prompt's, which engines run eagerly.
        (run if i else step)()
        written.append(token.item())
    return written


plain = compile_kernel()
print("graphs off:                    ", decode(plain, graphs=False))
# The kernel ran once, while capturing; no replay moves the state, so the first token comes again and again.
print("graphs on:                     ", decode(plain, graphs=True))

with streamshim.install():
    # Compiled again, since a kernel without a stream parameter gets its stream when it is compiled.
    print("graphs on, streamshim in place:", decode(compile_kernel(), graphs=True))
