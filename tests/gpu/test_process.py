"""What the shim does to a process."""

import subprocess
import sys

import pytest

SCRIPT = {
    "install makes no CUDA context": """
import streamshim
streamshim.install()
import torch, cutlass, tvm_ffi
import cuda.bindings.driver as cuda
assert not torch.cuda.is_initialized()
cuda.cuInit(0)
_, device = cuda.cuDeviceGet(0)
error, flags, active = cuda.cuDevicePrimaryCtxGetState(device)
assert error == 0 and active == 0, (error, active)
""",
    "a kernel launched from a forked worker follows torch": """
import os, sys
sys.path.insert(0, "tests"); sys.path.insert(0, "tests/gpu")
import streamshim
streamshim.install()
import torch, cute_kernels as kernels
pid = os.fork()
if pid == 0:
    from harness import captured, RIGHT
    os._exit(0 if captured(kernels.compile_fake(kernels.no_stream)) == RIGHT else 7)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
""",
}


@pytest.mark.parametrize("script", SCRIPT.values(), ids=SCRIPT)
def test_in_a_fresh_process(script):
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
