"""Hooks that run after a module's import: never on a half-imported module, never raising into the user's import."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any

from . import fork, log

if TYPE_CHECKING:
    from importlib.machinery import ModuleSpec

Hook = Callable[[ModuleType], None]

_lock = fork.Lock()
_hooks: dict[str, Hook] = {}
#: Modules whose import has not begun.
_awaited: set[str] = set()
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
        if module is None or is_initializing(module):
            if module is not None:
                _half_imported.add(name)
            elif name not in _pending:
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


def _register(name: str) -> None:
    """Have wrapt call us after the import of a module, which begins now.

    Not earlier: wrapt brings asyncio and importlib.metadata, which a process that imports none of these has no use for.
    """
    import wrapt

    with _lock:
        if name not in _awaited:
            return
        # Who only looks for the module holds no lock of its import, which another thread may have begun meanwhile.
        if sys.modules.get(name) is None:
            wrapt.register_post_import_hook(functools.partial(_after_import, name), name)
            _pending.add(name)
        else:
            _half_imported.add(name)
        # Last: until then, whoever imports it waits for the lock above.
        _awaited.discard(name)


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
        log.exception("streamshim: the hook for %s failed", name)


def is_initializing(module: Any) -> bool:
    """Whether the import of a module is under way."""
    return bool(getattr(getattr(module, "__spec__", None), "_initializing", False))


class _Finder:
    """Finds nothing by itself: the import system passes by here, which is the time to look.

    It stays in ``sys.meta_path``: another thread may be walking through that list, and would skip a finder.
    """

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if _half_imported:
            settle()
        if name not in _awaited:
            return None
        _register(name)
        if name not in _pending:
            return None
        # wrapt's finder may have been put in front of this one just now, and has been passed then: ask all once more.
        from importlib.util import find_spec

        return find_spec(name)


_finder: Any = _Finder()
