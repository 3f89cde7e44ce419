"""A stand-in for CUPTI that delivers the same structures, and captures that are watched through it."""

from __future__ import annotations

import ctypes

import pytest

from streamshim import WrongStreamError, callsite, capture, gate
from streamshim.guards import redirect, watch
from streamshim.patching import PatchSet
from streamshim.runtime import CaptureState
from streamshim.runtime.cupti import CallbackData
from streamshim.runtime.driver_calls import CONFIG_STREAM, LAUNCHES
from streamshim.settings import Mode

STREAM, FORK, OUTSIDE, OTHER = 0x7F0010, 0x7F0018, 0x7F0020, 0x7F0030
KERNEL, KERNEL_EX, COPY_AT_ONCE = 307, 652, 278
NUMBERS = {name: number for number, name in watch.NAMES.items()}


class FakeCupti:
    """Tells of the calls that a test makes."""

    def __init__(self):
        self.told, self.closed, self.left, self.error = None, 0, 0, None
        self.names = dict(watch.NAMES)

    def name_of(self, function):
        return self.names.get(function, "")

    def subscribe(self, told, functions):
        if self.error is not None:
            raise self.error
        assert set(functions) == set(self.names)
        assert self.told is None, "CUPTI has one subscriber"
        self.told = told
        return self

    def close(self):
        self.told = None
        self.closed += 1

    def leave(self):
        assert self.told is None, "it is to be closed first"
        self.left += 1

    def launch(self, function, stream, symbol=None, size=8, status=0):
        """A launch, as the driver is called with it; returns the stream that the driver reads."""
        call, memory = LAUNCHES[function], (ctypes.c_uint64 * 16)()
        if call.in_config:
            config = (ctypes.c_uint64 * 16)()
            config[CONFIG_STREAM // 8] = stream
            memory[call.stream // 8] = ctypes.addressof(config)
        elif call.stream >= 0:
            memory[call.stream // 8] = stream
        if call.kind in ("copy", "set") and call.stream == 24:
            memory[2] = size
        result = ctypes.c_int(status)
        data = CallbackData(
            functionParams=ctypes.addressof(memory), symbolName=symbol, functionReturnValue=ctypes.addressof(result)
        )
        where = config if call.in_config else memory
        place = CONFIG_STREAM // 8 if call.in_config else call.stream // 8
        seen = None
        for site in (0, 1):
            data.callbackSite = site
            if self.told is not None:
                self.told(function, data)
            if site == 0:
                seen = where[place] if call.stream >= 0 else None
        self.after = where[place]
        return seen

    def enter(self, function, parameters):
        """The entry of a call with these parameters."""
        self.told(function, CallbackData(callbackSite=0, functionParams=parameters))

    def come_back(self, function, parameters):
        """Its return."""
        self.told(function, CallbackData(callbackSite=1, functionParams=parameters))

    def fail(self, name, status):
        """A call that the driver refuses."""
        result = ctypes.c_int(status)
        data = CallbackData(callbackSite=1, functionReturnValue=ctypes.addressof(result))
        self.told(NUMBERS[name], data)


@pytest.fixture
def cupti(monkeypatch):
    # What calls the watch is the driver, which has no Python frame.
    monkeypatch.setattr(callsite, "MACHINERY", callsite.MACHINERY | {__name__})
    return FakeCupti()


@pytest.fixture
def watched(cupti, cuda, monkeypatch):
    """``watched(body)`` captures a block under the watch."""

    class CUDAGraph:
        id = 7

        def capture_begin(self, capture_error_mode="global"):
            cuda.captures[STREAM] = CaptureState(self.id)

        def capture_end(self):
            cuda.captures.pop(STREAM)

    cuda.current = STREAM
    patches = PatchSet(capture.patches(CUDAGraph))
    patches.apply()
    mover = redirect.Redirect(lambda: None)
    guard = watch.Watch(lambda: cupti, lambda: True, mover, compares=True)
    monkeypatch.setattr(capture, "enabled", True)
    monkeypatch.setattr(capture, "guards", [guard])
    monkeypatch.setattr(capture, "judges", [guard.judge])

    def run(body=lambda: None, mode="strict"):
        gate.set_mode(Mode(mode))
        graph = CUDAGraph()
        graph.capture_begin()
        try:
            body()
        finally:
            graph.capture_end()

    run.guard, run.redirect, run.graph = guard, mover, CUDAGraph
    yield run
    patches.undo()


def escapes(watched, body, mode="strict"):
    """The findings of a capture."""
    with pytest.raises(WrongStreamError) as error:
        watched(body, mode)
    return error.value.report.escapes


def installed_watch():
    """The watch of what is installed now, which is made before the first capture at the latest."""
    for check in capture.before_begin:
        check()
    (guard,) = [guard for guard in capture.guards if isinstance(guard, watch.Watch)]
    return guard
