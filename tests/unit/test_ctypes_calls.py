"""Calls of bound function pointers: what the C function gets, for every form of call."""

from __future__ import annotations

import contextlib
import ctypes
import inspect
import itertools
import sys
import threading
import warnings
from types import SimpleNamespace

import pytest
from ctypes_functions import OTHER, STREAM, THIRD, Int, Long, Pointer, Streams, forget_everything, recorder, undeclared

import streamshim
from streamshim import gate
from streamshim.binders.ctypes_ import calls, values
from streamshim.binders.ctypes_.specs import Spec


@pytest.fixture(autouse=True)
def nothing_bound(monkeypatch):
    monkeypatch.delenv("STREAMSHIM_CTYPES", raising=False)
    yield
    forget_everything()


@pytest.fixture
def streams():
    """One device, whose current stream is STREAM."""
    invented = Streams().use()
    invented.current[0] = STREAM
    return invented


@pytest.fixture
def shim(streams):
    streamshim.install(only=["ctypes"])


class Protocol:
    def __init__(self, handle):
        self.handle = handle

    def __cuda_stream__(self):
        return (0, self.handle)


class TorchStream:
    """As torch's: ctypes takes it for ``c_void_p``."""

    def __init__(self, handle):
        self.cuda_stream = handle
        self._as_parameter_ = ctypes.c_void_p(handle)


FORMS = {
    "int": int,
    "c_void_p": ctypes.c_void_p,
    "c_uint64": ctypes.c_uint64,
    "c_longlong": ctypes.c_longlong,
    "pointer": lambda handle: ctypes.cast(ctypes.c_void_p(handle), ctypes.POINTER(ctypes.c_char)),
    "__cuda_stream__": Protocol,
    "torch's": TorchStream,
}


def named(value):
    """A test's id without an address, which differs from process to process."""
    return repr(value) if isinstance(value, (int, float, str, type(None))) else type(value).__name__


DEFAULTS = [None, 0, 1, 2, ctypes.c_void_p(), ctypes.c_void_p(0), ctypes.c_size_t(2), Protocol(0)]


# The rule


@pytest.mark.parametrize("given", DEFAULTS, ids=named)
@pytest.mark.parametrize("declared", [True, False])
def test_a_default_stream_becomes_the_current_one(shim, given, declared):
    function, seen = recorder(Int, Pointer)
    bound = function if declared else undeclared(function)
    streamshim.bind(bound, nargs=2)
    assert bound(5, given) == 1
    assert seen == [(5, STREAM)]


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("declared", [True, False])
@pytest.mark.parametrize("handle", [STREAM, OTHER, 2**64 - 16])
def test_an_explicit_stream_arrives_whole(shim, streams, form, declared, handle):
    """Without argtypes, ctypes itself would make a C int of an int."""
    function, seen = recorder(Pointer, Int)
    bound = function if declared else undeclared(function)
    streamshim.bind(bound, 0)
    assert bound(form(handle), 5) == 1
    assert seen == [(handle, 5)]


