"""The plugins under the real loaders of vLLM and SGLang, in parents and workers, on a machine without a GPU.

Only with ``make test-engines``, which downloads the engines and names the folder in ``STREAMSHIM_ENGINES``. Of the
wheels only Python files are used, and of SGLang only the modules named here: its package imports dozens of others.
"""

from __future__ import annotations

import os
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from environments import Environment

FOLDER = Path(os.environ.get("STREAMSHIM_ENGINES", ""))
VLLM, NEWER_VLLM, SGLANG = "vllm-0.22.0", "vllm-0.33.0", "sglang-0.5.11"

LOADERS = {
    VLLM: "from vllm.plugins import load_general_plugins as load\n",
    NEWER_VLLM: "from vllm.plugins import load_general_plugins as load\n",
    SGLANG: (
        "import os, sys, types\n"
        "package = types.ModuleType('sglang')\n"
        "package.__path__ = [os.path.join(os.environ['ENGINE'], 'sglang')]\n"
        "sys.modules['sglang'] = package\n"
        "from sglang.srt.plugins import load_plugins as load\n"
    ),
}
NAMES = {VLLM: "the vLLM plugin", NEWER_VLLM: "the vLLM plugin", SGLANG: "the SGLang plugin"}
FILTERS = {VLLM: "VLLM_PLUGINS", NEWER_VLLM: "VLLM_PLUGINS", SGLANG: "SGLANG_PLUGINS"}

#: Loads the plugins as the engine does, in this process and in a worker, and says what each of them found.
PROGRAM = """
import multiprocessing, sys
LOADER
def work(who):
    load()
    load()
    import torch
    said = str(sys.modules["streamshim.installer"].status()) if "streamshim.installer" in sys.modules else "nothing"
    patched = hasattr(torch.cuda.CUDAGraph.capture_begin, "__wrapped__")
    twice = patched and hasattr(torch.cuda.CUDAGraph.capture_begin.__wrapped__, "__wrapped__")
    print(who, patched, twice, torch.cuda.is_initialized(), said.splitlines()[0], sep="|", flush=True)

if __name__ == "__main__":
    work("parent")
    process = multiprocessing.get_context(sys.argv[1]).Process(target=work, args=("worker",))
    process.start()
    process.join()
    sys.exit(process.exitcode)
"""

Run = Callable[..., list[str]]


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """``unpacked(engine)`` is a folder with the engine's Python files."""
    folder = tmp_path_factory.mktemp("engines")

    def unpack(engine: str) -> Path:
        target = folder / engine
        if not target.exists():
            (wheel,) = FOLDER.resolve().glob(f"{engine}-*.whl")
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(target, [n for n in archive.namelist() if n.endswith(".py") or ".dist-info/" in n])
        return target

    return unpack


@pytest.fixture
def run(installed: Environment, unpacked: Callable[[str], Path], tmp_path: Path) -> Run:
    """``run(engine, code, *arguments, VARIABLE=...)`` runs a program that sees the engine; returns its lines."""

    def in_engine(engine: str, code: str, *arguments: str, status: int = 0, **variables: str) -> list[str]:
        (tmp_path / "program.py").write_text(code)
        folder = unpacked(engine)
        path = os.pathsep.join([str(folder), str(FOLDER.resolve() / "requirements")])
        done = installed.run(
            "program.py", *arguments, cwd=tmp_path, status=status, PYTHONPATH=path, ENGINE=str(folder), **variables
        )
        return [*done.stdout.splitlines(), *(f"stderr: {line}" for line in done.stderr.splitlines())]

    return in_engine


def in_parent_and_worker(run: Run, engine: str, method: str, **variables: str) -> list[list[str]]:
    lines = run(engine, PROGRAM.replace("LOADER", LOADERS[engine]), method, **variables)
    found = [line.split("|") for line in lines if line.startswith(("parent|", "worker|"))]
    assert [who for who, *_ in found] == ["parent", "worker"]
    return [rest for _, *rest in found]


@pytest.mark.parametrize("engine", LOADERS)
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_active_in_parent_and_worker_without_initialising_cuda(run, engine, method):
    for patched, twice, initialised, said in in_parent_and_worker(run, engine, method):
        assert (patched, twice, initialised) == ("True", "False", "False")
        assert f"installed by {NAMES[engine]}, mode bind (default)" in said


@pytest.mark.parametrize("engine", LOADERS)
def test_with_the_start_up_file_too(run, engine):
    for patched, twice, _, said in in_parent_and_worker(run, engine, "spawn", STREAMSHIM="check"):
        assert (patched, twice) == ("True", "False")
        assert "mode check (STREAMSHIM)" in said


