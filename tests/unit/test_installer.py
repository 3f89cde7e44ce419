"""install, uninstall, status, and the package's public face. Over a binder made for the purpose; see conftest."""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import re
import sys
import threading
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

import streamshim
from streamshim import binders, capture, gate, imports, ledger, settings
from streamshim.callsite import Site
from streamshim.errors import AlreadyInstalledError, BinderError
from streamshim.settings import Mode


@pytest.fixture
def library(fake_binder):
    """The fake binder's library, imported."""
    return importlib.import_module(fake_binder.modules[0])


def works_as_written(library):
    return (library.launch(), library.Kernel().run(), library.Kernel.make()) == ("launched", "run", "made")


def is_bound_once(library):
    found = (library.launch(), library.Kernel().run(), library.Kernel.make())
    return found == (["ours", "launched"], ["ours", "run"], ["ours", "made"])


def snapshot(library):
    return [(n, id(v)) for owner in (library, library.Kernel) for n, v in vars(owner).items()]


class TestInstall:
    """What one call does, and the second one."""

    def test_binds_what_is_imported_already(self, library):
        installation = streamshim.install()
        assert is_bound_once(library)
        assert (installation.mode, gate.mode(), capture.enabled) == (Mode.BIND, Mode.BIND, True)

    def test_binds_what_is_imported_later(self, fake_binder):
        streamshim.install()
        library = importlib.import_module(fake_binder.modules[0])
        imports.settle()
        assert is_bound_once(library)

    def test_again_is_a_no_op(self, library):
        first = streamshim.install("strict", only=["fake"])
        ledger.add(ledger.Event("rescued launch", "kernel", Site("f.py", 1, "f"), 1, 2, 3))
        for again in ({}, {"mode": "strict"}, {"only": "fake"}, {"mode": Mode.STRICT, "only": {"fake"}, "skip": []}):
            assert streamshim.install(**again).settings is first.settings
            assert is_bound_once(library)
        assert ledger.counts() == {"rescued launch": 1}

    def test_again_without_arguments_ignores_a_changed_environment(self, library, monkeypatch):
        streamshim.install("check")
        monkeypatch.setenv("STREAMSHIM_MODE", "strict")
        assert streamshim.install().mode is Mode.CHECK

    @pytest.mark.parametrize(
        ("first", "second", "differs"),
        [
            ({}, {"mode": "strict"}, r"mode=strict \(in force: bind\)"),
            ({"mode": "check"}, {"mode": "off"}, r"mode=off \(in force: check\)"),
            ({}, {"only": ["fake"]}, r"only=.*fake.* \(in force: None\)"),
            ({}, {"skip": ["fake"]}, r"skip=.*fake.* \(in force: .*\)"),
            ({"only": ["fake"]}, {"mode": "check", "only": []}, r"mode=check .*, only=.* \(in force: .*fake.*\)"),
        ],
    )
    def test_again_with_other_settings_is_refused(self, library, first, second, differs):
        streamshim.install(**first)
        with pytest.raises(AlreadyInstalledError) as error:
            streamshim.install(**second)
        assert re.fullmatch(
            rf"streamshim is installed already with other settings: {differs}\. Call streamshim\.uninstall\(\) first, "
            r"or leave the argument out to keep what is in force\.",
            str(error.value),
        )
        assert streamshim.status().mode == str(first.get("mode", "bind"))

    @pytest.mark.parametrize("second", [{"only": ["fake"]}, {"skip": ["fake"]}], ids=["only", "skip"])
    def test_a_conflict_is_told_in_the_words_of_the_call(self, library, second):
        """Not in those of Python's data model."""
        streamshim.install()
        with pytest.raises(AlreadyInstalledError) as error:
            streamshim.install(**second)
        assert "frozenset" not in str(error.value)

    def test_a_wrong_value_installs_nothing(self, library):
        with pytest.raises(ValueError, match="mode is 'loud'"):
            streamshim.install("loud")
        assert works_as_written(library)
        assert not streamshim.status().installed

    def test_check_binds_too_since_the_gate_tells_them_apart(self, library):
        """In check mode the patches are there, to see the launches; only the rule is another."""
        streamshim.install("check")
        assert is_bound_once(library)
        assert gate.mode() is Mode.CHECK

    @pytest.mark.parametrize("argument", [{"skip": ["fake"]}, {"only": []}])
    def test_what_is_left_out_is_not_patched(self, library, argument):
        before = snapshot(library)
        streamshim.install(**argument)
        assert snapshot(library) == before
        assert [(b.state, b.reason) for b in streamshim.status().binders] == [("skipped", "left out by install()")]

    def test_from_16_threads_at_once(self, library):
        before, installations = snapshot(library), []
        barrier = threading.Barrier(16, timeout=10)

        def install():
            barrier.wait()
            installations.append(streamshim.install())

        threads = [threading.Thread(target=install) for _ in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(installations) == 16
        assert len({id(i.settings) for i in installations}) == 1
        assert is_bound_once(library)
        streamshim.uninstall()
        assert snapshot(library) == before

    def test_a_binder_that_cannot_be_loaded_is_off(self, library, fake_binder, monkeypatch, caplog):
        """As in a half-installed environment; in strict mode nothing stays installed."""
        monkeypatch.setitem(settings.BINDERS, "broken", "streamshim_unit_no_such_module")
        monkeypatch.setitem(binders.MODULES, "broken", fake_binder.modules)
        before = snapshot(library)
        streamshim.install()
        assert "streamshim: binder broken is off: ModuleNotFoundError: No module named" in caplog.text
        assert is_bound_once(library)
        streamshim.uninstall()
        with pytest.raises(BinderError, match="streamshim_unit_no_such_module"):
            streamshim.install("strict")
        monkeypatch.delitem(settings.BINDERS, "broken")
        assert snapshot(library) == before
        assert not streamshim.status().installed
        assert gate.mode() is Mode.OFF

    def test_two_binders_may_wait_for_the_same_module(self, library, fake_binder, monkeypatch):
        """Each is applied once, although the hook of a module is registered twice."""
        second = SimpleNamespace(
            name="second",
            packages={},
            patches=lambda module: [],
            applied=lambda module: None,
            removed=lambda: None,
            notes=list,
        )
        monkeypatch.setitem(settings.BINDERS, "second", "streamshim_unit_second_binder")
        monkeypatch.setitem(binders.MODULES, "second", fake_binder.modules)
        monkeypatch.setitem(sys.modules, "streamshim_unit_second_binder", SimpleNamespace(binder=second))
        streamshim.install()
        assert is_bound_once(library)


class TestUninstall:
    """Everything is as it was."""

    def test_puts_everything_back(self, library):
        before = snapshot(library)
        streamshim.install()
        streamshim.uninstall()
        assert snapshot(library) == before
        assert works_as_written(library)
        assert (gate.mode(), capture.enabled, capture.before_begin) == (Mode.OFF, False, [])

    def test_of_nothing_is_nothing(self, library):
        before = snapshot(library)
        streamshim.uninstall()
        streamshim.uninstall()
        assert snapshot(library) == before

    def test_keeps_later_imports_unpatched(self, fake_binder):
        streamshim.install()
        streamshim.uninstall()
        library = importlib.import_module(fake_binder.modules[0])
        imports.settle()
        assert works_as_written(library)

    def test_and_install_again(self, library):
        for mode in ("bind", "strict", "check"):
            assert streamshim.install(mode).mode is Mode(mode)
            assert is_bound_once(library)
            streamshim.uninstall()
            assert works_as_written(library)

    def test_heals_what_a_reload_has_lost(self, library):
        streamshim.install()
        importlib.reload(library)
        assert works_as_written(library)
        streamshim.uninstall()
        streamshim.install()
        assert is_bound_once(library)

    def test_lists_what_was_wrapped_by_someone_else(self, library):
        streamshim.install()
        ours, theirs = library.launch, lambda: ["theirs", ours()]
        library.launch = theirs
        (note,) = [n for n in streamshim.status().binders[0].notes if n != "a note"]
        assert note == f"{library.__name__}.launch was replaced or wrapped by someone else"
        streamshim.uninstall()
        assert library.launch is theirs
        assert streamshim.status().shadowed == [f"{library.__name__}.launch"]
        streamshim.install()
        assert streamshim.status().shadowed == []

    def test_by_the_installation(self, library):
        streamshim.install().uninstall()
        assert works_as_written(library)


class TestBlocks:
    """``with streamshim.install():``"""

    def test_a_block_uninstalls_at_its_end(self, library):
        with streamshim.install() as installation:
            assert is_bound_once(library)
            assert installation.status().installed
        assert works_as_written(library)

    def test_a_block_uninstalls_after_an_exception(self, library):
        with pytest.raises(KeyError), streamshim.install():
            raise KeyError
        assert works_as_written(library)

    def test_an_inner_block_leaves_the_outer_installation(self, library):
        with streamshim.install():
            with streamshim.install():
                with streamshim.install("bind"):
                    assert is_bound_once(library)
                assert is_bound_once(library)
            assert is_bound_once(library)
        assert works_as_written(library)

    def test_a_block_leaves_an_installation_made_before(self, library):
        streamshim.install()
        with streamshim.install():
            pass
        assert is_bound_once(library)

    def test_a_block_leaves_an_installation_made_after_its_own_was_taken_away(self, library):
        with streamshim.install():
            streamshim.uninstall()
            streamshim.install("check")
        assert is_bound_once(library)
        assert streamshim.status().mode == "check"

    def test_a_disabled_block_leaves_an_installation_made_inside(self, library, monkeypatch):
        monkeypatch.setenv("STREAMSHIM_DISABLE", "1")
        with streamshim.install():
            monkeypatch.delenv("STREAMSHIM_DISABLE")
            streamshim.install()
        assert is_bound_once(library)

    def test_it_says_what_it_is(self, library):
        assert repr(streamshim.install("check")) == "<streamshim.Installation mode=check binders=['fake']>"


class TestStatus:
    """What is bound, and what is off and why."""

    VERSION = binders.version_of("wrapt")

    def head(self, monkeypatch):
        monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(__version__="2.13.0"))

    def test_text_before_and_after_the_import(self, fake_binder, monkeypatch):
        name = fake_binder.modules[0]
        self.head(monkeypatch)
        streamshim.install("strict")
        assert str(streamshim.status()) == (
            f"streamshim {streamshim.__version__}: installed, mode strict (argument)\n"
            "  torch     2.13.0\n"
            f"  fake      waiting (wrapt {self.VERSION}, a-package-that-nobody-has not installed)\n"
            "            note: a note"
        )
        importlib.import_module(name)
        assert str(streamshim.status()) == (
            f"streamshim {streamshim.__version__}: installed, mode strict (argument)\n"
            "  torch     2.13.0\n"
            f"  fake      bound (wrapt {self.VERSION}, a-package-that-nobody-has not installed)\n"
            f"            patched {name}.launch\n"
            f"            patched {name}.Kernel.run\n"
            f"            patched {name}.Kernel.make\n"
            "            note: a note"
        )

    def test_text_with_everything_that_can_happen(self, library, monkeypatch):
        self.head(monkeypatch)
        streamshim.install(skip=["fake"])
        capture._windows[7] = capture.Window(7, 0x10, 0, Site("serve.py", 3, "warm_up"), "MainThread", "global")
        ledger.add(ledger.Event("rescued launch", "kernel", Site("f.py", 1, "f"), 1, 2, 7))
        assert str(streamshim.status()).splitlines()[1:] == [
            "  torch     2.13.0",
            "  fake      skipped: left out by install() "
            f"(wrapt {self.VERSION}, a-package-that-nobody-has not installed)",
            "  capturing capture 7 on stream 0x10 of cuda:0, begun at serve.py:3 in warm_up, thread MainThread",
            "  noticed   rescued launch: 1",
        ]

    def test_text_of_what_could_not_be_put_back(self, library):
        streamshim.install()
        ours = library.launch
        library.launch = lambda: ours()
        streamshim.uninstall()
        assert str(streamshim.status()).splitlines()[-1] == (
            f"  shadowed  {library.__name__}.launch: wrapped by someone else since; it passes through"
        )

    @pytest.mark.parametrize(
        ("environ", "reason"),
        [
            ({}, "install() has not been called"),
            ({"STREAMSHIM_MODE": "off"}, "mode is off"),
            ({"STREAMSHIM_DISABLE": "1"}, "STREAMSHIM_DISABLE=1 is set"),
        ],
    )
    def test_why_nothing_is_installed(self, library, monkeypatch, environ, reason):
        for name, value in environ.items():
            monkeypatch.setenv(name, value)
        if environ:
            streamshim.install()
        status = streamshim.status()
        assert (status.installed, status.mode, status.reason) == (False, "off", reason)
        assert str(status).splitlines()[0] == f"streamshim {streamshim.__version__}: not installed ({reason})"
        assert works_as_written(library)

    def test_an_install_that_was_told_to_be_off_is_not_said_to_be_missing(self, library):
        streamshim.install("off")
        assert streamshim.status().reason == "mode is off"

    def test_it_can_be_sent_as_json(self, library):
        streamshim.install()
        status = streamshim.status()
        plain = json.loads(json.dumps(status.to_dict()))
        assert plain == status.to_dict()
        assert plain["binders"][0]["tested"] == {"wrapt": ">=1.16", "a-package-that-nobody-has": ">=1"}
        assert plain["binders"][0]["versions"] == {"wrapt": self.VERSION, "a-package-that-nobody-has": None}

    def test_after_an_uninstall_it_does_not_say_that_install_was_never_called(self, library):
        streamshim.install()
        streamshim.uninstall()
        assert streamshim.status().reason not in ("", "install() has not been called")

    @pytest.mark.parametrize("package", ["tvm_ffi", "cutlass", "cuda"])
    def test_a_stand_in_for_a_package_does_not_break_it(self, monkeypatch, package):
        """Test suites put bare modules into ``sys.modules``, which have no spec."""
        monkeypatch.setitem(sys.modules, package, ModuleType(package))
        assert [b.name for b in streamshim.status().binders] == list(settings.BINDERS)

    def test_torch_is_named_only_where_it_is_imported(self, library, monkeypatch):
        monkeypatch.delitem(sys.modules, "torch", raising=False)
        assert streamshim.status().torch is None
        assert "  torch     not imported yet" in str(streamshim.status())


