"""streamshim: foreign GPU kernels follow torch's current stream, and what escapes a CUDA graph is refused at its line.

    import streamshim
    streamshim.install()

The public names are loaded when first used; importing this package imports nothing else and changes nothing.

PYTEST_DONT_REWRITE: the start-up file may have imported it before pytest, which would warn of that.
"""

from ._version import __version__

# Not from typing, whose import takes longer than all of this: the start-up file imports it in every process.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from .allowance import allow
    from .binders.ctypes_.api import bind, load, unbind
    from .binders.ctypes_.specs import SYNCS
    from .binders.ctypes_.stream_type import Stream
    from .compiler import compile
    from .errors import (
        AlreadyInstalledError,
        BinderError,
        CaptureInvalidatedError,
        CompiledInCaptureError,
        CompiledInCaptureWarning,
        EscapedLaunchWarning,
        HostSyncError,
        MissingFromGraphError,
        NoCudaError,
        RescuedLaunchWarning,
        StreamShimError,
        StreamShimWarning,
        ValidationError,
        ValidationMismatchError,
        ValidationMismatchWarning,
        WrongStreamError,
    )
    from .graph_audit import GraphAudit, assert_captured, audit
    from .installer import Installation, current_handle, install, status, uninstall
    from .report import Status
    from .settings import Mode
    from .validation.calls import validate
    from .validation.reading import ValidationReport
    from .validation.report import validation_report

_HOMES = {
    "AlreadyInstalledError": "errors",
    "BinderError": "errors",
    "CaptureInvalidatedError": "errors",
    "CompiledInCaptureError": "errors",
    "CompiledInCaptureWarning": "errors",
    "EscapedLaunchWarning": "errors",
    "HostSyncError": "errors",
    "GraphAudit": "graph_audit",
    "Installation": "installer",
    "MissingFromGraphError": "errors",
    "Mode": "settings",
    "NoCudaError": "errors",
    "RescuedLaunchWarning": "errors",
    "SYNCS": "binders.ctypes_.specs",
    "Status": "report",
    "Stream": "binders.ctypes_.stream_type",
    "StreamShimError": "errors",
    "StreamShimWarning": "errors",
    "ValidationError": "errors",
    "ValidationMismatchError": "errors",
    "ValidationMismatchWarning": "errors",
    "ValidationReport": "validation.reading",
    "WrongStreamError": "errors",
    "allow": "allowance",
    "assert_captured": "graph_audit",
    "audit": "graph_audit",
    "bind": "binders.ctypes_.api",
    "compile": "compiler",
    "current_handle": "installer",
    "install": "installer",
    "load": "binders.ctypes_.api",
    "status": "installer",
    "unbind": "binders.ctypes_.api",
    "uninstall": "installer",
    "validate": "validation.calls",
    "validation_report": "validation.report",
}

__all__ = [
    "SYNCS",
    "AlreadyInstalledError",
    "BinderError",
    "CaptureInvalidatedError",
    "CompiledInCaptureError",
    "CompiledInCaptureWarning",
    "EscapedLaunchWarning",
    "GraphAudit",
    "HostSyncError",
    "Installation",
    "MissingFromGraphError",
    "Mode",
    "NoCudaError",
    "RescuedLaunchWarning",
    "Status",
    "Stream",
    "StreamShimError",
    "StreamShimWarning",
    "ValidationError",
    "ValidationMismatchError",
    "ValidationMismatchWarning",
    "ValidationReport",
    "WrongStreamError",
    "__version__",
    "allow",
    "assert_captured",
    "audit",
    "bind",
    "compile",
    "current_handle",
    "install",
    "load",
    "status",
    "unbind",
    "uninstall",
    "validate",
    "validation_report",
]


def __getattr__(name: str) -> object:
    import importlib

    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(importlib.import_module(f".{home}", __name__), name)
    return value


def __dir__() -> list[str]:
    return __all__
