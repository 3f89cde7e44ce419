"""CUPTI's callback API, through ctypes on the ``libcupti`` that torch has mapped: what the driver is called with.

A subscriber sees every call of the enabled functions of the driver, at entry and at exit, in the thread that makes it;
the runtime's calls come by here too, since they end in the driver's. Functions are enabled from the begin of a capture
to its end (https://docs.nvidia.com/cupti/api/group__CUPTI__CALLBACK__API.html).

CUPTI has one subscriber for the process, and this one outlives the capture. A thread that comes back from a callback
goes on in the list of subscribers from the entry that it came from. Where that was freed meanwhile and another one
made, it reads memory that is somebody else's: of three processes that captured for 45 s, beside three busy threads, one
ended in a segmentation fault (13.0). So CUPTI is given back a while after the last capture, at a garbage collection,
since there is no thread for it.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import os
import time
import weakref
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from .. import fork
from ..errors import StreamShimError

#: ``CUPTI_CB_DOMAIN_DRIVER_API``, ``CUPTI_API_ENTER``.
_DRIVER_API, ENTER = 1, 0
#: ``CUPTI_ERROR_MULTIPLE_SUBSCRIBERS_NOT_SUPPORTED``.
TAKEN = 39
_FUNCTIONS = (
    "cuptiSubscribe", "cuptiUnsubscribe", "cuptiEnableCallback", "cuptiEnableDomain", "cuptiGetCallbackName",
)  # fmt: skip
#: Seconds in which threads come back from their callbacks, also those that wait for the GIL there: when somebody waits,
#: and when nobody does.
_GRACE, _REST = 0.02, 1.0
#: Held by who takes CUPTI or gives it back. Giving it back takes a while, in which other threads run and find it taken.
_changing = fork.Lock()


class CuptiError(StreamShimError):
    """CUPTI is not there, or has refused.

    Attributes:
        code: the number of its ``CUptiResult``; 0 if the library itself is missing.
    """

    def __init__(self, text: str, code: int = 0) -> None:
        super().__init__(text)
        self.code = code


class CallbackData(ctypes.Structure):
    """``CUpti_CallbackData`` of cupti_callbacks.h (CUDA 12 and 13)."""

    _fields_ = [
        ("callbackSite", ctypes.c_int),
        ("functionName", ctypes.c_char_p),
        ("functionParams", ctypes.c_void_p),
        ("functionReturnValue", ctypes.c_void_p),
        ("symbolName", ctypes.c_char_p),
        ("context", ctypes.c_void_p),
        ("contextUid", ctypes.c_uint32),
        ("correlationData", ctypes.c_void_p),
        ("correlationId", ctypes.c_uint32),
    ]


_Callback = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32, ctypes.POINTER(CallbackData))
_told: Callable[[int, CallbackData], None] | None = None


def _called(_user: int | None, _domain: int, function: int, data: Any) -> None:
    told = _told
    if told is not None:
        told(function, data.contents)


#: One for all subscriptions, and never freed: a thread may be on its way here while its subscription is closed.
_CALL = _Callback(_called)


class Cupti:
    """The library, with the functions that are used here.

    Raises:
        CuptiError: if torch has mapped none.
    """

    def __init__(self) -> None:
        path = _mapped("libcupti.so")
        if path is None:
            raise CuptiError("no libcupti is loaded in this process; torch brings one with its CUDA builds")
        self._library: Any = ctypes.CDLL(path)
        for name in _FUNCTIONS:
            getattr(self._library, name).restype = ctypes.c_int
        self._names: dict[int, str] = {}
        #: The subscriber between two subscriptions; taken out with `_changing` held.
        self._resting: _Subscriber | None = None

    def name_of(self, function: int) -> str:
        """The name of a function of the driver, by CUPTI's number for it; an empty string if there is none."""
        known = self._names.get(function)
        if known is None:
            name = ctypes.c_char_p()
            result = self._library.cuptiGetCallbackName(_DRIVER_API, function, ctypes.byref(name))
            known = self._names[function] = (name.value or b"").decode() if result == 0 else ""
        return known

    def subscribe(self, told: Callable[[int, CallbackData], None], functions: Iterable[int]) -> Subscription:
        """Be told of every call of some functions of the driver, by any thread, until `Subscription.close`.

        CUPTI is taken from then on, also for a while after that; see `leave`.

        Args:
            told: called with CUPTI's number for the function and what is known of the call, at its entry and at its
                exit; must not raise, since nobody would see it.
            functions: CUPTI's numbers.

        Raises:
            CuptiError: with `TAKEN` if somebody else is subscribed (a profiler), or another number.
        """
        global _told
        with _changing:
            subscriber = self._taken()
            if subscriber is None or subscriber.process != os.getpid():
                handle = ctypes.c_void_p()
                self._check("cuptiSubscribe", self._library.cuptiSubscribe(ctypes.byref(handle), _CALL, None))
                subscriber = _Subscriber(self._library, handle)
        subscription = Subscription(self, subscriber)
        _told = told
        try:
            enable = self._library.cuptiEnableCallback
            for function in functions:
                result = enable(1, subscriber.handle, _DRIVER_API, function)
                if result != 0:
                    self._check("cuptiEnableCallback", result)
        except BaseException:
            subscription.close()
            raise
        return subscription

    def leave(self) -> None:
        """Let somebody else have CUPTI now; not between `subscribe` and `Subscription.close`."""
        if self._at_collection in gc.callbacks:
            gc.callbacks.remove(self._at_collection)
        with _changing:
            subscriber = self._taken()
            if subscriber is not None:
                # Who subscribes next must not find threads that are still in a callback of this one.
                time.sleep(_GRACE)
                subscriber.leave()

    def _rest(self, subscriber: _Subscriber) -> None:
        """Keep it for the next subscription, for a while."""
        subscriber.rests_since = time.monotonic()
        self._resting = subscriber
        if self._at_collection not in gc.callbacks:
            gc.callbacks.append(self._at_collection)

    def _taken(self) -> _Subscriber | None:
        subscriber, self._resting = self._resting, None
        return subscriber

    def _at_collection(self, phase: str, info: Any) -> None:
        # Not waited for: this thread may be anywhere, also where the one that is inside waits for it.
        if phase != "stop" or self._resting is None or not _changing.enter_at_once():
            return
        try:
            resting = self._resting
            if resting is not None and time.monotonic() - resting.rests_since >= _REST:
                self._resting = None
                resting.leave()
        finally:
            _changing.__exit__()

    @staticmethod
    def _check(name: str, result: int) -> None:
        if result == TAKEN:
            raise CuptiError(
                "CUPTI has another subscriber already: a profiler (torch.profiler, Nsight, a tracing agent)", result
            )
        if result != 0:
            raise CuptiError(f"{name} failed with CUptiResult {result}", result)


