"""The start-up file of the built wheel: silent unless it is asked, and active before any of the user's code."""

from __future__ import annotations

import pkgutil
import shutil
import zipfile

import pytest
from environments import FAKE_TORCH, ROOT, in_the_middle_of, install, make

#: Says which function an early ``from ... import`` of torch has got, and how often it is wrapped.
SCRIPT = """
import sys
from torch.cuda.graphs import CUDAGraph
function, depth = CUDAGraph.capture_begin, 0
first = function.__code__.co_filename.rpartition("/")[2]
while hasattr(function, "__wrapped__"):
    function, depth = function.__wrapped__, depth + 1
print(first, depth)
"""
BOUND, BARE = "capture.py 1", "graphs.py 0"
QUIET = "import sys; print([name for name in sys.modules if 'streamshim' in name or name == 'typing'])"


def test_the_wheel_has_both_files_beside_the_package(wheel):
    with zipfile.ZipFile(wheel) as archive:
        assert {"streamshim.pth", "streamshim.start", "streamshim/boot.py"} <= set(archive.namelist())
        (line,) = archive.read("streamshim.pth").decode().splitlines()
        start = archive.read("streamshim.start").decode()
    assert line.startswith("import ")  # any other line would be a folder for sys.path
    # What Python 3.15 does with the other form (PEP 829): resolve the name on each line, and call it.
    (entry,) = [text for text in start.splitlines() if not text.startswith("#")]
    assert pkgutil.resolve_name(entry).__name__ == "start"


@pytest.mark.parametrize("variables", [{}, {"STREAMSHIM": ""}, {"STREAMSHIM": "0"}], ids=["unset", "empty", "0"])
def test_it_imports_nothing_unless_it_is_asked(installed, tmp_path, variables):
    assert installed.run("-c", QUIET, cwd=tmp_path, **variables).stdout == "[]\n"


def test_it_imports_only_itself_until_a_library_is_imported(installed, tmp_path):
    """pip and compile workers import no torch, and pay for no more than this."""
    done = installed.run("-c", QUIET, cwd=tmp_path, STREAMSHIM="1")
    assert done.stdout == "['streamshim._version', 'streamshim', 'streamshim.boot', 'streamshim.loading']\n"


def test_starting_takes_less_than_a_millisecond(installed, tmp_path):
    for _ in range(5):  # the first one writes the bytecode; a machine that is busy is asked again
        told = installed.run("-X", "importtime", "-c", "", cwd=tmp_path, STREAMSHIM="1").stderr
        (line,) = [line for line in told.splitlines() if line.endswith(" streamshim.boot")]
        microseconds = int(line.split("|")[1])
        if microseconds < 1000:
            break
    assert microseconds < 1000


@pytest.mark.parametrize("value", ["1", "bind", "Strict", "check", "on"])
def test_early_copies_are_bound(installed, write, value):
    folder = write(FAKE_TORCH, {"script.py": SCRIPT})
    done = installed.run("script.py", cwd=folder, STREAMSHIM=value)
    assert done.stdout.strip() == BOUND
    assert done.stderr == ""


def test_the_mode_and_the_way_are_in_the_status(installed, write):
    folder = write(FAKE_TORCH)
    code = "import torch, streamshim; print(streamshim.status())"
    done = installed.run("-c", code, cwd=folder, STREAMSHIM="strict")
    assert done.stdout.startswith("streamshim ")
    assert ": installed by the start-up file, mode strict (STREAMSHIM)\n" in done.stdout


@pytest.mark.parametrize(
    ("flags", "expected"), [(["-I"], BOUND), (["-E"], BOUND), (["-s"], BOUND), (["-S"], BARE)], ids=["I", "E", "s", "S"]
)
def test_flags_of_python(installed, write, flags, expected):
    """Only -S, which keeps Python from reading start-up files, keeps it from starting; nothing breaks."""
    folder = write(FAKE_TORCH, {"script.py": f"import sys; sys.path.insert(0, '.')\n{SCRIPT}"})
    done = installed.run(*flags, "script.py", cwd=folder, STREAMSHIM="1")
    assert (done.stdout.strip(), done.stderr) == (expected, "")


def test_a_sitecustomize_of_another_tool_still_runs(installed, write):
    folder = write(FAKE_TORCH, {"script.py": SCRIPT, "tool/sitecustomize.py": "print('the tool')\n"})
    done = installed.run("script.py", cwd=folder, STREAMSHIM="1", PYTHONPATH=str(folder / "tool"))
    assert done.stdout.splitlines() == ["the tool", BOUND]