@pytest.mark.parametrize("mode", ["bind", "strict", "check"])
@pytest.mark.parametrize("given", [0, STREAM, OTHER, THIRD])
@pytest.mark.parametrize("capturing", [(), (STREAM,), (STREAM, OTHER)])
def test_every_row_of_the_rule(streams, mode, given, capturing):
    streams.capture(*capturing)
    streams.capture(THIRD, id=8)
    function, seen = recorder(Int, Pointer)
    streamshim.install(mode, only=["ctypes"])
    streamshim.bind(function)
    verdict = gate.decide(
        streamshim.Mode(mode), given, STREAM, streams.capture_state(STREAM), streams.capture_state(given)
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if "REFUSE" in verdict.name:
            with pytest.raises(streamshim.WrongStreamError, match=r"argument 'stream'"):
                function(5, given)
            assert seen == []
            return
        function(5, given)
    assert seen == [(5, (STREAM if verdict.name in ("BIND", "RESCUE") else given) or None)]
    assert [w.category for w in caught] == [streamshim.RescuedLaunchWarning] * (verdict.name == "RESCUE")


def test_the_rule_is_asked_once_a_call(shim, streams):
    function, _ = recorder(Int, Pointer)
    streamshim.bind(function)
    for call in [(5, 0), (5,), (5, STREAM), (5, OTHER), (5, ctypes.c_void_p(0))]:
        streams.asked = 0
        function(*call)
        assert streams.asked == 1


def test_nothing_happens_while_nothing_is_installed(streams):
    function, seen = recorder(Int, Pointer)
    streamshim.bind(function)
    function(5, 0)
    with pytest.raises(TypeError):
        function(5)
    assert seen == [(5, None)]
    assert streams.asked == 0


# Where the stream is


@pytest.mark.parametrize("place", range(4))
@pytest.mark.parametrize(
    ("known", "said"),
    [*itertools.product(["argtypes", "nargs", "argnames"], ["index", "negative"]), ("argnames", "name")],
)
@pytest.mark.parametrize("given", ["passed", "left out"])
def test_every_place(shim, place, known, said, given):
    names = ["a", "b", "c"]
    names.insert(place, "stream")
    kinds = [Int] * 3
    kinds.insert(place, Pointer)
    function, seen = recorder(*kinds)
    bound = function if known == "argtypes" else undeclared(function)
    options = {"nargs": {"nargs": 4}, "argnames": {"argnames": names}, "argtypes": {}}[known]
    streamshim.bind(bound, {"index": place, "negative": place - 4, "name": "stream"}[said], **options)
    args = [1, 2, 3]
    if given == "passed":
        args.insert(place, None)
    bound(*args)
    expected = [1, 2, 3]
    expected.insert(place, STREAM)
    assert seen == [tuple(expected)]


def test_argtypes_may_be_set_and_changed_after_binding(shim):
    function, seen = recorder(Int, Pointer)
    bound = streamshim.bind(undeclared(function))
    for _ in range(2):
        with pytest.raises(TypeError, match="not known"):
            bound(5, 0)
        bound.argtypes = [Int, Pointer]
        bound(5)
        bound(5, None)
        bound.argtypes = None
    assert seen == [(5, STREAM)] * 4


def test_a_negative_index_needs_a_count(shim):
    function, seen = recorder(Int, Pointer)
    bound = streamshim.bind(undeclared(function))
    with pytest.raises(TypeError) as refused:
        bound(5, 0)
    text = str(refused.value)
    assert "its stream is argument -1, counted from the end" in text
    assert "set its argtypes, or bind it with nargs=N or argnames=(...)" in text
    assert seen == []


def test_an_index_without_a_count_needs_something_in_the_streams_place(shim):
    function, seen = recorder(Int, Pointer)
    bound = streamshim.bind(undeclared(function), 1)
    with pytest.raises(TypeError, match=r"1 arguments were given.*Pass something in the stream's place \(None will"):
        bound(5)
    bound(5, None)
    assert seen == [(5, STREAM)]


@pytest.mark.parametrize("args", [(), (1,), (1, 2, 3, 4)], ids=len)
@pytest.mark.parametrize("options", [{}, {"nargs": 3}, {"argnames": ("a", "b", "stream"), "stream": "stream"}])
def test_a_wrong_count_names_the_function_and_the_count(shim, args, options):
    function, seen = recorder(Int, Int, Pointer)
    function.__name__ = "scale_on"
    streamshim.bind(function, **options)
    with pytest.raises(
        TypeError, match=rf"scale_on takes 3 arguments, or 2 without its stream .*{len(args)} were given"
    ):
        function(*args)
    assert seen == []


def test_an_index_beyond_argtypes(shim):
    function, seen = recorder(Int, Pointer)
    for index in (2, -3):
        streamshim.bind(function, index)
        with pytest.raises(TypeError, match=f"its stream is argument {index}, but its argtypes has 2 types"):
            function(5, 0)
        streamshim.unbind(function)
    assert seen == []


@pytest.mark.parametrize("given", ["text", 1.5, object(), True, -1, 2**64], ids=named)
@pytest.mark.parametrize("declared", [True, False])
def test_what_is_no_stream_is_refused(shim, given, declared):
    function, seen = recorder(Int, Pointer)
    bound = function if declared else undeclared(function)
    streamshim.bind(bound, 1)
    with pytest.raises(TypeError, match=r"argument 1: .*accepted: None, an int handle"):
        bound(5, given)
    assert seen == []


# The declared type of the stream


class Subclass(ctypes.c_void_p):
    pass


class Opaque(ctypes.Structure):
    pass


class Converter:
    """What ctypes accepts as a type without being one."""

    @staticmethod
    def from_param(value):
        return ctypes.c_void_p(value)


KINDS = [
    Pointer, Subclass, streamshim.Stream, ctypes.POINTER(Opaque), ctypes.POINTER(ctypes.c_int), ctypes.c_char_p,
    ctypes.c_wchar_p, ctypes.c_uint64, ctypes.c_int64, ctypes.c_size_t, ctypes.c_ulonglong, ctypes.CFUNCTYPE(None),
    Converter, Converter(),
]  # fmt: skip


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: getattr(kind, "__name__", "instance"))
@pytest.mark.parametrize("given", [None, 0, OTHER, 2**63 + 16])
@pytest.mark.parametrize("left_out", [False, True])
def test_every_declared_type_of_the_stream(shim, streams, kind, given, left_out):
    function, seen = recorder(Int, Pointer)
    bound = undeclared(function)
    bound.argtypes = [Int, kind]
    streamshim.bind(bound)
    streams.asked = 0
    bound(5) if left_out else bound(5, given)
    assert seen == [(5, STREAM if left_out or not given else given)]
    assert streams.asked == 1


