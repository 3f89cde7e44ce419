"""Hooks that run after a module's import: never on a half-imported module, never raising into the user's import."""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import wrapt

from . import fork

logger = logging.getLogger("streamshim")

Hook = Callable[[ModuleType], None]

_lock = fork.Lock()
_hooks: dict[str, Hook] = {}
#: Modules for which wrapt has a hook of ours that has not run yet; it cannot be taken back.
_pending: set[str] = set()
#: Modules that were in the middle of their own import when a hook was registered: wrapt comes too late for these.
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
        if module is None:
            if name not in _pending:
                _pending.add(name)
                wrapt.register_post_import_hook(functools.partial(_after_import, name), name)
            return
        if is_initializing(module):
            _half_imported.add(name)
            if _waiter not in sys.meta_path:
                sys.meta_path.insert(0, _waiter)
            return
    _run(name, module)


def forget(name: str) -> None:
    """Call nothing for this module any more."""
    with _lock:
        _hooks.pop(name, None)
        _half_imported.discard(name)


def settle() -> None:
    """Run the hooks of modules that were half-imported before and are complete now."""
    _run_completed()
    with _lock:
        if not _half_imported and _waiter in sys.meta_path:
            sys.meta_path.remove(_waiter)


def _after_import(name: str, module: ModuleType) -> None:
    """Called by wrapt when the module's body has run; Python marks the module as complete just after this."""
    with _lock:
        _pending.discard(name)
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
        logger.exception("streamshim: the hook for %s failed", name)


def is_initializing(module: Any) -> bool:
    """Whether the import of a module is under way."""
    return bool(getattr(getattr(module, "__spec__", None), "_initializing", False))


def _run_completed() -> None:
    with _lock:
        ready = [n for n in _half_imported if (m := sys.modules.get(n)) is not None and not is_initializing(m)]
        _half_imported.difference_update(ready)
    for name in ready:
        _run(name, sys.modules[name])


class _Waiter:
    """A finder that finds nothing: the import system passes by here, which is the time to look again."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        # It stays in the list: the import system is walking through it right now, and would skip a finder.
        if _half_imported:
            _run_completed()


_waiter: Any = _Waiter()
