"""Patches on other people's classes and modules: applied all or none, undone exactly."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable
from typing import Any

_MISSING: Any = object()


class Patch:
    """One attribute to be replaced.

    Args:
        owner: the class or module that holds the attribute.
        name: the attribute's name. It must exist, on the owner itself or inherited.
        make: called with the original (as a plain function), returns the replacement.
        static: the attribute is a ``staticmethod``.
        getter: the attribute is a ``property``, of which the getter is replaced.
    """

    def __init__(
        self,
        owner: Any,
        name: str,
        make: Callable[[Callable[..., Any]], Callable[..., Any]],
        static: bool = False,
        getter: bool = False,
    ) -> None:
        self.owner = owner
        self.name = name
        self.make = make
        self.static = static
        self.getter = getter
        self._raw = _MISSING
        self._ours: Any = None
        self._made_of = _MISSING

    @property
    def target(self) -> str:
        """The attribute in words, for instance ``cutlass.base_dsl.jit_executor.JitExecutor.__call__``."""
        module = getattr(self.owner, "__module__", None)
        name = getattr(self.owner, "__qualname__", getattr(self.owner, "__name__", "?"))
        return ".".join(filter(None, (module, name, self.name)))

    def probe(self) -> str:
        """An empty string if the patch can be applied, else what is missing."""
        _, found = self._found()
        if found is _MISSING or found is None:
            return f"{self.target} does not exist"
        if isinstance(found, classmethod) or isinstance(found, property) is not self.getter:
            return f"{self.target} is {'no property' if self.getter else f'a {type(found).__name__}'}"
        if isinstance(found, staticmethod) is not self.static and isinstance(self.owner, type):
            return f"{self.target} is {'no' if self.static else 'a'} staticmethod"
        return ""

    def apply(self) -> None:
        """Put the replacement in place: the one of the last time, if the attribute is what it was then."""
        # Not by getattr, which gives a changed class a new version: CPython 3.13 has a thousand for each class, and
        # when they are used up (a few dozen captures did that to torch.Tensor), look-ups on it are slow for good.
        holder, found = self._found()
        # A module may make an attribute when it is asked for it.
        if found is not self._made_of or found is _MISSING:
            self._make()
            self._made_of = found
        self._raw = found if holder is self.owner else _MISSING
        setattr(self.owner, self.name, self._ours)

    def _make(self) -> None:
        found: Any = getattr(self.owner, self.name)
        original = found.fget if self.getter else found
        replacement = self.make(original)
        functools.update_wrapper(replacement, original)
        if self.getter:
            self._ours = property(replacement, found.fset, found.fdel, found.__doc__)
        else:
            self._ours = staticmethod(replacement) if self.static else replacement

    def undo(self) -> bool:
        """Put the original back. False if somebody has wrapped ours since: then theirs stays, and ours passes through.

        Passing through is the job of the replacement: it does nothing of its own while `gate.mode` is off.
        """
        if vars(self.owner).get(self.name, _MISSING) is not self._ours:
            return False
        if self._raw is _MISSING:
            delattr(self.owner, self.name)
        else:
            setattr(self.owner, self.name, self._raw)
        return True

    @property
    def in_place(self) -> bool:
        """Whether the attribute is ours right now (False after someone else's wrapper, or a module reload)."""
        return vars(self.owner).get(self.name, _MISSING) is self._ours and self._is_current()

    def _is_current(self) -> bool:
        """Whether the owner is still what its module holds under that name: a reload makes a new class."""
        if not isinstance(self.owner, type) or "<locals>" in self.owner.__qualname__:
            return True
        found: Any = sys.modules.get(self.owner.__module__)
        for name in self.owner.__qualname__.split("."):
            found = getattr(found, name, None)
        return found is None or found is self.owner

    def _found(self) -> tuple[Any, Any]:
        """Who has the attribute, the owner or one of its bases, and as what; what a metaclass has does not count."""
        for holder in self.owner.__mro__ if isinstance(self.owner, type) else (self.owner,):
            found = vars(holder).get(self.name, _MISSING)
            if found is not _MISSING:
                return holder, found
        return None, _MISSING


class PatchSet:
    """Patches that are applied together or not at all."""

    def __init__(self, patches: Iterable[Patch]) -> None:
        self.patches = list(patches)
        self._applied: list[Patch] = []

    def probe(self) -> list[str]:
        """What is missing, one line each; empty if all patches can be applied."""
        return [problem for patch in self.patches if (problem := patch.probe())]

    def apply(self) -> None:
        """Apply all. If one fails, those before it are undone and the exception goes on."""
        try:
            for patch in self.patches:
                patch.apply()
                self._applied.append(patch)
        except BaseException:
            self.undo()
            raise

    def undo(self) -> list[str]:
        """Undo in reverse order; returns the targets that someone else has wrapped since."""
        shadowed = [patch.target for patch in reversed(self._applied) if not patch.undo()]
        self._applied.clear()
        return shadowed
