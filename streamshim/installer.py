"""`install`, `uninstall`, `status`: which patches are in place, and in what order they came."""

from __future__ import annotations

import atexit
import functools
import sys
from collections.abc import Iterable
from types import ModuleType
from typing import TYPE_CHECKING

from . import allowance, binders, capture, fork, gate, guards, imports, ledger, log, runtime
from ._version import __version__
from .errors import AlreadyInstalledError, BinderError
from .patching import Patch
from .settings import BINDERS, Mode, Settings
from .state import State

if TYPE_CHECKING:
    from .guards.watch import Watch
    from .report import Status

_lock = imports.installing
_active: State | None = None
_asked: Settings | None = None  # by the last call of `install`
_shadowed: list[str] = []


class Installation:
    """What `install` returns; also a context manager that uninstalls at the end of its block.

    Attributes:
        settings: the settings in force.
    """

    def __init__(self, settings: Settings, state: State | None) -> None:
        self.settings = settings
        self._state = state

    @property
    def mode(self) -> Mode:
        """The mode in force; off if nothing was installed."""
        return self.settings.mode if self.settings.active else Mode.OFF

    def uninstall(self) -> None:
        """The same as `streamshim.uninstall`."""
        uninstall()

    def status(self) -> Status:
        """The same as `streamshim.status`."""
        return status()

    def __enter__(self) -> Installation:
        return self

    def __exit__(self, *exc: object) -> None:
        # Only what this very call has installed: not what was there before, nor what came after it was taken away.
        if self._state is not None and self._state is _active:
            uninstall()

    def __repr__(self) -> str:
        binders = sorted(_wanted(self.settings)) if self.settings.active else []
        return f"<streamshim.Installation mode={self.mode} binders={binders}>"


def install(
    mode: str | Mode | None = None,
    *,
    only: Iterable[str] | None = None,
    skip: Iterable[str] | None = None,
    watch: bool | None = None,
    redirect: bool | None = None,
) -> Installation:
    """Make foreign kernels follow torch's current stream, in this process, from now on.

    May be called before or after torch, cutlass or tvm_ffi are imported; imports none of them, creates no CUDA
    context and starts no thread. Calling it again is a no-op. Arguments given here win over what the start-up file or a
    plugin has installed before.

    Args:
        mode: "bind" (repair what can be repaired, raise where the graph would be wrong), "strict" (also raise for
            what had to be rescued), "check" (bind nothing, tell what is wrong without the shim) or "off". None takes
            ``STREAMSHIM_MODE``, or ``STREAMSHIM_STRICT=1`` for strict, and "bind" if neither is set.
        only: names of the only binders to apply. A binder named here that cannot be applied is an error.
        skip: names of binders to leave out.
        watch: whether captures are watched for launches that do not pass through Python, with CUPTI. None takes
            ``STREAMSHIM_WATCH``, and if that is not set, True in strict and check mode.
        redirect: whether every launch on a default stream that a capturing thread makes, from any extension, is moved
            into the capture, below Python; not in check mode, which binds nothing. None takes ``STREAMSHIM_REDIRECT``;
            False if that is not set.

    Returns:
        An `Installation`. With ``STREAMSHIM_DISABLE=1`` nothing is patched, and ``status()`` says so.

    Raises:
        ValueError: for a wrong value of an argument or variable, naming it and the allowed values.
        AlreadyInstalledError: if it is installed already and an argument given here says otherwise.
        BinderError: if a binder named in ``only``, or any binder in strict mode, cannot be applied to what is
            imported already.
    """
    settings = Settings.read(mode, only, skip, watch, redirect)
    with _lock:
        if _active is not None:
            said = {"mode": mode, "only": only, "skip": skip, "watch": watch, "redirect": redirect}
            differs = _active.settings.differences(settings, said)
            if not differs:
                imports.settle()
                return Installation(_active.settings, None)
            if not _active.by:
                raise AlreadyInstalledError(
                    f"streamshim is installed already with other settings: {', '.join(differs)}. Call "
                    "streamshim.uninstall() first, or leave the argument out to keep what is in force."
                )
            uninstall()
        return _install(settings)


def start(by: str) -> Installation | None:
    """Install for the start-up file or a plugin; `boot.activate` is what they call.

    Args:
        by: who asks, in words.

    Returns:
        The installation; None if `install` or this was called before: the program's word, also an `uninstall`, counts.

    Raises:
        ValueError, BinderError: as `install`.
    """
    with _lock:
        return _install(Settings.read(), by) if _asked is None else None


def _install(settings: Settings, by: str = "") -> Installation:
    global _active, _asked
    _asked = settings
    if not settings.active:
        return Installation(settings, None)
    _active = state = State(settings, by, _shadowed)
    _shadowed.clear()
    ledger.clear()
    gate.set_mode(settings.mode)
    capture.enabled = True
    capture.before_begin[:] = [_insist]
    allowance.on_change["sync"] = _on_allow
    for module in guards.MODULES:
        imports.when_imported(module, _guard)
    for module in _modules(settings):
        imports.when_imported(module, _bind)
    imports.settle()  # another thread may have had to leave something to us
    if state.problems and (settings.mode is Mode.STRICT or settings.only is not None):
        uninstall()
        raise BinderError(state.problems_text)
    return Installation(settings, state)


