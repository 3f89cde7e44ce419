"""Calls that wait while no window is open: what is added to them, and what is seen all the same.

It is counted as `test_launch_cost` counts launches. Engines poll events and streams in loops, from many threads. The
runtime's questions are C functions here, so what is counted is all ours; limits are what CPython 3.11 needs and about a
third more, calls have no margin.
"""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import pytest
from bytecodes import warm_count

from streamshim import capture, gate, ledger, runtime
from streamshim.binders import cuda_waits
from streamshim.binders.ctypes_ import waits
from streamshim.callsite import Site
from streamshim.errors import HostSyncError
from streamshim.guards import libraries, torch_calls
from streamshim.guards.sync_table import EVENT_METHODS, STREAM_METHODS, Kind
from streamshim.runtime import NOT_CAPTURING, CaptureState
from streamshim.settings import Mode

STREAM = 0x7F0010


class Questions:
    """A runtime of one current stream, answered from C."""

    name = "questions"
    current_handle = {0: STREAM}.__getitem__
    current_device = int
    capture_state = {STREAM: NOT_CAPTURING}.__getitem__
    thread_mode = str

    def device_count(self):
        return 1


@pytest.fixture(autouse=True)
def installed(monkeypatch):
    questions = Questions()
    runtime.use(questions)
    gate.connect(questions)
    gate.set_mode(Mode.BIND)
    monkeypatch.setattr(cuda_waits, "stream_object", int)  # cuda-bindings need not be here


def nothing(*args):
    return (0,)


HANDLE = SimpleNamespace(cuda_event=9, cuda_stream=STREAM)
_event, _stream = EVENT_METHODS["query"], STREAM_METHODS["query"]
_driver = cuda_waits._makers("cuda.bindings.driver")
_cupy = {call.name: call for call in libraries.CALLS["cupy_backends.cuda.api.runtime"]}


def through_ctypes(kind, label):
    path = waits.waiting(SimpleNamespace(waits=kind), f"lib.so: {label}")
    return lambda original: lambda *args: path(original, (None, *args), {})


#: The call -> what makes its replacement, its arguments, and the Python calls and bytecodes that may be added.
LIMITS = {
    "torch: Event.query": (torch_calls.waiting_for_an_event(_event), (HANDLE,), 1, 17),
    "torch: Stream.query": (torch_calls.waiting_for_a_stream(_stream), (HANDLE,), 1, 40),
    "torch.cuda.synchronize": (torch_calls.waiting_for_the_device, (), 1, 56),
    "torch.accelerator.synchronize": (torch_calls.waiting_for_the_device, (0,), 1, 66),
    "cuEventQuery": (_driver["cuEventQuery"], (9,), 1, 18),
    "cuMemAlloc": (_driver["cuMemAlloc"], (9,), 1, 18),
    "cuStreamQuery": (_driver["cuStreamQuery"], (STREAM,), 4, 140),
    "cuStreamSynchronize of stream 0": (_driver["cuStreamSynchronize"], (0,), 6, 190),
    "cuCtxSynchronize": (_driver["cuCtxSynchronize"], (), 6, 208),
    "ctypes, an event": (through_ctypes(Kind.EVENT, "wait"), (9,), 2, 34),
    "ctypes, a stream": (through_ctypes(Kind.STREAM, "wait"), (STREAM,), 6, 182),
    "CuPy, an event": (libraries._maker(_cupy["eventQuery"]), (9,), 1, 21),
    "CuPy, a stream": (libraries._maker(_cupy["streamQuery"]), (STREAM,), 6, 145),
}


@pytest.mark.parametrize("call", LIMITS)
def test_what_is_added_to_a_wait(call):
    make, args, most_calls, most_codes = LIMITS[call]
    replacement = make(nothing)
    bare_calls, bare_codes = warm_count(lambda: nothing(*args))
    calls, codes = warm_count(lambda: replacement(*args))
    assert calls - bare_calls <= most_calls
    assert codes - bare_codes <= most_codes


def test_a_wait_in_a_capture_costs_more(capturing):
    """So that the limits are about something."""
    make, args, _, most = LIMITS["torch: Event.query"]
    replacement = make(nothing)
    capturing("relaxed")
    assert warm_count(lambda: replacement(*args))[1] > most


#: Those of `LIMITS` that wait for a stream or a device.
ASKING = [name for name in LIMITS if "vent" not in name and "MemAlloc" not in name]


@pytest.mark.parametrize("call", ASKING)
def test_a_capture_that_was_begun_below_python_is_seen(call, cuda):
    make, args, *_ = LIMITS[call]
    replacement = make(nothing)
    cuda.current, cuda.captures[STREAM] = STREAM, CaptureState(9)
    with pytest.raises(HostSyncError, match=r"capture 9 \(begun before install\(\), or below Python\)"):
        replacement(*args)


@pytest.mark.parametrize("call", [name for name in LIMITS if name not in ASKING])
def test_its_mode_is_not_known_so_what_some_modes_allow_passes(call, cuda):
    make, args, *_ = LIMITS[call]
    cuda.current, cuda.captures[STREAM] = STREAM, CaptureState(9)
    assert make(nothing)(*args) == (0,)


#: ctypes functions return their errors as any number, of which nothing is known.
BLAMED = [name for name in LIMITS if not name.startswith("ctypes")]


@pytest.mark.parametrize("call", BLAMED)
def test_a_capture_that_another_thread_began_in_between_knows_what_broke_it(call):
    def refused(*args):
        site = Site("serve.py", 12, "capture_model")
        capture._windows[7] = capture.Window(7, STREAM, 0, site, "engine", "global", 1)
        if call.startswith("cu") and call[2].isupper():
            return (900,)
        raise RuntimeError("CUDA error: operation not permitted when stream is capturing")

    make, args, *_ = LIMITS[call]
    with contextlib.suppress(RuntimeError):
        make(refused)(*args)
    assert [(event.kind, event.capture) for event in ledger.events()] == [("failed sync", 7)]
