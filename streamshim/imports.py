"""Hooks that run after a module's import: never on a half-imported module, never raising into the user's import.

With importlib's own means, a finder that lets the others find and a loader around theirs: wrapt, which has such hooks,
takes longer to import than all of streamshim.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from . import fork

logger = logging.getLogger("streamshim")

Hook = Callable[[ModuleType], None]

_lock = fork.Lock()
_hooks: dict[str, Hook] = {}
#: Modules with a hook that has not run yet, whose import has not begun or goes on under our loader.
_awaited: set[str] = set()
#: Modules that were in the middle of their own import when a hook was registered: the loader comes too late for these.
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
        if module is None or _is_initializing(module):
            if name not in _awaited:
                (_awaited if module is None else _half_imported).add(name)
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
        ready = [n for n in _half_imported if (m := sys.modules.get(n)) is not None and not _is_initializing(m)]
        _half_imported.difference_update(ready)
    for name in ready:
        _run(name, sys.modules[name])


def _run(name: str, module: ModuleType) -> None:
    hook = _hooks.get(name)
    if hook is None:
        return
    try:
        hook(module)
    except Exception:
        # The user's import must not fail because of us. What failed is in status() too.
        logger.exception("streamshim: the hook for %s failed", name)


def _is_initializing(module: Any) -> bool:
    return bool(getattr(getattr(module, "__spec__", None), "_initializing", False))


class _Finder:
    """Finds what the finders behind it find, and puts our loader around the loader of a module that is awaited.

    The import system passes by here at each import, which is the time to look again for half-imported modules. It stays
    in ``sys.meta_path``: another thread may be walking through that list, and would skip a finder.
    """

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if _half_imported:
            settle()
        if name not in _awaited:
            return None
        finders = list(sys.meta_path)
        for finder in finders[finders.index(self) + 1 :] if self in finders else ():
            spec: Any = finder.find_spec(name, path, target) if hasattr(finder, "find_spec") else None
            if spec is not None:
                if hasattr(spec.loader, "exec_module"):
                    spec.loader = _Loader(spec.loader)
                return spec
        return None


class _Loader:
    """A module's loader, and the hook after the module's body; the module itself sees its own loader only."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def exec_module(self, module: Any) -> None:
        module.__spec__.loader = module.__loader__ = self._loader
        self._loader.exec_module(module)
        # The body has run; Python marks the module as complete just after this.
        name = module.__spec__.name
        with _lock:
            awaited = name in _awaited or name in _half_imported
            _awaited.discard(name)
            _half_imported.discard(name)
        if awaited:
            _run(name, module)


_finder: Any = _Finder()
