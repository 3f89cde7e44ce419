"""TVM-FFI functions of a real CUDA library on a GPU: the environment stream is torch's for every kind of argument."""

import pytest
import torch
import tvm_ffi
import tvm_ffi.cpp
from harness import DELAY, RIGHT, N, captured, eager_rounds

import streamshim

SOURCE = """
#include <cuda_runtime.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/extra/c_env_api.h>
#include <tvm/ffi/function.h>

__global__ void add_one_kernel(const float* x, float* out, int64_t n) {
  int64_t i = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x;
  if (i < n) out[i] = x[i] + 1.0f;
}

static cudaStream_t environment(int device) {
  return static_cast<cudaStream_t>(TVMFFIEnvGetStream(kDLCUDA, device));
}

// Tensors: the environment stream of the tensor's device.
void add_one(tvm::ffi::TensorView x, tvm::ffi::TensorView out) {
  int64_t n = x.size(0);
  add_one_kernel<<<(n + 31) / 32, 32, 0, environment(x.device().device_id)>>>(
      static_cast<const float*>(x.data_ptr()), static_cast<float*>(out.data_ptr()), n);
}

// Addresses only: no argument tells the device, so it is the current one, as in much code of engines.
void add_one_at(int64_t x, int64_t out, int64_t n) {
  int device = 0;
  cudaGetDevice(&device);
  add_one_kernel<<<(n + 31) / 32, 32, 0, environment(device)>>>(
      reinterpret_cast<const float*>(x), reinterpret_cast<float*>(out), n);
}

int64_t environment_stream(int64_t device) { return reinterpret_cast<int64_t>(environment(static_cast<int>(device))); }

void after_a_tensor_on_the_cpu(tvm::ffi::TensorView ignored, int64_t x, int64_t out, int64_t n) {
  add_one_at(x, out, n);
}
"""


@pytest.fixture(scope="module")
def library():
    """Loaded, and its functions fetched, before anything is installed."""
    names = ["add_one", "add_one_at", "environment_stream", "after_a_tensor_on_the_cpu"]
    module = tvm_ffi.cpp.load_inline("streamshim_gpu_test", cuda_sources=SOURCE, functions=names)
    for name in names:
        getattr(module, name)
    return module


def with_addresses(library):
    return lambda x, out: library.add_one_at(x.data_ptr(), out.data_ptr(), N)


def with_tvm_tensors(library):
    return lambda x, out: library.add_one(tvm_ffi.from_dlpack(x), tvm_ffi.from_dlpack(out))


def with_dlpack_producers(library):
    class Producer:
        def __init__(self, tensor):
            self.tensor = tensor

        def __dlpack__(self, **kwargs):
            return self.tensor.__dlpack__(stream=-1)

        def __dlpack_device__(self):
            return self.tensor.__dlpack_device__()

    return lambda x, out: library.add_one(Producer(x), Producer(out))


def with_a_cpu_tensor_first(library):
    on_cpu = torch.zeros(3)
    return lambda x, out: library.after_a_tensor_on_the_cpu(on_cpu, x.data_ptr(), out.data_ptr(), N)


def with_a_list(library):
    call = tvm_ffi.convert(lambda pair: library.add_one_at(pair[0], pair[1], N))
    return lambda x, out: call([x.data_ptr(), out.data_ptr()])


BLIND = {
    "addresses": with_addresses,
    "tvm_ffi tensors": with_tvm_tensors,
    "DLPack producers": with_dlpack_producers,
    "a CPU tensor first": with_a_cpu_tensor_first,
    "through a Python callback": with_a_list,
}
SIGHTED = {"torch tensors": lambda library: library.add_one}


@pytest.mark.parametrize("make", BLIND.values(), ids=BLIND)
def test_without_the_shim_the_kernel_is_missing_from_the_graph(library, make):
    seen = captured(make(library))
    assert seen[0] == 1.0
    assert seen[1] != seen[1]


@pytest.mark.parametrize("make", (BLIND | SIGHTED).values(), ids=BLIND | SIGHTED)
def test_b03_with_the_shim_the_kernel_is_in_the_graph(shim, library, make):
    assert captured(make(library)) == RIGHT


