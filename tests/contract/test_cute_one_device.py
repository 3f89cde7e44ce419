"""The CuTe binder asks no tensor for its device where there is one device, and every time where there are several."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

import streamshim
from streamshim import gate, runtime
from streamshim.binders import stream_objects
from streamshim.binders.cute import devices
from streamshim.binders.cute.plans import ATTRIBUTE
from streamshim.binders.cute.slots import Plan, Slot
from streamshim.gate import Launch
from streamshim.runtime import NOT_CAPTURING

#: By device.
CURRENT = (0x7F0010, 0x7F0020)
OTHER = 0x7F0030


class Tensor:
    """Stands for a torch tensor on a GPU."""

    is_cuda = True
    asked = 0

    def __init__(self, device=0):
        self.device = device

    def get_device(self):
        Tensor.asked += 1
        return self.device


@pytest.fixture(autouse=True)
def _restored(monkeypatch):
    monkeypatch.setattr(devices, "tensor_type", Tensor)
    previous = runtime.use(None)
    yield
    runtime.use(previous)
    gate.connect(None)


def use(count):
    fake = SimpleNamespace(
        current_handle=CURRENT.__getitem__,
        current_device=lambda: 0,
        device_count=lambda: count,
        set_device=lambda device: None,
        capture_state=lambda handle: NOT_CAPTURING,
    )
    runtime.use(fake)
    gate.connect(fake)


def kernel(environment=False):
    """A compiled function of the DSL, without the compiled code: it returns the handle that it is given."""
    cls = pytest.importorskip("cutlass.cutlass_dsl.tvm_ffi_provider").TVMFFIJitCompiledFunctionWithKwargs
    made = object.__new__(cls)
    made.execution_args = SimpleNamespace(has_pointer_address_arg_specs=False)
    made._kwargs_wrapper = lambda *args, **kwargs: int(args[1])
    setattr(made, ATTRIBUTE, Plan((Slot(1, "stream"),), Launch("kernel"), environment, tensor=0))
    return made


@pytest.mark.parametrize("environment", [False, True])
def test_one_device(environment):
    use(1)
    streamshim.install(only=["cute"])
    called = kernel(environment)
    Tensor.asked = 0
    for given in (None, 0, 1, stream_objects.stream_object(CURRENT[0])):
        assert called(Tensor(), given) == CURRENT[0]
    assert called(Tensor(), OTHER) == OTHER
    assert Tensor.asked == (5 if environment else 0)


def test_several_devices():
    use(2)
    streamshim.install(only=["cute"])
    called = kernel()
    for device in (0, 1, 0):
        assert called(Tensor(device), None) == CURRENT[device]


def test_another_runtime_with_more_devices():
    use(1)
    streamshim.install(only=["cute"])
    called = kernel()
    assert called(Tensor(), None) == CURRENT[0]
    use(2)
    assert called(Tensor(1), None) == CURRENT[1]


def test_the_gate_need_not_have_been_asked_before():
    use(1)
    gate.connect(None)
    assert not gate.one_device
    streamshim.install(only=["cute"])
    called = kernel()
    assert called(Tensor(), None) == CURRENT[0]
    assert gate.one_device
