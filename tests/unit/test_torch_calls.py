"""torch's waiting calls and its operations that need a value on the host: what is patched, and what is left alone."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from streamshim.callsite import Site
from streamshim.capture import Window
from streamshim.errors import HostSyncError
from streamshim.guards import sync_table, torch_calls
from streamshim.guards.sync_table import EVENT_METHODS, FUNCTIONS, METHODS, STREAM_METHODS

STREAM, SIDE = 0x7F0010, 0x7F0020
TABLES = ((torch.Tensor, METHODS), (torch, FUNCTIONS))


class FakeTensor:
    """A tensor on a GPU, as far as the guards look."""

    is_cuda, dtype, ndim, shape = True, torch.bool, 1, (4,)
    device = SimpleNamespace(index=0)

    def __init__(self, numel=4, floating=False):
        self._numel, self._floating = numel, floating

    def item(self):
        return 5

    def numel(self):
        return self._numel

    def is_floating_point(self):
        return self._floating

    def is_complex(self):
        return False


@pytest.fixture(autouse=True)
def fake_tensors_count(monkeypatch):
    monkeypatch.setattr(sync_table, "is_plain", lambda value: type(value) in (torch.Tensor, FakeTensor))


def window(mode="global", id_=7):
    return Window(id_, STREAM, 0, Site("serve.py", 12, "capture_model"), "MainThread", mode)


def event(handle, name="synchronize"):
    """A patched method of an event with this handle."""
    make = torch_calls.waiting_for_an_event(EVENT_METHODS[name])
    return make(lambda self: "waited")(SimpleNamespace(cuda_event=handle))


def stream(handle, name="synchronize"):
    """A patched method of a stream with this handle."""
    make = torch_calls.waiting_for_a_stream(STREAM_METHODS[name])
    return make(lambda self: "waited")(SimpleNamespace(cuda_stream=handle))


class TestWaitingCalls:
    def test_outside_a_capture_nothing_changes(self, cuda):
        assert [event(9), stream(SIDE), torch_calls.waiting_for_the_device(lambda: "waited")()] == ["waited"] * 3

    @pytest.mark.parametrize("mode", ["global", "thread_local", "relaxed"])
    def test_the_device(self, capturing, mode):
        capturing(mode)
        with pytest.raises(HostSyncError, match=r"torch\.cuda\.synchronize"):
            torch_calls.waiting_for_the_device(lambda: "waited")()

    def test_a_device_that_is_named(self, capturing, cuda):
        """``torch.accelerator.synchronize(device)`` waits for that, whichever is the current one."""
        capturing("relaxed", by_other=True)
        synchronize = torch_calls.waiting_for_the_device(lambda index: "waited")
        assert synchronize(1) == "waited"
        cuda.device = 1
        with pytest.raises(HostSyncError):
            synchronize(0)

    def test_an_event_that_was_never_recorded_waits_for_nothing(self, capturing):
        capturing()
        assert event(0) == "waited"

    @pytest.mark.parametrize("name", EVENT_METHODS)
    def test_events(self, capturing, name):
        capturing()
        with pytest.raises(HostSyncError, match=rf"Event\.{name}\(\)"):
            event(9, name)
        capturing("relaxed")
        assert event(9, name) == "waited"

    @pytest.mark.parametrize("name", STREAM_METHODS)
    def test_streams(self, capturing, name):
        capturing()
        with pytest.raises(HostSyncError, match=rf"Stream\.{name}\(\)"):
            stream(SIDE, name)
        capturing("relaxed")
        assert stream(SIDE, name) == "waited"
        with pytest.raises(HostSyncError):
            stream(STREAM, name)


class TestNamedOperations:
    def test_a_refusal(self, capturing):
        capturing()
        with pytest.raises(HostSyncError, match=r"\.item\(\) on a CUDA tensor"):
            torch_calls.wanting_a_value(METHODS["item"])(FakeTensor.item)(FakeTensor(1))

    def test_what_torch_complains_of_without_waiting_is_its_own_to_refuse(self, capturing):
        """Code asks whether a value can be an index or a number, and catches what torch raises."""
        capturing()
        index = torch_calls.wanting_a_value(METHODS["__index__"])(lambda self: torch.ones(2).__index__())
        with pytest.raises(TypeError, match="only integer tensors of a single element"):
            index(FakeTensor(2))
        number = torch_calls.wanting_a_value(METHODS["__float__"])(lambda self: float(torch.ones(2)))
        with pytest.raises(ValueError, match="only one element"):
            number(FakeTensor(2))

    def test_nothing_is_looked_at_while_compiling(self, capturing, monkeypatch):
        capturing()
        monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
        tensor = FakeTensor(1)
        monkeypatch.setattr(FakeTensor, "numel", lambda self: pytest.fail("would become a guard"))
        assert torch_calls.wanting_a_value(METHODS["item"])(FakeTensor.item)(tensor) == 5

    def test_a_tensor_that_is_passed_by_name(self, capturing):
        capturing("relaxed")
        nonzero = torch_calls.wanting_a_value(FUNCTIONS["nonzero"])(lambda *, input: "waited")
        with pytest.raises(HostSyncError, match="nonzero: its result's size"):
            nonzero(input=FakeTensor())
        equal = torch_calls.wanting_a_value(FUNCTIONS["equal"])(lambda *, input, other: "waited")
        with pytest.raises(HostSyncError):
            equal(input=FakeTensor(), other=FakeTensor())
        assert equal(input=FakeTensor(), other=torch.ones(3)) == "waited"

    def test_a_tensor_on_the_host_is_left_alone(self, capturing, cuda):
        capturing()
        assert torch_calls.wanting_a_value(METHODS["item"])(torch.Tensor.item)(torch.ones(())) == 1.0
        assert cuda.asked == []

    def test_what_torch_refuses_by_itself_is_explained(self, capturing):
        capturing()

        def index(self, key):
            raise RuntimeError("called a synchronizing CUDA operation")

        with pytest.raises(HostSyncError, match="boolean-mask index") as error:
            torch_calls.wanting_a_value(METHODS["__getitem__"])(index)(FakeTensor(), 1)
        assert "synchronizing" in str(error.value.__cause__)

    def test_other_errors_pass(self, capturing):
        capturing()

        def copy(self):
            raise RuntimeError("out of memory")

        with pytest.raises(RuntimeError, match="out of memory") as error:
            torch_calls.wanting_a_value(METHODS["cpu"])(copy)(FakeTensor())
        assert not isinstance(error.value, HostSyncError)

    def test_torch_is_as_it_was_after_the_capture(self, cuda):
        owners = {name: vars(torch.Tensor).get(name) for name in METHODS}
        functions = {name: getattr(torch, name) for name in FUNCTIONS}
        guard = torch_calls.HostSyncs()
        guard.opened(window())
        guard.opened(window(id_=8))
        assert torch.Tensor.item is not owners["item"]
        assert torch.ones(2).tolist() == [1.0, 1.0]
        guard.closing(window())
        assert torch.nonzero is not functions["nonzero"]
        guard.closing(window(id_=8))
        assert {name: vars(torch.Tensor).get(name) for name in METHODS} == owners
        assert {name: getattr(torch, name) for name in FUNCTIONS} == functions

    def test_the_next_capture_finds_the_same_replacements(self, cuda):
        guard, seen = torch_calls.HostSyncs(), []
        for id_ in (7, 8):
            guard.opened(window(id_=id_))
            seen.append([getattr(owner, name) for owner, table in TABLES for name in table if hasattr(owner, name)])
            guard.closing(window(id_=id_))
        assert all(first is second for first, second in zip(*seen, strict=True))

    def test_who_wraps_a_method_in_a_capture_or_between_two_keeps_that(self, cuda, monkeypatch):
        """What is undone once stays undone, and what is kept is no older than what is there."""
        guard, calls = torch_calls.HostSyncs(), []

        def wrap(name):
            original = torch.Tensor.item
            monkeypatch.setattr(torch.Tensor, "item", lambda self: calls.append(name) or original(self))
            return vars(torch.Tensor)["item"]

        guard.opened(window())
        theirs = wrap("inside")
        guard.closing(window())
        assert vars(torch.Tensor)["item"] is theirs
        theirs = wrap("between")
        for id_ in (8, 9):
            guard.opened(window(id_=id_))
            assert torch.Tensor.item is not theirs
            assert torch.ones(()).item() == 1.0
            guard.closing(window(id_=id_))
            assert vars(torch.Tensor)["item"] is theirs
        assert calls == ["between", "inside"] * 2

    def test_of_a_torch_that_is_being_imported_nothing_is_kept(self, cuda, monkeypatch):
        guard, whole = torch_calls.HostSyncs(), torch
        half = ModuleType("torch")
        half.__spec__ = SimpleNamespace(_initializing=True)
        monkeypatch.setitem(sys.modules, "torch", half)
        guard.opened(window())
        guard.closing(window())
        monkeypatch.setitem(sys.modules, "torch", whole)
        before = whole.Tensor.item
        guard.opened(window())
        assert whole.Tensor.item is not before
        guard.closing(window())
        assert whole.Tensor.item is before

    def test_every_entry_exists_in_this_torch(self):
        assert [name for name in METHODS if not hasattr(torch.Tensor, name) and name != "is_nonzero"] == []
        assert [name for name in FUNCTIONS if not hasattr(torch, name)] == []

    def test_an_end_that_is_told_twice_counts_once(self, cuda):
        before = torch.Tensor.item
        guard = torch_calls.HostSyncs()
        guard.opened(window())
        guard.closing(window())
        guard.closing(window())
        assert not torch_calls._open
        guard.opened(window(id_=8))
        assert torch.Tensor.item is not before
        guard.closing(window(id_=8))
        assert torch.Tensor.item is before

    def test_the_tables_of_a_subclass_find_the_original_methods(self, cuda):
        table, hits = dict.fromkeys((torch.Tensor.copy_, torch.Tensor.to, torch.Tensor.__getitem__)), []

        class Quantised(torch.Tensor):
            @classmethod
            def __torch_function__(cls, func, types, args=(), kwargs=None):
                if func in table:
                    hits.append(func)
                    return "own"
                return super().__torch_function__(func, types, args, kwargs or {})

        value = torch.ones(3).as_subclass(Quantised)
        guard = torch_calls.HostSyncs()
        guard.opened(window())
        try:
            assert [value.to("cpu"), value[0], torch.ones(3).copy_(value)] == ["own"] * 3
            assert torch.ones(3)[value.as_subclass(torch.Tensor) > 0, ...].tolist() == [1.0] * 3
        finally:
            guard.closing(window())
        assert hits == [torch.Tensor.to, torch.Tensor.__getitem__, torch.Tensor.copy_]

    def test_a_mode_is_told_only_of_what_the_user_calls(self, cuda, capturing):
        from torch.overrides import TorchFunctionMode

        class Seen(TorchFunctionMode):
            def __torch_function__(self, func, types, args=(), kwargs=None):
                calls.append(func)
                return func(*args, **(kwargs or {}))

        calls, value = [], torch.ones(3)
        bare = [torch.Tensor.item, torch.Tensor.__getitem__, torch.Tensor.nonzero, torch.equal]
        capturing("thread_local")
        guard = torch_calls.HostSyncs()
        guard.opened(window())
        try:
            with Seen():
                assert value.sum().item() == 3.0
                value[value > 0]
                value.nonzero()
                assert torch.equal(value, value)
        finally:
            guard.closing(window())
        assert [func for func in calls if func not in (torch.Tensor.sum, torch.Tensor.gt, torch.Tensor.__gt__)] == bare

    def test_what_makes_tensors_is_not_replaced_since_torch_keeps_tables_of_it(self):
        from torch.utils._device import _device_constructors

        assert not {getattr(torch, name) for name in FUNCTIONS} & set(_device_constructors())

    def test_a_compiled_function_is_not_compiled_anew_while_a_capture_is_open(self, cuda):
        def masked(x):
            return torch.where(x > 0, x, torch.zeros_like(x)).to(torch.float64)[1:]

        torch._dynamo.reset()
        compiled = torch.compile(masked, backend="eager")
        compiled(torch.ones(3))
        guard = torch_calls.HostSyncs()
        guard.opened(window())
        try:
            with torch.compiler.set_stance("fail_on_recompile"):
                assert compiled(torch.ones(3)).tolist() == [1.0, 1.0]
        finally:
            guard.closing(window())
            torch._dynamo.reset()


class TestArguments:
    """What decides for operations that do not always wait."""

    mask, on_host = FakeTensor(), torch.ones(())

    @pytest.mark.parametrize(
        ("name", "args", "kwargs", "waits"),
        [
            ("__getitem__", (FakeTensor(), mask), {}, True),
            ("__getitem__", (FakeTensor(), (0, mask)), {}, True),
            ("__getitem__", (FakeTensor(), 0), {}, False),
            ("__setitem__", (FakeTensor(), mask, FakeTensor()), {}, True),
            ("__setitem__", (FakeTensor(), mask, 1.0), {}, False),
            ("__setitem__", (FakeTensor(), mask, on_host), {}, False),
            ("repeat_interleave", (FakeTensor(), FakeTensor()), {}, True),
            ("repeat_interleave", (FakeTensor(), FakeTensor()), {"output_size": 8}, False),
            ("repeat_interleave", (FakeTensor(), 2), {}, False),
            ("equal", (FakeTensor(), FakeTensor()), {}, True),
            ("equal", (FakeTensor(), torch.ones(3)), {}, False),
            ("item", (FakeTensor(1),), {}, True),
            ("item", (FakeTensor(),), {}, False),
            ("__index__", (FakeTensor(1),), {}, True),
            ("__index__", (FakeTensor(1, floating=True),), {}, False),
            ("__index__", (FakeTensor(2),), {}, False),
            ("__repr__", (FakeTensor(),), {}, True),
            ("__repr__", (FakeTensor(0),), {}, False),
            ("tolist", (FakeTensor(0),), {}, False),
        ],
    )
    def test_it(self, name, args, kwargs, waits):
        assert bool(METHODS[name].needs(args, kwargs)) is waits

    def test_a_single_number_on_the_device_is_read_for_a_mask(self):
        number = FakeTensor()
        number.ndim = 0
        assert METHODS["__setitem__"].needs((FakeTensor(), self.mask, number), {})

    def test_a_tensor_with_a_behaviour_of_its_own_is_not_judged(self, monkeypatch):
        monkeypatch.undo()

        class Lazy(torch.Tensor):
            @property
            def is_cuda(self):
                raise AssertionError("asked")

        assert not sync_table.on_device(torch.ones(1).as_subclass(Lazy))
        assert sync_table.is_plain(torch.nn.Parameter(torch.ones(1)))
