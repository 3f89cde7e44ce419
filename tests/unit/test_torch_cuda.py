"""The runtime over torch: what it makes of the driver's answers, over functions that are called through ctypes, too."""

from __future__ import annotations

import ctypes
import gc

import pytest
import torch

from streamshim.errors import NoCudaError
from streamshim.runtime import NOT_CAPTURING, CaptureState
from streamshim.runtime.torch_cuda import TorchCuda

_ADDRESS = ctypes.c_void_p
ACTIVE, LOST = 1, 2
STREAM, FORK, OTHER, BROKEN, IDLE, GONE = 0x7F55_0000_0010, 0x7F55_0000_0018, 0x20, 0x30, 0x40, 0x50
#: Stream -> status and id, of those that the driver knows.
STREAMS = {STREAM: (ACTIVE, 7), FORK: (ACTIVE, 7), OTHER: (ACTIVE, 2**40), BROKEN: (LOST, 0), IDLE: (0, 0)}


class Driver:
    """``libcuda``, as far as it tells of captures."""

    def __init__(self):
        self.asked = []
        self.cuStreamIsCapturing = ctypes.CFUNCTYPE(ctypes.c_int, _ADDRESS, _ADDRESS)(self._is_capturing)
        self.cuStreamGetCaptureInfo_v2 = ctypes.CFUNCTYPE(ctypes.c_int, *[_ADDRESS] * 6)(self._capture_info)
        self.cuThreadExchangeStreamCaptureMode = ctypes.CFUNCTYPE(ctypes.c_int, _ADDRESS)(lambda mode: 1)

    def _is_capturing(self, stream, status):
        self.asked.append(stream)
        if stream not in STREAMS:
            return 400
        ctypes.c_int.from_address(status).value = STREAMS[stream][0]
        return 0

    def _capture_info(self, stream, status, capture, graph, dependencies, count):
        assert (graph, dependencies, count) == (None, None, None)
        result = self._is_capturing(stream, status)
        ctypes.c_uint64.from_address(capture).value = STREAMS[stream][1]
        return result


def no_driver(name):
    raise OSError(f"{name}: cannot open shared object file")


@pytest.fixture
def over(monkeypatch):
    """``over(load)`` is the runtime where ``load`` finds the driver's library."""
    for name in ("_cuda_getCurrentRawStream", "_cuda_getDevice", "_cuda_setDevice"):
        monkeypatch.setattr(torch._C, name, lambda *args: 0, raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)

    def make(load):
        monkeypatch.setattr(ctypes, "CDLL", load)
        return TorchCuda()

    return make


def test_a_cuda_build_of_torch_without_a_driver_says_so(over):
    with pytest.raises(NoCudaError, match=r"no CUDA driver here \(libcuda\.so\.1: cannot open"):
        over(no_driver)


def test_what_the_driver_says_of_a_stream(over):
    state = over(lambda name: Driver()).capture_state
    gc.collect()
    streams = (STREAM, OTHER, FORK, STREAM, IDLE, BROKEN, STREAM, BROKEN)
    said = [CaptureState(7), CaptureState(2**40), CaptureState(7), CaptureState(7), NOT_CAPTURING]
    assert [state(stream) for stream in streams] == [*said, CaptureState(0, False), CaptureState(7), state(BROKEN)]
    assert not state(BROKEN).valid
    assert state(GONE) == NOT_CAPTURING


def test_of_a_stream_that_does_not_capture_one_question_is_asked(over):
    driver = Driver()
    state = over(lambda name: driver).capture_state
    for stream in (IDLE, GONE):
        state(stream)
    assert driver.asked == [IDLE, GONE]


def test_what_is_asked_twice_in_a_capture_is_made_once(over):
    state = over(lambda name: Driver()).capture_state
    assert state(STREAM) is state(FORK)


def test_threads_get_their_own_answers(over):
    """While one is in C another asks, and each must read its own answer."""
    driver = Driver()
    answered = driver._is_capturing

    def meanwhile(stream, status):
        result = answered(stream, status)
        if stream == IDLE:
            assert asked.capture_state(STREAM).id == 7
        return result

    driver.cuStreamIsCapturing = ctypes.CFUNCTYPE(ctypes.c_int, _ADDRESS, _ADDRESS)(meanwhile)
    asked = over(lambda name: driver)
    assert asked.capture_state(IDLE) == NOT_CAPTURING