def test_a_start_up_file_that_imports_torch_before_ours(wheel, write, tmp_path_factory):
    made = make(tmp_path_factory.mktemp("early"))
    install(made, wheel)
    folder = write(FAKE_TORCH, {"script.py": SCRIPT})
    (made.site / "a_first.pth").write_text(f"import sys; sys.path.insert(0, {str(folder)!r}); import torch\n")
    assert made.run("script.py", cwd=folder, STREAMSHIM="1").stdout.strip() == BOUND


def test_a_program_that_reads_the_start_up_file_after_it_has_imported_torch(installed, bare, write):
    code = f"import site, torch\nsite.addsitedir({str(installed.site)!r})\n{SCRIPT}"
    folder = write(FAKE_TORCH, {"script.py": code})
    assert bare.run("script.py", cwd=folder, STREAMSHIM="1").stdout.strip() == BOUND


def test_another_thread_in_the_middle_of_an_import_that_install_needs(installed, write):
    """While Python looks for a module it holds its only import lock, for which that thread waits."""
    folder = write(FAKE_TORCH, {"script.py": f"{in_the_middle_of('ctypes')}{SCRIPT}\nthread.join()\n"})
    done = installed.run("script.py", cwd=folder, STREAMSHIM="1")
    assert (done.returncode, done.stdout.strip()) == (0, BOUND)


def test_another_thread_that_imports_another_library_waits_for_the_installation(installed, write):
    code = """
import os, sys, threading
from streamshim import boot
inside, torch_is_in, original = threading.Event(), threading.Event(), boot.activate
def slow(by):
    inside.set()
    torch_is_in.wait(0.5)
    return original(by)
boot.activate = slow
thread = threading.Thread(target=__import__, args=["cutlass"])
thread.start()
inside.wait()
import torch
torch_is_in.set()
"""
    folder = write(FAKE_TORCH, {"script.py": f"{code}{SCRIPT}\nthread.join()\n", "cutlass.py": ""})
    assert installed.run("script.py", cwd=folder, STREAMSHIM="1").stdout.strip() == BOUND


def test_a_child_that_is_forked_while_another_thread_installs_does_not_wait_for_it(installed, write):
    code = """
import os, threading
from streamshim import boot
inside, go_on = threading.Event(), threading.Event()
boot.activate = lambda by: inside.set() or go_on.wait(20)
thread = threading.Thread(target=__import__, args=["cutlass"])
thread.start()
inside.wait()
child = os.fork()
if child == 0:
    import torch
    os._exit(5)
timer = threading.Timer(10, os.kill, [child, 9])
timer.start()
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
timer.cancel()
go_on.set()
thread.join()
"""
    folder = write(FAKE_TORCH, {"script.py": code, "cutlass.py": ""})
    assert installed.run("script.py", cwd=folder, STREAMSHIM="1").stdout == "5\n"


def test_to_look_for_a_library_is_not_to_import_it(installed, write):
    code = """
import importlib.util, sys
print(importlib.util.find_spec("torch").name, "streamshim.installer" in sys.modules)
import torch
print("streamshim.installer" in sys.modules, type(torch.__loader__).__name__)
"""
    folder = write(FAKE_TORCH, {"script.py": code + SCRIPT})
    done = installed.run("script.py", cwd=folder, STREAMSHIM="1")
    assert done.stdout.splitlines() == ["torch False", "True SourceFileLoader", BOUND]


def test_a_library_without_a_body(installed, write):
    """``cuda`` is a namespace package."""
    files = {"cuda/part/__init__.py": "import sys; print('streamshim.installer' in sys.modules)\n"}
    folder = write(FAKE_TORCH, {**files, "script.py": "import cuda\nimport cuda.part\n"})
    assert installed.run("script.py", cwd=folder, STREAMSHIM="1").stdout == "True\n"


@pytest.mark.parametrize(
    "missing", ["streamshim", "streamshim/boot.py", "streamshim/loading.py", "streamshim/installer.py"]
)
def test_a_half_installed_environment_still_works(installed, write, tmp_path_factory, missing):
    """As in the middle of an upgrade: Python starts, and says what is wrong."""
    made = make(tmp_path_factory.mktemp("half"))
    shutil.copytree(installed.site / "streamshim", made.site / "streamshim")
    shutil.copy(installed.site / "streamshim.pth", made.site)
    gone = made.site / missing
    shutil.rmtree(gone) if gone.is_dir() else gone.unlink()
    for cache in made.site.glob("streamshim/__pycache__"):
        shutil.rmtree(cache)
    folder = write(FAKE_TORCH, {"script.py": SCRIPT})
    done = made.run("script.py", cwd=folder, STREAMSHIM="1")
    assert done.stdout.strip() == BARE
    assert "streamshim" in done.stderr
    assert made.run("script.py", cwd=folder).stderr == ""


