"""The contract that every binder keeps, run over the real library of each.

The tests know no binder by name: what a binder patches is asked from it. What they check is what a library that
patches others owes them: that it patches each target once, in whatever order the user imports and installs; that
afterwards nothing tells that it has been there; and that it gets along with others who patch the same things.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import itertools
import os
import re
import subprocess
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from packaging.specifiers import SpecifierSet
from packaging.version import Version

import streamshim
from streamshim import binders, capture
from streamshim.errors import BinderError
from streamshim.patching import Patch
from streamshim.report import LISTED
from streamshim.settings import BINDERS

_MISSING = object()


@dataclass
class Target:
    """One attribute that is patched.

    Attributes:
        owner: the class or module.
        name: the attribute.
        static: whether it is a staticmethod.
        words: the target as `status` names it.
    """

    owner: Any
    name: str
    static: bool
    words: str

    @property
    def raw(self) -> Any:
        return vars(self.owner).get(self.name, _MISSING)

    @property
    def function(self) -> Any:
        return getattr(self.owner, self.name)

    def replace(self, function: Any) -> None:
        setattr(self.owner, self.name, staticmethod(function) if self.static else function)

    def restore(self, raw: Any) -> None:
        if raw is not _MISSING:
            setattr(self.owner, self.name, raw)
        elif self.name in vars(self.owner):
            delattr(self.owner, self.name)

    @property
    def depth(self) -> int:
        """How many of our replacements are on top of each other."""
        function, depth = self.function, 0
        while function is not None:
            depth += _is_ours(function)
            function = getattr(function, "__wrapped__", None)
        return depth


def _is_ours(function: Any) -> bool:
    return getattr(getattr(function, "__globals__", None), "get", lambda _: "")("__name__").startswith("streamshim.")


@functools.cache
def patches_of(name: str) -> list[Patch]:
    """What a binder patches, asked from it with its library imported."""
    if name == "torch":
        # Not a binder, but its patches owe the same to others.
        return capture.patches(importlib.import_module("torch.cuda.graphs").CUDAGraph)
    binder = binders.load(name)
    return [patch for module in binders.MODULES[name] for patch in binder.patches(importlib.import_module(module))]


def targets_of(name: str) -> list[Target]:
    for package in () if name == "torch" else binders.load(name).packages:
        if binders.version_of(package) is None:
            pytest.skip(f"{package} is not installed")
    return [Target(p.owner, p.name, p.static, p.target) for p in patches_of(name)]


def install(name: str, mode: str | None = None) -> streamshim.Installation:
    """Install what the patches of this name need, and no more."""
    return streamshim.install(mode, skip=[other for other in BINDERS if other != name])


def snapshot(targets: list[Target]) -> list[Any]:
    """Everything that each owner holds: names in their order, each with the very object, and its type."""
    return [[(name, value, type(value)) for name, value in vars(t.owner).items()] for t in targets]


def bound_names(targets: list[Target]) -> list[Any]:
    """The targets alone, where the guards of captures may have patched other names of the same owner."""
    return [[(t.name, value := vars(t.owner).get(t.name, _MISSING), type(value))] for t in targets]


def same(before: list[Any], after: list[Any]) -> bool:
    """Compared by identity: an equal function is another one."""
    flat_before, flat_after = list(itertools.chain(*before)), list(itertools.chain(*after))
    return len(flat_before) == len(flat_after) and all(
        a[0] == b[0] and a[1] is b[1] and a[2] is b[2] for a, b in zip(flat_before, flat_after, strict=True)
    )


@pytest.mark.parametrize("name", BINDERS)
class TestBinderContract:
    """What a binder is."""

    def test_it_has_all_parts(self, name):
        binder = binders.load(name)
        assert binder.name == name
        assert binder.packages
        assert binders.MODULES[name]
        assert isinstance(binder.notes(), list)
        assert all(isinstance(note, str) and note for note in binder.notes())
        assert callable(binder.patches)
        for patch in patches_of(name):
            assert isinstance(patch, Patch)

    def test_it_states_the_versions_it_was_tested_with(self, name):
        for package, tested in binders.load(name).packages.items():
            specifiers = SpecifierSet(tested)
            assert any(s.operator in (">=", "==", "~=") for s in specifiers), f"{package} has no lower bound"
            assert any(s.operator in ("<", "<=", "==", "~=") for s in specifiers), f"{package} has no upper bound"

    def test_what_is_installed_is_within_the_tested_range(self, name):
        for package, tested in binders.load(name).packages.items():
            installed = binders.version_of(package)
            assert installed is None or Version(installed) in SpecifierSet(tested)

    def test_its_docstring_states_every_target_and_when_it_ends(self, name):
        text = " ".join(inspect.getdoc(type(binders.load(name))).split())
        quoted = re.findall(r"``([^`]+)``", text)
        # ``Class(Suffix).method`` stands for both classes.
        stated = {re.sub(r"\(.*?\)", "", q) for q in quoted} | {re.sub(r"[()]", "", q) for q in quoted}
        missing = [t.words for t in targets_of(name) if not any(f".{t.words}".endswith(f".{s}") for s in stated)]
        assert missing == []
        assert "ends when" in text
        assert re.search(r"version|tested", text)

    def test_its_targets_can_be_patched_in_the_installed_version(self, name):
        assert [patch.probe() for patch in patches_of(name)] == [""] * len(patches_of(name))

    def test_no_target_is_named_twice(self, name):
        assert len({(id(t.owner), t.name) for t in targets_of(name)}) == len(targets_of(name))

    def test_status_names_every_target(self, name):
        targets = targets_of(name)
        streamshim.install()
        status = streamshim.status()
        (mine,) = [b for b in status.binders if b.name == name]
        assert (mine.state, mine.reason) == ("bound", "")
        assert sorted(mine.patched) == sorted(t.words for t in targets)
        text = str(status)
        assert [words for words in mine.patched[:LISTED] if words not in text] == []
        assert (f"{len(targets) - LISTED} more" in text) == (len(targets) > LISTED)
        streamshim.uninstall()
        (mine,) = [b for b in streamshim.status().binders if b.name == name]
        assert (mine.state, mine.patched) == ("off", [])

    def test_status_gives_versions_and_tested_ranges(self, name):
        (mine,) = [b for b in streamshim.status().binders if b.name == name]
        assert mine.tested == dict(binders.load(name).packages)
        assert set(mine.versions) == set(mine.tested)

    @pytest.mark.parametrize("how", ["skip", "only others", "off", "disabled"])
    def test_what_is_left_out_is_not_touched(self, name, how, monkeypatch):
        targets = targets_of(name)
        before = bound_names(targets)
        if how == "disabled":
            monkeypatch.setenv("STREAMSHIM_DISABLE", "1")
        others = [other for other in BINDERS if other != name]
        arguments = {"skip": {"skip": [name]}, "only others": {"only": others}, "off": {"mode": "off"}, "disabled": {}}
        streamshim.install(**arguments[how])
        assert same(before, bound_names(targets))

    def test_a_target_that_is_gone_takes_the_whole_binder_off(self, name, monkeypatch):
        """One half of a binder would bind some launches and not others."""
        # What is inherited as well is not gone when it is deleted.
        checked = [
            t
            for t in targets_of(name)
            if t.raw is not _MISSING and not (isinstance(t.owner, type) and hasattr(super(t.owner, t.owner), t.name))
        ]
        if name == "ctypes":
            assert checked == []  # its only target is a constructor, which every class inherits
        else:
            assert checked
        for gone in checked:
            with monkeypatch.context() as patched:
                patched.delattr(gone.owner, gone.name)
                before = bound_names(targets_of(name))
                binder = binders.load(name)
                asked = [p.target for m in binders.MODULES[name] for p in binder.patches(importlib.import_module(m))]
                if gone.words not in asked:
                    continue  # not every version has it, and the binder does without
                streamshim.install()
                (mine,) = [b for b in streamshim.status().binders if b.name == name]
                assert (mine.state, mine.reason, mine.patched) == ("off", f"{gone.words} does not exist", [])
                assert same(before, bound_names(targets_of(name)))
                streamshim.uninstall()
                for insistent in ({"mode": "strict"}, {"only": [name]}) if gone is checked[0] else ():
                    with pytest.raises(BinderError, match=re.escape(f"  {name}: {gone.words} does not exist")):
                        streamshim.install(**insistent)
                    assert same(before, bound_names(targets_of(name)))


@pytest.mark.parametrize("name", [*BINDERS, "torch"])
class TestPatches:
    """What the patches of a binder, and those on torch itself, owe to others."""

    @pytest.mark.parametrize("mode", ["bind", "strict", "check"])
    def test_each_target_is_patched_once(self, name, mode):
        targets = targets_of(name)
        assert [t.depth for t in targets] == [0] * len(targets)
        for _ in range(2):
            install(name, mode)
            assert [t.depth for t in targets] == [1] * len(targets)

    def test_uninstall_leaves_no_trace(self, name):
        targets = targets_of(name)
        before = snapshot(targets)
        install(name)
        assert not same(before, snapshot(targets))
        streamshim.uninstall()
        assert same(before, snapshot(targets))
        assert streamshim.status().shadowed == []

    def test_every_sequence_of_installs_and_uninstalls(self, name):
        targets = targets_of(name)
        before = snapshot(targets)
        steps = "UUUIUIIIUU"  # has every sequence of three in it
        for place, step in enumerate(steps, 1):
            install(name) if step == "I" else streamshim.uninstall()
            assert [t.depth for t in targets] == [step == "I"] * len(targets), steps[:place]
            assert same(before, snapshot(targets)) is (step == "U"), steps[:place]

    def test_a_replacement_looks_like_the_original(self, name):
        targets = targets_of(name)
        originals = [t.function for t in targets]
        install(name)
        for target, original in zip(targets, originals, strict=True):
            ours = target.function
            assert ours is not original
            assert inspect.isfunction(ours), f"{target.words} became a {type(ours)}, which binds no instance"
            assert (ours.__name__, ours.__qualname__, ours.__doc__, ours.__module__) == (
                original.__name__, original.__qualname__, original.__doc__,
                getattr(original, "__module__", ours.__module__),  # a slot of a C type has none
            )  # fmt: skip
            assert signature_of(ours) == signature_of(original)
            assert isinstance(target.raw, staticmethod) is target.static

    def test_wrapped_before_us_by_someone_else(self, name):
        targets = targets_of(name)
        untouched = snapshot(targets)
        raws = [t.raw for t in targets]
        try:
            recorders = [Recorder(t) for t in targets]
            below = snapshot(targets)
            install(name)
            assert [t.depth for t in targets] == [1] * len(targets)
            streamshim.uninstall()
            assert same(below, snapshot(targets))
            assert all(r.target.function is r.wrapper for r in recorders)
        finally:
            for target, raw in zip(targets, raws, strict=True):
                target.restore(raw)
        assert same(untouched, snapshot(targets))

    def test_wrapped_after_us_by_someone_else(self, name):
        """Theirs stays, and what they call, ours, does nothing of its own any more."""
        targets = targets_of(name)
        untouched = snapshot(targets)
        raws = [t.raw for t in targets]
        try:
            below = [Recorder(t) for t in targets]
            install(name)
            above = [Recorder(t, call_through=True) for t in targets]
            if name != "torch":
                (mine,) = [b for b in streamshim.status().binders if b.name == name]
                assert mine.patched == []
                assert all(any(t.words in note for note in mine.notes) for t in targets)
            streamshim.uninstall()
            assert sorted(streamshim.status().shadowed) == sorted(t.words for t in targets)
            for target, lower, upper in zip(targets, below, above, strict=True):
                assert target.function is upper.wrapper
                passed, received = call_with_stand_ins(target)
                assert upper.calls == [passed], target.words
                assert lower.calls == [passed], f"{target.words} does not pass its arguments through"
                if target.name != "__init__":
                    assert received is lower.result, f"{target.words} does not pass the result through"
                assert all(vars(stand_in) == {} for stand_in in passed), f"{target.words} left something behind"
        finally:
            for target, raw in zip(targets, raws, strict=True):
                target.restore(raw)
        assert same(untouched, snapshot(targets))

    def test_installed_by_two_threads_at_once(self, name):
        targets = targets_of(name)
        before = snapshot(targets)
        for _ in range(3):
            barrier = threading.Barrier(2, timeout=10)
            threads = [threading.Thread(target=_install_at, args=(name, barrier)) for _ in range(2)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert [t.depth for t in targets] == [1] * len(targets)
            streamshim.uninstall()
            assert same(before, snapshot(targets))

    def test_installed_and_uninstalled_by_threads_at_will(self, name):
        targets = targets_of(name)
        before = snapshot(targets)
        barrier = threading.Barrier(4, timeout=10)
        failures: list[BaseException] = []

        def toggle(step):
            try:
                barrier.wait()
                for _ in range(10):
                    step()
            except BaseException as error:  # noqa: BLE001 - told by the main thread
                failures.append(error)

        steps = [functools.partial(install, name), streamshim.uninstall] * 2
        threads = [threading.Thread(target=toggle, args=(step,)) for step in steps]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert failures == []
        streamshim.uninstall()
        assert same(before, snapshot(targets))


def _install_at(name: str, barrier: threading.Barrier) -> None:
    barrier.wait()
    install(name)


class Recorder:
    """Somebody else's wrapper on a target: writes down its calls, and calls through or answers for itself."""

    def __init__(self, target: Target, call_through: bool = False) -> None:
        self.target, self.calls, self.result = target, [], object()
        original = target.function

        @functools.wraps(original)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            self.calls.append([*args, *kwargs.values()])
            return original(*args, **kwargs) if call_through else self.result

        self.wrapper = wrapper
        target.replace(wrapper)


