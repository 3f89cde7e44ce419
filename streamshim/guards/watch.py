"""Every launch that a capturing thread makes, also below Python: which of them leave the capture.

A C++ extension, a helper kernel in a .so, a library's own stream do not pass through Python. CUPTI tells of them
(`runtime.cupti`), from the begin of a capture to its end. A launch on a stream outside the capture, by a thread whose
current stream captures, is a finding. So is what CUDA refuses in the meantime: it names the call that lost the capture.
"""

from __future__ import annotations

import ctypes
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from .. import allowance, capture, fork, gate, ledger, log, runtime
from ..callsite import user_site
from ..capture import Window
from ..errors import EscapedLaunchWarning, MissingFromGraphError, StreamShimError, WrongStreamError
from ..findings import Escape, EscapeReport, MissingReport
from ..runtime.driver_calls import LAUNCHES, NAMES, Call, has_size, known, stream_address, stream_of
from ..runtime.graphs import Node
from ..settings import Mode
from ..streams import LAST_DEFAULT, LEGACY, describe
from .recorded import Recorded
from .redirect import Redirect

#: How many different findings are kept; a capture may have millions of launches.
KEPT = 100
_CAPTURE_ERRORS, _LOST_BEFORE = range(900, 909), 901
_ENTER = 0


class Subscription(Protocol):
    """What `Source.subscribe` returns."""

    def close(self) -> None:
        """Tell of nothing more."""


class Source(Protocol):
    """What tells of calls: `runtime.cupti.Cupti`, or a stand-in that delivers the same structures."""

    def subscribe(self, told: Callable[[int, Any], None], functions: Iterable[int]) -> Subscription:
        """Tell of these functions until the result is closed."""

    def leave(self) -> None:
        """Let others have what only one can have, and what this keeps from one subscription to the next."""

    def name_of(self, function: int) -> str:
        """The name of a function, or an empty string."""


