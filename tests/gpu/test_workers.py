"""Workers that never import streamshim capture a stream-less kernel rightly: by start-up file, by `run`, by a plugin.

For the start-up file the project must be installed, not only checked out.
"""

import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

#: Captures a CuTe kernel without a stream, changes the input, poisons the output, replays twice; says what it saw.
WORKER = """
import sys

def work():
    import cute_kernels as kernels
    from harness import RIGHT, captured, is_missing
    seen = captured(kernels.compile_fake(kernels.no_stream))
    print("right" if seen == RIGHT else "missing" if is_missing(seen) else seen, flush=True)
    named = [m.__name__ for m in (sys.modules["worker"], kernels) if hasattr(m, "streamshim")]
    assert not named, named

def item():
    import torch
    x = torch.ones(1, device="cuda")
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        x.add_(1)
        x.item()
"""
PROGRAM = """
import multiprocessing, subprocess, sys, worker

if __name__ == "__main__":
    method, what = sys.argv[1], getattr(worker, sys.argv[2])
    if method == "alone":
        what()
    elif method == "subprocess":
        sys.exit(subprocess.call([sys.executable, "-c", f"import worker; worker.{sys.argv[2]}()"]))
    else:
        process = multiprocessing.get_context(method).Process(target=what)
        process.start()
        process.join()
        sys.exit(process.exitcode)
"""
METHODS = ("alone", "fork", "spawn", "forkserver", "subprocess")


@pytest.fixture
def run(tmp_path):
    """``run(*arguments, VARIABLE=...)`` runs Python in a folder with the program and its worker."""
    (tmp_path / "worker.py").write_text(WORKER)
    (tmp_path / "program.py").write_text(PROGRAM)

    def python(*arguments, path=(), **variables):
        env = {n: v for n, v in os.environ.items() if not n.startswith("STREAMSHIM")}
        env["PYTHONPATH"] = os.pathsep.join([str(tmp_path), str(ROOT / "tests"), str(ROOT / "tests" / "gpu"), *path])
        return subprocess.run(
            [sys.executable, *arguments],
            cwd=tmp_path,
            env={**env, **variables},
            capture_output=True,
            text=True,
            timeout=200,
        )

    return python


@pytest.fixture
def start_up_file(run):
    """Skips unless a new Python starts streamshim by itself."""
    if run("-c", "import sys; sys.exit('streamshim.boot' not in sys.modules)", STREAMSHIM="1").returncode:
        pytest.skip("the project is not installed here, so there is no start-up file")


def test_without_the_shim_the_kernel_is_missing(run):
    done = run("program.py", "spawn", "work")
    assert done.stdout == "missing\n", done.stderr


@pytest.mark.parametrize("mode", ["bind", "strict"])
@pytest.mark.parametrize("method", METHODS)
def test_by_the_start_up_file_alone(run, start_up_file, method, mode):
    done = run("program.py", method, "work", STREAMSHIM=mode)
    assert done.stdout == "right\n", done.stderr


@pytest.mark.parametrize("method", METHODS)
def test_by_run(run, method):
    done = run("-m", "streamshim", "run", "program.py", method, "work", path=[str(ROOT)])
    assert done.stdout == "right\n", done.stderr


def test_a_sync_in_a_spawned_worker_is_refused_at_its_line(run, start_up_file):
    done = run("program.py", "spawn", "item", STREAMSHIM="1")
    assert done.returncode == 1
    assert "HostSyncError: Host sync refused inside a CUDA graph capture: .item() on a CUDA tensor, at worker.py:" in (
        done.stderr
    )


def test_starting_makes_no_cuda_context(run, start_up_file):
    code = (
        "import torch, cutlass, tvm_ffi, sys; print(sys.modules['streamshim.gate'].active, torch.cuda.is_initialized())"
    )
    assert run("-c", code, STREAMSHIM="1").stdout == "True False\n"


def test_a_fork_in_the_middle_of_a_capture(run):
    """The child has no open capture, and the parent's goes on."""
    code = """
import os, streamshim
streamshim.install()
import torch
x = torch.zeros(1, device="cuda")
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    x.add_(1)
    assert streamshim.status().captures
    pid = os.fork()
    if pid == 0:
        ok = not streamshim.status().captures and not hasattr(torch.Tensor.item, "__wrapped__")
        os._exit(0 if ok and torch.ones(1).item() == 1 else 7)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
graph.replay()
print(x.item())
"""
    done = run("-c", code, path=[str(ROOT)])
    assert done.stdout == "1.0\n", done.stderr


def test_doctor_tries_the_gpu(run):
    done = run("-m", "streamshim", "doctor", path=[str(ROOT)])
    assert done.returncode == 0, done.stdout + done.stderr
    for words in (
        "a ctypes call with the NULL stream in a capture is bound",
        "a CuTe kernel without a stream in a capture is bound",
        "a host sync in a capture is refused",
    ):
        assert f"self-test: {words}" in done.stdout


def test_the_fixture_of_the_pytest_plugin(run, tmp_path):
    if not [e for e in metadata.entry_points(group="pytest11") if e.name == "streamshim"]:
        pytest.skip("the project is not installed here, so pytest does not see the plugin")
    (tmp_path / "test_it.py").write_text(
        "import cute_kernels as kernels, pytest, torch\n"
        "@pytest.fixture\n"
        "def tensors(): return torch.ones(100, device='cuda'), torch.zeros(100, device='cuda')\n"
        "def test_bound(streamshim_graph, tensors):\n"
        "    kernel = kernels.compile_fake(kernels.no_stream)\n"
        "    streamshim_graph(kernel, *tensors)\n"
        "@pytest.mark.streamshim(mode='off')\n"
        "def test_bare(streamshim_graph, tensors):\n"
        "    kernel = kernels.compile_fake(kernels.no_stream)\n"
        "    with pytest.raises(AssertionError, match='Nothing in the graph writes it'):\n"
        "        streamshim_graph(kernel, *tensors)\n"
    )
    (tmp_path / "pytest.ini").touch()
    done = run("-m", "pytest", "-q", "-p", "no:cacheprovider", "--streamshim=strict", "test_it.py")
    assert "2 passed" in done.stdout, done.stdout + done.stderr
