"""Functions bound with `SYNCS`, and CUDA's own functions that wait, through ctypes."""

from __future__ import annotations

import ctypes
import threading

import pytest
from ctypes_functions import OTHER, STREAM, Int, Long, Pointer, Streams, build, forget_everything, recorder

import streamshim
from streamshim import HostSyncError, capture
from streamshim.binders import cuda_functions
from streamshim.binders.ctypes_ import registry, tables
from streamshim.binders.ctypes_.environment import patterns_from
from streamshim.binders.ctypes_.specs import Spec, spec_of
from streamshim.callsite import Site
from streamshim.guards.sync_table import Kind


@pytest.fixture(autouse=True)
def nothing_bound(monkeypatch):
    monkeypatch.delenv("STREAMSHIM_CTYPES", raising=False)
    yield
    forget_everything()


@pytest.fixture
def streams():
    invented = Streams().use()
    invented.current[0] = STREAM
    return invented


@pytest.fixture
def shim(streams):
    streamshim.install(only=["ctypes"])


def window(error_mode):
    """A capture of this thread on its current stream."""
    site, ident = Site("serve.py", 12, "capture_model"), threading.get_ident()
    capture._windows[7] = capture.Window(7, STREAM, 0, site, "MainThread", error_mode, ident)


@pytest.mark.parametrize("error_mode", ["global", "thread_local", "relaxed"])
def test_a_function_that_waits_is_refused_in_a_capture(shim, streams, error_mode):
    function, seen = recorder(Int)
    streamshim.bind(function, streamshim.SYNCS)
    assert function(5) == 1
    streams.capture(STREAM)
    window(error_mode)
    with pytest.raises(HostSyncError, match=r"called through ctypes, at .*test_ctypes_waits\.py"):
        function(6)
    assert seen == [(5,)]
    with streamshim.allow("sync", reason="a test"):
        assert function(7) == 1
    streams.captures.clear()
    assert function(8) == 1
    assert seen == [(5,), (7,), (8,)]


def test_its_arguments_are_its_own(shim):
    function, seen = recorder(Pointer, Long)
    streamshim.bind(function, streamshim.SYNCS)
    function(OTHER, 3)
    assert seen == [(OTHER, 3)]


def test_in_a_library(shim, streams, tmp_path):
    library = streamshim.load(build(tmp_path), {"none": streamshim.SYNCS, "last": -1})
    streams.capture(STREAM)
    with pytest.raises(HostSyncError, match=r"libplain\.so: none, called through ctypes"):
        library.none(1, 2)
    assert registry.notes() == ["libplain.so: last, none"]


def test_a_conflict_is_told():
    function, _ = recorder(Int)
    streamshim.bind(function, streamshim.SYNCS)
    with pytest.raises(ValueError, match=r"bound already with stream=streamshim\.SYNCS"):
        streamshim.bind(function, None)


def test_what_is_said_in_the_environment():
    (functions,) = patterns_from({"STREAMSHIM_CTYPES": "lib*.so:wait=syncs,gate=none"}).values()
    assert functions == {"wait": spec_of(streamshim.SYNCS), "gate": spec_of(None)}
    with pytest.raises(ValueError, match="neither an index nor none nor syncs"):
        patterns_from({"STREAMSHIM_CTYPES": "lib*.so:wait=maybe"})


CUDART = """
long waited[8]; int calls, status;
int cudaStreamSynchronize(void *stream) { waited[calls++] = (long)stream; return status; }
int cudaStreamQuery(void *stream) { waited[calls++] = (long)stream; return 0; }
int cudaDeviceSynchronize(void) { calls++; return 0; }
int cudaMalloc(void **p, unsigned long n) { calls++; return 0; }
int cudaEventQuery(void *event) { calls++; return 0; }
"""


@pytest.fixture
def cudart(shim, tmp_path):
    """A stand-in for CUDA's runtime, bound by its table."""
    library = ctypes.CDLL(str(build(tmp_path, "libcudart_stand_in.so", CUDART)))
    streamshim.bind(library)
    library.cudaStreamSynchronize.argtypes = [Pointer]
    return library


def waited(library):
    count = ctypes.c_int.in_dll(library, "calls").value
    return list((Long * 8).in_dll(library, "waited"))[:count]


def test_what_waits_in_cuda_python_waits_through_ctypes():
    for table in (cuda_functions.WAITING, cuda_functions.ALLOCATING):
        for names in table.values():
            assert [name for name in names if name not in tables.WAITING] == []
    assert {tables.WAITING[name].name for name in cuda_functions.ALLOCATING["cuda.bindings.runtime"]} == {"MEMORY"}


def test_cudas_own_functions(cudart, streams):
    streams.capture(STREAM)
    window("thread_local")
    for call in (
        cudart.cudaDeviceSynchronize,
        lambda: cudart.cudaStreamSynchronize(OTHER),
        lambda: cudart.cudaStreamQuery(ctypes.c_void_p(STREAM)),
        lambda: cudart.cudaMalloc(None, 64),
        lambda: cudart.cudaEventQuery(None),
    ):
        with pytest.raises(HostSyncError):
            call()
    window("relaxed")
    cudart.cudaStreamSynchronize(OTHER)
    cudart.cudaMalloc(None, 64)
    with pytest.raises(HostSyncError):
        cudart.cudaStreamSynchronize(STREAM)
    assert waited(cudart)[0] == OTHER


@pytest.mark.parametrize("given", [None, 0, 1, 2])
def test_waiting_for_a_default_stream_waits_for_what_was_bound_too(cudart, given):
    assert cudart.cudaStreamSynchronize(given) == 0
    assert waited(cudart) == [STREAM, given or 0]
    ctypes.c_int.in_dll(cudart, "calls").value = 0
    ctypes.c_int.in_dll(cudart, "status").value = 700
    assert cudart.cudaStreamSynchronize(given) == 700
    assert waited(cudart) == [STREAM]


def test_the_table_has_the_place_of_each_stream():
    assert tables.SPECS["cudaStreamSynchronize"] == Spec(0, waits=Kind.STREAM)
    assert tables.SPECS["cuStreamQuery_ptsz"] == Spec(0, waits=Kind.STREAM)
    assert tables.SPECS["cudaDeviceSynchronize"] == Spec(None, waits=Kind.DEVICE)
    assert not set(tables.WAITING) & {*tables.PLACES, *tables.CONFIGURED}


def test_where_torch_has_no_streams_a_wait_passes(cudart, monkeypatch):
    monkeypatch.setattr("streamshim.runtime.found", lambda: None)
    monkeypatch.setattr("streamshim.gate.current_device", lambda: pytest.fail("asked"))
    cudart.cudaStreamSynchronize(OTHER)
    assert waited(cudart) == [OTHER]
