"""An NVRTC kernel launched with cuda-python on stream 0, in a CUDA graph, without and with streamshim. Needs a GPU:

pip install '.[cuda]'
python examples/cuda_python_kernel.py
"""

import ctypes
import sys

import torch

import streamshim

try:
    from cuda.bindings import driver, nvrtc
except ImportError as error:
    print(f"This example needs cuda-python ({error}): pip install '.[cuda]'")
    sys.exit(0)
if not torch.cuda.is_available():
    print("This example needs a GPU.")
    sys.exit(0)

SOURCE = b"""
extern "C" __global__ void scale(const float* x, float* out, float factor, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) out[i] = x[i] * factor;
}
"""
THREADS = 128


def check(result):
    """What a function of cuda-python returned; raises if its error code says so."""
    error, *values = result
    if int(error) != 0:
        raise RuntimeError(str(error))
    return values[0] if values else None


def compile_kernel():
    major, minor = torch.cuda.get_device_capability()
    program = check(nvrtc.nvrtcCreateProgram(SOURCE, b"scale.cu", 0, [], []))
    check(nvrtc.nvrtcCompileProgram(program, 1, [f"--gpu-architecture=sm_{major}{minor}".encode()]))
    cubin = b" " * check(nvrtc.nvrtcGetCUBINSize(program))
    check(nvrtc.nvrtcGetCUBIN(program, cubin))
    return check(driver.cuModuleGetFunction(check(driver.cuModuleLoadData(cubin)), b"scale"))


def scale(x, out, factor):
    n = x.numel()
    values = (x.data_ptr(), out.data_ptr(), factor, n)
    types = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_float, ctypes.c_int)
    blocks = (n + THREADS - 1) // THREADS
    # Stream 0, whatever torch's current stream is.
    check(driver.cuLaunchKernel(kernel, blocks, 1, 1, THREADS, 1, 1, 0, 0, (values, types), 0))


def replayed():
    """Capture one call, and replay it with another input."""
    x, out = torch.ones(1000, device="cuda"), torch.zeros(1000, device="cuda")
    scale(x, out, 2.0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        scale(x, out, 2.0)
    x.fill_(21.0)
    out.fill_(-1.0)
    graph.replay()
    return out[:4].tolist()


torch.cuda.init()
x = torch.zeros(1, device="cuda")  # makes the context current
kernel = compile_kernel()

print("without streamshim:", replayed())  # untouched: the kernel is not in the graph
with streamshim.install():
    print("with streamshim:   ", replayed())
