"""Every kind of value that people pass as a stream, and every kind that is refused, with nothing formatted."""

from __future__ import annotations

import ctypes
import enum
import math
import sys
import types

import numpy
import pytest
import torch
from cuda.bindings import driver, runtime

from streamshim import streams
from streamshim.streams import describe, handle_of, is_stream_like

ACCEPTED = (
    "accepted: None, an int handle, ctypes.c_void_p, torch.cuda.Stream, cuda.bindings CUstream or cudaStream_t, a CuTe "
    "fake stream, or any object with __cuda_stream__"
)
HIGH = 0x7F12AB30CD00  # a pointer, as the driver hands them out
TOP = 2**64 - 1


@pytest.fixture(autouse=True)
def forget_types(monkeypatch):
    """Each test meets each type for the first time."""
    monkeypatch.setattr(streams, "_readers", {})


class Number(enum.IntEnum):
    STREAM = 0x1000


class SubclassOfCUstream(driver.CUstream):
    pass


class SubclassOfVoidPointer(ctypes.c_void_p):
    pass


class Unprintable:
    """Whoever formats or converts this gets caught."""

    def _touched(self, *_):
        raise AssertionError("the value was formatted or converted")

    __repr__ = __str__ = __format__ = __int__ = __index__ = __bool__ = __len__ = __eq__ = __hash__ = _touched


class ByMethod(Unprintable):
    """The protocol as cuda.core has it now; torch streams have it too."""

    def __init__(self, handle=HIGH):
        self._handle = handle

    def __cuda_stream__(self):
        return (0, self._handle)


class ByProperty(Unprintable):
    """The protocol as early cuda.core had it."""

    @property
    def __cuda_stream__(self):
        return (0, HIGH)


class TorchLike(Unprintable):
    """Like ``torch.cuda.Stream`` of a build with CUDA: `cuda_stream` is a descriptor of the class."""

    cuda_stream = property(lambda self: HIGH)


def fake_stream(**kwargs):
    return pytest.importorskip("cutlass.cute.runtime").make_fake_stream(**kwargs)


@pytest.mark.parametrize(
    ("make", "handle"),
    [
        pytest.param(make, handle, id=name)
        for name, make, handle in [
            ("None", lambda: None, 0),
            ("int 0", lambda: 0, 0),
            ("int 1", lambda: 1, 1),
            ("int 2", lambda: 2, 2),
            ("int above 2**31", lambda: 2**31 + 5, 2**31 + 5),
            ("int pointer", lambda: HIGH, HIGH),
            ("largest int", lambda: TOP, TOP),
            ("IntEnum", lambda: Number.STREAM, 0x1000),
            ("numpy.int32", lambda: numpy.int32(7), 7),
            ("numpy.int64", lambda: numpy.int64(HIGH), HIGH),
            ("numpy.uint64", lambda: numpy.uint64(TOP), TOP),
            ("c_void_p", lambda: ctypes.c_void_p(HIGH), HIGH),
            ("c_void_p of 64 bits", lambda: ctypes.c_void_p(TOP), TOP),
            ("c_void_p null", lambda: ctypes.c_void_p(), 0),
            ("c_void_p of 0", lambda: ctypes.c_void_p(0), 0),
            ("c_void_p subclass", lambda: SubclassOfVoidPointer(HIGH), HIGH),
            ("CUstream", lambda: driver.CUstream(HIGH), HIGH),
            ("CUstream 0", lambda: driver.CUstream(0), 0),
            ("CUstream of 64 bits", lambda: driver.CUstream(TOP), TOP),
            ("CUstream subclass", lambda: SubclassOfCUstream(HIGH), HIGH),
            ("cudaStream_t", lambda: runtime.cudaStream_t(HIGH), HIGH),
            ("protocol, method", ByMethod, HIGH),
            ("protocol, property", ByProperty, HIGH),
            ("protocol, null", lambda: ByMethod(0), 0),
            ("protocol, numpy handle", lambda: ByMethod(numpy.uint64(TOP)), TOP),
            ("torch-like", TorchLike, HIGH),
            ("fake stream", fake_stream, 0),
            ("fake environment stream", lambda: fake_stream(use_tvm_ffi_env_stream=True), 0),
        ]
    ],
)
def test_accepted(make, handle):
    value = make()
    first = handle_of(value)
    assert (type(first), first) == (int, handle)
    assert handle_of(value) == handle  # now by the reader that is kept for the type


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        pytest.param(make, kind, id=kind)
        for make, kind in [
            (lambda: True, "builtins.bool"),
            (lambda: numpy.bool_(True), f"numpy.{numpy.bool_.__name__}"),  # its name differs between numpy 1 and 2
            (lambda: "0x7f12", "builtins.str"),
            (lambda: b"\0", "builtins.bytes"),
            (lambda: 1.0, "builtins.float"),
            (lambda: math.nan, "builtins.float"),
            (lambda: numpy.float64(0), "numpy.float64"),
            (lambda: 1j, "builtins.complex"),
            (lambda: [0], "builtins.list"),
            (lambda: (0, HIGH), "builtins.tuple"),
            (dict, "builtins.dict"),
            (lambda: object(), "builtins.object"),
            (lambda: ByMethod, "builtins.type"),
            (lambda: ctypes.c_int(1), "ctypes.c_int"),
            (lambda: driver.CUevent(HIGH), "cuda.bindings.driver.CUevent"),
            (lambda: numpy.zeros(1, dtype=numpy.uint64), "numpy.ndarray"),
            (lambda: torch.zeros(1, dtype=torch.int64), "torch.Tensor"),
            (lambda: torch.device("cpu"), "torch.device"),
            (lambda: torch.Stream("cpu"), "torch.Stream"),
        ]
    ],
)
def test_refused_by_type(make, kind):
    value = make()
    with pytest.raises(TypeError) as error:
        handle_of(value, "argument 'queue'")
    assert str(error.value) == f"argument 'queue': got {kind}; {ACCEPTED}"


