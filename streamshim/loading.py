"""What is to run before and after the body of a module: for the start-up file before it, for `imports` after it.

Nothing runs while Python looks for a module. It holds its one import lock there, which another thread in the middle of
an import needs to go on; to import something then would be to wait for ever where that thread is at it. (wrapt's import
hooks run after the body only, and importing wrapt takes longer than all of `install`.)

The start-up file loads this in every process that is to have streamshim, so it imports nothing that Python has not.
"""

import sys
from _thread import get_ident

TYPE_CHECKING = False  # as in typing, which takes longer to import than everything here
if TYPE_CHECKING:
    from collections.abc import Callable
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any


def is_initializing(module: "Any") -> bool:
    """Whether the import of a module is under way."""
    return bool(getattr(getattr(module, "__spec__", None), "_initializing", False))


class Finder:
    """Finds nothing by itself: what the other finders find gets a `_Loader`.

    It stays in ``sys.meta_path``: another thread may be walking through that list, and would skip a finder.

    Args:
        wanted: whether a module is to have one; called with its name, and may not import anything.
        before: called with the name of the module; like ``after``, not to raise.
        after: called with its name and the module.
    """

    def __init__(
        self,
        wanted: "Callable[[str], bool]",
        before: "Callable[[str], object]",
        after: "Callable[[str, ModuleType], object]",
    ) -> None:
        self._wanted, self._before, self._after = wanted, before, after
        #: Thread, module: what all finders are being asked for, this one among them.
        self._asking: set[tuple[int, str]] = set()

    def find_spec(self, name: str, path: "Any" = None, target: "Any" = None) -> "ModuleSpec | None":
        question = get_ident(), name
        if not self._wanted(name) or question in self._asking:
            return None
        self._asking.add(question)
        try:
            for finder in list(sys.meta_path):
                spec: Any = finder.find_spec(name, path, target) if hasattr(finder, "find_spec") else None
                if spec is not None:
                    # A namespace package has no loader, and no body either.
                    if hasattr(spec.loader, "exec_module"):
                        spec.loader = _Loader(name, spec.loader, self._before, self._after)
                    return spec  # type: ignore[no-any-return]
        finally:
            self._asking.discard(question)
        return None


class _Loader:
    """A module's own loader, which calls us before and after the module's body."""

    def __init__(
        self,
        name: str,
        loader: "Any",
        before: "Callable[[str], object]",
        after: "Callable[[str, ModuleType], object]",
    ) -> None:
        self._name, self._loader, self._before, self._after = name, loader, before, after

    @property  # type: ignore[misc]
    def __class__(self) -> "Any":
        # Whoever only looks for the module may ask what kind of loader it has.
        return type(self._loader)

    def __getattr__(self, name: str) -> "Any":
        return getattr(self._loader, name)

    def exec_module(self, module: "ModuleType") -> None:
        for holder, name in ((module, "__loader__"), (getattr(module, "__spec__", None), "loader")):
            if getattr(holder, name, None) is self:
                setattr(holder, name, self._loader)
        self._before(self._name)
        self._loader.exec_module(module)
        self._after(self._name, module)
