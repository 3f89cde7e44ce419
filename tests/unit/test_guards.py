"""The guards of captures without a GPU: what is refused, what is explained, and what is left alone."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest
import torch

import streamshim
from streamshim import capture, gate, ledger
from streamshim.callsite import Site
from streamshim.capture import Window
from streamshim.errors import HostSyncError, LostCaptureReport, SyncReport
from streamshim.guards import forks, lost, sync_mode, sync_table, syncs
from streamshim.guards.sync_table import EVENT_METHODS, FUNCTIONS, METHODS, STREAM_METHODS, SYNCHRONIZE
from streamshim.runtime import NOT_CAPTURING, CaptureState
from streamshim.settings import Mode

STREAM, SIDE = 0x7F0010, 0x7F0020


class Cuda:
    """A runtime of which the test says what is current and what captures."""

    name = "test"

    def __init__(self):
        self.current, self.captures = STREAM, {}

    def current_handle(self, device):
        return self.current

    def current_device(self):
        return 0

    def device_count(self):
        return 1

    def set_device(self, device):
        pass

    def order(self, first, then, device):
        pass

    def capture_state(self, handle):
        return self.captures.get(handle, NOT_CAPTURING)


@pytest.fixture(autouse=True)
def nothing_remembered(monkeypatch):
    monkeypatch.setattr(syncs, "_noted", set())


@pytest.fixture
def cuda(monkeypatch):
    from streamshim import runtime

    fake = Cuda()
    before = runtime.use(fake)
    gate.connect(fake)
    gate.set_mode(Mode.BIND)
    yield fake
    runtime.use(before)
    gate.connect(None)
    gate.set_mode(Mode.OFF)


def window(mode="global", id_=7):
    return Window(id_, STREAM, 0, Site("serve.py", 12, "capture_model"), "MainThread", mode)


@pytest.fixture
def capturing(cuda, monkeypatch):
    """This thread captures; ``capturing("relaxed")`` says in which mode."""

    def begin(mode="global"):
        cuda.captures[STREAM] = CaptureState(7)
        opened = window(mode)
        monkeypatch.setitem(capture._windows, 7, opened)
        monkeypatch.setattr(syncs, "_open", {7})
        monkeypatch.setattr(sync_table, "is_plain", lambda value: isinstance(value, (torch.Tensor, FakeTensor)))
        return opened

    return begin


class FakeTensor:
    is_cuda = True

    def item(self):
        return 5


def wait_for(target, name="synchronize", table=EVENT_METHODS):
    """A patched waiting call on a target."""
    return syncs._refusing(table[name])(lambda self: "waited")(target)


class TestWaitingCalls:
    def test_outside_a_capture_nothing_changes(self, cuda):
        assert wait_for(SimpleNamespace(cuda_event=9)) == "waited"

    @pytest.mark.parametrize("mode", ["global", "thread_local", "relaxed"])
    def test_synchronize_is_refused_in_every_mode(self, capturing, mode):
        capturing(mode)
        with pytest.raises(HostSyncError, match=r"torch\.cuda\.synchronize"):
            syncs._refusing(SYNCHRONIZE)(lambda: "waited")()

    def test_an_event_that_was_never_recorded_waits_for_nothing(self, capturing):
        capturing()
        assert wait_for(SimpleNamespace(cuda_event=0)) == "waited"

    @pytest.mark.parametrize("name", EVENT_METHODS)
    def test_events_may_be_waited_for_in_relaxed_mode(self, capturing, name):
        capturing("relaxed")
        assert wait_for(SimpleNamespace(cuda_event=9), name) == "waited"

    @pytest.mark.parametrize("name", EVENT_METHODS)
    def test_events_are_refused(self, capturing, name):
        capturing()
        with pytest.raises(HostSyncError, match=rf"Event\.{name}\(\)"):
            wait_for(SimpleNamespace(cuda_event=9), name)

    @pytest.mark.parametrize("name", STREAM_METHODS)
    @pytest.mark.parametrize(("mode", "refused"), [("global", True), ("thread_local", True), ("relaxed", False)])
    def test_another_stream_may_be_waited_for_in_relaxed_mode(self, capturing, name, mode, refused):
        capturing(mode)
        side = SimpleNamespace(cuda_stream=SIDE)
        if refused:
            with pytest.raises(HostSyncError, match=rf"Stream\.{name}\(\)"):
                wait_for(side, name, STREAM_METHODS)
        else:
            assert wait_for(side, name, STREAM_METHODS) == "waited"

    def test_a_capturing_stream_may_not_be_waited_for_in_relaxed_mode(self, capturing):
        capturing("relaxed")
        with pytest.raises(HostSyncError):
            wait_for(SimpleNamespace(cuda_stream=STREAM), "synchronize", STREAM_METHODS)

    def test_another_thread_is_left_alone_and_remembered(self, cuda, capturing):
        capturing("thread_local")
        cuda.current = SIDE
        ledger.clear()
        assert wait_for(SimpleNamespace(cuda_event=9)) == "waited"
        (event,) = ledger.events()
        assert (event.kind, event.what, event.capture) == ("sync in another thread", "Event.synchronize()", 7)
        assert event.site.file.endswith("test_guards.py")


class TestNamedOperations:
    def test_a_refusal_names_operation_line_capture_and_remedy(self, capturing):
        capturing()
        with pytest.raises(HostSyncError) as error:
            syncs._naming(METHODS["item"])(FakeTensor.item)(FakeTensor())
        assert isinstance(error.value, RuntimeError)
        text = str(error.value)
        assert text.startswith("Host sync refused inside a CUDA graph capture: .item() on a CUDA tensor, at ")
        assert "test_guards.py:" in text
        assert "capture 7 on stream 0x7f0010" in text
        assert "Keep the value on the device" in text

    def test_a_tensor_on_the_host_is_left_alone(self, capturing):
        capturing()
        assert syncs._naming(METHODS["item"])(torch.Tensor.item)(torch.ones(())) == 1.0

    def test_torchs_own_refusal_is_explained_and_kept_as_the_cause(self, capturing):
        capturing()

        def index(self, key):
            raise RuntimeError("called a synchronizing CUDA operation")

        with pytest.raises(HostSyncError, match="boolean-mask index") as error:
            syncs._naming(METHODS["__getitem__"])(index)(FakeTensor(), 1)
        assert "synchronizing" in str(error.value.__cause__)

    def test_other_errors_pass(self, capturing):
        capturing()

        def copy(self):
            raise RuntimeError("Cannot copy between CPU and CUDA tensors during CUDA graph capture unless pinned")

        with pytest.raises(RuntimeError, match="unless pinned") as error:
            syncs._naming(METHODS["cpu"])(copy)(FakeTensor())
        assert not isinstance(error.value, HostSyncError)

    def test_a_region_lets_it_through_and_is_counted(self, capturing):
        capturing()
        ledger.clear()
        with streamshim.allow("sync", reason="a test"):
            assert syncs._naming(METHODS["item"])(FakeTensor.item)(FakeTensor()) == 5
        assert ledger.counts() == {"allowed sync": 1}
        with pytest.raises(HostSyncError):
            syncs._naming(METHODS["item"])(FakeTensor.item)(FakeTensor())

    def test_it_is_logged_at_once_but_once_a_line(self, capturing, caplog):
        capturing()
        with caplog.at_level(logging.ERROR, logger="streamshim"):
            for _ in range(3):
                with pytest.raises(HostSyncError):
                    syncs._naming(METHODS["item"])(FakeTensor.item)(FakeTensor())
        assert len(caplog.records) == 1

    def test_torch_is_as_it_was_after_the_capture(self, cuda):
        owners = {name: vars(torch.Tensor).get(name) for name in METHODS}
        functions = {name: getattr(torch, name) for name in FUNCTIONS}
        guard = syncs.HostSyncs()
        guard.opened(window())
        guard.opened(window(id_=8))
        assert torch.Tensor.item is not owners["item"]
        assert torch.ones(2).tolist() == [1.0, 1.0]
        guard.closing(window())
        assert torch.nonzero is not functions["nonzero"]
        guard.closing(window(id_=8))
        assert {name: vars(torch.Tensor).get(name) for name in METHODS} == owners
        assert {name: getattr(torch, name) for name in FUNCTIONS} == functions

    def test_every_entry_exists_in_this_torch(self):
        assert [name for name in METHODS if not hasattr(torch.Tensor, name) and name != "is_nonzero"] == []
        assert [name for name in FUNCTIONS if not hasattr(torch, name)] == []

    def test_an_end_that_is_told_twice_counts_once(self, cuda):
        before = torch.Tensor.item
        guard = syncs.HostSyncs()
        guard.opened(window())
        guard.closing(window())
        guard.closing(window())
        assert not syncs._open
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
        guard = syncs.HostSyncs()
        guard.opened(window())
        try:
            assert [value.to("cpu"), value[0], torch.ones(3).copy_(value)] == ["own"] * 3
            assert torch.ones(3)[value.as_subclass(torch.Tensor) > 0, ...].tolist() == [1.0] * 3
        finally:
            guard.closing(window())
        assert hits == [torch.Tensor.to, torch.Tensor.__getitem__, torch.Tensor.copy_]

    def test_a_tensor_with_a_behaviour_of_its_own_is_not_judged(self):
        class Lazy(torch.Tensor):
            @property
            def is_cuda(self):
                raise AssertionError("asked")

        assert not sync_table.on_device(torch.ones(1).as_subclass(Lazy))
        assert sync_table.is_plain(torch.nn.Parameter(torch.ones(1)))

    def test_what_makes_tensors_is_not_replaced_since_torch_keeps_tables_of_it(self):
        from torch.utils._device import _device_constructors

        assert not {getattr(torch, name) for name in FUNCTIONS} & set(_device_constructors())

    def test_a_compiled_function_is_not_compiled_anew_while_a_capture_is_open(self, cuda):
        def masked(x):
            return torch.where(x > 0, x, torch.zeros_like(x)).to(torch.float64)[1:]

        torch._dynamo.reset()
        compiled = torch.compile(masked, backend="eager")
        compiled(torch.ones(3))
        guard = syncs.HostSyncs()
        guard.opened(window())
        try:
            with torch.compiler.set_stance("fail_on_recompile"):
                assert compiled(torch.ones(3)).tolist() == [1.0, 1.0]
        finally:
            guard.closing(window())
            torch._dynamo.reset()

    def test_a_poll_of_another_thread_is_remembered_once(self, cuda, capturing):
        capturing("thread_local")
        cuda.current = SIDE
        ledger.clear()
        for _ in range(50):
            wait_for(SimpleNamespace(cuda_event=9))
        assert ledger.counts() == {"sync in another thread": 1}


class TestSyncMode:
    @pytest.fixture
    def switch(self, monkeypatch):
        state = SimpleNamespace(mode=1)
        monkeypatch.setattr(torch._C, "_cuda_get_sync_debug_mode", lambda: state.mode, raising=False)
        monkeypatch.setattr(torch._C, "_cuda_set_sync_debug_mode", lambda m: setattr(state, "mode", m), raising=False)
        return state

    def test_it_is_armed_for_global_captures_and_put_back(self, switch):
        guard = sync_mode.SyncMode()
        guard.opened(window())
        guard.opened(window(id_=8))
        assert switch.mode == 2
        guard.closing(window())
        assert switch.mode == 2
        guard.closing(window(id_=8))
        assert switch.mode == 1

    @pytest.mark.parametrize("mode", ["thread_local", "relaxed"])
    def test_it_is_not_armed_where_other_threads_wait_legally(self, switch, mode):
        guard = sync_mode.SyncMode()
        guard.opened(window(mode))
        assert switch.mode == 1
        guard.closing(window(mode))
        assert switch.mode == 1

    def test_a_region_disarms_it(self, switch):
        guard = sync_mode.SyncMode()
        guard.opened(window())
        sync_mode.on_allow(True)
        assert switch.mode == 1
        sync_mode.on_allow(False)
        assert switch.mode == 2
        guard.closing(window())
        assert switch.mode == 1


class TestLostCaptures:
    @pytest.mark.parametrize(
        ("text", "number"),
        [
            ("CUDA error: operation failed due to a previous error during capture\nSearch for `cuda", 901),
            ("CUDA error: operation not permitted when stream is capturing", 900),
            ("CUDA error: capturing stream has unjoined work", 904),
            ("Search for `cudaErrorStreamCaptureImplicit' in https://docs", 906),
            ("cudaErrorStreamCaptureInvalidated (error code: 901)", 901),
        ],
    )
    def test_the_code_is_found_in_the_words_of_torch_and_others(self, text, number):
        assert lost.code_of(RuntimeError(text)).number == number

    def test_the_table_has_every_code_once(self):
        assert [code.number for code in lost.CODES] == list(range(900, 909))

    def test_another_error_is_not_explained(self):
        assert lost.explained(window(), RuntimeError("out of memory")) is None

    def failing(self):
        try:
            try:
                raise ValueError("the culprit")
            except ValueError:
                raise RuntimeError("operation failed due to a previous error during capture")  # noqa: B904
        except RuntimeError as error:
            return error

    def test_the_first_error_inside_the_block_is_named_with_its_line(self, caplog):
        ledger.clear()
        with caplog.at_level(logging.ERROR, logger="streamshim"):
            explained = lost.explained(window(), self.failing())
        assert explained.report.site.file.endswith("test_guards.py")
        assert explained.report.culprits == ("ValueError: the culprit",)
        assert "901: the capture was lost earlier" in str(explained)
        assert len(caplog.records) == 1
        assert isinstance(explained, RuntimeError)

    def test_an_exception_that_was_handled_when_the_capture_began_is_not_its_cause(self):
        try:
            {}["cfg"]
        except KeyError as handled:
            before = handled
            error = self.failing()
            try:
                raise RuntimeError("operation failed due to a previous error during capture")
            except RuntimeError as late:
                alone = late
        began = Window(7, STREAM, 0, Site("serve.py", 12, "capture_model"), "MainThread", "global", before)
        assert lost.explained(began, error).report.culprits == ("ValueError: the culprit",)
        assert lost.explained(began, alone).report.culprits == ()

    def test_a_wait_in_another_thread_is_a_suspect(self):
        ledger.clear()
        ledger.add(ledger.Event("sync in another thread", "Event.query()", Site("io.py", 3, "poll"), 0, 0, 7))
        explained = lost.explained(window(), RuntimeError("operation failed due to a previous error during capture"))
        assert explained.report.culprits == ("Event.query(), thread other than the capturing one, at io.py:3 in poll",)

    def test_a_fork_that_was_not_joined_is_named(self, monkeypatch):
        monkeypatch.setitem(forks._forks, 7, {SIDE: Site("model.py", 40, "forward")})
        explained = lost.explained(window(), RuntimeError("CUDA error: capturing stream has unjoined work"))
        assert explained.report.culprits == ("stream 0x7f0020 was forked into the capture at model.py:40 in forward",)
        assert "wait_stream(side_stream)" in str(explained)


def test_the_text_of_a_refused_sync():
    report = SyncReport(
        ".item() on a CUDA tensor",
        Site("model.py", 40, "forward"),
        "capture 7 on stream 0x7f0010 of cuda:0, begun at serve.py:12 in capture_model, thread MainThread",
        "bind",
        ("Keep the value on the device.",),
    )
    assert (
        str(report)
        == """\
Host sync refused inside a CUDA graph capture: .item() on a CUDA tensor, at model.py:40 in forward.

  operation        .item() on a CUDA tensor
  called at        model.py:40 in forward
  capturing        capture 7 on stream 0x7f0010 of cuda:0, begun at serve.py:12 in capture_model, thread MainThread
  streamshim mode  bind

The host would wait for work that is only being recorded, which CUDA does not allow: the capture would be
lost. Nothing has been touched, and the capture is still valid.
What to do:
  * Keep the value on the device.
  * If it is known to be harmless: with streamshim.allow('sync', reason='...')."""
    )


def test_the_text_of_a_lost_capture():
    report = LostCaptureReport(
        901, "the capture was lost earlier", ("ValueError: no",), Site("model.py", 40, "forward"), "capture 7",
        ("Look for the first error.",),
    )  # fmt: skip
    assert (
        str(report)
        == """\
The CUDA graph capture was lost at model.py:40 in forward.

  capture          capture 7
  CUDA error       901: the capture was lost earlier
  cause            ValueError: no
  raised at        model.py:40 in forward

The graph cannot be used. The process can capture again.
What to do:
  * Look for the first error."""
    )