@pytest.mark.parametrize("make", [int, numpy.int64, ByMethod], ids=["int", "numpy", "protocol"])
def test_negative_handles_are_refused(make):
    # Twice: the second time by the reader that is kept for the type.
    for _ in range(2):
        with pytest.raises(TypeError) as error:
            handle_of(make(-1))
        assert str(error.value) == f"stream: -1 is not a stream handle (negative or beyond 64 bits); {ACCEPTED}"


@pytest.mark.parametrize("make", [int, ByMethod], ids=["int", "protocol"])
def test_handles_beyond_64_bits_are_refused(make):
    with pytest.raises(TypeError) as error:
        handle_of(make(2**64))
    assert str(error.value) == (
        f"stream: 18446744073709551616 is not a stream handle (negative or beyond 64 bits); {ACCEPTED}"
    )


@pytest.mark.parametrize("answer", [None, (), (0,), (0, None), (0, "7"), 5], ids=repr)
def test_an_object_whose_protocol_answers_nonsense_is_refused_like_any_other(answer):
    class Nonsense:
        def __cuda_stream__(self):
            return answer

    with pytest.raises(TypeError, match="accepted: None, an int handle") as error:
        handle_of(Nonsense())
    assert "Nonsense" in str(error.value)


def test_nothing_is_formatted_or_converted():
    class UnprintableTensor(torch.Tensor):
        pass

    for name in ("__repr__", "__str__", "__format__", "__int__", "__index__", "__bool__", "__len__", "item", "tolist"):
        setattr(UnprintableTensor, name, Unprintable._touched)
    tensor = torch.zeros(1).as_subclass(UnprintableTensor)
    for value, kind in ((tensor, "UnprintableTensor"), (Unprintable(), "Unprintable")):
        with pytest.raises(TypeError, match=rf"^stream: got test_streams\..*{kind}; accepted"):
            handle_of(value)
        assert not is_stream_like(value)
    for stream in (ByMethod(), ByProperty(), TorchLike()):
        assert is_stream_like(stream)
        assert handle_of(stream) == HIGH


def test_a_stream_of_torch_without_cuda_stream_is_read_by_its_ids(monkeypatch):
    """``torch.Stream``, the generic class, knows only ids; torch.cuda.Stream turns them into a handle."""
    made = []

    def cuda_stream_class(**ids):
        made.append(ids)
        return types.SimpleNamespace(cuda_stream=HIGH)

    monkeypatch.setattr(torch.cuda, "Stream", cuda_stream_class)
    assert handle_of(generic_stream(streams._torch_cuda_device_type())) == HIGH
    assert made == [{"stream_id": 3, "device_index": 1, "device_type": 1}]


def test_a_torch_stream_of_another_device_type_is_refused_also_after_a_cuda_one(monkeypatch):
    """Both are the same Python type, so the type alone does not tell."""
    monkeypatch.setattr(torch.cuda, "Stream", lambda **ids: types.SimpleNamespace(cuda_stream=HIGH))
    cuda_type = streams._torch_cuda_device_type()
    assert handle_of(generic_stream(cuda_type)) == HIGH
    with pytest.raises(TypeError, match=r"^stream: got torch\.Stream; accepted"):
        handle_of(generic_stream(cuda_type + 1))


class GenericStream:
    """What is asked of ``torch.Stream``, whose CUDA kind cannot be made without a GPU."""

    stream_id = 3
    device_index = 1

    def __init__(self, device_type):
        self.device_type = device_type


GenericStream.__module__, GenericStream.__name__, GenericStream.__qualname__ = "torch", "Stream", "Stream"


def generic_stream(device_type):
    return GenericStream(device_type)


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        pytest.param(make, expected, id=name)
        for name, make, expected in [
            ("None", lambda: None, False),
            ("int", lambda: HIGH, False),
            ("bool", lambda: True, False),
            ("IntEnum", lambda: Number.STREAM, False),
            ("numpy integer", lambda: numpy.int64(4), False),
            ("c_void_p", lambda: ctypes.c_void_p(HIGH), False),
            ("str", lambda: "stream", False),
            ("tensor", lambda: torch.zeros(1), False),
            ("CUstream", lambda: driver.CUstream(0), True),
            ("cudaStream_t", lambda: runtime.cudaStream_t(0), True),
            ("protocol", ByMethod, True),
            ("torch-like", TorchLike, True),
            ("fake stream", fake_stream, True),
        ]
    ],
)
def test_only_what_cannot_be_anything_else_is_stream_like(make, expected):
    """A number may be a size as well as a handle: whoever looks for streams among arguments must leave it alone."""
    assert is_stream_like(make()) is expected


@pytest.mark.parametrize(
    ("handle", "text"),
    [
        (0, "the NULL stream (0)"),
        (1, "the legacy default stream (1)"),
        (2, "the per-thread default stream (2)"),
        (3, "0x3"),
        (HIGH, "0x7f12ab30cd00"),
        (TOP, "0xffffffffffffffff"),
    ],
)
def test_description(handle, text):
    assert describe(handle) == text


def test_reading_a_stream_needs_no_torch(run_python):
    assert run_python("import sys, streamshim.streams as s; print(s.handle_of(5), 'torch' in sys.modules)") == (
        "5 False\n"
    )
    assert "torch" in sys.modules  # here it is there, and the tests above have asked it