def test_a_type_that_cuts_the_handle_is_refused(shim, streams):
    function, seen = recorder(Int, Int)
    function.__name__ = "scale_on"
    streamshim.bind(function)
    for given in (0, STREAM, OTHER):
        with pytest.raises(
            TypeError, match=r"scale_on, argument 1 is declared as c_int, which would cut 0x7f55.* to 32"
        ):
            function(5, given)
    assert seen == []
    streams.current[0] = 0
    function(5, 0)
    assert seen == [(5, 0)]


# What ctypes offers goes on working


def test_it_stays_the_same_object_with_all_its_parts(shim):
    prototype = ctypes.CFUNCTYPE(ctypes.c_int, Int, Pointer)
    seen = []
    function = prototype(lambda a, s: seen.append((a, s)) or 1)
    other = prototype(lambda a, s: seen.append((a, s)) or 2)
    before = (type(function), function.argtypes, function.restype, ctypes.cast(function, Pointer).value)
    assert streamshim.bind(function) is function
    assert isinstance(function, prototype)
    assert (prototype, function.argtypes, function.restype, ctypes.cast(function, Pointer).value) == before
    assert type(function).__name__ == prototype.__name__
    # The type that they share is as it was.
    other(5, None)
    assert prototype.__call__ is ctypes._CFuncPtr.__call__
    assert seen == [(5, None)]
    assert prototype(ctypes.cast(function, Pointer).value)(6, None) == 1
    assert seen[1:] == [(6, None)]
    streamshim.uninstall()
    assert type(function) is prototype
    assert vars(function) == {}


def test_restype_and_errcheck(shim):
    function, seen = recorder(Int, Pointer)
    bound = undeclared(function)
    bound.argtypes = [Int, Pointer]
    streamshim.bind(bound)
    checked = []
    bound.restype = ctypes.c_char
    bound.errcheck = lambda result, func, args: checked.append((result, func, args)) or "checked"
    assert bound(5, None) == "checked"
    assert checked == [(b"\x01", bound, (5, STREAM))]
    assert bound.errcheck is not None
    bound.restype, bound.errcheck = Int, lambda result, func, args: result / 0
    with pytest.raises(ZeroDivisionError):
        bound(5)
    assert seen == [(5, STREAM)] * 2


