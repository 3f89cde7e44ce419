"""Python's way into ctypes calls: a ``__call__`` on the class of a library's functions, or of one function pointer.

Every `ctypes.CDLL` object makes a class of its own, on which all of its functions are instances, so a ``__call__`` set
there reaches functions fetched before and after, and no other library. A lone function pointer shares its class with
every other one of the same signature, so it gets a subclass of its own instead: it stays the same object, and its
``argtypes``, ``restype``, ``errcheck`` and paramflags stay in it. C code that is handed such a pointer calls the C
function itself.

Versions: CPython 3.10 to 3.13.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Mapping
from typing import Any

from ... import gate
from ...patching import Patch
from .calls import Path
from .shortcuts import Shortcuts, class_of, subclass
from .values import FunctionPointer


class LibraryHook:
    """The ``__call__`` on the class of a library's functions.

    Attributes:
        paths: from a function's name to the way its calls take. Changed by whoever binds, read by every call; while it
            is empty, every call passes.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        self.paths = _Paths()
        self._shortcuts = Shortcuts(library._FuncPtr, self.paths.get, lambda: self._patch.in_place)
        self.paths.changed = self._shortcuts.withdraw
        # Neither the class nor what is set on it leads back to the library, which may be collected.
        by_name = _call_by_name(self.paths, weakref.ref(library), self._shortcuts)
        self._patch = Patch(library._FuncPtr, "__call__", by_name)
        self._is_applied = False

    def apply(self) -> None:
        """Put it in place, unless it is there already: also where someone else has wrapped it since."""
        if not self._is_applied:
            self._patch.apply()
            self._is_applied = True

    def undo(self) -> bool:
        """Take it away; False if someone else has wrapped it since. Theirs stays then, and ours passes through."""
        self.paths.clear()
        if self._is_applied and self._patch.undo():
            self._is_applied = False
        return not self._is_applied

    @property
    def is_wrapped(self) -> bool:
        """Whether someone else has wrapped or replaced it."""
        return self._is_applied and not self._patch.in_place


class _Paths(dict[str, Path]):
    """Paths by name. After each change ``changed`` is called: shortcuts are made for what was there before."""

    changed: Callable[[], None]

    def update(self, other: Mapping[str, Path]) -> None:  # type: ignore[override]
        super().update(other)
        self.changed()

    def __setitem__(self, name: str, path: Path) -> None:
        super().__setitem__(name, path)
        self.changed()

    def __delitem__(self, name: str) -> None:
        super().__delitem__(name)
        self.changed()

    def clear(self) -> None:
        super().clear()
        self.changed()


#: The code of what `_call_by_name` makes, to recognise it by.
_ours: set[Any] = set()


def _call_by_name(paths: dict[str, Path], library: weakref.ref[Any], shortcuts: Shortcuts) -> Callable[..., Any]:
    find = paths.get

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def __call__(*call: Any, **kwargs: Any) -> Any:
            name = ""
            try:
                name = call[0].__name__
                path = find(name)
            except AttributeError:
                path = _by_address(call[0], paths, library()) if paths else None
            if path is None or not gate.active:
                return original(*call, **kwargs)
            shortcuts.offer(call[0], name, path, original)
            return path(original, call, kwargs)

        _ours.add(__call__.__code__)
        return __call__

    return make


def _by_address(function: Any, paths: dict[str, Path], library: Any) -> Path | None:
    """For objects of the library's class that were not fetched from the library, which gives them their name."""
    address = ctypes.cast(function, ctypes.c_void_p).value
    for name, path in list(paths.items()):
        if library is not None and ctypes.cast(library._FuncPtr((name, library)), ctypes.c_void_p).value == address:
            return path
    return None


class PointerHook:
    """The ``__call__`` of one function pointer."""

    def __init__(self, function: Any) -> None:
        self._path: Path | None = None
        self._base = class_of(function)
        self._class: Any = subclass(self._base, _call_of(self, _below_ours(self._base.__call__)))
        self._ours = vars(self._class)["__call__"]
        self._shortcuts = Shortcuts(self._class, lambda _: self._path, self._is_in_place)

    @property
    def path(self) -> Path | None:
        """The way its calls take; None lets them pass."""
        return self._path

    @path.setter
    def path(self, path: Path | None) -> None:
        self._path = path
        self._shortcuts.withdraw()

    def apply(self, function: Any) -> None:
        """Give the function its own class, if it has not got it."""
        if class_of(function) is self._base:
            function.__class__ = self._class

    def undo(self, function: Any) -> bool:
        """Give it the class that it had; False if someone else has wrapped ours since, which passes through then."""
        self.path = None
        if self.is_wrapped(function):
            return False
        if type(function) is self._class:
            function.__class__ = self._base
        return True

    def is_wrapped(self, function: Any) -> bool:
        """Whether someone else has wrapped or replaced it."""
        kind = class_of(function)
        return kind is not self._base and (kind is not self._class or not self._is_in_place())

    def _is_in_place(self) -> bool:
        return vars(self._class).get("__call__") is self._ours


def _below_ours(call: Any) -> Any:
    """What a library's class has below our ``__call__``: a function that is bound by itself asks the rule by itself."""
    while getattr(call, "__code__", None) in _ours:
        call = call.__wrapped__
    return call


def _call_of(hook: PointerHook, original: Callable[..., Any]) -> Callable[..., Any]:
    def __call__(*call: Any, **kwargs: Any) -> Any:
        path = hook._path
        if path is None or not gate.active:
            return original(*call, **kwargs)
        hook._shortcuts.offer(call[0], "", path, original)
        return path(original, call, kwargs)

    return __call__


def is_function(value: Any) -> bool:
    """Whether this is a function pointer of ctypes."""
    return isinstance(value, FunctionPointer)
