"""Import hooks: after the import and never in the middle of it, and never a reason for the import to fail."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import logging
import sys
import threading
import types

import pytest
import wrapt
from environments import in_the_middle_of

from streamshim import imports


@pytest.fixture
def calls():
    """A list, and hooks that add to it the module's name and whether its body had run to its end."""

    class Calls(list):
        def hook(self, module):
            self.append((module.__name__, getattr(module, "complete", None)))

    return Calls()


def test_a_hook_registered_before_the_import_runs_before_the_import_returns(write_module, calls):
    """Whoever imports and launches at once must be bound: nothing else may have to be imported first."""
    name = write_module("complete = True")
    imports.when_imported(name, calls.hook)
    assert calls == []
    importlib.import_module(name)
    assert calls == [(name, True)]


def test_it_has_run_at_the_latest_when_something_else_is_imported(write_module, calls):
    name, another = write_module("complete = True"), write_module("")
    imports.when_imported(name, calls.hook)
    importlib.import_module(name)
    importlib.import_module(another)
    assert calls == [(name, True)]


def test_a_hook_registered_after_the_import_runs_at_once(write_module, calls):
    name = write_module("complete = True")
    importlib.import_module(name)
    imports.when_imported(name, calls.hook)
    assert calls == [(name, True)]


def test_a_hook_runs_once_although_the_module_is_imported_twice(write_module, calls):
    name = write_module("complete = True")
    imports.when_imported(name, calls.hook)
    for _ in range(2):
        importlib.import_module(name)
        imports.settle()
    assert calls == [(name, True)]


def test_a_submodule_is_waited_for(tmp_path, write_module, calls, new_name):
    package = new_name()
    (tmp_path / package).mkdir()
    (tmp_path / package / "__init__.py").write_text("from . import part\n")
    (tmp_path / package / "part.py").write_text("complete = True\n")
    imports.when_imported(f"{package}.part", calls.hook)
    try:
        importlib.import_module(package)
        imports.settle()
        assert calls == [(f"{package}.part", True)]
    finally:
        for name in [n for n in sys.modules if n.partition(".")[0] == package]:
            del sys.modules[name]
        imports.forget(f"{package}.part")


def test_a_half_imported_module_is_waited_for(write_module, calls, monkeypatch):
    """``install()`` may be called by something that the module itself imports, in the middle of its body."""
    middle = write_module("from streamshim import imports\nimports.hook_of_test()\n")
    name = write_module("complete = False\nimport {0}\ncomplete = True\n", middle)
    another = write_module("")
    monkeypatch.setattr(imports, "hook_of_test", lambda: imports.when_imported(name, calls.hook), raising=False)
    importlib.import_module(name)
    assert calls == [] or calls == [(name, True)]  # never with a half-imported module
    importlib.import_module(another)
    assert calls == [(name, True)]


def test_a_circular_import_is_waited_for(write_module, calls, monkeypatch, new_name):
    """A imports B, B imports A back (and gets half of it) and registers for A, while A goes on importing others."""
    a, b = new_name(), new_name()
    late = write_module("seen = True")
    write_module("complete = False\nimport {0}\nimport {1}\ncomplete = True\n", b, late, name=a)
    write_module("import {0}\nfrom streamshim import imports\nimports.hook_of_test()\n", a, name=b)
    monkeypatch.setattr(imports, "hook_of_test", lambda: imports.when_imported(a, calls.hook), raising=False)
    importlib.import_module(a)
    imports.settle()
    assert calls == [(a, True)]


def test_a_hook_that_imports_what_another_thread_is_in_the_middle_of(run_python, tmp_path):
    """Python holds its only import lock while it looks for a module, and that thread needs it to go on."""
    (tmp_path / "hooked.py").write_text("")
    code = f"""
from streamshim import imports
imports.when_imported("hooked", lambda module: print(__import__("asyncio").__name__))
{in_the_middle_of("asyncio")}
import hooked
thread.join()
"""
    assert run_python(code) == "asyncio\n"


def test_a_module_that_is_only_looked_for_is_hooked_when_it_is_imported(write_module, calls):
    """``importlib.util.find_spec("torch")`` is how many libraries ask whether it is there."""
    name = write_module("complete = True")
    imports.when_imported(name, calls.hook)
    assert importlib.util.find_spec(name).name == name
    assert calls == []
    importlib.import_module(name)
    assert calls == [(name, True)]


def test_a_module_that_is_not_there_is_told_so_as_ever(new_name, calls):
    name = new_name()
    imports.when_imported(name, calls.hook)
    assert importlib.util.find_spec(name) is None
    with pytest.raises(ModuleNotFoundError, match=f"No module named '{name}'") as caught:
        importlib.import_module(name)
    assert caught.value.name == name
    assert calls == []


