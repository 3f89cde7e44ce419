"""The entry points of the built wheel, called as engines call them; `test_engines.py` has the engines' own loaders."""

from __future__ import annotations

import pytest
from environments import FAKE_TORCH

#: What SGLang does with plugins: whatever they raise is logged. vLLM does the same without the try.
HOST = """
from importlib.metadata import entry_points
import logging, sys
SETUP
(entry,) = entry_points(group="GROUP", name="streamshim")
try:
    entry.load()()
    entry.load()()
except Exception:
    logging.exception("swallowed")
import torch
print(hasattr(torch.cuda.CUDAGraph.capture_begin, "__wrapped__"))
"""
GROUPS = {"vllm.general_plugins": "the vLLM plugin", "sglang.srt.plugins": "the SGLang plugin"}


@pytest.fixture(params=GROUPS)
def group(request):
    return request.param


@pytest.fixture
def host(installed, write, group):
    """``host(setup="", status=0, VARIABLE=...)`` runs a program that loads the plugin."""

    def run(setup="", status=0, **variables):
        folder = write(FAKE_TORCH, {"host.py": HOST.replace("GROUP", group).replace("SETUP", setup)})
        return installed.run("host.py", cwd=folder, status=status, **variables)

    return run


@pytest.mark.parametrize(
    "variables", [{}, {"STREAMSHIM": "1"}, {"STREAMSHIM": ""}, {"STREAMSHIM_MODE": "strict"}], ids=str
)
def test_active_unless_it_is_switched_off(host, variables):
    done = host(**variables)
    assert (done.stdout, done.stderr) == ("True\n", "")


@pytest.mark.parametrize(
    "variables", [{"STREAMSHIM": "0"}, {"STREAMSHIM_DISABLE": "1"}, {"STREAMSHIM_MODE": "off"}], ids=str
)
def test_switched_off(host, variables):
    done = host(**variables)
    assert (done.stdout, done.stderr) == ("False\n", "")


def test_a_failure_is_told_and_the_engine_goes_on(host, group):
    done = host("sys.modules['streamshim.gate'] = None")
    assert done.stdout == "False\n"
    assert done.stderr.startswith(
        f"streamshim: {GROUPS[group]} could not start it, so it is not active in this process: "
    )


def test_a_failure_in_strict_mode_ends_the_process(host, group):
    done = host("sys.modules['streamshim.gate'] = None", status=3, STREAMSHIM_STRICT="1")
    assert done.stdout == ""
    assert f"streamshim: {GROUPS[group]} could not start it, so this process (pid " in done.stderr


def test_a_library_of_an_unknown_shape_ends_the_process_in_strict_mode(host, write, group):
    """The same for a binder that cannot be applied to what is imported already."""
    write({"tvm_ffi/__init__.py": "", "tvm_ffi/stream.py": ""})
    done = host("import tvm_ffi", status=3, STREAMSHIM_STRICT="1")
    assert f"streamshim: {GROUPS[group]} could not start it" in done.stderr
    assert "tvm_ffi" in done.stderr
    assert host("import tvm_ffi").stdout == "True\n"


def test_nothing_of_the_command_line_is_imported(installed, write):
    code = (
        "import sys, torch, streamshim, streamshim.plugins.vllm, streamshim.plugins.sglang\n"
        "streamshim.plugins.vllm.activate(); streamshim.plugins.sglang.activate(); streamshim.status()\n"
        "print(sorted({'click', 'rich', 'packaging', 'pytest'} & sys.modules.keys()))\n"
    )
    assert installed.run("-c", code, cwd=write(FAKE_TORCH), STREAMSHIM="1").stdout == "[]\n"
