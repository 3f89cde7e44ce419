"""Host synchronisation by a capturing thread is refused before CUDA is touched, so that the capture stays valid.

Two kinds of patches. Waiting calls (synchronise, query) are patched while streamshim is installed, since torch's own
check does not know them. Tensor methods and some functions of torch are patched only while a capture is open: then they
name the operation, and where torch's check is not armed they are the check.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from .. import allowance, capture, fork, gate, ledger, runtime
from ..callsite import Site, user_site
from ..capture import Window
from ..errors import HostSyncError, SyncReport
from ..patching import Patch, PatchSet
from ..streams import LEGACY
from .sync_table import ALWAYS, EVENT_METHODS, FUNCTIONS, METHODS, STREAM_METHODS, SYNCHRONIZE, Operation, on_device

logger = logging.getLogger("streamshim")

#: How torch's own check begins its message.
_TORCH_SAYS = "called a synchronizing CUDA operation"

_lock = fork.Lock()
#: The ids of the open captures; a guard may be told twice that one ends.
_open: set[int] = set()
_named: PatchSet | None = None
_logged: set[Site] = set()
#: The lines of other threads that are in the ledger already, and the capture; a poll comes a thousand times a second.
_noted: set[tuple[Site, int]] = set()


class HostSyncs:
    """The guard that names torch's synchronising operations while any capture is open."""

    def opened(self, window: Window) -> None:
        global _named
        with _lock:
            _open.add(window.id)
            if _named is None:
                _named = PatchSet(_patches_while_open())
                _named.apply()

    def closing(self, window: Window) -> None:
        global _named
        with _lock:
            _open.discard(window.id)
            if not _open and _named is not None:
                _named.undo()
                _named = None
                _noted.clear()


def patches(torch_cuda: ModuleType) -> list[Patch]:
    """The patches on torch's waiting calls, for as long as streamshim is installed.

    Targets: ``torch._C._cuda_synchronize`` and ``torch._C._accelerator_synchronizeDevice``, which every alias of both
    synchronize functions calls, and ``synchronize``, ``query``, ``elapsed_time`` of ``torch.cuda.Event`` and
    ``torch.cuda.Stream`` (torch 2.6 to 2.13). Needed because torch's sync debug mode does not know them, so that a
    capture would be lost without a line. Ends when it does.
    """
    c = getattr(sys.modules.get("torch"), "_C", None)
    event, stream = getattr(torch_cuda, "Event", None), getattr(torch_cuda, "Stream", None)
    wanted: list[tuple[Any, str, Operation]] = [
        (c, "_cuda_synchronize", SYNCHRONIZE),
        (c, "_accelerator_synchronizeDevice", SYNCHRONIZE),
        *((event, name, operation) for name, operation in EVENT_METHODS.items()),
        *((stream, name, operation) for name, operation in STREAM_METHODS.items()),
    ]
    return [Patch(owner, name, _refusing(operation)) for owner, name, operation in wanted if hasattr(owner, name)]


def _patches_while_open() -> list[Patch]:
    torch = sys.modules.get("torch")
    if torch is None or not hasattr(torch, "Tensor"):
        return []
    tables: tuple[tuple[Any, Mapping[str, Operation]], ...] = ((torch.Tensor, METHODS), (torch, FUNCTIONS))
    return [
        Patch(owner, name, _naming(operation))
        for owner, table in tables
        for name, operation in table.items()
        if hasattr(owner, name)
    ]


def _refusing(operation: Operation) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Refuse a call that waits, if this thread captures."""

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def waiting(*args: Any, **kwargs: Any) -> Any:
            if _open and gate.active:
                window = _capturing()
                if window is None:
                    _note_other_thread(operation)
                elif _harms(operation, window, args):
                    refuse(operation)
            return original(*args, **kwargs)

        return waiting

    return make


def _naming(operation: Operation) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Refuse, or explain torch's refusal of, an operation that needs a value on the host."""
    always = operation.when == ALWAYS

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        from torch.overrides import handle_torch_function, has_torch_function

        def synchronising(*args: Any, **kwargs: Any) -> Any:
            # The arguments first: what is on the host needs no question to the driver.
            waits = (always and bool(args) and on_device(args[0])) or (
                operation.waits is not None and operation.waits(args, kwargs)
            )
            if waits and gate.active and not _is_compiling() and _capturing() is not None:
                refuse(operation)
            try:
                values = [*args, *kwargs.values()]
                values += [item for value in values if type(value) is tuple for item in value]
                if has_torch_function(values):
                    # torch would look the method up by its name and hand our replacement to __torch_function__, where
                    # tables of a subclass or a mode know the original only.
                    return handle_torch_function(original, values, *args, **kwargs)
                return original(*args, **kwargs)
            except RuntimeError as error:
                if gate.active and _TORCH_SAYS in str(error) and _capturing() is not None:
                    refuse(operation, error)
                raise

        return synchronising

    return make


def refuse(operation: Operation, cause: BaseException | None = None) -> None:
    """Raise `HostSyncError` for an operation of the calling thread, unless a region allows it.

    Raises:
        HostSyncError: naming the operation, the user's line, the capture and what to do.
    """
    site = user_site()
    window = _capturing()
    capture_id = window.id if window is not None else 0
    if cause is None and allowance.covers("sync", site):
        ledger.add(ledger.Event("allowed sync", operation.words, site, 0, 0, capture_id))
        return
    report = SyncReport(operation.words, site, capture.describe(capture_id), str(gate.mode()), operation.remedy)
    ledger.add(ledger.Event("refused sync", operation.words, site, 0, 0, capture_id))
    if site not in _logged:
        # An engine that does collective work on its way out of the block may hang, and the exception with it.
        _logged.add(site)
        logger.error("%s", report)
    raise HostSyncError(report) from cause


def _capturing() -> Window | None:
    """The capture of the calling thread's current stream; a stand-in for one that torch has not begun."""
    asked = runtime.get()
    device = asked.current_device()
    handle = asked.current_handle(device)
    state = asked.capture_state(handle) if handle > LEGACY else None
    if not state:
        return None
    return capture.window(state.id) or Window(state.id, handle, device, user_site(), "?", "global")


def _harms(operation: Operation, window: Window, args: tuple[Any, ...]) -> bool:
    """Whether a waiting call breaks the capture of its own thread."""
    if operation is SYNCHRONIZE:
        return True
    target: Any = args[0] if args else None
    if hasattr(target, "cuda_event"):
        # An event that was never recorded has no handle, and waits for nothing.
        return bool(target.cuda_event) and window.error_mode != "relaxed"
    handle = getattr(target, "cuda_stream", 0)
    if handle > LEGACY and runtime.get().capture_state(handle):
        return True
    return window.error_mode != "relaxed"


def _note_other_thread(operation: Operation) -> None:
    """Another thread captures: CUDA decides, by that capture's mode. Remember the line, in case it breaks."""
    site = user_site()
    for window in capture.open_windows():
        if (site, window.id) in _noted:
            continue
        _noted.add((site, window.id))
        ledger.add(ledger.Event("sync in another thread", operation.words, site, 0, 0, window.id))


def _is_compiling() -> bool:
    compiler = getattr(sys.modules.get("torch"), "compiler", None)
    return bool(compiler is not None and compiler.is_compiling())