def test_as_a_callback_it_is_the_c_function(shim):
    """C calls the address, so nothing is bound there."""
    function, seen = recorder(Int, Pointer)
    streamshim.bind(function)
    calls_it = ctypes.CFUNCTYPE(Int, type(function).__mro__[1])(lambda given: given(5, 0))
    assert calls_it(function) == 1
    assert seen == [(5, None)]


def test_an_exception_in_the_conversion_of_another_argument(shim, streams):
    function, seen = recorder(Int, Pointer)
    streamshim.bind(function)
    with pytest.raises(ctypes.ArgumentError):
        function("no number", None)
    function(5, None)
    assert seen == [(5, STREAM)]


LIBC = ctypes.CDLL(None)


def memset(*flags):
    """memset(stream, value, 0) returns its first argument."""
    return ctypes.CFUNCTYPE(Pointer, Pointer, Int, ctypes.c_size_t)(("memset", LIBC), flags)


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        ((), {"stream": None, "value": 5, "n": 0}),
        ((), {"value": 5, "n": 0}),
        ((None,), {"value": 5, "n": 0}),
        ((0, 5), {"n": 0}),
        ((0, 5, 0), {}),
        ((5, 0), {}),
        ((), {"stream": TorchStream(0), "value": 5, "n": 0}),
    ],
)
def test_paramflags_and_keywords(shim, args, kwargs):
    function = memset((1, "stream", None), (1, "value"), (1, "n"))
    streamshim.bind(function, "stream", argnames=("stream", "value", "n"))
    assert function(*args, **kwargs) == STREAM


def test_keywords_without_names(shim):
    function = memset((1, "stream", None), (1, "value"), (1, "n", 0))
    streamshim.bind(function, 0)
    assert function(None, value=5) == STREAM
    with pytest.raises(TypeError, match=r"was called with keyword.*stream='NAME' and argnames"):
        function(stream=None, value=5)


def test_outputs_among_paramflags(shim):
    """The caller passes fewer arguments than C gets, so the places are those that the caller sees."""
    function = ctypes.CFUNCTYPE(Pointer, Pointer, ctypes.POINTER(Int), ctypes.c_size_t)(
        ("memset", LIBC), ((1, "stream"), (2, "out"), (1, "n"))
    )
    streamshim.bind(function, "stream", argnames=("stream", "n"))
    function.errcheck = lambda result, func, args: result
    assert function(0, 0) == STREAM
    assert function(0) == STREAM
    assert function(stream=None, n=0) == STREAM


def test_keywords_for_a_function_without_paramflags_are_refused(shim):
    """ctypes would drop them without a word."""
    function, seen = recorder(Int, Pointer)
    bound = streamshim.bind(undeclared(function), "stream", argnames=("a", "stream"))
    with pytest.raises(TypeError, match="only for functions that were made by a prototype with paramflags"):
        bound(5, stream=None)
    assert seen == []


# Devices


@pytest.fixture
def two(streams):
    streams.devices = 2
    streams.current[1] = OTHER
    streamshim.install(only=["ctypes"])
    return streams


class Tensor:
    """Stands for a torch tensor."""

    def __init__(self, device=0, address=0x7F0000001000, is_cuda=True):
        self.device, self.address, self.is_cuda = device, address, is_cuda

    def get_device(self):
        return self.device

    def data_ptr(self):
        return self.address


@pytest.fixture
def torch(monkeypatch):
    """A torch of which only the tensor type is needed."""
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(Tensor=Tensor))


@pytest.fixture
def noting(two):
    """A function that writes down which device is current when it runs."""
    seen = []

    def run(*args):
        seen.append((two.device, args[-1]))
        return 1

    function = ctypes.PYFUNCTYPE(Int, Pointer, Pointer, Pointer)(run)
    return function, seen


