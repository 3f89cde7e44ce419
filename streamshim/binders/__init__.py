"""The contract of a binder: one ecosystem, one module, the same four things.

A binder says what it patches and turns calls into facts for `gate.resolve`; it never decides. It imports its
ecosystem only from inside functions that run after the user has imported it.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from types import ModuleType
from typing import Protocol

from ..patching import Patch
from ..settings import BINDERS

#: The modules after whose import a binder is asked for its `patches`. The binder itself is loaded only then.
MODULES: Mapping[str, tuple[str, ...]] = {
    "cute": ("cutlass.cutlass_dsl", "cutlass.cutlass_dsl.tvm_ffi_provider"),
    "tvm_ffi": ("tvm_ffi",),
    "cuda_bindings": ("cuda.bindings.driver", "cuda.bindings.runtime"),
    "cuda_core": ("cuda.core._launcher",),
    "ctypes": ("ctypes",),
}


class Binder(Protocol):
    """What each module named in `settings.BINDERS` provides as its attribute ``binder``.

    Attributes:
        name: the name used in ``only=`` and ``skip=``.
        packages: the distributions it works on, each with the range of versions it was tested with, as text.
    """

    name: str
    packages: Mapping[str, str]

    def patches(self, module: ModuleType) -> list[Patch]:
        """The patches for one of its `MODULES`, which has just been imported; probed and applied by the installer."""

    def applied(self, module: ModuleType) -> None:
        """Called once the patches for one of its `MODULES` are in place; what goes wrong here is logged."""

    def removed(self) -> None:
        """Called at `uninstall`, after the patches have been undone: put back what was changed besides them."""

    def notes(self) -> list[str]:
        """What a user should know about the state of this binder right now; shown by ``status()``."""


def load(name: str) -> Binder:
    """The binder of this name."""
    binder: Binder = importlib.import_module(BINDERS[name]).binder
    return binder


def version_of(package: str) -> str | None:
    """The installed version of a distribution, or None; that of the interpreter for "python"."""
    # Here, since `install` needs neither, and they take longer to import than it does.
    import platform
    from importlib import metadata

    if package == "python":
        return platform.python_version()
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
