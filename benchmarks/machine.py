"""The machine that the benchmarks run on: a GPU, or stand-ins that let the calls be made without one."""

from __future__ import annotations

import ctypes
import importlib.machinery
import importlib.metadata
import importlib.util
import os
import platform
import shutil
import subprocess
import sysconfig
import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

import streamshim
from streamshim import gate, runtime
from streamshim.runtime import NOT_CAPTURING, CaptureState

HERE = Path(__file__).parent
#: Elements of the tensors: a kernel that takes less time than its launch.
N = 100
#: The handle that stands for torch's current stream where there is no GPU.
STAND_IN = 0x7F5512345678

_KERNEL = r"""
extern "C" __global__ void add_one(const float* x, float* out, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) out[i] = x[i] + 1.0f;
}
"""
_PACKAGES = ("torch", "nvidia-cutlass-dsl", "apache-tvm-ffi", "cuda-bindings", "cuda-core", "wrapt")


class Machine:
    """What a form of launch needs, on a GPU or without one.

    Attributes:
        gpu: whether there is one.
        missing: what could not be measured, and why.
    """

    def __init__(self, gpu: bool) -> None:
        self.gpu = gpu
        self.missing: dict[str, str] = {}
        self._folder = tempfile.TemporaryDirectory(prefix="streamshim-bench-")
        device = "cuda" if gpu else "cpu"
        self.x, self.out = torch.zeros(N, device=device), torch.zeros(N, device=device)
        self.side: Any = torch.cuda.Stream() if gpu else None
        #: The handle of the stream that is torch's current one while launches are measured.
        self.handle: int = self.side.cuda_stream if gpu else STAND_IN
        if not gpu:
            stand_in = StandIn()
            runtime.use(stand_in)
            gate.connect(stand_in)

    def on_stream(self) -> AbstractContextManager[Any]:
        """Torch's current stream is a side stream, so that there is something to bind."""
        return torch.cuda.stream(self.side) if self.gpu else nullcontext()

    def settle(self) -> None:
        """Wait for the device."""
        if self.gpu:
            torch.cuda.synchronize()

    @cached_property
    def library(self) -> ctypes.CDLL:
        """`launchers.c`, built with gcc, its functions declared; OSError where there is no gcc."""
        flags = []
        if _version("apache-tvm-ffi"):
            from tvm_ffi import libinfo

            flags = ["-DWITH_TVM_FFI", f"-I{libinfo.find_include_path()}", f"-I{libinfo.find_dlpack_include_path()}"]
        library = declared(ctypes.CDLL(self._build("launchers.c", "liblaunchers.so", *flags)))
        if self.gpu:
            driver = ctypes.CDLL("libcuda.so.1")
            launch_kernel = ctypes.cast(driver.cuLaunchKernel, ctypes.c_void_p)
            library.on_gpu(launch_kernel, ctypes.c_void_p(int(self.function)))
        if flags:
            get_stream = ctypes.CDLL(libinfo.find_libtvm_ffi()).TVMFFIEnvGetStream
            library.with_environment(ctypes.cast(get_stream, ctypes.c_void_p))
        return library

    @cached_property
    def bound(self) -> ctypes.CDLL:
        """The same library as another object, to bind this one and leave that one alone."""
        return self.another_library()

    def another_library(self) -> ctypes.CDLL:
        """The same library as another object."""
        return declared(ctypes.CDLL(self.library._name))

    @cached_property
    def compiled(self) -> Any:
        """`compiled.c` as a module; None, with a reason in `missing`, where it cannot be built."""
        try:
            path = self._build("compiled.c", "streamshim_compiled.so", f"-I{sysconfig.get_path('include')}")
        except (OSError, subprocess.CalledProcessError) as error:
            self.missing["a compiled part"] = f"{type(error).__name__}: {error}"
            return None
        loader = importlib.machinery.ExtensionFileLoader("streamshim_compiled", path)
        spec = importlib.util.spec_from_loader("streamshim_compiled", loader)
        assert spec is not None
        module = importlib.util.module_from_spec(spec)
        loader.exec_module(module)
        return module

    def tvm_ffi_function(self, name: str) -> Any:
        """A function of `launchers.c` as TVM-FFI's."""
        import tvm_ffi

        address = ctypes.cast(getattr(self.library, name), ctypes.c_void_p).value
        return tvm_ffi.Function.__from_extern_c__(address, keep_alive_object=self.library)

    @cached_property
    def driver(self) -> Any:
        """``cuda.bindings.driver``, over a stand-in for the driver where there is none."""
        if not self.gpu:
            path = self._build("libcuda_standin.c", "libcuda.so.1", "-Wl,-soname,libcuda.so.1")
            ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)
        from cuda.bindings import driver

        return driver

    @cached_property
    def cubin(self) -> bytes:
        """The kernel, compiled by NVRTC for this GPU."""
        from cuda.bindings import nvrtc

        program = checked(nvrtc.nvrtcCreateProgram(_KERNEL.encode(), b"add_one.cu", 0, [], []))
        major, minor = torch.cuda.get_device_capability()
        checked(nvrtc.nvrtcCompileProgram(program, 1, [f"--gpu-architecture=sm_{major}{minor}".encode()]))
        code = b" " * checked(nvrtc.nvrtcGetCUBINSize(program))
        checked(nvrtc.nvrtcGetCUBIN(program, code))
        return code

    @cached_property
    def function(self) -> Any:
        """The kernel as a ``CUfunction``."""
        if not self.gpu:
            return self.driver.CUfunction(0)
        module = checked(self.driver.cuModuleLoadData(self.cubin))
        return checked(self.driver.cuModuleGetFunction(module, b"add_one"))

    def describe(self) -> dict[str, Any]:
        """The machine and the versions, for JSON."""
        versions = {name: version for name in _PACKAGES if (version := _version(name))}
        found = {
            "gpu": torch.cuda.get_device_name() if self.gpu else None,
            "cpu": _cpu(), "cores": os.cpu_count(), "python": platform.python_version(),
            "streamshim": streamshim.__version__, **versions,
        }  # fmt: skip
        if self.gpu:
            found["cuda"] = torch.version.cuda
            found["driver"] = _nvidia_driver()
        return found

    def _build(self, source: str, name: str, *flags: str) -> str:
        gcc = shutil.which("gcc")
        if gcc is None:
            raise OSError("needs gcc")
        built = Path(self._folder.name) / name
        subprocess.run([gcc, "-O2", "-shared", "-fPIC", *flags, "-o", built, HERE / source], check=True)
        return str(built)