class TestNothing:
    """Off and disabled: as if the package were not there."""

    @pytest.mark.parametrize(
        ("mode", "environ"),
        [("off", {}), (None, {"STREAMSHIM_MODE": "off"}), (None, {"STREAMSHIM_DISABLE": "1"}),
         ("strict", {"STREAMSHIM_DISABLE": "yes"})],
    )  # fmt: skip
    def test_nothing_is_patched(self, library, monkeypatch, mode, environ):
        for name, value in environ.items():
            monkeypatch.setenv(name, value)
        before = snapshot(library)
        with streamshim.install(mode) as installation:
            assert snapshot(library) == before
            assert not installation.status().installed
            assert (gate.mode(), capture.enabled) == (Mode.OFF, False)
        assert snapshot(library) == before

    def test_disabled_can_be_installed_once_the_variable_is_gone(self, library, monkeypatch):
        monkeypatch.setenv("STREAMSHIM_DISABLE", "1")
        streamshim.install()
        monkeypatch.delenv("STREAMSHIM_DISABLE")
        streamshim.install()
        assert is_bound_once(library)


#: What `install` loads of ours in a process that has imported no library; the guards and binders come with theirs.
OURS = [
    "_version", "allowance", "binders", "binders.ctypes_", "binders.ctypes_.in_place", "boot", "callsite", "capture",
    "errors", "fork", "gate", "guards", "imports", "installer", "ledger", "loading", "log", "patching", "runtime",
    "settings", "state", "streams",
]  # fmt: skip
#: Modules of Python's own that take a millisecond or more to import, or to make use of.
HEAVY = [
    "argparse", "ast", "asyncio", "concurrent.futures", "ctypes", "dataclasses", "datetime", "email", "enum",
    "importlib.metadata", "importlib.resources", "inspect", "json", "linecache", "logging", "multiprocessing",
    "pathlib", "platform", "random", "re", "shutil", "socket", "ssl", "subprocess", "tempfile", "typing", "unittest",
    "urllib.parse", "uuid", "wrapt", "zipfile",
]  # fmt: skip


