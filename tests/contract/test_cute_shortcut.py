"""The shortcut of the CuTe binder: on the launch path it does what the DSL's ``__call__`` does, instead of calling it.

Where that is not the same, it must not be taken: somebody else may have wrapped the method before, the function may
not be usable, and after an uninstall nothing may happen that is not the DSL's own.
"""

from __future__ import annotations

import functools
import importlib
from types import SimpleNamespace

import pytest

import streamshim
from streamshim import binders, gate, runtime
from streamshim.binders import stream_objects
from streamshim.binders.cute import devices
from streamshim.binders.cute.plans import ATTRIBUTE
from streamshim.binders.cute.slots import Plan, Slot
from streamshim.gate import Launch
from streamshim.runtime import NOT_CAPTURING

STREAM, OTHER = 0x7F0010, 0x7F0020


class Tensor:
    """Stands for a torch tensor on a GPU."""

    is_cuda = True

    def get_device(self):
        return 0


@pytest.fixture
def cls():
    """The DSL's class, whose ``__call__`` a test may replace."""
    cls = pytest.importorskip("cutlass.cutlass_dsl.tvm_ffi_provider").TVMFFIJitCompiledFunctionWithKwargs
    original = cls.__call__
    yield cls
    cls.__call__ = original


@pytest.fixture
def make_kernel(cls, monkeypatch):
    """``make_kernel(plan)``: a compiled function of the DSL, without the compiled code."""
    monkeypatch.setattr(devices, "tensor_type", Tensor)
    fake = SimpleNamespace(
        current_handle=lambda device: STREAM,
        current_device=lambda: 0,
        device_count=lambda: 1,
        capture_state=lambda handle: NOT_CAPTURING,
    )
    monkeypatch.setattr(runtime._holder, "_runtime", fake)
    monkeypatch.setattr(gate, "current_handle", fake.current_handle)

    def make(plan, kwargs_wrapper=lambda *args, **kwargs: ("ran", args, kwargs)):
        kernel = object.__new__(cls)
        kernel.execution_args = SimpleNamespace(has_pointer_address_arg_specs=False)
        kernel._kwargs_wrapper = kwargs_wrapper
        setattr(kernel, ATTRIBUTE, plan)
        return kernel

    return make


def with_stream():
    return Plan((Slot(1, "stream"),), Launch("kernel"), tensor=0)


def without_stream():
    return Plan((), Launch("kernel"), tensor=0)


@pytest.mark.parametrize("plan", [without_stream, with_stream])
def test_a_wrapper_below_ours_sees_the_call(cls, make_kernel, plan):
    """A profiler, say, that was there first."""
    seen, original = [], cls.__call__

    def profiler(self, *args, **kwargs):
        seen.append(self)
        return original(self, *args, **kwargs)

    cls.__call__ = profiler
    streamshim.install()
    kernel = make_kernel(plan())
    assert kernel(Tensor(), STREAM)[0] == "ran"
    assert seen == [kernel]


def test_a_wrapper_below_ours_need_not_be_a_function(cls, make_kernel):
    """Other libraries put callables of their own kind there."""

    class Profiler:
        def __get__(self, instance, owner=None):
            return functools.partial(original, instance) if instance is not None else self

        def __call__(self, *args, **kwargs):
            return original(*args, **kwargs)

    original = cls.__call__
    cls.__call__ = Profiler()
    streamshim.install()
    (cute,) = [b for b in streamshim.status().binders if b.name == "cute"]
    assert (cute.state, cute.reason) == ("bound", "")
    assert make_kernel(with_stream())(Tensor(), STREAM)[0] == "ran"


@pytest.mark.parametrize("plan", [without_stream, with_stream])
def test_a_function_that_cannot_run_gives_the_error_of_the_dsl(make_kernel, plan):
    """The DSL leaves the wrapper out when the code is for another architecture; newer ones say so in ``__call__``."""
    streamshim.install()
    kernel = make_kernel(plan(), kwargs_wrapper=None)
    with pytest.raises(Exception, match=r"TVM FFI function is not initialized|'NoneType' object is not callable"):
        kernel(Tensor(), STREAM)


@pytest.mark.parametrize("plan", [without_stream, with_stream])
def test_what_is_left_of_it_after_an_uninstall_converts_nothing(cls, make_kernel, plan):
    """Somebody else's wrapper keeps ours in the chain; values that we would convert or refuse go to the DSL then."""
    streamshim.install()
    ours = cls.__call__
    cls.__call__ = lambda self, *args, **kwargs: ours(self, *args, **kwargs)
    streamshim.uninstall()
    tensor, kernel = Tensor(), make_kernel(plan())
    for value in (OTHER, 0, "no stream at all"):
        assert kernel(tensor, value) == ("ran", (tensor, value), {})


def test_asking_for_the_patches_changes_nothing(cls):
    """They may be refused afterwards, by a probe: then the compiled functions of the user must be as they were."""
    kernel = object.__new__(cls)
    before = dict(vars(kernel))
    cute = binders.load("cute")
    for module in binders.MODULES["cute"]:
        cute.patches(importlib.import_module(module))
    assert vars(kernel) == before


def test_a_compiled_function_of_unknown_shape_does_not_take_the_binder_off(cls):
    """One that somebody has derived or changed, among all that exist in the process at ``install``."""
    kernel = object.__new__(cls)
    kernel.execution_args = object()
    try:
        streamshim.install()
        (cute,) = [b for b in streamshim.status().binders if b.name == "cute"]
        assert (cute.state, cute.reason) == ("bound", "")
    finally:
        kernel.execution_args = None  # a failure keeps the object alive, for the other tests to meet


@pytest.mark.parametrize("given", [0, 1, 2, None], ids=str)
def test_a_default_stream_becomes_the_current_one(make_kernel, given):
    """So that the tests above are about something: this is what the shortcut does while it is installed."""
    streamshim.install()
    tensor = Tensor()
    ran, args, kwargs = make_kernel(with_stream())(tensor, given)
    assert (ran, args[0], kwargs) == ("ran", tensor, {})
    assert args[1] is stream_objects.stream_object(STREAM)
