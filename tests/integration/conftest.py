"""Real libraries without a GPU: the DSL compiles, nothing is launched, and the streams are the simulator's."""

import contextlib
import os

import pytest

# The DSL asks the GPU for its architecture unless it is told.
os.environ.setdefault("CUTE_DSL_ARCH", "sm_90a")

import streamshim
from streamshim import gate, ledger, runtime
from streamshim.runtime.simulated import Simulator

try:
    import cutlass
except ImportError:
    cutlass = None
    collect_ignore_glob = ["test_cute_*.py", "test_tvm_ffi_*.py", "test_cuda_python_*.py"]


@pytest.fixture(scope="session", autouse=True)
def _first_compile():
    """Before 4.6 the DSL looks for a driver at the first compile of a process, and complains once."""
    if cutlass is not None and tuple(map(int, cutlass.__version__.split(".")[:2])) < (4, 6):
        import cute_kernels

        with contextlib.suppress(Exception):
            cute_kernels.compile_fake(cute_kernels.no_stream, options="")


@pytest.fixture
def sim():
    """The simulator as the runtime in use."""
    simulated = Simulator()
    previous = runtime.use(simulated)
    gate.connect(simulated)
    yield simulated
    runtime.use(previous)
    gate.connect(None)


@pytest.fixture
def shim(sim):
    """streamshim installed in bind mode on the simulator."""
    with streamshim.install("bind") as installation:
        ledger.clear()
        yield installation


@pytest.fixture(autouse=True)
def _uninstalled():
    yield
    streamshim.uninstall()
