"""Every launch that a capturing thread makes, also below Python: which of them leave the capture.

A C++ extension, a helper kernel in a .so, a library's own stream do not pass through Python. CUPTI tells of them
(`runtime.cupti`), from the begin of a capture to its end. A launch on a stream outside the capture, by a thread whose
current stream captures, is a finding. So is what CUDA refuses in the meantime: it names the call that lost the capture.
"""

from __future__ import annotations

import ctypes
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

from .. import allowance, capture, ledger, runtime
from ..callsite import Site, user_site
from ..capture import Window
from ..runtime.driver_calls import BREAKING, CONFIG_STREAM, LAUNCHES, Call
from ..streams import LAST_DEFAULT, LEGACY

logger = logging.getLogger("streamshim")

#: How many different findings a capture keeps; the counts go on.
KEPT = 100
_CAPTURE_ERRORS = range(900, 909)


class Source(Protocol):
    """What tells of calls: `runtime.cupti.Cupti`, or a stand-in that delivers the same structures."""

    def subscribe(self, told: Callable[[int, Any], None], functions: Any) -> Any:
        """Tell of these functions until the result is closed."""

    def name_of(self, function: int) -> str:
        """The name of a function."""


@dataclass(frozen=True)
class Finding:
    """A launch outside the capture, by a thread that captures.

    Attributes:
        what: the function of the driver, with the kernel's name where there is one.
        site: the user's line.
        given: the handle that it was launched on.
        expected: the handle of torch's current stream.
        device: the device's index.
        capture: the driver's id of the capture.
        count: how often this line did it.
    """

    what: str
    site: Site
    given: int
    expected: int
    device: int
    capture: int
    count: int = 1


class Watch:
    """The guard that subscribes while captures are open.

    Args:
        source: makes what tells of calls, when the first capture begins; raises an exception where there is none.
    """

    def __init__(self, source: Callable[[], Source]) -> None:
        self._make, self._source = source, None
        self._lock = threading.Lock()
        self._open: set[int] = set()
        self._subscription: Any = None
        self._found: dict[tuple[str, Site, int, int], Finding] = {}
        self._busy = threading.local()
        #: Why it does not watch, in words; an empty string if it does, or has not had to yet.
        self.off = ""

    def opened(self, window: Window) -> None:
        with self._lock:
            self._open.add(window.id)
            if self._subscription is None and (not self.off or self._source is not None):
                self._start()

    def closing(self, window: Window) -> None:
        with self._lock:
            self._open.discard(window.id)
            if not self._open and self._subscription is not None:
                subscription, self._subscription = self._subscription, None
                subscription.close()

    def findings(self, window: Window) -> list[Finding]:
        """What was found in a capture; forgotten with this."""
        mine = [finding for finding in self._found.values() if finding.capture == window.id]
        self._found = {key: finding for key, finding in self._found.items() if finding.capture != window.id}
        return mine

    def _start(self) -> None:
        try:
            if self._source is None:
                source = self._make()
                wrong = [n for n, name in _NAMES.items() if source.name_of(n) not in (name, "")]
                if wrong:
                    raise LookupError(
                        f"CUPTI's number {wrong[0]} is {source.name_of(wrong[0])}, not {_NAMES[wrong[0]]}"
                    )
                self._source = source
            self._subscription = self._source.subscribe(self._told, _NAMES)
            self.off = ""
        except Exception as error:  # noqa: BLE001, the capture goes on without a watch
            if str(error) != self.off:
                logger.warning("streamshim: this capture is not watched: %s", error)
            self.off = str(error) or type(error).__name__

    def _told(self, function: int, data: Any) -> None:
        # Called from inside the driver, in any thread. What is asked of the driver here comes by here again.
        if getattr(self._busy, "now", False):
            return
        self._busy.now = True
        try:
            if data.callbackSite == 0:
                call = LAUNCHES.get(function)
                if call is not None:
                    self._launched(call, data)
            elif function in BREAKING:
                self._returned(BREAKING[function], data)
        except Exception:
            logger.exception("streamshim: the watch failed at %s", _NAMES.get(function, function))
        finally:
            self._busy.now = False

    def _launched(self, call: Call, data: Any) -> None:
        asked = runtime.get()
        device = asked.current_device()
        current = asked.current_handle(device)
        given = _stream_of(call, data.functionParams)
        if given == current or current <= LEGACY:
            return
        mine = asked.capture_state(current)
        if not mine or (given > LAST_DEFAULT and asked.capture_state(given).id == mine.id):
            return
        site = user_site()
        if allowance.covers("launch", site):
            return
        symbol = data.symbolName
        what = (
            f"{call.name}, kernel {symbol.decode(errors='replace')!r}"
            if symbol and call.kind == "kernel"
            else call.name
        )
        key = (what, site, given, mine.id)
        known = self._found.get(key)
        if known is not None:
            self._found[key] = replace(known, count=known.count + 1)
        elif len(self._found) < KEPT:
            self._found[key] = Finding(what, site, given, current, device, mine.id)
        ledger.add(ledger.Event("escaped launch", what, site, given, current, mine.id))

    def _returned(self, name: str, data: Any) -> None:
        if not data.functionReturnValue:
            return
        if ctypes.c_int.from_address(data.functionReturnValue).value not in _CAPTURE_ERRORS:
            return
        site, thread = user_site(), threading.current_thread().name
        for window in capture.open_windows():
            ledger.add(ledger.Event("failed sync", f"{name} in thread {thread}", site, 0, 0, window.id))


def _stream_of(call: Call, parameters: int) -> int:
    """The stream of a launch, from its parameters in memory; 0 if it takes none."""
    if call.stream < 0 or not parameters:
        return 0
    address = parameters + call.stream
    if call.in_config:
        address = (ctypes.c_void_p.from_address(address).value or 0) + CONFIG_STREAM
        if address == CONFIG_STREAM:
            return 0
    return ctypes.c_void_p.from_address(address).value or 0


_NAMES: dict[int, str] = {**{number: call.name for number, call in LAUNCHES.items()}, **BREAKING}