class TestFootprint:
    """What install() does to a process besides."""

    def test_no_heavy_import_and_no_thread(self, run_python):
        code = """
import sys, threading
import streamshim
light = sorted(m for m in sys.modules if m.startswith("streamshim"))
streamshim.install()
streamshim.uninstall()
heavy = [m for m in ("torch", "cutlass", "tvm_ffi", "cuda", "numpy", "cupy", "triton") if m in sys.modules]
print(light, heavy, threading.active_count())
"""
        assert run_python(code) == "['streamshim', 'streamshim._version'] [] 1\n"

    def test_what_is_not_needed_yet_is_not_imported(self, run_python):
        """A process that calls install() and imports no library is to notice as little of it as it can."""
        code = """
import sys
before = set(sys.modules)
import streamshim
streamshim.install()
streamshim.uninstall()
new = set(sys.modules) - before
ours = sorted(name.removeprefix("streamshim.") for name in new if name.startswith("streamshim."))
print([ours, sorted(new & set(HEAVY))])
"""
        ours, heavy = ast.literal_eval(run_python(f"HEAVY = {HEAVY}\n{code}"))
        assert ours == OURS
        # Until Python 3.12 typing brings re.
        assert [name for name in heavy if name != "re"] == ["ctypes", "enum", "typing"]

    @pytest.mark.parametrize("name", ["torch.cuda", "cupy", "cuda.bindings.driver", "cuda.bindings.runtime"])
    def test_the_guards_come_with_what_can_capture(self, run_python, tmp_path, name):
        folder = tmp_path
        for part in name.split("."):
            folder /= part
            folder.mkdir()
            (folder / "__init__.py").touch()
        code = f"""
import sys, streamshim
from streamshim import capture
streamshim.install()
print(capture.guards, "streamshim.guards.watch" in sys.modules)
import {name}
print([type(guard).__name__ for guard in capture.guards], capture.explain is None)
streamshim.uninstall()
print(capture.guards, capture.explain)
"""
        armed = "['SyncMode', 'Forks', 'HostSyncs', 'Refusals', 'Watch'] False"
        assert run_python(code) == f"[] False\n{armed}\n[] None\n"

    def test_the_guards_are_there_before_the_first_capture(self, run_python):
        """Whatever captures: a model of torch is not imported under its name."""
        code = """
import streamshim
from streamshim import capture
for mode in ("bind", "strict"):
    with streamshim.install(mode):
        (check,) = capture.before_begin
        check()
        first = list(capture.guards)
        check()
        print(len(first), first == capture.guards, len(capture.readers))
"""
        assert run_python(code) == "5 True 0\n5 True 1\n"

    def test_another_thread_imports_what_the_guards_need(self, run_python, tmp_path):
        """Neither waits for the other: that one for the lock of `install`, and this one for the module."""
        (tmp_path / "torch" / "cuda").mkdir(parents=True)
        for name in ("__init__", "cuda/__init__"):
            (tmp_path / "torch" / f"{name}.py").touch()
        graphs = "import __main__\n__main__.inside.set()\n__main__.go_on.wait(5)\nclass CUDAGraph: pass\n"
        (tmp_path / "torch" / "cuda" / "graphs.py").write_text(graphs)
        code = """
import os, sys, threading, time, streamshim
from streamshim import capture, imports, installer
inside, go_on, guard = threading.Event(), threading.Event(), installer._guard
assert "dis" not in sys.modules
def load():
    import torch.cuda.graphs
    import dis
thread = threading.Thread(target=load)
def slow(module):
    if threading.current_thread() is not thread:
        go_on.set()
        time.sleep(0.5)
    guard(module)
installer._guard = slow
timer = threading.Timer(10, os._exit, [3])
timer.daemon = True
timer.start()
thread.start()
inside.wait()
streamshim.install()
thread.join()
print("dis" in sys.modules, imports._half_imported, len(capture.guards))
"""
        assert run_python(code) == "True set() 5\n"

    def test_guards_that_cannot_be_loaded_are_a_problem(self, run_python, tmp_path):
        (tmp_path / "torch" / "cuda").mkdir(parents=True)
        for name in ("__init__", "cuda/__init__"):
            (tmp_path / "torch" / f"{name}.py").touch()
        (tmp_path / "torch" / "cuda" / "graphs.py").write_text("class CUDAGraph: pass")
        code = """
import sys, streamshim
sys.modules["streamshim.guards.watch"] = None
import torch.cuda.graphs
for mode in ("bind", "strict"):
    try:
        print(streamshim.install(mode).status().guards_off.partition(":")[0])
    except streamshim.BinderError as error:
        print("torch captures" in str(error), streamshim.status().installed)
    streamshim.uninstall()
"""
        assert run_python(code) == "torch captures\nTrue False\n"

    def test_a_region_that_was_entered_before_is_known_to_the_guards(self, run_python):
        code = """
import streamshim
from streamshim import capture
streamshim.install()
with streamshim.allow("sync", reason="a test"):
    capture.before_begin[0]()
    from streamshim.guards import sync_mode
    print(sync_mode._paused)
print(sync_mode._paused)
"""
        assert run_python(code) == "1\n0\n"

    def test_status_looks_and_does_not_import(self, run_python, tmp_path):
        """Whoever asks what is bound must not change the answer (tvm_ffi imports torch, which takes seconds)."""
        for package in ("torch", "cutlass", "tvm_ffi", "cuda"):
            (tmp_path / f"{package}.py").write_text("")
        code = """
import sys, streamshim
streamshim.install()
streamshim.status()
print([m for m in ("torch", "cutlass", "tvm_ffi", "cuda") if m in sys.modules])
"""
        assert run_python(code) == "[]\n"

    def test_it_works_without_torch(self, run_python, tmp_path):
        (tmp_path / "torch.py").write_text("raise ImportError('no torch here')")
        code = """
import streamshim
with streamshim.install() as installation:
    print(installation.mode, streamshim.status().torch)
"""
        assert run_python(code) == "bind None\n"


