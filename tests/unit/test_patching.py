"""Patches: all or none, and undone so that nothing tells that they have been there."""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
from types import ModuleType

import pytest

from streamshim.patching import Patch, PatchSet


def ours(original):
    def replacement(*args, **kwargs):
        return ("ours", original(*args, **kwargs))

    return replacement


def make_classes():
    """Fresh classes for each test, since tests change them."""

    class Base:
        def inherited(self, x=1):
            """About inherited."""
            return ("inherited", x)

        @staticmethod
        def inherited_static():
            return "inherited static"

    class Owner(Base):
        def own(self, x, *, y=2) -> tuple:
            """About own."""
            return ("own", x, y)

        @staticmethod
        def static(x):
            return ("static", x)

        @classmethod
        def of_class(cls):
            return cls

        def __call__(self, x):
            return ("call", x)

        @property
        def computed(self):
            return 1

        missing = None

    return Base, Owner


@pytest.fixture
def owner():
    return make_classes()[1]


def snapshot(owner):
    """Names in their order, each with the very object."""
    return [(name, id(value), type(value)) for name, value in vars(owner).items()]


CASES = [
    # name, static, call, result without the wrapper
    ("own", False, lambda o: o().own(5, y=6), ("own", 5, 6)),
    ("inherited", False, lambda o: o().inherited(), ("inherited", 1)),
    ("static", True, lambda o: o.static(3), ("static", 3)),
    ("static", True, lambda o: o().static(3), ("static", 3)),
    ("__call__", False, lambda o: o()(4), ("call", 4)),
]


@pytest.mark.parametrize(("name", "static", "call", "result"), CASES)
def test_apply_and_undo(owner, name, static, call, result):
    before = snapshot(owner)
    patch = Patch(owner, name, ours, static)
    assert patch.probe() == ""
    assert not patch.in_place
    patch.apply()
    assert patch.in_place
    assert call(owner) == ("ours", result)
    assert patch.undo() is True
    assert not patch.in_place
    assert snapshot(owner) == before
    assert call(owner) == result


@pytest.mark.parametrize(("name", "static"), [("own", False), ("inherited", False), ("static", True)])
def test_the_replacement_looks_like_the_original(owner, name, static):
    original = getattr(owner, name)
    Patch(owner, name, ours, static).apply()
    replacement = getattr(owner, name)
    for attribute in ("__name__", "__qualname__", "__doc__", "__module__", "__annotations__"):
        assert getattr(replacement, attribute) == getattr(original, attribute)
    assert inspect.signature(replacement) == inspect.signature(original)
    assert replacement.__wrapped__ is original


def test_an_inherited_attribute_is_patched_on_the_owner_only():
    base, owner = make_classes()
    patch = Patch(owner, "inherited", ours)
    patch.apply()
    assert base().inherited() == ("inherited", 1)
    patch.undo()
    assert "inherited" not in vars(owner)


def test_subclasses_and_living_instances_see_it(owner):
    living = owner()

    class Derived(owner):
        pass

    patch = Patch(owner, "own", ours)
    patch.apply()
    assert living.own(1) == ("ours", ("own", 1, 2))
    assert Derived().own(1) == ("ours", ("own", 1, 2))
    patch.undo()
    assert living.own(1) == ("own", 1, 2)


def test_a_function_of_a_module(owner):
    module = ModuleType("library")
    module.launch = lambda x: ("launch", x)
    before = snapshot(module)
    patch = Patch(module, "launch", ours)
    patch.apply()
    assert module.launch(1) == ("ours", ("launch", 1))
    assert patch.undo()
    assert snapshot(module) == before


def test_patches_on_one_attribute_come_off_in_reverse(owner):
    before = snapshot(owner)
    patches = PatchSet([Patch(owner, "own", ours), Patch(owner, "own", ours)])
    patches.apply()
    assert owner().own(1) == ("ours", ("ours", ("own", 1, 2)))
    assert patches.undo() == []
    assert snapshot(owner) == before


def test_a_set_can_be_applied_again_after_undo(owner):
    before = snapshot(owner)
    patches = PatchSet([Patch(owner, "own", ours), Patch(owner, "static", ours, static=True)])
    for _ in range(3):
        patches.apply()
        assert owner().own(1) == ("ours", ("own", 1, 2))
        assert patches.undo() == []
        assert snapshot(owner) == before
    assert patches.undo() == []