class Watch:
    """The guard that subscribes while captures are open.

    Args:
        make: makes what tells of calls, when the first capture begins; raises an exception where there is none.
        wanted: whether the capture that begins is to be watched.
        redirect: says which launches are to be moved into the capture.
        compares: whether what goes into a capture is counted, for `compare`.

    Attributes:
        off: why it does not watch, in words; an empty string if it does, or has not had to yet.
    """

    def __init__(
        self,
        make: Callable[[], Source],
        wanted: Callable[[], bool],
        redirect: Redirect | None = None,
        compares: bool = False,
    ) -> None:
        self.off = ""
        self._make, self._wanted, self._redirect = make, wanted, redirect
        self._recorded = Recorded() if compares else None
        #: Capture -> what its graph lacks, from `compare` to `judge`.
        self._missing: dict[int, MissingReport] = {}
        self._source: Source | None = None
        self._known: list[int] = []
        self._lock = fork.Lock()
        self._open: set[int] = set()
        self._subscription: Subscription | None = None
        #: Function and kernel, line, stream, capture -> the finding and how often; filled by any thread.
        self._found: dict[tuple[Any, ...], Escape] = {}
        #: Thread, place -> what was there before a launch was moved. Not in ``_inside``: a thread that is not Python's
        #: has another one of that each time that it is in Python.
        self._moved: dict[tuple[int, int], int] = {}
        self._moves = 0  # since CUPTI was subscribed to
        self._inside = threading.local()
        self._interrupt: BaseException | None = None

    def opened(self, window: Window) -> None:
        if not self._wanted():
            return
        with self._lock:
            self._open.add(window.id)
            # What was found in captures that were lost, or that nobody saw begin, is told by nobody.
            live = {w.id for w in capture.open_windows()}
            for key in [key for key, escape in list(self._found.items()) if escape.capture not in live]:
                self._found.pop(key, None)
            for id_ in [id_ for id_ in list(self._missing) if id_ not in live]:
                self._missing.pop(id_, None)
            if self._recorded is not None:
                self._recorded.forget_all_but(live)
            if self._subscription is None:
                self._moves = 0
                self._start()

    def closing(self, window: Window) -> None:
        with self._lock:
            self._open.discard(window.id)
            if not self._open:
                self._stop()

    def give_way(self, whom: str) -> None:
        """Let somebody else have CUPTI: what is captured now is watched no further.

        Args:
            whom: who wants it, in words.
        """
        with self._lock:
            was_watching = self._subscription is not None
            self._leave()
            if was_watching:
                self.off = f"{whom} was started inside a capture, and CUPTI has one user at a time"
        if was_watching:
            log.warning("streamshim: the rest of this capture is not watched: %s", self.off)

    def compare(self, window: Window, nodes: Iterable[Node]) -> None:
        """Hold the nodes of a graph against what was launched into its capture; `judge` tells what is missing."""
        found = self._recorded.missing(window.id, nodes) if self._recorded is not None else []
        self._missing.pop(window.id, None)
        # Where code below Python has ended the capture and begun another on its stream, the nodes are the other's.
        if found and runtime.get().capture_state(window.stream).id == window.id:
            self._missing[window.id] = MissingReport(tuple(found), str(window), str(gate.mode()))

    def end(self) -> None:
        """For `uninstall`: watch nothing more, also if a capture is just beginning in another thread."""
        with self._lock:
            self._wanted = lambda: False
            self._leave()

    def judge(self, window: Window) -> BaseException | None:
        """What was found in a capture that has ended well: an error in strict and check mode, a warning in bind mode.

        Launches that left it come before launches that went into it and are missing from its graph.

        Where another exception is on its way already, it is only logged. An interrupt (Ctrl-C) that came while the
        driver was asking is returned now, since nothing can be raised through the driver.
        """
        interrupt, self._interrupt = self._interrupt, None
        if interrupt is not None:
            return interrupt
        found, missing = self.taken(window), self._missing.pop(window.id, None)
        verdict: StreamShimError
        if found:
            site, verdict = found[0].site, WrongStreamError(EscapeReport(tuple(found), str(window), str(gate.mode())))
        elif missing is not None:
            site, verdict = missing.kernels[0].site, MissingFromGraphError(missing)
        else:
            return None
        if sys.exc_info()[1] not in (None, window.handled):
            log.error("%s", verdict)
            return None
        if gate.mode() is not Mode.BIND:
            return verdict
        warnings.warn_explicit(str(verdict), EscapedLaunchWarning, site.file, site.line, registry={})
        return None

    def taken(self, window: Window) -> list[Escape]:
        """What was found in a capture, in the order in which it was found first; forgotten with this."""
        keys = [key for key, escape in list(self._found.items()) if escape.capture == window.id]
        return [self._found.pop(key) for key in keys]

    @property
    def available(self) -> bool:
        """Whether launches can be moved in this process; with `calling` this is the gate's mover."""
        return self._redirect is not None and self._redirect.available and self._subscription is not None

    @contextmanager
    def calling(self) -> Iterator[None]:
        """Move the default-class launches of this thread during a block, which is one call of a bound function.

        Raises:
            WrongStreamError: at the end, if the call has made other launches outside the capture.
        """
        assert self._redirect is not None
        outer = getattr(self._inside, "escaped", None)
        escaped: dict[tuple[Any, ...], None] = {}
        self._inside.escaped = escaped
        try:
            # What the call raises comes first; its launches are told at the end of the capture then.
            with self._redirect.calling():
                yield
        finally:
            self._inside.escaped = outer
        found = [self._found.pop(key) for key in escaped if key in self._found]
        if found:
            report = EscapeReport(tuple(found), capture.describe(found[0].capture), str(gate.mode()), is_over=False)
            raise WrongStreamError(report)

    def _start(self) -> None:
        try:
            if self._source is None:
                source = self._make()
                self._known = known(source.name_of)
                self._source = source
            self._subscription = self._source.subscribe(self._told, self._known)
            self.off = ""
        except Exception as error:  # noqa: BLE001, the capture goes on without a watch, whatever is the matter
            reason = f"{type(error).__name__}: {error}"
            if reason != self.off or gate.mode() is Mode.STRICT:
                log.warning("streamshim: this capture is not watched: %s", reason)
            self.off = reason

    def _stop(self) -> None:
        subscription, self._subscription = self._subscription, None
        if subscription is not None:
            subscription.close()

    def _leave(self) -> None:
        self._stop()
        if self._source is not None:
            self._source.leave()

    def _told(self, function: int, data: Any) -> None:
        # Called from inside the driver, in any thread. What is asked of the driver here would come by here again.
        if getattr(self._inside, "now", False):
            return
        self._inside.now = True
        try:
            if data.callbackSite == _ENTER:
                call = LAUNCHES.get(function)
                if call is not None:
                    self._launched(call, data)
            else:
                self._returned(function, data)
        except Exception:
            log.exception("streamshim: the watch failed at %s", NAMES.get(function, function))
        except BaseException as interrupt:  # noqa: BLE001, `judge` raises it
            self._interrupt = interrupt
        finally:
            self._inside.now = False

    def _launched(self, call: Call, data: Any) -> None:
        asked = runtime.get()
        device = asked.current_device()
        current = asked.current_handle(device)
        given = stream_of(call, data.functionParams or 0)
        if given == current or current <= LEGACY:
            return
        mine = asked.capture_state(current).id
        if not mine or (given > LEGACY and asked.capture_state(given).id == mine):
            return
        if given <= LAST_DEFAULT and self._redirect is not None and self._redirect.is_wanted:
            address = stream_address(call, data.functionParams or 0)
            if address:
                place = ctypes.c_void_p.from_address(address)
                if call.in_config:
                    # This is the caller's own structure, to be found as it was.
                    self._moved[threading.get_ident(), address] = place.value or 0
                place.value = current
                self._inside.moved = True
                self._count_moved(call, given, current, mine)
                return
        site = user_site()
        what = _named(call.name, data) if call.kind == "kernel" else call.name
        if allowance.was_let_through(site):
            return
        if allowance.covers("launch", site):
            ledger.add(ledger.Event("allowed launch", what, site, given, current, mine))
            return
        key = (what, site, given, mine)
        before = self._found.get(key)
        if before is None and len(self._found) >= KEPT:
            ledger.add(ledger.Event("escaped launch", what, site, given, current, mine))
            return
        escaped = getattr(self._inside, "escaped", None)
        if escaped is not None:
            escaped[key] = None
        count = before.count + 1 if before is not None else 1
        stream = "none; the NULL stream (0)" if call.stream < 0 else describe(given)
        expected = f"{describe(current)}, torch's current stream of cuda:{device}"
        self._found[key] = Escape(what, site, stream, expected, mine, count)
        ledger.add(ledger.Event("escaped launch", what, site, given, current, mine))

    def _count_moved(self, call: Call, given: int, current: int, mine: int) -> None:
        if self._moves < KEPT:
            # The line takes longer to find than all the rest.
            self._moves += 1
            ledger.add(ledger.Event("moved launch", call.name, user_site(), given, current, mine))
        else:
            ledger.count("moved launch")

    def _returned(self, function: int, data: Any) -> None:
        """After a call: what it did to a capture, and what was moved for it."""
        call = LAUNCHES.get(function)
        status = ctypes.c_int.from_address(data.functionReturnValue).value if data.functionReturnValue else 0
        try:
            # A launch into a capture that is lost already has not lost it.
            if status in _CAPTURE_ERRORS and (call is None or status != _LOST_BEFORE):
                # CUPTI fills in the kernel's name for launches; what it leaves there for other calls is not to be read.
                is_kernel = call is not None and call.kind == "kernel"
                self._blame(_named(NAMES[function], data) if is_kernel else NAMES[function])
            if call is not None:
                moved, self._inside.moved = getattr(self._inside, "moved", False), False
                if self._recorded is not None and status == 0:
                    self._record(self._recorded, call, data, moved)
        finally:
            if call is not None and self._moved:
                self._put_back(call, data)

    def _record(self, recorded: Recorded, call: Call, data: Any, moved: bool) -> None:
        """Count a launch that went into a capture. Of copies and sets only those that were moved there."""
        name: bytes = (data.symbolName or b"") if call.kind == "kernel" else b""
        # A kernel that CUPTI does not name may be that of any node.
        if not (name if call.kind == "kernel" else moved and has_size(call, data.functionParams)):
            return
        stream = stream_of(call, data.functionParams or 0)
        if stream <= LEGACY:
            return
        # The per-thread stream is another one in each thread, under the same handle.
        id_ = (stream > LAST_DEFAULT and capture.on(stream)) or runtime.get().capture_state(stream).id
        if id_ > 0:
            recorded.launched(id_, call.kind, name)

    def _put_back(self, call: Call, data: Any) -> None:
        """After a launch: what was written into a structure of the caller's."""
        address = stream_address(call, data.functionParams or 0)
        before = self._moved.pop((threading.get_ident(), address), None)
        if before is not None:
            ctypes.c_void_p.from_address(address).value = before

    def _blame(self, what: str) -> None:
        """Remember a call that CUDA refused because of a capture."""
        site, thread = user_site(), threading.current_thread().name
        for window in capture.open_windows():
            ledger.add(ledger.Event("failed sync", f"{what} in thread {thread}", site, 0, 0, window.id))


def _named(name: str, data: Any) -> str:
    """A function, with the kernel that it launches."""
    kernel = data.symbolName
    return f"{name}, kernel {kernel.decode(errors='replace')!r}" if kernel else name
