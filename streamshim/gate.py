"""The rule: which stream a launch goes to. `decide` is the rule as a pure function, `resolve` the one way to it.

    given handle                        current stream   bind            strict     check
    equals current                      any              pass            pass       pass
    default-class (none, 0, 1, 2)       not capturing    bind            bind       pass
    default-class                       capturing        bind            bind       refuse
    explicit                            not capturing    pass            pass       pass
    explicit, same capture (a fork)     capturing        pass            pass       pass
    explicit, not capturing             capturing        bind and warn   refuse     refuse
    explicit, another capture           capturing        refuse          refuse     refuse
    cannot be bound                     capturing        refuse          refuse     refuse
      ... but moved below Python        capturing        bind            bind       refuse

Binders turn a call into facts and come here; nothing else decides, and nothing here patches.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from enum import Enum
from typing import TYPE_CHECKING, Any, Protocol

from . import allowance, capture, ledger, runtime
from .callsite import Site, user_site
from .errors import RescuedLaunchWarning, WrongStreamError
from .runtime import NOT_CAPTURING, CaptureState
from .settings import Mode
from .streams import LAST_DEFAULT, LEGACY, describe

if TYPE_CHECKING:
    from .findings import LaunchReport


class Verdict(Enum):
    """What becomes of a launch."""

    PASS = "it goes where the caller sent it"
    BIND = "it goes to torch's current stream"
    RESCUE = "it goes to torch's current stream, with a warning"
    REFUSE_ESCAPE = "it would escape the capture"
    REFUSE_OTHER_CAPTURE = "it would land in another capture"
    REFUSE_UNBOUND = "it takes no stream and would escape the capture"


class Launch:
    """What is launched, as far as it is the same for every call; made once per compiled kernel or bound function.

    Attributes:
        what: for messages, for instance "CuTe kernel 'gate' (TVM-FFI)".
        can_bind: False if the launch takes no stream.
        note: one more line for messages, for instance where the stream was lost.
        remedy: what to do when it is refused because it cannot be bound.
        can_move: what takes no stream can be moved by `mover` all the same, if there is one that works; the caller is
            then given the current stream's handle, and makes the call inside ``mover.calling()``.
    """

    def __init__(
        self,
        what: str,
        can_bind: bool = True,
        note: str = "",
        remedy: tuple[str, ...] = (),
        can_move: bool = False,
    ) -> None:
        self.what = what
        self.can_bind = can_bind
        self.note = note
        self.remedy = remedy
        self.can_move = can_move


class Mover(Protocol):
    """What moves launches below Python (`guards.redirect`)."""

    @property
    def available(self) -> bool:
        """Whether it works in this process."""

    def calling(self) -> AbstractContextManager[None]:
        """Move the default-class launches of this thread during a block."""


def decide(
    mode: Mode,
    given: int,
    current: int,
    current_capture: CaptureState = NOT_CAPTURING,
    given_capture: CaptureState = NOT_CAPTURING,
    can_bind: bool = True,
    can_move: bool = False,
) -> Verdict:
    """The rule.

    Args:
        mode: the mode in force.
        given: the handle that the caller passed; 0 if none.
        current: the handle of torch's current stream of the launch's device.
        current_capture: the capture of the current stream.
        given_capture: the capture of the given stream; not asked for default-class handles.
        can_bind: False if the launch takes no stream.
        can_move: whether it can be moved all the same, below Python.
    """
    if mode is Mode.OFF:
        return Verdict.PASS
    if not can_bind:
        if not current_capture:
            return Verdict.PASS
        return Verdict.BIND if can_move and mode is not Mode.CHECK else Verdict.REFUSE_UNBOUND
    if given == current:
        return Verdict.PASS
    if given <= LAST_DEFAULT:
        if mode is not Mode.CHECK:
            return Verdict.BIND
        return Verdict.REFUSE_ESCAPE if current_capture else Verdict.PASS
    if not current_capture or given_capture.id == current_capture.id:
        return Verdict.PASS
    if given_capture:
        return Verdict.REFUSE_OTHER_CAPTURE
    return Verdict.RESCUE if mode is Mode.BIND else Verdict.REFUSE_ESCAPE


def _first_question(device: int) -> int:
    """Stands in for the runtime's `current_handle` until somebody asks; torch may not be imported before that."""
    connect(runtime.get())
    return current_handle(device)


def _first_device() -> int:
    """The same for `current_device`."""
    connect(runtime.get())
    return current_device()


def _first_state(handle: int) -> CaptureState:
    """The same for `capture_state`."""
    connect(runtime.get())
    return capture_state(handle)


#: What the launch path and waits read. Rebound as a whole by `connect` and `set_mode`, never mutated.
current_handle: Callable[[int], int] = _first_question
current_device: Callable[[], int] = _first_device
capture_state: Callable[[int], CaptureState] = _first_state
#: Whether it is known that there is one device, so that nobody has to be asked which one is current.
one_device = False
_mode: Mode = Mode.OFF
_binds = False
active = False

#: Moves launches that take no stream, below Python; None if nothing can.
mover: Mover | None = None
#: Whether there is a function that needs it.
needs_mover = False

#: So that Python's "default" filter shows a rescue once for each line and capture.
_warned: dict[Any, Any] = {}


def connect(new: runtime.Runtime | None) -> None:
    """Ask this runtime from now on; None: ask torch, found at the next question."""
    global current_handle, current_device, capture_state, one_device
    current_handle = new.current_handle if new is not None else _first_question
    current_device = new.current_device if new is not None else _first_device
    capture_state = new.capture_state if new is not None else _first_state
    one_device = new is not None and new.device_count() == 1