class StandIn:
    """An argument of which nothing is known, but for whether something was written on it."""

    def __iter__(self):
        return iter(())

    def __len__(self):
        return 0


def signature_of(function: Any) -> inspect.Signature | None:
    """None for a function of C that does not tell."""
    try:
        return inspect.signature(function)
    except ValueError:
        return None


def call_with_stand_ins(target: Target) -> tuple[list[StandIn], Any]:
    """Call a target with an object for each argument that it requires; returns these and what it returned."""
    signature = signature_of(target.function)
    required = [
        p
        for p in (signature.parameters.values() if signature is not None else ())
        if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    passed = [StandIn() for _ in required] if signature is not None else [StandIn()]
    return passed, target.function(*passed)


# The order in which a program imports, installs and uninstalls: each way to get to the import in a process of its own,
# and in it each way to go on in a fork, since the import takes most of the time. (That a program imports first and then
# installs is what all tests above are about.)

BEFORE_IMPORT = ["I", "IU", "IUI"]
AFTER_IMPORT = ["", "I", "U", "IU", "UI", "II", "UU", "IUI", "UIU"]

PROGRAM = """
import importlib, os, sys
sys.modules["torch"] = None  # half of the time is spent on importing it, and it has no part in this
import streamshim
from streamshim import binders
name, first, *rest = sys.argv[1:]
binder = binders.load(name)
for step in first:
    streamshim.install() if step == "I" else streamshim.uninstall()
for module in binders.MODULES[name]:
    importlib.import_module(module)
for then in rest:
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        for step in then:
            streamshim.install() if step == "I" else streamshim.uninstall()
        owners = [(p.owner, p.name) for m in binders.MODULES[name] for p in binder.patches(sys.modules[m])]
        depths = set()
        for owner, attribute in owners:
            function, depth = getattr(owner, attribute), 0
            while function is not None:
                depth += getattr(function, "__globals__", {}).get("__name__", "").startswith("streamshim.")
                function = getattr(function, "__wrapped__", None)
            depths.add(depth)
        (mine,) = [b for b in streamshim.status().binders if b.name == name]
        print(first, then, sorted(depths), mine.state, len(mine.patched) == len(owners), sep="|", flush=True)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
"""


@pytest.fixture(scope="module", autouse=True)
def runs():
    """All programs, started with the first test; ``runs(name, before)`` waits for one and returns its lines."""
    root = Path(streamshim.__file__).parents[1]
    env = {k: v for k, v in os.environ.items() if not k.startswith("STREAMSHIM_")} | {"PYTHONPATH": str(root)}
    started = {
        (name, before): subprocess.Popen(
            [sys.executable, "-c", PROGRAM, name, before, *AFTER_IMPORT],
            env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for name in BINDERS
        for before in BEFORE_IMPORT
    }  # fmt: skip

    @functools.cache
    def result(name: str, before: str) -> dict[str, list[str]]:
        out, err = started[name, before].communicate(timeout=100)
        assert started[name, before].returncode == 0, err
        return {line.split("|")[1]: line.split("|")[2:] for line in out.splitlines()}

    yield result
    for process in started.values():
        process.kill()
        process.communicate()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("after", AFTER_IMPORT, ids=lambda s: s or "nothing")
@pytest.mark.parametrize("before", BEFORE_IMPORT)
@pytest.mark.parametrize("name", BINDERS)
def test_in_whatever_order_a_program_imports_and_installs(runs, name, before, after):
    targets_of(name)
    depths, state, all_patched = runs(name, before)[after]
    if (before + after).endswith("I"):
        assert (depths, state, all_patched) == ("[1]", "bound", "True")
    else:
        assert (depths, state, all_patched) == ("[0]", "off", "False")