def test_the_current_device(two):
    function, seen = recorder(Pointer, Pointer)
    streamshim.bind(function)
    function(5)
    two.device = 1
    function(5)
    assert seen == [(5, STREAM), (5, OTHER)]


def test_a_given_device_is_current_for_the_call(two, noting):
    function, seen = noting
    streamshim.bind(function, device=1)
    function(5, 6)
    assert seen == [(1, OTHER)]
    assert two.device == 0
    with pytest.raises(ctypes.ArgumentError):
        function("no pointer", 6.5)
    assert two.device == 0


@pytest.mark.parametrize("stream", [-1, None])
def test_the_device_of_the_tensors(two, noting, torch, stream):
    function, seen = noting
    streamshim.bind(function, stream, device="tensors", tensors="data_ptr")
    rest = () if stream == -1 else (7,)
    for tensor in (Tensor(0), Tensor(1), Tensor(1, is_cuda=False)):
        function(5, tensor, *rest)
    expected = [(0, STREAM), (1, OTHER), (0, STREAM)]
    assert seen == ([(d, 7) for d, _ in expected] if stream is None else expected)
    assert two.device == 0
    if stream is None:
        first, second = [(STREAM, 0, 0), (0, STREAM, 0)], [(OTHER, 0, 1), (0, OTHER, 1)]
        assert two.ordered == [*first, *second, *first]


def test_a_function_that_waits_takes_tensors_and_a_device_like_any_other(two, noting, torch):
    function, seen = noting
    streamshim.bind(function, streamshim.SYNCS, device="tensors", tensors="data_ptr")
    function(5, 6, Tensor(1))
    assert seen == [(1, 0x7F0000001000)]
    assert two.device == 0
    two.capture(OTHER)
    function(5, 6, Tensor(0))
    with pytest.raises(streamshim.HostSyncError):
        function(5, 6, Tensor(1))
    assert [device for device, _ in seen] == [1, 0]
    assert two.device == 0


def test_tensors_on_several_devices_are_refused(two, noting, torch):
    function, seen = noting
    streamshim.bind(function, device="tensors", tensors="data_ptr")
    with pytest.raises(ValueError, match="argument 0 on cuda:1, argument 1 on cuda:0") as refused:
        function(Tensor(1), Tensor(0))
    assert "device='current'" in str(refused.value)
    assert seen == []
    assert two.device == 0


def test_one_device_is_not_asked_for(shim, streams, monkeypatch):
    function, seen = recorder(Int, Pointer)
    streamshim.bind(function)
    monkeypatch.setattr(streams, "current_device", None)
    function(5)
    function(5)
    assert seen == [(5, STREAM)] * 2


# Tensors


@pytest.mark.parametrize("declared", [True, False])
@pytest.mark.parametrize("stream", [0, None])
def test_tensors_as_addresses_if_asked_for(shim, torch, declared, stream):
    function, seen = recorder(Pointer, Pointer, Pointer)
    bound = function if declared else undeclared(function)
    streamshim.bind(bound, stream, 3, tensors="data_ptr")
    bound(None, Tensor(), Tensor(address=0x7F0000002000))
    assert seen == [(None if stream is None else STREAM, 0x7F0000001000, 0x7F0000002000)]
    if stream == 0:
        bound(Tensor(), 5)
        assert seen[1:] == [(STREAM, 0x7F0000001000, 5)]


def test_tensors_as_addresses_of_declared_pointers(shim, torch):
    function, seen = recorder(Pointer, Pointer)
    bound = undeclared(function)
    bound.argtypes = [ctypes.POINTER(ctypes.c_float), Pointer]
    streamshim.bind(bound, tensors="data_ptr")
    bound(Tensor())
    assert seen == [(0x7F0000001000, STREAM)]


def test_tensors_are_left_to_ctypes_otherwise(shim, torch):
    function, seen = recorder(Pointer, Pointer)
    streamshim.bind(function)
    with pytest.raises(ctypes.ArgumentError):
        function(Tensor(), None)
    assert seen == []