class TestFailures:
    """What cannot be had is told; where strict mode was asked for, or nobody can say what was, the process ends."""

    BROKEN = "import sys; sys.modules['streamshim.gate'] = None\n" + SCRIPT

    def test_without_strict_the_process_goes_on_without_it(self, installed, write):
        folder = write(FAKE_TORCH, {"script.py": self.BROKEN})
        done = installed.run("script.py", cwd=folder, STREAMSHIM="1")
        assert done.stdout.strip() == BARE
        assert "streamshim: the start-up file could not start it, so it is not active in this process" in done.stderr
        assert "streamshim.gate" in done.stderr

    @pytest.mark.parametrize(
        "variables",
        [
            {"STREAMSHIM": "strict"},
            {"STREAMSHIM": "1", "STREAMSHIM_STRICT": "1"},
            {"STREAMSHIM": "1", "STREAMSHIM_MODE": "strict"},
        ],
        ids=lambda variables: ",".join(variables),
    )
    def test_strict_ends_the_process_whatever_catches(self, installed, write, variables):
        caught = "import threading\ndef work():\n    try:\n        import torch\n    except BaseException: pass\n"
        folder = write(
            FAKE_TORCH, {"script.py": f"import sys; sys.modules['streamshim.gate'] = None\n{caught}work()\nprint('on')"}
        )
        done = installed.run("script.py", cwd=folder, status=3, **variables)
        assert "on" not in done.stdout
        assert "could not start it, so this process (pid " in done.stderr
        assert "streamshim.gate" in done.stderr

    @pytest.mark.parametrize("close", ["sys.stderr.close(); sys.stdout.close()", "sys.stderr = sys.stdout = None"])
    def test_with_nothing_to_write_to(self, installed, write, close):
        folder = write(
            FAKE_TORCH,
            {"script.py": f"import os, sys\nsys.modules['streamshim.gate'] = None\n{close}\nimport torch\nos._exit(7)"},
        )
        installed.run("script.py", cwd=folder, status=3, STREAMSHIM="strict")
        installed.run("script.py", cwd=folder, status=7, STREAMSHIM="bind")

    @pytest.mark.parametrize(
        ("variables", "named"),
        [
            ({"STREAMSHIM": "strct"}, "STREAMSHIM is 'strct'; allowed values: '1', 'bind', 'strict', 'check', '0'"),
            ({"STREAMSHIM": "1", "STREAMSHIM_MODE": "loud"}, "STREAMSHIM_MODE is 'loud'"),
            ({"STREAMSHIM": "bind", "STREAMSHIM_STRICT": "1"}, "ask for different modes"),
            ({"STREAMSHIM": "1", "STREAMSHIM_CTYPES": "nonsense"}, "STREAMSHIM_CTYPES"),
        ],
        ids=lambda value: ",".join(value) if isinstance(value, dict) else "",
    )
    def test_a_setting_that_cannot_be_understood_may_have_meant_strict(self, installed, write, variables, named):
        folder = write(FAKE_TORCH, {"script.py": SCRIPT})
        done = installed.run("script.py", cwd=folder, status=3, **variables)
        assert named in done.stderr
        # pip and other programs that import none of the libraries are left alone.
        assert installed.run("-c", "print('fine')", cwd=folder, **variables).stdout == "fine\n"


@pytest.mark.parametrize(
    ("call", "mode"),
    [("install()", "bind"), ("install('check')", "check"), ("install('bind')", "bind")],
)
@pytest.mark.parametrize("first", ["call", "torch"])
def test_the_start_up_file_and_a_call(installed, write, call, mode, first):
    """The program's own word wins, in whatever order they come; nothing is patched twice."""
    lines = {"call": f"import streamshim; streamshim.{call}\n", "torch": "import torch\n"}
    second = "torch" if first == "call" else "call"
    script = f"{lines[first]}{lines[second]}{SCRIPT}\nprint(streamshim.status().mode)\n"
    done = installed.run("-c", script, cwd=write(FAKE_TORCH), STREAMSHIM="1")
    assert done.stdout.splitlines() == [BOUND, mode]


def test_a_program_that_has_uninstalled_it_is_left_alone(installed, write):
    script = f"import streamshim; streamshim.install(); streamshim.uninstall()\n{SCRIPT}"
    assert installed.run("-c", script, cwd=write(FAKE_TORCH), STREAMSHIM="1").stdout.strip() == BARE


def test_the_checkout_is_not_what_is_tested(installed, tmp_path):
    where = installed.run("-c", "import streamshim; print(streamshim.__file__)", cwd=tmp_path).stdout
    assert str(ROOT) not in where
    assert where.startswith(str(installed.site))
