"""What `registry` remembers: libraries, lone function pointers and patterns, each with what was said about it."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import Any

from .calls import path_of
from .hooks import LibraryHook, PointerHook
from .specs import Spec


@dataclass(eq=False)
class Library:
    """A library of which functions are bound.

    Attributes:
        ref: the library.
        label: its file name, for messages.
        asked: what was said about the library itself.
        matched: what was said about a pattern that it matches.
    """

    ref: weakref.ref[Any]
    label: str
    asked: dict[str, Spec] = field(default_factory=dict)
    matched: dict[str, Spec] = field(default_factory=dict)
    hook: LibraryHook | None = None

    @property
    def specs(self) -> dict[str, Spec]:
        return {**self.matched, **self.asked}

    def update(self, applied: bool) -> None:
        """Put in place what is asked for, and no more; nothing if the binder is not ``applied``."""
        library = self.ref()
        if library is None:
            return
        specs = self.specs if applied else {}
        if not specs:
            if self.hook is not None and self.hook.undo():
                self.hook = None
            return
        if self.hook is None:
            self.hook = LibraryHook(library)
        self.hook.apply()
        # In two steps, since others call while this changes: a function that stays bound is bound all the time.
        self.hook.paths.update({name: path_of(spec, f"{self.label}: {name}") for name, spec in specs.items()})
        for name in [name for name in self.hook.paths if name not in specs]:
            del self.hook.paths[name]


@dataclass(eq=False)
class Pointer:
    """A lone function pointer that is bound."""

    ref: weakref.ref[Any]
    label: str
    spec: Spec | None
    hook: PointerHook | None = None

    def update(self, applied: bool) -> None:
        """Put in place what is asked for; nothing if the binder is not ``applied``."""
        function = self.ref()
        if function is None:
            return
        if applied and self.spec is not None:
            self.hook = self.hook or PointerHook(function)
            self.hook.path = path_of(self.spec, self.label)
            self.hook.apply(function)
        elif self.hook is not None and self.hook.undo(function):
            self.hook = None


@dataclass(eq=False)
class Pattern:
    """A file name pattern.

    Attributes:
        text: the pattern.
        specs: the functions; empty: those of `tables`.
        matches: how many libraries have matched since this was put in place.
        remarks: what went wrong with them, in words.
    """

    text: str
    specs: dict[str, Spec]
    matches: int = 0
    remarks: list[str] = field(default_factory=list)