def test_a_replacement_is_made_once_for_the_same_original(owner):
    made = []

    def make(original):
        made.append(original)
        return ours(original)

    base, library = owner.__mro__[1], ModuleType("library")
    library.launch = lambda: "launched"
    patches = PatchSet([Patch(owner, "own", make), Patch(owner, "inherited", make), Patch(library, "launch", make)])
    originals = [owner.own, owner.inherited, library.launch]
    for _ in range(3):
        patches.apply()
        assert patches.undo() == []
    assert made == originals
    base.inherited = wrapper = theirs(base.inherited)
    patches.apply()
    assert owner().inherited() == ("ours", ("theirs", ("inherited", 1)))
    assert patches.undo() == []
    assert made == [*originals, wrapper]
    assert "inherited" not in vars(owner)


def test_to_apply_again_looks_nothing_up_on_the_class():
    """Each look-up after a change takes one of the thousand versions that a class has in CPython 3.13."""
    asked = []

    class Counting(type):
        def __getattribute__(cls, name):
            asked.append(name)
            return super().__getattribute__(name)

    class Owner(make_classes()[0], metaclass=Counting):
        def own(self):
            pass

    patches = PatchSet([Patch(Owner, "own", ours), Patch(Owner, "inherited", ours)])
    patches.apply()
    patches.undo()
    assert {"own", "inherited"} <= set(asked)
    asked.clear()
    patches.apply()
    patches.undo()
    assert not {"own", "inherited"} & set(asked)


def test_what_somebody_did_between_two_applications_is_kept(owner):
    patches = PatchSet([Patch(owner, "own", ours)])
    patches.apply()
    kept = owner.own
    assert patches.undo() == []
    # Theirs over the original, ours of the last time put back by hand, and theirs over ours.
    for found in (theirs(owner.own), kept, theirs(kept)):
        owner.own = found
        before, result = snapshot(owner), owner().own(1)
        for _ in range(2):
            patches.apply()
            assert owner().own(1) == ("ours", result)
            assert patches.undo() == []
            assert snapshot(owner) == before


def test_an_attribute_that_a_module_makes_when_asked_is_asked_for_each_time():
    module, names = ModuleType("library"), iter("ab")
    module.__getattr__ = lambda name: functools.partial(str, next(names))
    patches = PatchSet([Patch(module, "launch", ours)])
    for name in "ab":
        patches.apply()
        assert module.launch() == ("ours", name)
        assert patches.undo() == []
    assert "launch" not in vars(module)


class Refused(Exception):
    pass


def refuse(original):
    raise Refused


class ReadOnly(type):
    def __setattr__(cls, name, value):
        raise Refused


@pytest.mark.parametrize("why", ["make raises", "the owner is immutable"])
def test_one_that_fails_takes_those_before_it_back(owner, why):
    class Immutable(metaclass=ReadOnly):
        def own(self):
            pass

    bad = Patch(owner, "inherited", refuse) if why == "make raises" else Patch(Immutable, "own", ours)
    before = snapshot(owner)
    patches = PatchSet([Patch(owner, "own", ours), bad, Patch(owner, "__call__", ours)])
    with pytest.raises(Refused):
        patches.apply()
    assert snapshot(owner) == before
    assert [p.in_place for p in patches.patches] == [False, False, False]
    assert patches.undo() == []


def test_an_interrupt_takes_them_back_too(owner):
    def interrupted(original):
        raise KeyboardInterrupt

    before = snapshot(owner)
    with pytest.raises(KeyboardInterrupt):
        PatchSet([Patch(owner, "own", ours), Patch(owner, "inherited", interrupted)]).apply()
    assert snapshot(owner) == before


def theirs(original):
    @functools.wraps(original)
    def wrapper(*args, **kwargs):
        return ("theirs", original(*args, **kwargs))

    return wrapper


def test_whoever_wraps_ours_afterwards_keeps_theirs(owner):
    patches = PatchSet([Patch(owner, "own", ours), Patch(owner, "inherited", ours)])
    patches.apply()
    owner.own = wrapper = theirs(owner.own)
    target = patches.patches[0].target
    assert not patches.patches[0].in_place
    assert patches.undo() == [target]
    assert vars(owner)["own"] is wrapper
    assert "inherited" not in vars(owner)