@pytest.mark.parametrize("make", (BLIND | SIGHTED).values(), ids=BLIND | SIGHTED)
def test_b03_eager_two_hundred_of_two_hundred_rounds_are_right(shim, library, make):
    assert eager_rounds(make(library)) == 200


WAYS = {
    "torch.cuda.stream": lambda s: torch.cuda.stream(s),
    "with stream": lambda s: s,
}


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_every_way_to_switch_the_stream(shim, library, way):
    side = torch.cuda.Stream()
    if not hasattr(side, "__enter__"):
        pytest.skip("this torch has no such block")
    with way(side):
        assert library.environment_stream(0) == side.cuda_stream == torch.cuda.current_stream().cuda_stream
    assert library.environment_stream(0) == 0


def test_set_stream_of_torch_cuda_and_torch_accelerator(shim, library):
    side, default = torch.cuda.Stream(), torch.cuda.current_stream()
    for set_stream in (torch.cuda.set_stream, torch.accelerator.set_stream):
        set_stream(side)
        assert library.environment_stream(0) == side.cuda_stream
        set_stream(default)
        assert library.environment_stream(0) == default.cuda_stream


def test_a_stream_that_is_current_at_install_is_seen(library):
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        assert library.environment_stream(0) == 0
        with streamshim.install():
            assert library.environment_stream(0) == side.cuda_stream
        assert library.environment_stream(0) == 0


def test_the_stream_is_back_after_a_call_that_raises(shim, library):
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        with pytest.raises(Exception, match=r"(?i)type|argument|convert"):
            library.add_one("no tensor", 3)
        assert library.environment_stream(0) == side.cuda_stream


def test_blocks_of_tvm_ffi(shim, library):
    side, mine = torch.cuda.Stream(), torch.cuda.Stream()
    with torch.cuda.stream(side):
        with tvm_ffi.use_raw_stream(tvm_ffi.device("cuda:0"), mine.cuda_stream):
            assert library.environment_stream(0) == mine.cuda_stream
        assert library.environment_stream(0) == side.cuda_stream
    with tvm_ffi.use_torch_stream(torch.cuda.stream(side)):
        assert library.environment_stream(0) == side.cuda_stream
    assert library.environment_stream(0) == 0


def test_use_torch_stream_around_a_capture(shim, library):
    x, out = torch.zeros(N, device="cuda"), torch.zeros(N, device="cuda")
    with_addresses(library)(x, out)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    out.fill_(-1)
    with tvm_ffi.use_torch_stream(torch.cuda.graph(graph)):
        with_addresses(library)(x, out)
    assert library.environment_stream(0) == 0
    torch.cuda.synchronize()
    assert out.tolist()[0] == -1
    x.fill_(41)
    out.fill_(float("nan"))
    graph.replay()
    torch.cuda.synchronize()
    assert out.tolist() == [42.0] * N


def test_backward_on_the_autograd_thread(shim, library):
    side = torch.cuda.Stream()

    class AddOne(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 1.0

        @staticmethod
        def backward(ctx, gradient):
            gradient = gradient.contiguous()
            out = torch.empty_like(gradient)
            library.add_one_at(gradient.data_ptr(), out.data_ptr(), N)
            return out

    x = torch.zeros(N, device="cuda", requires_grad=True)
    torch.cuda.synchronize()
    for _ in range(20):
        with torch.cuda.stream(side):
            y = AddOne.apply(x)
            gradient = torch.empty(N, device="cuda")
            torch.cuda._sleep(DELAY // 10)
            gradient.fill_(5.0)
            (result,) = torch.autograd.grad(y, x, gradient)
            side.synchronize()
            assert result.tolist() == [6.0] * N


@pytest.mark.two_gpus
def test_addresses_on_the_last_device_while_the_first_is_current(shim, library):
    last = torch.cuda.device_count() - 1
    side = torch.cuda.Stream(last)
    with torch.cuda.stream(side):
        assert library.environment_stream(last) == side.cuda_stream
        assert library.environment_stream(0) == 0
        with torch.cuda.device(0):
            x, out = torch.zeros(N, device=f"cuda:{last}"), torch.zeros(N, device=f"cuda:{last}")
            library.add_one(tvm_ffi.from_dlpack(x), tvm_ffi.from_dlpack(out))
            torch.cuda.synchronize(last)
            assert out.tolist() == [1.0] * N