# Functions without a stream


@pytest.fixture
def unstreamed(streams):
    function, seen = recorder(Int, Pointer)
    function.__name__ = "scale"
    streamshim.bind(function, None)
    return function, seen


def test_on_the_default_stream_it_is_left_alone(shim, streams, unstreamed):
    function, seen = unstreamed
    streams.current[0] = 0
    function(5, None)
    assert (seen, streams.ordered) == ([(5, None)], [])


def test_on_a_side_stream_it_is_ordered_on_both_sides(shim, streams, unstreamed):
    function, seen = unstreamed
    order = []
    streams.order = lambda *asked: order.append((asked, len(seen)))
    function(5, OTHER)
    assert seen == [(5, OTHER)]
    assert order == [((STREAM, 0, 0), 0), ((0, STREAM, 0), 1)]


def test_it_is_ordered_also_if_the_call_fails(shim, streams, unstreamed):
    function, seen = unstreamed
    with pytest.raises(ctypes.ArgumentError):
        function("no number", None)
    assert (seen, streams.ordered) == ([], [(STREAM, 0, 0), (0, STREAM, 0)])


@pytest.mark.parametrize("mode", ["bind", "strict", "check"])
def test_in_a_capture_it_is_refused(streams, unstreamed, mode):
    function, seen = unstreamed
    streams.capture(STREAM)
    streamshim.install(mode, only=["ctypes"])
    with pytest.raises(streamshim.WrongStreamError) as refused:
        function(5, None)
    assert "scale" in refused.value.report.launch
    assert any("Give scale a cudaStream_t parameter" in step for step in refused.value.report.remedy)
    assert (seen, streams.ordered) == ([], [])
    with streamshim.allow("launch", reason="a test"):
        function(5, None)
    # Ordering would make the legacy stream depend on the capture.
    assert (seen, streams.ordered) == ([(5, None)], [])


def test_where_it_is_allowed_it_is_ordered_outside_a_capture(shim, streams, unstreamed):
    function, _ = unstreamed
    with streamshim.allow("launch", reason="a test"):
        function(5, None)
    assert len(streams.ordered) == 2


def test_check_mode_orders_nothing(streams, unstreamed):
    function, seen = unstreamed
    streamshim.install("check", only=["ctypes"])
    function(5, None)
    assert (seen, streams.ordered) == ([(5, None)], [])


# Launches that are configured by a structure


class Config(ctypes.Structure):
    _fields_ = [(n, ctypes.c_uint) for n in ("gx", "gy", "gz", "bx", "by", "bz", "shared")] + [
        ("stream", Pointer), ("attributes", Pointer), ("count", ctypes.c_uint)
    ]  # fmt: skip


def config_passed(form, kind, given):
    seen = []
    function = ctypes.CFUNCTYPE(Int, ctypes.POINTER(Config), Int)(
        lambda c, n: (
            seen.append((ctypes.addressof(c.contents), c.contents.gx, c.contents.stream, c.contents.count)) or 1
        )
    )
    bound = undeclared(function)
    bound.argtypes = [kind, Int] if kind else None
    config = Config(gx=11, stream=given, count=12)
    path = calls.path_of(Spec(0, 2, field=Config.stream.offset), "libcuda.so.1: cuLaunchKernelEx")
    path(ctypes._CFuncPtr.__call__, (bound, form(config), 5), {})
    assert config.stream == given
    return config, seen


CONFIGS = {
    "byref": ctypes.byref,
    "pointer": ctypes.pointer,
    "c_void_p": lambda c: ctypes.c_void_p(ctypes.addressof(c)),
    "array": lambda c: (Config * 1).from_address(ctypes.addressof(c)),
}


