"""Hooks that run after a module's import: never on a half-imported module, never raising into the user's import."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable
from types import ModuleType
from typing import Any

import wrapt

logger = logging.getLogger("streamshim")

Hook = Callable[[ModuleType], None]

_lock = threading.RLock()
#: wrapt cannot forget a hook, so each module gets one dispatcher for the life of the process, and what it calls is
#: looked up here.
_hooks: dict[str, Hook] = {}
_dispatched: set[str] = set()
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
        first = name not in _dispatched
        _dispatched.add(name)
    if first:
        wrapt.register_post_import_hook(_dispatch, name)
    elif name in sys.modules:
        _dispatch(sys.modules[name])


def forget(name: str) -> None:
    """Call nothing for this module any more."""
    with _lock:
        _hooks.pop(name, None)
        _half_imported.discard(name)


def _dispatch(module: ModuleType) -> None:
    name = module.__name__
    if getattr(getattr(module, "__spec__", None), "_initializing", False):
        # wrapt calls at once when the module is in sys.modules, even while its body still runs.
        with _lock:
            _half_imported.add(name)
            if _waiter not in sys.meta_path:
                sys.meta_path.insert(0, _waiter)
        return
    hook = _hooks.get(name)
    if hook is None:
        return
    try:
        hook(module)
    except Exception:
        # The user's import must not fail because of us. What failed is in status() too.
        logger.exception("streamshim: the hook for %s failed", name)


def settle() -> None:
    """Run the hooks of modules that were half-imported before and are complete now."""
    with _lock:
        ready = [
            name
            for name in _half_imported
            if name in sys.modules and not getattr(sys.modules[name].__spec__, "_initializing", False)
        ]
        _half_imported.difference_update(ready)
        if not _half_imported and _waiter in sys.meta_path:
            sys.meta_path.remove(_waiter)
    for name in ready:
        _dispatch(sys.modules[name])


class _Waiter:
    """A finder that finds nothing: the import system passes by here, which is the time to look again."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        settle()


_waiter: Any = _Waiter()