class TestPublicNames:
    """What ``import streamshim`` gives."""

    def test_dir_shows_them(self):
        assert dir(streamshim) == sorted(streamshim.__all__)

    @pytest.mark.parametrize("name", streamshim.__all__)
    def test_each_is_there_and_documented(self, name):
        value = getattr(streamshim, name)
        assert isinstance(value, str) or inspect.getdoc(value)
        assert not isinstance(value, ModuleType)

    def test_the_lazy_table_and_the_list_are_the_same(self):
        assert sorted([*streamshim._HOMES, "__version__"]) == sorted(streamshim.__all__)

    def test_the_list_for_type_checkers_is_the_same(self):
        """What is behind TYPE_CHECKING is not run, so it is read."""
        block = inspect.getsource(streamshim).partition("if TYPE_CHECKING:\n")[2].partition("\n\n_HOMES")[0]
        names = set(re.findall(r"\w+", re.sub(r"from [\w.]+ import", "", block)))
        assert names == set(streamshim._HOMES)

    def test_functions_stay_functions_when_their_modules_are_imported(self, run_python):
        """A submodule becomes an attribute of the package; none may have the name of a public function."""
        code = """
import importlib, inspect, pkgutil
import streamshim
for module in pkgutil.iter_modules(streamshim.__path__):
    if module.name not in ("compiler", "__main__"):  # these two import torch, or are a program
        importlib.import_module(f"streamshim.{module.name}")
public = [getattr(streamshim, name) for name in streamshim.__all__ if name != "compile"]
print([value for value in public if inspect.ismodule(value)], inspect.isfunction(streamshim.install))
"""
        assert run_python(code) == "[] True\n"

    def test_no_module_of_the_package_has_a_public_name(self):
        files = {path.stem for path in Path(streamshim.__file__).parent.iterdir()}
        assert files & set(streamshim.__all__) == set()

    def test_an_unknown_name_is_an_attribute_error(self):
        with pytest.raises(AttributeError) as error:
            streamshim.no_such_name  # noqa: B018
        assert str(error.value) == "module 'streamshim' has no attribute 'no_such_name'"
        assert not hasattr(streamshim, "CUDAGraph")

    def test_the_signature_of_install(self):
        assert str(inspect.signature(streamshim.install)).startswith("(mode: 'str | Mode | None' = None, *, only:")
        assert list(inspect.signature(streamshim.install).parameters) == ["mode", "only", "skip", "watch", "redirect"]