@pytest.mark.parametrize("form", [*CONFIGS, "structure", "int"])
@pytest.mark.parametrize("kind", [None, Pointer, ctypes.POINTER(Config)], ids=["undeclared", "c_void_p", "typed"])
def test_the_stream_of_a_structure_is_replaced_in_a_copy(shim, form, kind):
    if form in ("structure", "int") and not (form == "structure" and kind not in (None, Pointer)):
        form = "byref"
    config, seen = config_passed(CONFIGS.get(form, lambda c: c), kind, None)
    ((address, gx, stream, count),) = seen
    assert (gx, stream, count) == (11, STREAM, 12)
    assert address != ctypes.addressof(config)


@pytest.mark.parametrize("given", [STREAM, OTHER])
def test_a_structure_that_stays_is_passed_as_it_is(shim, given):
    config, seen = config_passed(ctypes.byref, ctypes.POINTER(Config), given)
    assert seen == [(ctypes.addressof(config), 11, given, 12)]


def test_what_is_no_structure(shim):
    path = calls.path_of(Spec(0, 2, field=32), "libcuda.so.1: cuLaunchKernelEx")
    function, _ = recorder(Pointer, Int)
    with pytest.raises(TypeError, match=r"cuLaunchKernelEx, argument 0: got builtins.float; accepted: a pointer"):
        path(ctypes._CFuncPtr.__call__, (function, 1.5, 5), {})
    with pytest.raises(TypeError, match=r"takes 2 arguments \(argument 0\), but 1 were"):
        path(ctypes._CFuncPtr.__call__, (function, 5), {})
    assert path(ctypes._CFuncPtr.__call__, (function, None, 5), {}) == 1


# streamshim.Stream


@pytest.fixture
def declared():
    function, seen = recorder(Int, Pointer)
    bound = undeclared(function)
    bound.argtypes = [Int, streamshim.Stream]
    return bound, seen, function


@pytest.mark.parametrize("given", DEFAULTS, ids=named)
def test_a_declared_stream_follows_torch(shim, declared, given):
    function, seen, _ = declared
    function(5, given)
    assert seen == [(5, STREAM)]


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("installed", [True, False])
def test_a_declared_stream_passes_what_is_explicit(streams, declared, form, installed):
    function, seen, _ = declared
    if installed:
        streamshim.install(only=["ctypes"])
    function(5, form(OTHER))
    assert seen == [(5, OTHER)]


def test_a_declared_stream_is_passed_as_it_is_while_nothing_is_installed(streams, declared):
    function, seen, _ = declared
    for given in (None, 0, 1):
        function(5, given)
    assert seen == [(5, None), (5, None), (5, 1)]
    assert streams.asked == 0


def test_a_declared_stream_that_is_refused(shim, streams, declared):
    """ctypes makes an ArgumentError of whatever a type raises; a function that is bound raises the error itself."""
    function, seen, _ = declared
    streams.capture(STREAM)
    streams.capture(THIRD, id=8)
    with pytest.raises(ctypes.ArgumentError, match="WrongStreamError: Launch refused"):
        function(5, THIRD)
    streamshim.bind(function)
    with pytest.raises(streamshim.WrongStreamError):
        function(5, THIRD)
    with pytest.raises(TypeError, match=r"accepted: None"):
        function(5, "text")
    assert seen == []


# Threads, messages, the quick way