@pytest.mark.parametrize("engine", LOADERS)
@pytest.mark.parametrize(
    ("value", "active"), [("another", "False"), ("another,streamshim", "True")], ids=["left out", "named"]
)
def test_the_engines_own_filter(run, engine, value, active):
    for patched, *_ in in_parent_and_worker(run, engine, "spawn", **{FILTERS[engine]: value}):
        assert patched == active


@pytest.mark.parametrize("engine", LOADERS)
@pytest.mark.parametrize("variables", [{"STREAMSHIM": "0"}, {"STREAMSHIM_DISABLE": "1"}], ids=lambda v: next(iter(v)))
def test_switched_off(run, engine, variables):
    for patched, *_ in in_parent_and_worker(run, engine, "fork", **variables):
        assert patched == "False"


@pytest.mark.parametrize("engine", LOADERS)
def test_a_failure_in_strict_mode_ends_the_process_and_otherwise_does_not(run, engine):
    code = f"{LOADERS[engine]}import sys\nsys.modules['streamshim.gate'] = None\nload()\nprint('went on')\n"
    lines = run(engine, code, status=3, STREAMSHIM_MODE="strict")
    assert "went on" not in lines
    assert any(f"streamshim: {NAMES[engine]} could not start it, so this process" in line for line in lines)
    lines = run(engine, code)
    assert "went on" in lines
    assert any("it is not active in this process" in line for line in lines)


@pytest.mark.parametrize("engine", [VLLM, NEWER_VLLM])
@pytest.mark.parametrize("first", ["vllm", "streamshim"])
def test_vllms_patch_of_set_stream_stays(run, engine, first):
    """vLLM keeps the stream that is set in a variable of its own, and calls what was there before."""
    imports = ["import vllm.utils.torch_utils as utils", "import streamshim; streamshim.install()"]
    code = "\n".join(imports if first == "vllm" else imports[::-1])
    code += (
        "\nimport torch\n"
        "assert torch.cuda.set_stream is utils._patched_set_stream\n"
        "called = []\n"
        "utils.prev_set_stream = called.append\n"
        "torch.cuda.set_stream('a stream')\n"
        "assert called == ['a stream'] and utils._current_stream_tls.value == 'a stream'\n"
        "streamshim.uninstall()\n"
        "assert torch.cuda.set_stream is utils._patched_set_stream\n"
        "print('fine')\n"
    )
    assert "fine" in run(engine, code)


def test_vllms_monitor_of_cute_compile(run):
    """It puts an object of its own in place of ``cute.compile``; what streamshim patches lies below."""
    pytest.importorskip("cutlass")
    code = (
        "import sys; sys.path.insert(0, TESTS)\n"
        "import streamshim; streamshim.install('strict', only=['cute'])\n"
        "import vllm.utils.jit_monitor as monitor, cutlass.cute as cute, cute_kernels as kernels\n"
        "import vllm.logger; vllm.logger._should_log_with_scope = lambda scope: True  # which imports all of vLLM\n"
        "monitor._setup_cutedsl_jit_hook()\n"
        "assert type(cute.compile).__name__ == '_MonitoredCuteCompile'\n"
        "texts = []\n"
        "keep = lambda owner, module, name: texts.append(str(module))\n"
        "kernels.compile_fake(kernels.no_stream, trace_finalize_hooks=keep)\n"
        "assert 'TVMFFIEnvGetStream' in texts[0]\n"
        "print(streamshim.status().to_dict()['binders'][0]['state'])\n"
    )
    tests = str(Path(__file__).parents[1])
    assert "bound" in run(NEWER_VLLM, code.replace("TESTS", repr(tests)), CUTE_DSL_ARCH="sm_90a")


def test_vllms_sync_check_keeps_its_methods(run):
    """It replaces ``to``, ``cuda`` and ``copy_`` of tensors; ours are on top while a capture is open."""
    code = (
        "import vllm.utils.gpu_sync_debug as check, torch, streamshim\n"
        "from streamshim import capture\n"
        "from streamshim.callsite import UNKNOWN\n"
        "streamshim.install('strict', only=['ctypes'])\n"
        "check._install_copy_checkers()\n"
        "theirs = {name: getattr(torch.Tensor, name) for name in ('to', 'cuda', 'copy_')}\n"
        "assert theirs['to'] is check._checked_to\n"
        "window = capture.Window(1, 4096, 0, UNKNOWN, 'MainThread', 'thread_local')\n"
        "for guard in capture.guards: guard.opened(window)\n"
        "assert torch.Tensor.to is not theirs['to']\n"
        "assert torch.ones(2).to(torch.float64).tolist() == [1.0, 1.0]\n"
        "for guard in capture.guards: guard.closing(window)\n"
        "assert {name: getattr(torch.Tensor, name) for name in theirs} == theirs\n"
        "print('fine')\n"
    )
    assert "fine" in run(NEWER_VLLM, code)
