"""Fixtures of the unit tests: invented streams, modules written to disk, and a clean slate after each test."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from fake_cupti import cupti, watched  # noqa: F401, fixtures

import streamshim
from streamshim import binders, capture, gate, imports, installer, ledger, runtime, settings
from streamshim.callsite import Site
from streamshim.patching import Patch
from streamshim.runtime import NOT_CAPTURING, CaptureState

VARIABLES = ("STREAMSHIM", "STREAMSHIM_MODE", "STREAMSHIM_STRICT", "STREAMSHIM_DISABLE", "STREAMSHIM_CTYPES")
ROOT = Path(__file__).parents[2]

_numbers = itertools.count()


@pytest.fixture(autouse=True)
def clean_slate(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No setting from outside, and nothing left behind: installation, mode, runtime, windows, events."""
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    before = runtime._holder._runtime
    yield
    streamshim.uninstall()
    gate.set_mode(settings.Mode.OFF)
    gate.mover, gate.needs_mover = None, False
    runtime.use(before)
    gate.connect(before)
    capture.enabled = False
    capture.before_begin.clear()
    capture._windows.clear()
    capture._captured_on.clear()
    capture._lost_on.clear()
    installer._shadowed.clear()
    installer._asked = None
    ledger.clear()


class FakeRuntime:
    """Streams are invented integers, and captures what a test says; every question about a capture is written down."""

    name = "fake"

    def __init__(self) -> None:
        self.current = 0
        self.device = 0
        self.captures: dict[int, CaptureState] = {}
        self.asked: list[int] = []
        self.mode = "global"

    def current_handle(self, device: int) -> int:
        return self.current

    def current_device(self) -> int:
        return self.device

    def device_count(self) -> int:
        return 2

    def set_device(self, device: int) -> None:
        self.device = device

    def capture_state(self, handle: int) -> CaptureState:
        self.asked.append(handle)
        return self.captures.get(handle, NOT_CAPTURING)

    def thread_mode(self) -> str:
        return self.mode

    def order(self, first: int, then: int, device: int) -> None:
        pass


@pytest.fixture
def cuda() -> FakeRuntime:
    """The runtime in use, with invented streams."""
    fake = FakeRuntime()
    runtime.use(fake)
    gate.connect(fake)
    return fake


@pytest.fixture
def capturing(cuda: FakeRuntime) -> Callable[..., capture.Window]:
    """This thread captures on the stream 0x7f0010, in bind mode; ``capturing("relaxed")`` says in which mode.

    With ``by_other=True`` another thread does, and this one's current stream is another.
    """
    gate.set_mode(settings.Mode.BIND)

    def begin(error_mode: str = "global", by_other: bool = False) -> capture.Window:
        cuda.captures[0x7F0010] = CaptureState(7)
        cuda.current = 0x7F0030 if by_other else 0x7F0010
        site = Site("serve.py", 12, "capture_model")
        thread, ident = ("engine", 1) if by_other else ("MainThread", threading.get_ident())
        capture._windows[7] = capture.Window(7, 0x7F0010, 0, site, thread, error_mode, ident)
        return capture._windows[7]

    return begin


@pytest.fixture
def at_root(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run from the project's root, so that a file of the project has the same short name wherever pytest started."""
    monkeypatch.chdir(ROOT)


@pytest.fixture
def write_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., str]]:
    """``write_module(source)`` writes a module with a name that nobody has used, and returns that name.

    Other modules can be named in the source as ``{0}``, ``{1}``; ``{me}`` is the module's own name.
    """
    monkeypatch.syspath_prepend(str(tmp_path))
    written: list[str] = []

    def write(source: str, *others: str, name: str = "") -> str:
        me = name or f"streamshim_unit_{next(_numbers)}"
        (tmp_path / f"{me}.py").write_text(source.format(*others, me=me))
        written.append(me)
        return me

    yield write
    for name in written:
        sys.modules.pop(name, None)
        imports.forget(name)


@pytest.fixture
def new_name() -> Callable[[], str]:
    """A module name that nobody has used, to be written later."""
    return lambda: f"streamshim_unit_{next(_numbers)}"


class FakeBinder:
    """A binder over one module with a function ``launch`` and a class ``Kernel`` that has ``run`` and ``make``."""

    name = "fake"

    def __init__(self, module: str) -> None:
        self.packages = {"wrapt": ">=1.16", "a-package-that-nobody-has": ">=1"}
        self.modules: tuple[str, ...] = (module,)

    def patches(self, module: ModuleType) -> list[Patch]:
        def wrap(original: Callable[..., object]) -> Callable[..., object]:
            return lambda *args, **kwargs: ["ours", original(*args, **kwargs)]

        return [
            Patch(module, "launch", wrap),
            Patch(module.Kernel, "run", wrap),
            Patch(module.Kernel, "make", wrap, static=True),
        ]

    def applied(self, module: ModuleType) -> None:
        pass

    def removed(self) -> None:
        pass

    def notes(self) -> list[str]:
        return ["a note"]


FAKE_LIBRARY = """
def launch():
    return "launched"

class Kernel:
    def run(self):
        return "run"

    @staticmethod
    def make():
        return "made"
"""


@pytest.fixture
def fake_binder(write_module: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> FakeBinder:
    """The only binder that exists, over a module that is on disk and not imported yet (``fake_binder.modules[0]``)."""
    binder = FakeBinder(write_module(FAKE_LIBRARY))
    for name in list(settings.BINDERS):
        monkeypatch.delitem(settings.BINDERS, name)
    monkeypatch.setitem(settings.BINDERS, "fake", "streamshim_unit_fake_binder")
    monkeypatch.setitem(binders.MODULES, "fake", binder.modules)
    monkeypatch.setitem(sys.modules, "streamshim_unit_fake_binder", SimpleNamespace(binder=binder))
    assert binders.load("fake") is binder
    return binder


@pytest.fixture
def run_python(tmp_path: Path) -> Callable[..., str]:
    """``run_python(code, VARIABLE="value")`` runs code in a fresh interpreter and returns what it printed.

    ``tmp_path`` is on its path, so modules written there can be imported. The environment has no streamshim setting.
    """

    def run(code: str, **variables: str) -> str:
        env = {name: value for name, value in os.environ.items() if name not in VARIABLES}
        env["PYTHONPATH"] = os.pathsep.join([str(tmp_path), str(ROOT)])
        done = subprocess.run(
            [sys.executable, "-c", code], env={**env, **variables}, cwd=tmp_path, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run
