"""Active in every process: fork, spawn, forkserver and subprocess, started in every way; and what `run` sets up."""

from __future__ import annotations

import os
import shutil
import subprocess

import pytest
from environments import FAKE_TORCH, ROOT

METHODS = ("fork", "spawn", "forkserver", "subprocess")

#: The worker never imports streamshim. It says which function an early import has got, and how often it is wrapped.
WORKER = """
from torch.cuda.graphs import CUDAGraph

def look():
    function, depth = CUDAGraph.capture_begin, 0
    file = function.__code__.co_filename.rpartition("/")[2]
    while hasattr(function, "__wrapped__"):
        function, depth = function.__wrapped__, depth + 1
    return f"{file} {depth}"

def tell():
    print(look(), flush=True)

if __name__ == "__main__":
    tell()
"""
PROGRAM = """
import multiprocessing, subprocess, sys
EXPLICIT

if __name__ == "__main__":
    method = sys.argv[1]
    if method == "subprocess":
        subprocess.run([sys.executable, "worker.py"], check=True)
    else:
        import worker
        process = multiprocessing.get_context(method).Process(target=worker.tell)
        process.start()
        process.join()
        assert process.exitcode == 0
"""
EXPLICIT = "import streamshim; streamshim.install()"
BOUND, BARE = "capture.py 1\n", "graphs.py 0\n"


def program(explicit: bool) -> dict[str, str]:
    return {**FAKE_TORCH, "worker.py": WORKER, "program.py": PROGRAM.replace("EXPLICIT", EXPLICIT if explicit else "")}


@pytest.mark.parametrize("way", ["start-up file", "call", "both", "neither"])
@pytest.mark.parametrize("method", METHODS)
def test_workers(installed, write, method, way):
    folder = write(program(explicit=way in ("call", "both")))
    variables = {"STREAMSHIM": "1"} if way in ("start-up file", "both") else {}
    done = installed.run("program.py", method, cwd=folder, **variables)
    # A call reaches what runs the program's own file: not a program that it starts.
    active = way in ("start-up file", "both") or (way == "call" and method != "subprocess")
    assert (done.stdout, done.stderr) == (BOUND if active else BARE, "")