class TestCurrentHandle:
    """``streamshim.current_handle``"""

    def test_asks_for_the_device(self, cuda, monkeypatch):
        monkeypatch.setattr(type(cuda), "current_handle", lambda self, device: 0x1000 + device)
        cuda.device = 1
        assert streamshim.current_handle() == 0x1001
        assert streamshim.current_handle(0) == 0x1000

    def test_torch_without_cuda_says_so(self, monkeypatch):
        torch = pytest.importorskip("torch")
        if hasattr(torch._C, "_cuda_getCurrentRawStream"):
            pytest.skip("this torch was built with CUDA")
        streamshim.runtime.use(None)
        with pytest.raises(streamshim.NoCudaError) as error:
            streamshim.current_handle()
        assert str(error.value).startswith(f"torch {torch.__version__} was built without CUDA")


# Libraries of another shape than the binder knows, as packages on disk, each in a process of its own.

STUB = {
    "torch/__init__.py": "__version__ = '2.99'\n",
    "torch/cuda/__init__.py": "",
    "torch/cuda/graphs.py": (
        "class CUDAGraph:\n"
        "    def capture_begin(self, pool=None, capture_error_mode='global'): print('begun')\n"
        "    def capture_end(self): print('ended')\n"
    ),
    "tvm_ffi/__init__.py": "",
    "tvm_ffi/core.py": (
        "def _env_get_current_stream(device_type, device): return 0\n"
        "def _env_set_current_stream(device_type, device, handle): pass\n"
    ),
    "cutlass/__init__.py": "from . import cutlass_dsl\n",
    "cutlass/base_dsl/__init__.py": "",
    "cutlass/base_dsl/dsl.py": (
        "class BaseDSL:\n"
        "    def _func(self, funcBody, *args, **kwargs): return funcBody(*args, **kwargs)\n"
        "    def mangle_name(self, function_name, args, sig): return function_name\n"
    ),
    "cutlass/base_dsl/jit_executor.py": (
        "class JitCompiledFunction:\n"
        "    def __init__(self, ir_module=None, *, dynamic_args=(), dynamic_kwargs={}): pass\n"
        "    def __call__(self, *args, **kwargs): return 'called'\n"
        "class ExecutionArgs:\n"
        "    def generate_execution_args(self, args, kwargs): return [], []\n"
        "class JitExecutor:\n"
        "    def run_compiled_program(self, exe_args): return 'run'\n"
    ),
    "cutlass/cutlass_dsl/__init__.py": "from . import cutlass\nfrom ..base_dsl import dsl, jit_executor\n",
    "cutlass/cutlass_dsl/cutlass.py": (
        "class CutlassBaseDSL:\n"
        "    @staticmethod\n"
        "    def cuda_launch_func(stream, *args, **kwargs): return 'launched'\n"
    ),
    "cutlass/cutlass_dsl/tvm_ffi_provider.py": (
        "class TVMFFIJitCompiledFunctionBase:\n"
        "    def __call__(self, *args): return 'ffi'\n"
        "class TVMFFIJitCompiledFunction(TVMFFIJitCompiledFunctionBase): pass\n"
        "class TVMFFIJitCompiledFunctionWithKwargs(TVMFFIJitCompiledFunctionBase):\n"
        "    def __call__(self, *args, **kwargs): return 'ffi'\n"
    ),
}

