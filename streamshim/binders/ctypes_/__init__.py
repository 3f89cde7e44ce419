"""ctypes: functions of shared objects that the user names follow torch's current stream."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from types import MappingProxyType, ModuleType
from typing import Any

from ...patching import Patch
from . import in_place

#: The setting that names patterns; `environment` reads it.
VARIABLE = "STREAMSHIM_CTYPES"


class CtypesBinder:
    """The binder of functions that are called through ctypes.

    A shared object does not say which of its functions launch kernels; the user does (`streamshim.bind`). Nothing is
    patched for all of ctypes but this, which does no more than look whether there are patterns:

    ==================  ==============================================================================================
    ``CDLL.__init__``    a library that is loaded later may match a file name pattern (tested: CPython 3.10 to 3.13)
    ==================  ==============================================================================================

    Besides, a library that is bound gets a ``__call__`` on its own class of functions, and a lone function pointer a
    class of its own (`hooks`); functions with plain argtypes get one more, for speed (`shortcuts`). It ends when ctypes
    has a hook for calls and one for loading, or when nobody needs patterns and all declare ``streamshim.Stream``.
    """

    name = "ctypes"
    packages: Mapping[str, str] = MappingProxyType({"python": ">=3.10,<3.14"})

    def patches(self, module: ModuleType) -> list[Patch]:
        """The patch on the class of all libraries."""
        return [Patch(module.CDLL, "__init__", _load_and_look)]

    def applied(self, module: ModuleType) -> None:
        """Bind what was named before, and what the environment names."""
        # First, so that a thread that has just begun to import the registry finds it, or is found below.
        in_place.applied = True
        if _is_used() or os.environ.get(VARIABLE):
            from . import registry

            registry.apply()

    def removed(self) -> None:
        """Put libraries and function pointers back as they were; what was named is remembered."""
        in_place.applied = False
        if _is_used():
            from . import registry

            registry.withdraw()

    def notes(self) -> list[str]:
        """What is bound, and what could not be."""
        if not _is_used():
            return []
        from . import registry

        return registry.notes()


def _is_used() -> bool:
    """Whether anything was ever named in this process: the registry is imported only then, by whoever does."""
    return f"{__name__}.registry" in sys.modules


def _load_and_look(original: Callable[..., Any]) -> Callable[..., Any]:
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if in_place.patterns:
            from . import registry  # loaded already, since it is what makes patterns

            registry.loaded(self)

    return __init__


binder = CtypesBinder()