def test_a_module_that_is_found_later_is_hooked(write_module, new_name, calls):
    """A first look, or an import that failed, does not use up the hook."""
    name = new_name()
    imports.when_imported(name, calls.hook)
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module(name)
    write_module("complete = True", name=name)
    importlib.import_module(name)
    assert calls == [(name, True)]


def test_a_hook_of_somebody_else_with_wrapt_and_ours_both_run(write_module, calls):
    name, theirs = write_module("complete = True"), []
    wrapt.register_post_import_hook(theirs.append, name)
    imports.when_imported(name, calls.hook)
    module = importlib.import_module(name)
    assert theirs == [module]
    assert calls == [(name, True)]


@pytest.mark.parametrize("first", ["theirs", "ours"])
def test_a_finder_that_asks_the_others_too_is_no_endless_loop(write_module, calls, monkeypatch, first):
    name = write_module("complete = True")

    class Finder:
        asking = False

        def find_spec(self, name, path=None, target=None):
            if self.asking:
                return None
            self.asking = True
            try:
                return importlib.util.find_spec(name)
            finally:
                self.asking = False

    imports.when_imported(name, calls.hook)
    others = [finder for finder in sys.meta_path if finder is not imports._finder]
    ours = [Finder(), imports._finder] if first == "theirs" else [imports._finder, Finder()]
    monkeypatch.setattr(sys, "meta_path", [*ours, *others])
    importlib.import_module(name)
    assert calls == [(name, True)]


def test_a_module_is_left_with_its_own_loader(write_module, calls):
    name = write_module("complete = True")
    imports.when_imported(name, calls.hook)
    found = importlib.util.find_spec(name)
    assert isinstance(found.loader, importlib.machinery.SourceFileLoader)
    assert found.loader.get_source(name) == "complete = True"
    module = importlib.import_module(name)
    assert type(module.__loader__) is type(module.__spec__.loader) is importlib.machinery.SourceFileLoader


def test_a_module_that_is_imported_lazily_is_hooked_when_it_is_loaded(write_module, calls, monkeypatch):
    name = write_module("complete = True")
    imports.when_imported(name, calls.hook)
    spec = importlib.util.find_spec(name)
    spec.loader = importlib.util.LazyLoader(spec.loader)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)
    spec.loader.exec_module(module)
    assert calls == []
    assert module.complete
    assert calls == [(name, True)]


def test_a_module_that_was_put_there_by_hand_can_be_reloaded(write_module, calls, monkeypatch):
    name = write_module("complete = True")
    imports.when_imported(name, calls.hook)
    module = types.ModuleType(name)
    monkeypatch.setitem(sys.modules, name, module)
    assert importlib.reload(module) is module
    imports.settle()
    assert calls == [(name, True)]


def test_no_finder_is_hidden(run_python, tmp_path):
    """The import system walks through the list of finders; whoever shortens it meanwhile makes it skip one."""
    (tmp_path / "half.py").write_text(
        "from streamshim import imports\nimports.when_imported('half', lambda module: seen.append('half'))\nseen = []\n"
    )
    (tmp_path / "hooked.py").write_text("")
    code = """
import sys
from streamshim import imports
imports.when_imported("hooked", lambda module: half.seen.append("hooked"))
import half
import hooked
imports.settle()
name = next(n for n in sys.builtin_module_names if n not in sys.modules)
__import__(name)
print(half.seen, name in sys.modules)
"""
    assert run_python(code) == "['half', 'hooked'] True\n"


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_hook_that_raises_is_logged_and_breaks_nothing(write_module, caplog, when):
    name = write_module("value = 5")

    def broken(module):
        raise ValueError("out of order")

    if when == "after":
        importlib.import_module(name)
    with caplog.at_level(logging.ERROR, logger="streamshim"):
        imports.when_imported(name, broken)
        module = importlib.import_module(name)
        imports.settle()
    assert module.value == 5
    assert sys.modules[name] is module
    assert [record.getMessage() for record in caplog.records] == [f"streamshim: the hook for {name} failed"]
    assert "out of order" in caplog.text


def test_a_hook_that_raises_does_not_keep_the_others_from_running(write_module, caplog, calls):
    first, second = write_module("complete = True"), write_module("complete = True")
    imports.when_imported(first, lambda module: 1 / 0)
    imports.when_imported(second, calls.hook)
    importlib.import_module(first)
    importlib.import_module(second)
    imports.settle()
    assert calls == [(second, True)]


