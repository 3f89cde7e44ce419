"""A kernel in a shared object, called through ctypes, in a captured graph. Needs a GPU, nvcc and torch:

    pip install .
    python examples/ctypes_kernel.py

The library has two launchers, as people write them: one with a stream parameter, which most callers leave NULL, and one
without. The first follows torch once it is named; the second is moved into the capture below Python, and refused
where that does not work.
"""

import ctypes
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

import streamshim

SOURCE = """
__global__ void add_one_kernel(float* x, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) x[i] += 1.0f;
}
extern "C" void add_one_on(float* x, int n, cudaStream_t stream) {
    add_one_kernel<<<(n + 127) / 128, 128, 0, stream>>>(x, n);
}
extern "C" void add_one(float* x, int n) { add_one_on(x, n, nullptr); }
"""

nvcc = shutil.which("nvcc")
if nvcc is None or not torch.cuda.is_available():
    print("This example needs a GPU and nvcc.")
    sys.exit(0)


def build() -> str:
    folder = Path(tempfile.mkdtemp())
    (folder / "add_one.cu").write_text(SOURCE)
    major, minor = torch.cuda.get_device_capability()
    library = str(folder / "libaddone-1.so")
    options = ["-shared", "-Xcompiler", "-fPIC", f"-arch=sm_{major}{minor}"]
    subprocess.run([nvcc, *options, "-o", library, str(folder / "add_one.cu")], check=True)
    return library


def captured(call) -> float:
    """What is in x after one capture and two replays; 2.0 is right."""
    x = torch.zeros(256, device="cuda")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call(x)
    for _ in range(2):
        graph.replay()
    return x[0].item()


path = build()
library = ctypes.CDLL(path)
library.add_one_on.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p]
library.add_one.argtypes = [ctypes.c_void_p, ctypes.c_int]

print("without streamshim       ", captured(lambda x: library.add_one_on(x.data_ptr(), len(x), None)))

streamshim.install()
# For code that cannot be edited, the same with a pattern: streamshim.bind("libaddone-*.so", {...})
streamshim.bind(library, {"add_one_on": -1, "add_one": None})

print("stream passed as None    ", captured(lambda x: library.add_one_on(x.data_ptr(), len(x), None)))
print("stream left out          ", captured(lambda x: library.add_one_on(x.data_ptr(), len(x))))


def without_stream(x: torch.Tensor) -> None:
    try:
        library.add_one(x.data_ptr(), len(x))
    except streamshim.WrongStreamError as error:
        print(f"\n{error}\n")
        library.add_one_on(x.data_ptr(), len(x))  # the capture is still good


print("no stream parameter      ", captured(without_stream))
print(streamshim.status())