def test_whoever_wrapped_before_us_is_put_back(owner):
    owner.own = wrapper = theirs(owner.own)
    before = snapshot(owner)
    patches = PatchSet([Patch(owner, "own", ours)])
    patches.apply()
    assert owner().own(1) == ("ours", ("theirs", ("own", 1, 2)))
    assert patches.undo() == []
    assert snapshot(owner) == before
    assert owner.own is wrapper


def test_whoever_deletes_ours_is_not_undone(owner):
    patches = PatchSet([Patch(owner, "inherited", ours)])
    patches.apply()
    del owner.inherited
    assert len(patches.undo()) == 1
    assert "inherited" not in vars(owner)


NAME = f"{__name__}.make_classes.<locals>.Owner"


@pytest.mark.parametrize(
    ("name", "static", "problem"),
    [
        ("own", False, ""),
        ("inherited", False, ""),
        ("static", True, ""),
        ("__call__", False, ""),
        ("gone", False, f"{NAME}.gone does not exist"),
        ("gone", True, f"{NAME}.gone does not exist"),
        ("missing", False, f"{NAME}.missing does not exist"),
        ("static", False, f"{NAME}.static is a staticmethod"),
        ("own", True, f"{NAME}.own is no staticmethod"),
        ("inherited_static", False, f"{NAME}.inherited_static is a staticmethod"),
        ("inherited", True, f"{NAME}.inherited is no staticmethod"),
    ],
)
def test_probe(owner, name, static, problem):
    before = snapshot(owner)
    assert Patch(owner, name, ours, static).probe() == problem
    assert snapshot(owner) == before


@pytest.mark.parametrize("name", ["__call__", "mro", "__subclasses__"])
def test_probe_does_not_take_an_attribute_of_the_metaclass_for_one_of_the_class(name):
    """``getattr`` finds ``type.__call__`` on every class; patching it would make instances callable, wrongly."""

    class NotCallable:
        pass

    problem = Patch(NotCallable, name, ours).probe()
    assert problem.endswith(f".NotCallable.{name} does not exist")


@pytest.mark.parametrize("name", ["of_class", "computed"])
def test_probe_refuses_what_a_function_cannot_stand_for(owner, name):
    """A classmethod or a property that became a plain function would get other arguments, or none."""
    assert Patch(owner, name, ours).probe() != ""


def test_a_class_that_says_that_it_lives_elsewhere_is_in_place(owner):
    """Libraries write another ``__module__`` on their classes, to show the public place, which need not hold them."""
    owner.__module__, owner.__qualname__ = "library.public", "Owner"
    patch = Patch(owner, "own", ours)
    patch.apply()
    assert patch.in_place
    assert patch.undo()


def test_probe_of_a_set_lists_every_problem(owner):
    patches = PatchSet([Patch(owner, "gone", ours), Patch(owner, "own", ours), Patch(owner, "static", ours)])
    assert patches.probe() == [f"{NAME}.gone does not exist", f"{NAME}.static is a staticmethod"]
    assert PatchSet([]).probe() == []


@pytest.mark.parametrize(
    ("get_owner", "name", "target"),
    [
        (lambda: Patch, "apply", "streamshim.patching.Patch.apply"),
        (lambda: sys.modules["functools"], "wraps", "functools.wraps"),
        (lambda: sys.modules["importlib.util"], "find_spec", "importlib.util.find_spec"),
    ],
)
def test_the_target_in_words(get_owner, name, target):
    assert Patch(get_owner(), name, ours).target == target


LIBRARY = """
def launch():
    return "launched"

class Kernel:
    def run(self):
        return "run"
"""


@pytest.mark.parametrize("kind", ["function of the module", "method of a class"])
def test_a_reload_loses_the_patch(write_module, kind):
    """A reload makes a new class, and nobody calls the method of the old one any more: `status` must show that."""
    module = importlib.import_module(write_module(LIBRARY))
    patch = Patch(module, "launch", ours) if kind.startswith("function") else Patch(module.Kernel, "run", ours)
    patch.apply()
    assert patch.in_place
    importlib.reload(module)
    assert module.launch() == "launched"
    assert module.Kernel().run() == "run"
    assert not patch.in_place


def test_undo_after_a_reload_leaves_the_new_function(write_module):
    module = importlib.import_module(write_module(LIBRARY))
    patches = PatchSet([Patch(module, "launch", ours)])
    patches.apply()
    importlib.reload(module)
    new = module.launch
    assert len(patches.undo()) == 1
    assert module.launch is new