def test_an_import_that_fails_is_the_users_own(write_module, calls):
    name = write_module("raise RuntimeError('broken library')")
    imports.when_imported(name, calls.hook)
    with pytest.raises(RuntimeError, match="broken library"):
        importlib.import_module(name)
    imports.settle()
    assert calls == []


def test_what_is_forgotten_is_not_called(write_module, calls):
    name = write_module("complete = True")
    imports.when_imported(name, calls.hook)
    imports.forget(name)
    importlib.import_module(name)
    imports.settle()
    assert calls == []


def test_forgetting_what_was_never_registered_is_nothing(new_name):
    imports.forget(new_name())


def test_what_is_forgotten_while_half_imported_is_not_called(write_module, calls, monkeypatch):
    middle = write_module("from streamshim import imports\nimports.hook_of_test()\n")
    name = write_module("complete = False\nimport {0}\ncomplete = True\n", middle)

    def register_and_forget():
        imports.when_imported(name, calls.hook)
        imports.forget(name)

    monkeypatch.setattr(imports, "hook_of_test", register_and_forget, raising=False)
    importlib.import_module(name)
    imports.settle()
    assert calls == []


def test_the_last_one_registered_takes_the_place_of_the_one_before(write_module, calls):
    name = write_module("complete = True")
    imports.when_imported(name, lambda module: pytest.fail("this one was replaced"))
    imports.when_imported(name, calls.hook)
    importlib.import_module(name)
    imports.settle()
    assert calls == [(name, True)]


def test_registering_again_after_forgetting_works(write_module, calls):
    name = write_module("complete = True")
    imports.when_imported(name, calls.hook)
    imports.forget(name)
    imports.when_imported(name, calls.hook)
    importlib.import_module(name)
    imports.settle()
    imports.forget(name)
    imports.when_imported(name, calls.hook)
    assert calls == [(name, True), (name, True)]


def test_a_module_that_is_imported_anew_is_hooked_anew(write_module, calls):
    """Notebooks and test suites drop modules from ``sys.modules`` and import them again."""
    name = write_module("complete = True")
    imports.when_imported(name, calls.hook)
    importlib.import_module(name)
    imports.settle()
    imports.forget(name)
    del sys.modules[name]
    imports.when_imported(name, calls.hook)
    importlib.import_module(name)
    imports.settle()
    assert calls == [(name, True), (name, True)]


def test_a_module_that_is_blocked_is_not_there(new_name, calls, monkeypatch):
    """``sys.modules[name] = None`` is how test suites keep a library from being imported."""
    name = new_name()
    monkeypatch.setitem(sys.modules, name, None)
    for _ in range(2):
        imports.when_imported(name, calls.hook)
        imports.forget(name)
    assert calls == []


def test_a_module_that_was_blocked_is_hooked_once_it_is_there(write_module, calls, monkeypatch):
    name = write_module("complete = True")
    with monkeypatch.context() as blocked:
        blocked.setitem(sys.modules, name, None)
        imports.when_imported(name, calls.hook)
    importlib.import_module(name)
    imports.settle()
    assert calls == [(name, True)]


def test_a_hook_registered_before_and_again_in_the_middle_runs_once(write_module, calls, monkeypatch):
    """Uninstall and install in the middle of the library's import; applied twice, every patch would be there twice."""
    middle = write_module("from streamshim import imports\nimports.hook_of_test()\n")
    name = write_module("complete = False\nimport {0}\ncomplete = True\n", middle)

    def again():
        imports.forget(name)
        imports.when_imported(name, calls.hook)

    monkeypatch.setattr(imports, "hook_of_test", again, raising=False)
    imports.when_imported(name, calls.hook)
    importlib.import_module(name)
    imports.settle()
    importlib.import_module(write_module(""))
    assert calls == [(name, True)]


def test_an_object_in_place_of_a_module_breaks_nothing(new_name, monkeypatch):
    """Lazy loaders put objects into ``sys.modules`` that have neither a name nor a spec."""
    name, seen = new_name(), []
    lazy = object()
    monkeypatch.setitem(sys.modules, name, lazy)
    imports.when_imported(name, seen.append)
    imports.forget(name)
    assert seen in ([], [lazy])


def test_threads_that_import_at_the_same_time_run_each_hook_once(write_module, calls):
    names = [write_module("complete = True") for _ in range(8)]
    for name in names:
        imports.when_imported(name, calls.hook)
    barrier = threading.Barrier(len(names), timeout=10)

    def import_all(first):
        barrier.wait()
        for name in names[first:] + names[:first]:
            importlib.import_module(name)

    threads = [threading.Thread(target=import_all, args=(i,)) for i in range(len(names))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    imports.settle()
    assert sorted(calls) == sorted((name, True) for name in names)