def test_two_threads_with_streams_of_their_own(streams):
    own = threading.local()
    streams.current_handle = lambda device: own.handle
    streams.use()
    streamshim.install(only=["ctypes"])
    function, seen = recorder(Int, Pointer)
    streamshim.bind(function)
    barrier = threading.Barrier(2, timeout=10)

    def work(number, handle):
        own.handle = handle
        barrier.wait()
        for _ in range(200):
            function(number, 0)

    threads = [threading.Thread(target=work, args=pair) for pair in ((1, STREAM), (2, OTHER))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(seen) == [(1, STREAM)] * 200 + [(2, OTHER)] * 200


def test_the_text_of_a_refusal(shim, streams, unstreamed, at_root):
    streams.capture(STREAM)
    function, _ = unstreamed
    line = inspect.currentframe().f_lineno + 2
    with pytest.raises(streamshim.WrongStreamError) as refused:
        function(5, None)
    assert (
        str(refused.value)
        == f"""\
Launch refused: it takes no stream, so the CUDA graph being captured would miss it.

  launch           ctypes function: scale
                       bound through ctypes with stream=None: it takes no stream
  called at        tests/unit/test_ctypes_calls.py:{line} in test_the_text_of_a_refusal
                       function(5, None)
  stream given     none; the NULL stream (0) is built in
  stream expected  0x7f5512345678, torch's current stream of cuda:0
  capturing        capture 7 (begun before install(), or below Python)
  streamshim mode  bind

The kernel always goes to the NULL stream, so it would run once, now. The first result would be right and
every replay wrong, without any error.
What to do:
  * Give scale a cudaStream_t parameter that every launch inside it uses, and bind it by that parameter's
    place: {{'scale': -1}} if it is the last.
  * If this launch is meant to stay outside the graph, say so: with streamshim.allow('launch', reason='...')."""
    )


def test_the_quick_way_does_what_the_general_way_does(shim, streams):
    """For every kind of call: the same arguments to ctypes, or the same error, and as many questions."""
    function, _ = recorder(Int, Int, Pointer)
    bound = undeclared(function)

    def note(*call):
        return [(type(a), getattr(a, "value", a)) for a in call]

    kinds = [None, [Int, Int, Pointer], [Int, Int, Subclass], [Int, Int, Int], [Int, Pointer]]
    givens = [None, 0, 1, STREAM, OTHER, -1, 2**64, True, "text", ctypes.c_void_p(5)]
    streams.current[0] = 0x7000
    for index, count in itertools.product((2, -1, -4, 5), (0, 3, 2)):
        quick, general = (make(Spec(index, count), "libx.so: f") for make in (calls._quick, calls._general))
        for types, given, short in itertools.product(kinds, givens, (0, 1)):
            bound.argtypes = types
            outcomes = []
            for path in (quick, general):
                streams.asked = 0
                try:
                    outcomes.append((path(note, (bound, 1, 2, given)[: 4 - short], {}), streams.asked))
                except TypeError as error:
                    outcomes.append((TypeError, str(error)))
            assert outcomes[0] == outcomes[1], (types, index, count, given, short)


def test_addresses_of_pointers():
    value = Long(5)
    address = ctypes.addressof(value)
    for form in (ctypes.byref(value), ctypes.pointer(value), ctypes.c_void_p(address), address):
        assert values.address_of(form) == address
    assert values.address_of(SimpleNamespace(_as_parameter_=address)) == address
    assert values.address_of(None) == 0


class Mover:
    """Stands for what moves launches below Python."""

    def __init__(self, available=True):
        self.available, self.inside, self.seen = available, False, []

    @contextlib.contextmanager
    def calling(self):
        self.inside = True
        yield
        self.inside = False


@pytest.mark.parametrize("mode", ["bind", "strict"])
def test_a_function_without_a_stream_is_moved_into_the_capture_where_that_works(streams, monkeypatch, mode):
    streamshim.install(mode, only=["ctypes"])
    mover, seen = Mover(), []
    monkeypatch.setattr(gate, "mover", mover)
    function = ctypes.CFUNCTYPE(ctypes.c_int, Int)(lambda value: seen.append((value, mover.inside)) or 1)
    streamshim.bind(function, None)
    function(1)
    streams.capture(STREAM)
    function(2)
    assert seen == [(1, False), (2, True)]
    assert not mover.inside
    mover.available = False
    with pytest.raises(streamshim.WrongStreamError):
        function(3)


def test_in_check_mode_it_is_refused(streams, monkeypatch):
    streamshim.install("check", only=["ctypes"])
    monkeypatch.setattr(gate, "mover", Mover())
    function, seen = recorder(Int)
    streamshim.bind(function, None)
    streams.capture(STREAM)
    with pytest.raises(streamshim.WrongStreamError):
        function(3)
    assert seen == []