@functools.cache
def found() -> Cupti:
    """`Cupti`, looked for once in a process; a forked child has the library where its parent has it.

    Raises:
        CuptiError: as `Cupti`; not kept, since torch may load it later.
    """
    return Cupti()


class _Subscriber:
    """CUPTI's word for us; given back at the latest when Python ends, after which nothing may be called.

    Attributes:
        library: libcupti.
        handle: the ``CUpti_SubscriberHandle``.
        process: which it is of. In a forked child CUPTI does not work, and may wait for a lock that nobody holds.
        rests_since: when nothing was enabled any more, by `time.monotonic`.
        leave: gives it back; called twice it does nothing.
    """

    def __init__(self, library: Any, handle: ctypes.c_void_p) -> None:
        self.library, self.handle, self.process = library, handle, os.getpid()
        self.rests_since = 0.0
        self.leave = weakref.finalize(self, _unsubscribe, library, handle, self.process)


class Subscription:
    """What `Cupti.subscribe` returns."""

    def __init__(self, cupti: Cupti, subscriber: _Subscriber) -> None:
        self._cupti, self._subscriber = cupti, subscriber
        self._is_open = True

    def close(self) -> None:
        """Be told of nothing more. Called twice it does nothing."""
        global _told
        if self._is_open:
            self._is_open = False
            _told = None
            if self._subscriber.process == os.getpid():
                self._subscriber.library.cuptiEnableDomain(0, self._subscriber.handle, _DRIVER_API)
            self._cupti._rest(self._subscriber)


def _unsubscribe(library: Any, handle: ctypes.c_void_p, process: int) -> None:
    if os.getpid() == process:
        library.cuptiUnsubscribe(handle)


def _mapped(name: str) -> str | None:
    """The path of a library that this process has mapped."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        # First what is cheap: a process with torch has thousands of lines.
        if name in line:
            path = Path("/", line.partition("/")[2])
            if path.name.startswith(name):
                return str(path)
    return None
