"""``streamshim.compile`` on a GPU."""

import cuda.bindings.driver as cuda
import cute_kernels as kernels
import cutlass
import cutlass.cute as cute
import pytest
import torch
from harness import RIGHT, N, captured, eager_rounds, fresh_stream

import streamshim

THREADS = kernels.THREADS


@cute.kernel
def scale_kernel(x: cute.Tensor, out: cute.Tensor, factor: cutlass.Float32, plus: cutlass.Constexpr):
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    i = block * THREADS + thread
    if i < cute.size(x):
        out[i] = x[i] * factor + plus


@streamshim.compile
@cute.jit
def scale(queue: cuda.CUstream, x: cute.Tensor, out: cute.Tensor, factor: cutlass.Float32, plus: cutlass.Constexpr = 1):
    scale_kernel(x, out, factor, plus).launch(
        grid=[cute.ceil_div(cute.size(x), THREADS), 1, 1], block=[THREADS, 1, 1], stream=queue
    )


@cute.kernel
def copy_kernel(x: cute.Tensor, out: cute.Tensor):
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    if thread < cute.size(x, mode=[1]):
        out[block, thread] = x[block, thread]


@streamshim.compile(options="--enable-tvm-ffi")
@cute.jit
def copy(x: cute.Tensor, out: cute.Tensor, stream):
    copy_kernel(x, out).launch(grid=[cute.size(x, mode=[0]), 1, 1], block=[256, 1, 1], stream=stream)


PLAIN = streamshim.compile(kernels.with_stream, options="")
FORMS = {
    "stream parameter": streamshim.compile(kernels.with_stream),
    "no stream parameter": streamshim.compile(kernels.no_stream),
    "plain": PLAIN,
    "keyword-only": streamshim.compile(kernels.keyword_only),
    "default": streamshim.compile(kernels.default_none),
    "stream first": streamshim.compile(kernels.stream_first),
    "instance": streamshim.compile(kernels.Layer()),
    "with a number and a constant": lambda x, out: scale(x, out, 1.0),
}


@pytest.mark.parametrize("call", FORMS.values(), ids=FORMS)
def test_it_is_in_the_graph_and_waits_for_its_input(call):
    assert captured(call) == RIGHT
    assert eager_rounds(call, rounds=20) == 20


def test_it_compiles_once_for_each_signature():
    layer = streamshim.compile(kernels.with_stream)
    for n in (10, 100, 1000):
        layer(torch.zeros(n, device="cuda"), torch.zeros(n, device="cuda"))
    assert layer.signatures == 1
    unaligned = torch.zeros(9, device="cuda")[1:]
    layer(unaligned, torch.zeros(8, device="cuda"))
    assert layer.signatures == 2
    x, out = torch.zeros(N, device="cuda"), torch.zeros(N, device="cuda")
    before = scale.signatures
    for factor in (1.0, 2.0, 3.0):
        scale(x, out, factor, plus=11)
    assert scale.signatures == before + 1
    scale(x, out, 1.0, plus=12)
    assert scale.signatures == before + 2


@pytest.mark.parametrize("shape", [(5, 7), (1, 256), (256, 1)])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32, torch.uint8])
def test_ranks_strides_and_dtypes(shape, transposed, dtype):
    x = torch.arange(shape[0] * shape[1], device="cuda").reshape(shape).to(dtype)
    x = x.t() if transposed else x
    out = torch.zeros(x.shape, device="cuda", dtype=dtype)
    copy(x, out)
    assert torch.equal(x, out)


def test_a_stream_may_be_passed_and_is_treated_by_the_rule():
    layer = streamshim.compile(kernels.with_stream)
    side = fresh_stream()
    for given in (None, 0, cuda.CUstream(0), side, side.cuda_stream):
        x, out = torch.full((N,), 3.0, device="cuda"), torch.zeros(N, device="cuda")
        torch.cuda.synchronize()
        layer(x, out, given)
        torch.cuda.synchronize()
        assert out.tolist() == [4.0] * N
    with pytest.warns(streamshim.RescuedLaunchWarning):
        assert captured(lambda x, out: layer(x, out, stream=side), warm_up=False) == RIGHT


def test_compiling_inside_a_capture_warns_and_works():
    layer = streamshim.compile(kernels.with_stream)
    with pytest.warns(streamshim.CompiledInCaptureWarning, match="harness.py"):
        assert captured(layer, warm_up=False) == RIGHT


def test_compiling_inside_a_capture_raises_in_strict_mode():
    with streamshim.install("strict"):
        layer = streamshim.compile(kernels.with_stream)
        with pytest.raises(streamshim.CompiledInCaptureError, match="Call it once before capturing"):
            captured(layer, warm_up=False)
        assert layer.signatures == 0
        assert captured(layer) == RIGHT


def test_a_tensor_on_the_cpu_is_refused_by_name():
    layer = streamshim.compile(kernels.with_stream)
    with pytest.raises(ValueError, match="'out' is a tensor on cpu"):
        layer(torch.zeros(N, device="cuda"), torch.zeros(N))