def set_mode(mode: Mode) -> None:
    """Put a mode in force for the whole process; `Mode.OFF` lets every launch pass."""
    global _mode, _binds, active
    _mode, _binds, active = mode, mode in (Mode.BIND, Mode.STRICT), mode is not Mode.OFF
    _warned.clear()


def mode() -> Mode:
    """The mode in force."""
    return _mode


def binds() -> bool:
    """Whether launches are bound in the mode in force: in bind and strict, not in check."""
    return _binds


def resolve(given: int, device: int, launch: Launch, argument: str = "") -> int:
    """The handle that a launch is to use.

    Args:
        given: the handle that the caller passed; 0 if none.
        device: index of the device that the launch runs on.
        launch: what is launched.
        argument: the name of the stream argument, for messages.

    Returns:
        The handle to launch on.

    Raises:
        WrongStreamError: if the rule refuses the launch; nothing has been launched then.
    """
    current = current_handle(device)
    # The rows that need no question to the driver; `decide` has them too, and a test holds the two together.
    if launch.can_bind and (given == current or (_binds and given <= LAST_DEFAULT)):
        return current
    return _resolve_rare(given, current, device, launch, argument)


def _resolve_rare(given: int, current: int, device: int, launch: Launch, argument: str) -> int:
    """The rows of the table that need the capture state, or end in a report."""
    if _mode is Mode.OFF:
        return given
    ask = capture_state
    current_capture = ask(current) if current > LEGACY else NOT_CAPTURING
    given_capture = ask(given) if current_capture and given > LAST_DEFAULT else NOT_CAPTURING
    can_move = not launch.can_bind and launch.can_move and mover is not None and mover.available
    verdict = decide(_mode, given, current, current_capture, given_capture, launch.can_bind, can_move)
    if verdict is Verdict.PASS:
        return given
    if verdict is Verdict.BIND:
        return current
    site = user_site()
    if allowance.covers("launch", site):
        ledger.add(ledger.Event("allowed launch", launch.what, site, given, current, current_capture.id))
        allowance.let_through(site)
        return given
    report = _report(verdict, given, current, device, current_capture, launch, argument, site)
    if verdict is Verdict.RESCUE:
        ledger.add(ledger.Event("rescued launch", launch.what, site, given, current, current_capture.id))
        warnings.warn_explicit(str(report), RescuedLaunchWarning, site.file, site.line, registry=_warned)
        return current
    ledger.add(ledger.Event("refused launch", launch.what, site, given, current, current_capture.id))
    raise WrongStreamError(report)


_ALLOW = "If this launch is meant to stay outside the graph, say so: with streamshim.allow('launch', reason='...')."


def _remedy(verdict: Verdict, given: int, launch: Launch) -> tuple[str, ...]:
    """What to do; in check mode nothing is filled in, so None is no advice there."""
    or_none = "" if _mode is Mode.CHECK else ", or pass None and let streamshim fill it in"
    if verdict is Verdict.REFUSE_UNBOUND:
        return (*launch.remedy, _ALLOW)
    if verdict is Verdict.REFUSE_OTHER_CAPTURE:
        return (f"Pass the stream of this capture{or_none}: two captures share no stream.", _ALLOW)
    if given <= LAST_DEFAULT:
        return (
            "Pass torch's current stream (torch.cuda.current_stream().cuda_stream) at each call, or run with "
            "streamshim in bind mode, which fills it in.",
            _ALLOW,
        )
    return (
        f"Take the stream at each call instead of keeping it{or_none}: a handle that was cached before the capture "
        "(by a warm-up, say) is the usual cause.",
        _ALLOW,
    )


_HEADLINE = {
    Verdict.RESCUE: "A launch was moved onto the capturing stream; as written it would be missing from the CUDA graph.",
    Verdict.REFUSE_ESCAPE: "Launch refused: it would be missing from the CUDA graph that is being captured.",
    Verdict.REFUSE_OTHER_CAPTURE: "Launch refused: its stream belongs to another capture than torch's current stream.",
    Verdict.REFUSE_UNBOUND: "Launch refused: it takes no stream, so the CUDA graph being captured would miss it.",
}
_SILENT = "The first result would be right and every replay wrong, without any error."
_WHY = {
    Verdict.RESCUE: f"The given stream is outside the capture: as written the kernel would run once, now. {_SILENT}",
    Verdict.REFUSE_ESCAPE: f"The given stream is not part of the capture, so the kernel would run once, now. {_SILENT}",
    Verdict.REFUSE_OTHER_CAPTURE: "The kernel would become part of that other graph and be missing from this one.",
    Verdict.REFUSE_UNBOUND: f"The kernel always goes to the NULL stream, so it would run once, now. {_SILENT}",
}


def _report(
    verdict: Verdict,
    given: int,
    current: int,
    device: int,
    current_capture: CaptureState,
    launch: Launch,
    argument: str,
    site: Site,
) -> LaunchReport:
    from .findings import LaunchReport  # here, since only what is refused or rescued has a report

    said = f", argument {argument!r}" if argument else ""
    note = f"\n{launch.note}" if launch.note else ""
    state = " (not capturing)" if verdict in (Verdict.RESCUE, Verdict.REFUSE_ESCAPE) and given > LAST_DEFAULT else ""
    if verdict is Verdict.REFUSE_OTHER_CAPTURE:
        state = f", part of {capture.describe(runtime.get().capture_state(given).id)}"
    return LaunchReport(
        headline=_HEADLINE[verdict],
        launch=f"{launch.what}{said}{note}",
        site=site,
        given=("none; the NULL stream (0) is built in" if not launch.can_bind else describe(given)) + state,
        expected=f"{describe(current)}, torch's current stream of cuda:{device}",
        capture=capture.describe(current_capture.id),
        mode=str(_mode),
        why=_WHY[verdict],
        remedy=_remedy(verdict, given, launch),
    )
