"""The line that is named in a report: the innermost one that is not machinery."""

from __future__ import annotations

import contextlib
import functools
import linecache
import os
import threading
from pathlib import Path

import pytest

from streamshim import callsite
from streamshim.callsite import MACHINERY, UNKNOWN, Site, user_site

HERE = "tests/unit/test_callsite.py"


def call_from(module, call=user_site, file="<test>"):
    """Call from a frame whose module has this name."""
    namespace = {"__name__": module, "call": call}
    exec(compile("def caller():\n    return call()", file, "exec"), namespace)
    return namespace["caller"]


def test_the_calling_line_is_named(at_root):
    site = user_site()
    line = test_the_calling_line_is_named.__code__.co_firstlineno + 1
    assert site == Site(HERE, line, "test_the_calling_line_is_named")
    assert str(site) == f"{HERE}:{line} in test_the_calling_line_is_named"
    assert site.source == "site = user_site()"


@pytest.mark.parametrize("package", sorted(MACHINERY))
@pytest.mark.parametrize("module", ["", ".some.module"], ids=["package", "module"])
def test_machinery_is_passed_over(package, module, at_root):
    assert call_from(package + module)().file == HERE


@pytest.mark.parametrize(
    "module",
    ["__main__", "torchvision.ops", "cutlass_kernels", "my.torch", "warp_user", "streamshim_user", "streamshim.demo"],
)
def test_the_users_modules_are_not(module):
    assert call_from(module, file=f"<{module}>")() == Site(f"<{module}>", 2, "caller")


def test_code_that_a_library_has_written_is_passed_over(at_root):
    """TVM-FFI's functions around CuTe kernels, for instance; a file that is executed so is the user's."""
    for file, expected in (("<string>", HERE), ("script.py", "script.py")):
        namespace = {"call": user_site, "__builtins__": {}}
        exec(compile("site = call()", file, "exec"), namespace)
        assert namespace["site"].file == expected


def test_the_function_that_tvm_ffi_writes_is_passed_over(at_root):
    wrapping = pytest.importorskip("tvm_ffi.utils.kwargs_wrapper")
    wrapper = wrapping.make_kwargs_wrapper(lambda *args: user_site(), ["x", "stream"], arg_defaults=(None,))
    assert wrapper(1).file == HERE


def test_frozen_modules_are_passed_over(at_root):
    """``importlib`` is in every trace of a launch at import time."""
    assert call_from("importlib._bootstrap", file="<frozen importlib._bootstrap>")().file == HERE


def test_layers_of_machinery_are_passed_over(at_root):
    @contextlib.contextmanager
    def region():
        yield user_site()

    inner = call_from("torch.nn", functools.partial(call_from("cutlass", user_site)))
    assert inner().function == "test_layers_of_machinery_are_passed_over"
    with region() as site:
        assert site.function == "region"  # the innermost line of the user's own


def test_the_innermost_of_the_users_lines_counts():
    inner = call_from("my_model", file="<model>")
    outer = call_from("torch.nn", inner)
    assert call_from("my_server", outer, file="<server>")().file == "<model>"


def test_all_machinery_names_the_innermost_frame(monkeypatch):
    monkeypatch.setattr(callsite, "_is_machinery", lambda frame: True)
    assert user_site().function == "test_all_machinery_names_the_innermost_frame"


def test_a_thread_without_python_frames_has_no_site(monkeypatch):
    def no_frame(depth):
        raise ValueError("call stack is not deep enough")

    monkeypatch.setattr(callsite.sys, "_getframe", no_frame)
    assert user_site() is UNKNOWN
    assert str(UNKNOWN) == "<no Python frame>:0 in ?"
    assert UNKNOWN.source == ""


def test_another_thread_has_its_own_line():
    seen = []
    thread = threading.Thread(target=lambda: seen.append(user_site()))
    thread.start()
    thread.join()
    assert seen[0].function == "<lambda>"


@pytest.mark.parametrize(("below", "short"), [("", HERE), ("tests", "unit/test_callsite.py"), ("tests/contract", None)])
def test_files_are_short_below_the_working_directory(monkeypatch, below, short):
    root = Path(__file__).parents[2]
    monkeypatch.chdir(root / below)
    assert user_site().file == (__file__ if short is None else str(Path(short)))


def test_a_working_directory_that_is_gone_does_not_matter(monkeypatch, tmp_path):
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert user_site().file == __file__


def test_source_is_read_from_the_file(tmp_path):
    file = tmp_path / "model.py"
    file.write_text("first\n    second line   \n")
    linecache.checkcache()
    assert Site(str(file), 2, "f").source == "second line"
    assert Site(str(file), 99, "f").source == ""
    assert Site(os.devnull, 1, "f").source == ""
