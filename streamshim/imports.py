"""Hooks that run after a module's import: never on a half-imported module, never raising into the user's import."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from . import fork, log
from .loading import Finder, is_initializing

Hook = Callable[[ModuleType], None]

#: Held by hooks, and by who installs and so may import something meanwhile.
installing = fork.Lock()
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


def _before_import(name: str) -> None:
    # Not waited for: who installs may wait for the module that is about to be imported here.
    if installing.enter_at_once():
        try:
            settle()
        finally:
            installing.__exit__()


def after_import(name: str, module: ModuleType) -> None:
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


def _is_wanted(name: str) -> bool:
    # Where something is half-imported, each import is a time to look whether it is complete.
    return name in _awaited or bool(_half_imported)


_finder: Any = Finder(_is_wanted, before=_before_import, after=after_import)