def uninstall() -> None:
    """Put every patched object back as it was found. A no-op if nothing is installed.

    Where someone else has wrapped one of our replacements since, theirs stays and ours passes through; ``status()``
    lists it as shadowed. Kernels that were traced meanwhile go on following torch: that is in their code.
    """
    global _active
    with _lock:
        if _active is None:
            return
        state, _active = _active, None
        for name in list(state.sets):
            state.undo(name)
        for name in state.applied:
            binders.load(name).removed()
        gate.set_mode(Mode.OFF)
        capture.enabled = False
        capture.forget_windows()
        capture.before_begin.clear()
        if state.watch is not None:
            from .guards import arming

            arming.disarm(state.watch)
        gate.needs_mover = False
        allowance.on_change.clear()
        for module in (*guards.MODULES, *_modules(state.settings)):
            imports.forget(module)


def status() -> Status:
    """What is bound, in which version, and what is off and why. Prints well; has ``to_dict()``."""
    from .report import Status, binder_status

    with _lock:
        imports.settle()
        settings = _active.settings if _active is not None else _asked or Settings.read()
        torch = sys.modules.get("torch")
        return Status(
            version=__version__,
            installed=_active is not None,
            mode=str(settings.mode if _active is not None else Mode.OFF),
            source=settings.source,
            started_by=_active.by if _active is not None else "",
            reason="" if _active is not None else _why_not(settings),
            guards_off=_active.guards_off if _active is not None else "",
            torch=str(getattr(torch, "__version__", "?")) if torch is not None else None,
            binders=[binder_status(name, settings, _active) for name in BINDERS],
            captures=[capture.describe(window.id) for window in capture.open_windows()],
            events=ledger.counts(),
            shadowed=list(_shadowed),
        )


def current_handle(device: int | None = None) -> int:
    """The handle of torch's current stream, for the calling thread.

    Args:
        device: the device's index; None: the current device.

    Returns:
        The ``cudaStream_t`` as an int; 0 is the default stream.

    Raises:
        NoCudaError: if torch was built without CUDA, or there is no CUDA driver.
    """
    return runtime.get().current_handle(runtime.get().current_device() if device is None else device)


def _wanted(settings: Settings) -> list[str]:
    return [name for name in BINDERS if settings.wants(name)]


def _modules(settings: Settings) -> list[str]:
    """The modules that the wanted binders wait for, each once."""
    return list(dict.fromkeys(module for name in _wanted(settings) for module in binders.MODULES[name]))


def _bind(module: ModuleType) -> None:
    with _lock:
        state = _active
        for name in _wanted(state.settings) if state is not None else ():
            if state is not None and module.__name__ in binders.MODULES[name]:
                state.apply(name, functools.partial(_patches, name, module))
                if name not in state.problems:
                    state.applied.add(name)
                    binders.load(name).applied(module)


def _patches(name: str, module: ModuleType) -> list[Patch]:
    if module.__name__.startswith("cuda."):
        _arm()  # cuda-python captures without torch, too
    return binders.load(name).patches(module)


def _guard(module: ModuleType) -> None:
    with _lock:
        name = guards.MODULES[module.__name__]
        if _active is not None:
            _active.apply(name, functools.partial(_guarding_patches, module))
            if name not in _active.problems:
                from .guards import arming

                arming.applied(module)


def _guarding_patches(module: ModuleType) -> list[Patch]:
    # Loaded by `State.apply`, so that strict mode tells of what cannot be loaded.
    from .guards import arming

    return arming.patches(module, _arm())


def _arm() -> Watch | None:
    """Before the first capture can begin: load the guards and put them in place. Returns the watch among them."""
    from .guards import arming

    with _lock:
        return arming.arm(_active) if _active is not None else None


def _on_allow(entered: bool) -> None:
    """For ``allow("sync")`` regions, which may have been entered before the guards were loaded."""
    from .guards import sync_mode

    sync_mode.on_allow(entered)


def _insist() -> None:
    """Before a capture begins: bind what is complete by now; in strict mode, refuse to begin without a binder."""
    imports.settle()
    if _active is not None and _active.watch is None:
        _arm()  # this is no capture of torch's own, but of a model of it
    if _active is not None and _active.problems and _active.settings.mode is Mode.STRICT:
        raise BinderError(_active.problems_text)
    if _active is not None and _active.redirect is not None and _active.moves():
        watch = _active.watch
        _active.redirect.prepare(lambda: watch.off if watch is not None else "")
    # Counters of validated calls cannot be made inside the capture; nothing is done where there are no such calls.
    counters = sys.modules.get(f"{__package__}.validation.stats")
    if counters is not None:
        counters.before_capture()


def _tell_allowed() -> None:
    """At the end of a process in strict mode: which exceptions were made use of."""
    allowed = dict.fromkeys(f"{e.kind}: {e.what}, at {e.site}" for e in ledger.events() if e.kind.startswith("allowed"))
    if _active is not None and _active.settings.mode is Mode.STRICT and allowed:
        log.warning("streamshim: allowed in this process:\n  %s", "\n  ".join(allowed))


atexit.register(_tell_allowed)


@fork.in_child
def _forget_the_parent() -> None:
    """What the parent captures and has noticed is not this process's."""
    if _active is not None:
        capture.forget_windows()
        ledger.clear()


def _why_not(settings: Settings) -> str:
    if settings.disabled:
        return f"{settings.disabled} is set"
    if settings.mode is Mode.OFF:
        return "mode is off"
    return "install() has not been called" if _asked is None else "uninstall() was called"