HEAD = """
import logging
logging.getLogger("streamshim").addHandler(logging.NullHandler())
import streamshim
def ours():
    import cutlass.cutlass_dsl.tvm_ffi_provider as provider
    from cutlass.base_dsl import dsl, jit_executor
    from cutlass.cutlass_dsl import cutlass
    owners = [v for m in (provider, dsl, jit_executor, cutlass) for v in vars(m).values() if isinstance(v, type)]
    functions = [getattr(v, "__func__", v) for owner in owners for v in vars(owner).values()]
    return sum(hasattr(function, "__wrapped__") for function in functions)
def cute():
    (status,) = [b for b in streamshim.status().binders if b.name == "cute"]
    return status
"""


@pytest.fixture
def stub(tmp_path):
    """``stub({path: text or None})`` writes the stub packages with these files changed or left out."""

    def write(changes=None):
        for path, text in {**STUB, **(changes or {})}.items():
            if text is not None:
                file = tmp_path / path
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text(text)

    return write


#: What may be missing, and the words in which it is told.
LACKING = {
    "a method of the first module": (
        {"cutlass/base_dsl/jit_executor.py": STUB["cutlass/base_dsl/jit_executor.py"].replace("run_compiled", "run")},
        "cutlass.base_dsl.jit_executor.JitExecutor.run_compiled_program does not exist",
    ),
    "a staticmethod that is none": (
        {"cutlass/cutlass_dsl/cutlass.py": STUB["cutlass/cutlass_dsl/cutlass.py"].replace("@staticmethod", "")},
        "cutlass.cutlass_dsl.cutlass.CutlassBaseDSL.cuda_launch_func is no staticmethod",
    ),
    "a class": (
        {"cutlass/base_dsl/jit_executor.py": "class JitCompiledFunction:\n    def __call__(self): return 'called'\n"},
        "AttributeError: module 'cutlass.base_dsl.jit_executor' has no attribute 'ExecutionArgs'",
    ),
    "a class of the second module": (
        {"cutlass/cutlass_dsl/tvm_ffi_provider.py": "class TVMFFIJitCompiledFunction:\n    pass\n"},
        "AttributeError: module 'cutlass.cutlass_dsl.tvm_ffi_provider' has no attribute "
        "'TVMFFIJitCompiledFunctionWithKwargs'",
    ),
    "a method of the second module": (
        {"cutlass/cutlass_dsl/tvm_ffi_provider.py": (
            "class TVMFFIJitCompiledFunctionWithKwargs:\n    pass\n"
            "class TVMFFIJitCompiledFunction:\n    def __call__(self, *args): return 'ffi'\n"
        )},
        "cutlass.cutlass_dsl.tvm_ffi_provider.TVMFFIJitCompiledFunctionWithKwargs.__call__ does not exist",
    ),
}  # fmt: skip


