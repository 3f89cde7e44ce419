"""Hooks that run after a module's import: never on a half-imported module, never raising into the user's import."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any, cast

from . import fork, log

if TYPE_CHECKING:
    from importlib.machinery import ModuleSpec

Hook = Callable[[ModuleType], None]

_lock = fork.Lock()
_hooks: dict[str, Hook] = {}
#: Modules whose import has not ended.
_awaited: set[str] = set()
#: Modules that were in the middle of their own import when a hook was registered: the finder comes too late for these.
_half_imported: set[str] = set()


def when_imported(name: str, hook: Hook) -> None:
    """Call ``hook(module)`` once the module is imported completely; at once if it is already.

    The hook takes the place of one registered for this module before. An exception in it is logged, not raised.

    Args:
        name: the module's full name.
        hook: called with the module.
    """
    with _lock:
        _hooks[name] = hook
        module = sys.modules.get(name)
        if module is None or is_initializing(module):
            if module is not None:
                _half_imported.add(name)
            else:
                _awaited.add(name)
            if _finder not in sys.meta_path:
                sys.meta_path.insert(0, _finder)
            return
    _run(name, module)


def forget(name: str) -> None:
    """Call nothing for this module any more."""
    with _lock:
        _hooks.pop(name, None)
        _awaited.discard(name)
        _half_imported.discard(name)


def settle() -> None:
    """Run the hooks of modules that were half-imported before and are complete now."""
    with _lock:
        ready = [n for n in _half_imported if (m := sys.modules.get(n)) is not None and not is_initializing(m)]
        _half_imported.difference_update(ready)
    for name in ready:
        _run(name, sys.modules[name])


def _after_import(name: str, module: ModuleType) -> None:
    """Called when the module's body has run; Python marks the module as complete just after this."""
    with _lock:
        if name not in _awaited and name not in _half_imported:
            return
        _awaited.discard(name)
        _half_imported.discard(name)
    _run(name, module)


def _run(name: str, module: ModuleType) -> None:
    hook = _hooks.get(name)
    if hook is None:
        return
    try:
        hook(module)
    except Exception:
        # The user's import must not fail because of us. What failed is in status() too.
        log.exception("streamshim: the hook for %s failed", name)


def is_initializing(module: Any) -> bool:
    """Whether the import of a module is under way."""
    return bool(getattr(getattr(module, "__spec__", None), "_initializing", False))


class _Loader:
    """A module's own loader, which calls us after the module's body.

    What finds a module must not import anything, wrapt for instance: Python holds its only import lock there, and waits
    for ever if another thread has begun to import the same, since that one needs the lock to go on.
    """

    def __init__(self, name: str, loader: Any) -> None:
        self._name, self._loader = name, loader

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        # Whoever only looks for the module may ask what kind of loader it has.
        return type(self._loader)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def exec_module(self, module: ModuleType) -> None:
        for holder, name in ((module, "__loader__"), (getattr(module, "__spec__", None), "loader")):
            if getattr(holder, name, None) is self:
                setattr(holder, name, self._loader)
        self._loader.exec_module(module)
        _after_import(self._name, module)


class _Finder:
    """Finds nothing by itself: the import system passes by here, which is the time to look.

    It stays in ``sys.meta_path``: another thread may be walking through that list, and would skip a finder.
    """

    def __init__(self) -> None:
        #: Thread, module: what all finders are being asked for, this one among them.
        self._asking: set[tuple[int, str]] = set()

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if _half_imported:
            settle()
        question = threading.get_ident(), name
        if name not in _awaited or question in self._asking:
            return None
        self._asking.add(question)
        try:
            for finder in list(sys.meta_path):
                spec: ModuleSpec | None = finder.find_spec(name, path, target) if hasattr(finder, "find_spec") else None
                if spec is not None:
                    if hasattr(spec.loader, "exec_module"):
                        spec.loader = cast(Any, _Loader(name, spec.loader))
                    return spec
        finally:
            self._asking.discard(question)
        return None


_finder: Any = _Finder()
