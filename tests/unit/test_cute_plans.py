"""Functions that were compiled before `install` are found, without CuTe DSL."""

from __future__ import annotations

from streamshim.binders.cute import plans


class Compiled:
    """Stands for the DSL's compiled function."""


class Below(Compiled):
    """Stands for the one of TVM-FFI."""


class FarBelow(Below):
    """Stands for one of somebody else's."""


class Slotted(Compiled):
    """Has no attributes of its own, like the class that it is below."""

    __slots__ = ()


def test_each_object_of_the_class_and_of_those_below_is_found_once(monkeypatch):
    kept = [Compiled(), Below(), FarBelow(), Slotted(), Below()]
    found = []
    monkeypatch.setattr(plans, "plan_of", found.append)
    plans.plan_what_exists(Compiled)
    assert sorted(map(id, found)) == sorted(map(id, kept))


def test_one_of_unknown_shape_does_not_hide_the_others(monkeypatch):
    kept = [Compiled(), Compiled()]
    found = []

    def fail(compiled):
        found.append(compiled)
        raise AttributeError

    monkeypatch.setattr(plans, "plan_of", fail)
    plans.plan_what_exists(Compiled)
    assert sorted(map(id, found)) == sorted(map(id, kept))