class TestRun:
    @pytest.mark.parametrize("method", METHODS)
    def test_workers_of_an_installed_one(self, installed, write, method):
        folder = write(program(explicit=False))
        done = installed.run("-m", "streamshim", "run", "program.py", method, cwd=folder)
        assert (done.stdout, done.stderr) == (BOUND, "")

    @pytest.mark.parametrize("method", METHODS)
    def test_workers_of_a_checkout(self, bare, write, method):
        """No start-up file: a folder on PYTHONPATH stands in for it, and hides no other tool's sitecustomize."""
        folder = write(
            program(explicit=False), {"tool/sitecustomize.py": "import os; os.environ['TOOL'] = 'was here'\n"}
        )
        path = os.pathsep.join([str(ROOT), str(folder / "tool")])
        code = "import os, worker; worker.tell(); print(os.environ['TOOL'])"
        done = bare.run("-m", "streamshim", "run", "-c", code, cwd=folder, PYTHONPATH=path)
        assert (done.stdout, done.stderr) == (f"{BOUND}was here\n", "")
        done = bare.run("-m", "streamshim", "run", "program.py", method, cwd=folder, PYTHONPATH=path)
        assert (done.stdout, done.stderr) == (BOUND, "")

    def test_other_tools_print_when_they_start(self, installed, bare, write):
        """And when they end."""
        tool = "import atexit\nprint('a tool', end='')\natexit.register(print, 'its end')\n"
        folder = write(program(explicit=False), {"tool/sitecustomize.py": tool})
        for environment in (installed, bare):
            path = os.pathsep.join([str(folder / "tool"), *([str(ROOT)] if environment is bare else [])])
            done = environment.run("-m", "streamshim", "run", "worker.py", cwd=folder, PYTHONPATH=path)
            assert done.stdout.endswith(f"a tool{BOUND}its end\n")

    def test_a_checkout_that_is_not_on_the_path_of_the_program(self, bare, write):
        folder = write(program(explicit=False))
        copy = shutil.copytree(ROOT / "streamshim", folder / "checkout" / "streamshim")
        done = bare.run("-m", "streamshim", "run", folder / "worker.py", cwd=copy.parent, PYTHONPATH=str(folder))
        assert (done.stdout, done.stderr) == (BOUND, "")

    def test_the_arguments_are_the_programs(self, installed, write):
        folder = write({"say.py": "import sys; print(sys.argv[1:], __name__)"})
        arguments = ["--mode", "x", "--json", "-c", "--", "a b"]
        for how in (["say.py"], ["-m", "say"], ["-X", "dev", "say.py"]):
            done = installed.run("-m", "streamshim", "run", "--mode", "check", *how, *arguments, cwd=folder)
            assert done.stdout == f"{arguments} __main__\n"

    def test_the_exit_status_is_the_programs(self, installed, tmp_path):
        installed.run("-m", "streamshim", "run", "-c", "raise SystemExit(41)", cwd=tmp_path, status=41)

    def test_flags_of_python_go_on(self, installed, tmp_path):
        code = "import sys; print(sys.flags.optimize)"
        assert installed.run("-O", "-m", "streamshim", "run", "-c", code, cwd=tmp_path).stdout == "1\n"

    @pytest.mark.parametrize(
        ("options", "variables", "expected"),
        [
            ([], {}, "1"),
            ([], {"STREAMSHIM": "strict"}, "strict"),
            ([], {"STREAMSHIM": "0"}, "1"),
            (["--mode", "strict"], {"STREAMSHIM": "bind"}, "strict"),
        ],
    )
    def test_the_mode(self, installed, tmp_path, options, variables, expected):
        code = "import os; print(os.environ['STREAMSHIM'])"
        done = installed.run("-m", "streamshim", "run", *options, "-c", code, cwd=tmp_path, **variables)
        assert done.stdout == f"{expected}\n"

    @pytest.mark.parametrize(
        ("variables", "named"),
        [
            ({"STREAMSHIM_DISABLE": "1"}, "STREAMSHIM_DISABLE=1 is set, so streamshim would do nothing"),
            ({"STREAMSHIM_MODE": "off"}, "STREAMSHIM_MODE=off is set"),
            ({"STREAMSHIM_MODE": "check"}, "STREAMSHIM_MODE=check and STREAMSHIM=strict ask for different modes"),
            ({"STREAMSHIM_CTYPES": "x"}, "STREAMSHIM_CTYPES"),
        ],
        ids=lambda value: ",".join(value) if isinstance(value, dict) else "",
    )
    def test_what_would_not_work_is_refused(self, installed, tmp_path, variables, named):
        mode = [] if variables.get("STREAMSHIM_MODE") == "off" else ["--mode", "strict"]
        done = installed.run(
            "-m", "streamshim", "run", *mode, "-c", "print('ran')", cwd=tmp_path, status=1, **variables
        )
        assert named in done.stderr
        assert done.stdout == ""

    def test_a_python_that_would_not_start_it_is_refused(self, bare, tmp_path):
        code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from streamshim.cli import main; main()"
        done = bare.run("-E", "-c", code, "run", "-c", "print('ran')", cwd=tmp_path, status=1)
        assert "streamshim cannot be started in a new process" in done.stderr
        assert done.stdout == ""

    def test_mistakes_cost_two(self, installed, tmp_path):
        for wrong in ([], ["--mode", "loud", "x.py"]):
            assert "Usage:" in installed.run("-m", "streamshim", "run", *wrong, cwd=tmp_path, status=2).stderr


def test_real_torch_is_bound_in_a_spawned_worker(installed, write):
    """The same with the torch that is installed here, imported by the worker alone."""
    pytest.importorskip("torch")
    script = (
        "import multiprocessing, sys\n"
        "def work():\n"
        "    import worker\n"
        "    worker.tell()\n"
        "if __name__ == '__main__':\n"
        "    process = multiprocessing.get_context('spawn').Process(target=work)\n"
        "    process.start(); process.join(); assert process.exitcode == 0\n"
        "    assert 'torch' not in sys.modules\n"
    )
    folder = write({"worker.py": WORKER, "program.py": script})
    done = installed.run("program.py", cwd=folder, STREAMSHIM="1")
    assert done.stdout == BOUND


def test_the_console_script(installed, tmp_path):
    """`streamshim` is there beside `python -m streamshim`, and answers without importing torch."""
    script = installed.python.parent / "streamshim"
    done = subprocess.run([script, "--version"], capture_output=True, text=True, cwd=tmp_path)
    assert done.stdout.startswith("streamshim ")