class TestUnknownShape:
    """A library that is not as the binder knows it: off with a reason, and the user's program goes on."""

    def test_the_stub_is_bound_where_nothing_is_missing(self, stub, run_python):
        stub()
        code = "streamshim.install()\nimport cutlass.cutlass_dsl.tvm_ffi_provider\nprint(cute().state, ours())"
        assert run_python(HEAD + code) == "bound 8\n"

    @pytest.mark.parametrize(
        ("lacking", "order"),
        [
            *((lacking, "library first") for lacking in LACKING),
            ("a method of the first module", "shim first"),
            ("a method of the second module", "shim first"),
        ],
    )
    def test_it_is_off_with_a_reason_and_whoever_insists_is_told(self, stub, run_python, lacking, order):
        changes, reason = LACKING[lacking]
        stub(changes)
        steps = ["import cutlass.cutlass_dsl.tvm_ffi_provider", "streamshim.install()"]
        steps = steps if order == "library first" else steps[::-1]
        code = """
print(cute().state)
print(cute().reason)
print(cute().patched, ours())
for arguments in ({"mode": "strict"}, {"only": ["cute"]}):
    streamshim.uninstall()
    try:
        streamshim.install(**arguments)
    except streamshim.BinderError as error:
        print(error)
    print("installed:", streamshim.status().installed, ours())
"""
        told = (
            "A binder could not be applied, so launches through it would not follow torch's current stream:\n"
            f"  cute: {reason}\n"
            "Use a version within the tested range (streamshim.status() lists it), leave a binder out with "
            "install(skip=[...]), or use bind mode, which goes on without it.\n"
            "installed: False 0\n"
        )
        # Off is off: a binder of which one half is in place would bind some launches and not others.
        assert run_python("\n".join([HEAD, *steps, code])) == f"off\n{reason}\n[] 0\n" + told * 2

    def test_strict_mode_is_told_by_the_first_capture_if_the_library_comes_later(self, stub, run_python):
        changes, reason = LACKING["a method of the first module"]
        stub(changes)
        code = """
streamshim.install("strict")
import torch.cuda.graphs
torch.cuda.graphs.CUDAGraph  # whoever captures has torch
import cutlass
print("imported")
try:
    torch.cuda.graphs.CUDAGraph().capture_begin()
except streamshim.BinderError as error:
    print(str(error).splitlines()[1])
streamshim.uninstall()
torch.cuda.graphs.CUDAGraph().capture_begin()
"""
        assert run_python(HEAD + code) == f"imported\n  cute: {reason}\nbegun\n"

    def test_bind_mode_captures_nevertheless(self, stub, run_python):
        stub(LACKING["a method of the first module"][0])
        code = """
from streamshim import runtime
class Fake:
    def current_device(self): return 0
    def current_handle(self, device): return 0x7000
    def capture_state(self, handle): return runtime.CaptureState(7)
runtime.use(Fake())
streamshim.install()
import torch.cuda.graphs, cutlass
graph = torch.cuda.graphs.CUDAGraph()
graph.capture_begin()
graph.capture_end()
print(cute().state)
"""
        assert run_python(HEAD + code) == "begun\nended\noff\n"

    def test_a_torch_of_unknown_shape_is_in_the_status(self, stub, run_python):
        """Nothing knows of captures then: whoever asks what the shim does here must be told."""
        stub({"torch/cuda/graphs.py": "class CUDAGraph:\n    def capture_end(self): pass\n"})
        code = "streamshim.install()\nimport torch.cuda.graphs\nprint(streamshim.status())"
        assert "torch.cuda.graphs.CUDAGraph.capture_begin does not exist" in run_python(HEAD + code)

    def test_a_torch_without_graphs_is_in_the_status(self, stub, run_python):
        stub({"torch/cuda/graphs.py": ""})
        code = "streamshim.install()\nimport torch.cuda.graphs\nprint(streamshim.status())"
        assert "CUDAGraph" in run_python(HEAD + code)