class StandIn:
    """A runtime with one device and one stream; its questions are C functions, as torch's are."""

    name = "stand-in"

    def __init__(self) -> None:
        #: Tensors on the CPU say that they are on device -1.
        self.current_handle: Callable[[int], int] = {0: STAND_IN, -1: STAND_IN}.__getitem__
        self.current_device: Callable[[], int] = int
        self.captures: dict[int, CaptureState] = {}

    def device_count(self) -> int:
        return 1

    def set_device(self, device: int) -> None:
        raise RuntimeError("there is one device")

    def order(self, first: int, then: int, device: int) -> None:
        raise RuntimeError("nothing is ordered here")

    def capture_state(self, handle: int) -> CaptureState:
        return self.captures.get(handle, NOT_CAPTURING)


def declared(library: ctypes.CDLL) -> ctypes.CDLL:
    """The library with its functions' types."""
    pointer = ctypes.c_void_p
    library.launch.argtypes, library.launch.restype = [pointer, pointer, ctypes.c_int, pointer], ctypes.c_int
    library.on_gpu.argtypes, library.on_gpu.restype = [pointer, pointer], None
    if hasattr(library, "with_environment"):
        library.with_environment.argtypes, library.with_environment.restype = [pointer], None
    return library


def checked(result: tuple[Any, ...]) -> Any:
    """What a function of cuda.bindings returned, without its error code."""
    error, *values = result
    if int(error) != 0:
        raise RuntimeError(f"cuda.bindings: {error}")
    return values[0] if values else None


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def _nvidia_driver() -> str:
    smi = shutil.which("nvidia-smi")
    if smi is None:
        return "?"
    asked = [smi, "--query-gpu=driver_version", "--format=csv,noheader"]
    return subprocess.run(asked, capture_output=True, text=True).stdout.partition("\n")[0].strip() or "?"