OTHER_CUTLASS = {
    # An older package of that name, of C++ bindings; the binder's modules do not exist in it.
    "no cutlass_dsl": {"cutlass/__init__.py": "version = '3.5'\n"},
    "an empty module": {"cutlass.py": ""},
    # One that has a module of the name, but not what the binder needs.
    "no base_dsl": {"cutlass/__init__.py": "from . import cutlass_dsl\nversion = '3.5'\n",
                    "cutlass/cutlass_dsl/__init__.py": ""},
}  # fmt: skip


class TestUnrelatedPackage:
    """A package called ``cutlass`` that is something else."""

    @pytest.fixture(autouse=True)
    def nothing_heavy(self, tmp_path):
        for package in ("torch", "tvm_ffi"):
            (tmp_path / f"{package}.py").write_text("raise ImportError")

    @pytest.mark.parametrize("files", OTHER_CUTLASS.values(), ids=OTHER_CUTLASS)
    def test_it_does_not_matter(self, tmp_path, run_python, files):
        for path, text in files.items():
            (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / path).write_text(text)
        code = """
streamshim.install()
import cutlass
for _ in range(2):  # before it is imported, and after
    print(cute().state, getattr(cutlass, "version", None), streamshim.status().installed)
    streamshim.uninstall()
    streamshim.install()
"""
        for line in run_python(HEAD + code).splitlines():
            state, version, installed = line.split()
            assert state in ("waiting", "off")
            assert version in ("3.5", "None")
            assert installed == "True"

    def test_a_library_that_cannot_be_imported_is_the_users_own_error(self, tmp_path, run_python):
        (tmp_path / "cutlass.py").write_text("raise OSError('libcuda.so.1: cannot open shared object file')")
        code = """
streamshim.install()
try:
    import cutlass
except OSError as error:
    print(error)
print(cute().state)
"""
        assert run_python(HEAD + code) == "libcuda.so.1: cannot open shared object file\nwaiting\n"


def test_a_binder_error_is_raised_for_what_is_asked_by_name(fake_binder, library, monkeypatch):
    monkeypatch.delattr(library.Kernel, "run")
    before = snapshot(library)
    with pytest.raises(BinderError, match=rf"fake: {library.__name__}\.Kernel\.run does not exist"):
        streamshim.install(only=["fake"])
    assert snapshot(library) == before
    assert not streamshim.status().installed
    streamshim.install()  # who does not insist goes on without it
    assert streamshim.status().binders[0].state == "off"
