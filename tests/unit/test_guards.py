"""The guards of captures without a GPU: torch's own check, lost captures, and torch's own refusals."""

from __future__ import annotations

import logging
import warnings
from types import SimpleNamespace

import pytest
import torch

import streamshim
from streamshim import capture, ledger
from streamshim.callsite import Site
from streamshim.capture import Window
from streamshim.errors import HostSyncError
from streamshim.findings import LostCaptureReport
from streamshim.guards import codes, forks, lost, refusals, sync_mode, syncs
from streamshim.guards.sync_table import EVENT_METHODS, METHODS
from streamshim.patching import PatchSet
from streamshim.runtime import CaptureState

STREAM, SIDE = 0x7F0010, 0x7F0020


def window(mode="global", id_=7):
    return Window(id_, STREAM, 0, Site("serve.py", 12, "capture_model"), "MainThread", mode)


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

    def test_what_the_user_sets_meanwhile_stays(self, switch):
        guard = sync_mode.SyncMode()
        guard.opened(window())
        switch.mode = 0
        guard.closing(window())
        assert switch.mode == 0

    def test_python_does_not_forget_which_warnings_it_has_shown(self, switch):
        guard = sync_mode.SyncMode()
        with warnings.catch_warnings(record=True) as shown:
            warnings.simplefilter("default")
            for _ in range(3):
                guard.opened(window())
                guard.closing(window())
                warnings.warn("once a line", UserWarning, stacklevel=1)
            warnings.warn("Synchronization debug mode is a prototype feature", UserWarning, stacklevel=1)
        assert [str(warning.message) for warning in shown] == ["once a line"]


class TestLostCaptures:
    @pytest.mark.parametrize(
        ("text", "number"),
        [
            ("CUDA error: operation failed due to a previous error during capture\nSearch for `cuda", 901),
            ("CUDA error: operation not permitted when stream is capturing", 900),
            ("CUDA error: capturing stream has unjoined work", 904),
            ("Search for `cudaErrorStreamCaptureImplicit' in https://docs", 906),
            ("cudaErrorStreamCaptureInvalidated (error code: 901)", 901),
            ("[907] Call to cuEventQuery results in CUDA_ERROR_CAPTURED_EVENT", 907),
            ("cudaErrorCapturedEvent: operation not permitted", 907),
            ("<CUresult.CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD: 908>", 908),
        ],
    )
    def test_the_code_is_found_in_the_words_of_torch_and_others(self, text, number):
        assert codes.code_of(RuntimeError(text)).number == number

    def test_what_an_error_holds_is_not_formatted(self):
        """A tensor among it would be waited for, inside the capture."""

        class Tensor:
            def __repr__(self):
                raise AssertionError("formatted")

        words = "operation not permitted when stream is capturing"
        assert codes.code_of(RuntimeError(words, Tensor())).number == 900
        assert codes.code_of(ValueError([Tensor()])) is None

    def test_an_error_that_cannot_be_formatted_is_named_all_the_same(self):
        class BrokenError(Exception):
            def __str__(self):
                raise KeyError("no text")

        try:
            try:
                raise BrokenError
            finally:
                raise RuntimeError("operation failed due to a previous error during capture")
        except RuntimeError as error:
            explained = lost.explained(window(), error)
        assert "BrokenError" in explained.report.culprits[0]

    def test_the_table_has_every_code_once(self):
        assert [code.number for code in codes.CODES] == list(range(900, 909))

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

    def test_an_error_that_only_says_that_it_is_too_late_is_not_blamed(self):
        """Another thread broke the capture; torch noticed at the capturing thread's next operation."""
        try:
            try:
                raise RuntimeError("CUDA error: operation failed due to a previous error during capture")
            finally:
                raise RuntimeError("CUDA error: operation failed due to a previous error during capture")
        except RuntimeError as error:
            explained = lost.explained(window(), error)
        assert explained.report.culprits == ()
        text = str(explained)
        assert text.startswith("The CUDA graph capture was lost, as was noticed at ")
        assert "  noticed at       " in text
        assert "not seen: a call below Python" in text

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
        began = Window(7, STREAM, 0, Site("serve.py", 12, "capture_model"), "MainThread", "global", handled=before)
        assert lost.explained(began, error).report.culprits == ("ValueError: the culprit",)
        assert lost.explained(began, alone).report.culprits == ()

    def test_an_allowed_sync_is_named(self):
        ledger.add(ledger.Event("allowed sync", "Event.query()", Site("io.py", 3, "poll"), 0, 0, 7))
        ledger.add(ledger.Event("allowed sync", "Event.query()", Site("io.py", 4, "poll"), 0, 0, 8))
        explained = lost.explained(window(), RuntimeError("operation failed due to a previous error during capture"))
        assert explained.report.culprits == ("Event.query(), at io.py:3 in poll, which streamshim.allow let through",)

    def test_a_call_that_cuda_refused_in_another_thread_is_named(self, capturing):
        capturing("global", by_other=True)

        def query():
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing")

        with streamshim.allow("sync", reason="a test"), pytest.raises(RuntimeError, match="not permitted"):
            syncs.run(EVENT_METHODS["query"], 0, query, (), {})
        explained = lost.explained(window(), RuntimeError("operation failed due to a previous error during capture"))
        allowed, failed = explained.report.culprits
        assert allowed.endswith("which streamshim.allow let through")
        assert failed.startswith("Event.query() in thread MainThread, at ")
        assert "test_guards.py" in failed
        assert failed.endswith("which CUDA refused because of this capture")

    def test_a_call_that_was_refused_again_and_again_is_named_once(self):
        """A thread that polls a stream does so until the capture has ended."""
        for _ in range(50):
            ledger.add(
                ledger.Event("failed sync", "cuStreamQuery in thread poller", Site("poll.py", 3, "poll"), 0, 0, 7)
            )
        explained = lost.explained(window(), RuntimeError("operation failed due to a previous error during capture"))
        assert len(explained.report.culprits) == 1

    def test_another_failure_is_not_blamed(self, capturing):
        capturing("thread_local", by_other=True)

        def query():
            raise RuntimeError("out of memory")

        with pytest.raises(RuntimeError, match="out of memory"):
            syncs.run(EVENT_METHODS["query"], 0, query, (), {})
        assert ledger.events() == []

    def test_the_capture_is_named_although_its_window_is_closed(self):
        explained = lost.explained(window(), RuntimeError("operation failed due to a previous error during capture"))
        assert "begun at serve.py:12 in capture_model, thread MainThread" in explained.report.capture

    def test_the_first_of_several_codes_decides_what_to_do(self):
        try:
            try:
                raise RuntimeError(next(code.text for code in codes.CODES if code.number == 906))
            except RuntimeError:
                raise RuntimeError("operation failed due to a previous error during capture")  # noqa: B904
        except RuntimeError as error:
            explained = lost.explained(window(), error)
        assert explained.report.code == 901
        assert "CUDA error 906" in explained.report.culprits[0]
        assert explained.report.remedy == (next(code.remedy for code in codes.CODES if code.number == 906),)

    def test_an_autograd_node_of_the_default_stream_is_explained(self):
        """torch raises 906 from backward, and 901 from the end of the capture."""

        class Node(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                return x

            @staticmethod
            def backward(ctx, grad):
                raise RuntimeError("Search for `cudaErrorStreamCaptureImplicit' in https://docs")

        try:
            try:
                Node.apply(torch.ones(1, requires_grad=True)).backward()
            finally:
                raise RuntimeError("operation failed due to a previous error during capture")
        except RuntimeError as error:
            explained = lost.explained(window(), error)
        assert "a node of the autograd graph belongs to the default stream" in explained.report.culprits[0]
        assert "Warm up on a side stream" in explained.report.remedy[0]
        assert "Wait" not in "".join(explained.report.remedy)

    def test_a_fork_that_was_not_joined_is_named(self, monkeypatch):
        monkeypatch.setitem(forks._forks, 7, {SIDE: Site("model.py", 40, "forward")})
        explained = lost.explained(window(), RuntimeError("CUDA error: capturing stream has unjoined work"))
        assert explained.report.culprits == ("stream 0x7f0020 was forked into the capture at model.py:40 in forward",)
        assert "wait_stream(side_stream)" in str(explained)


@pytest.mark.skipif(not hasattr(BaseException, "add_note"), reason="notes came with Python 3.11")
class TestRefusals:
    def capture(self, body):
        """A capture of a stand-in for torch's graph whose block ends with an error, as `torch.cuda.graph` has it."""

        class CUDAGraph:
            def capture_begin(self):
                pass

            def capture_end(self):
                pass

        patches = PatchSet(capture.patches(CUDAGraph))
        patches.apply()
        capture.enabled = True
        capture.guards[:] = [refusals.Refusals()]
        graph = CUDAGraph()
        try:
            graph.capture_begin()
            try:
                body()
            finally:
                graph.capture_end()
        finally:
            capture.guards.clear()
            patches.undo()

    def test_a_copy_that_torch_refused_gets_a_note_on_its_way_out(self, cuda):
        cuda.current, cuda.captures[STREAM] = STREAM, CaptureState(7)

        def copy():
            raise RuntimeError("Cannot copy between CPU and CUDA tensors during CUDA graph capture unless pinned")

        with pytest.raises(RuntimeError, match="unless pinned") as error:
            self.capture(copy)
        (note,) = error.value.__notes__
        assert note.startswith("streamshim: a copy between host and device, at ")
        assert "test_guards.py" in note
        assert "while capturing: capture 7 on stream 0x7f0010" in note
        assert "the capture is still valid" in note
        assert "Copy into a pinned tensor" in note

    def test_an_error_that_holds_a_tensor_is_not_formatted(self, cuda, caplog):
        cuda.current, cuda.captures[STREAM] = STREAM, CaptureState(7)

        class Tensor:
            def __repr__(self):
                raise RuntimeError("a wait, which would lose the capture")

        def fail():
            raise RuntimeError("bad value", Tensor())

        with pytest.raises(RuntimeError) as error:
            self.capture(fail)
        assert error.value.args[0] == "bad value"
        assert caplog.records == []

    def test_another_error_gets_none(self, cuda):
        cuda.current, cuda.captures[STREAM] = STREAM, CaptureState(7)

        def fail():
            raise RuntimeError("out of memory")

        with pytest.raises(RuntimeError, match="out of memory") as error:
            self.capture(fail)
        assert not hasattr(error.value, "__notes__")

    def test_a_named_copy_gets_its_note_at_once(self, capturing):
        capturing("relaxed")
        error = RuntimeError("Cannot copy between CPU and CUDA tensors during CUDA graph capture unless pinned")
        refusals.explain(error, METHODS["cpu"])
        assert error.__notes__[0].startswith("streamshim: .cpu() of a CUDA tensor, at ")
        refusals.explain(error, METHODS["to"])
        assert len(error.__notes__) == 1

    def test_outside_a_capture_nothing_is_said(self, cuda):
        error = RuntimeError("Cannot copy between CPU and CUDA tensors during CUDA graph capture unless pinned")
        refusals.explain(error, METHODS["cpu"])
        assert not hasattr(error, "__notes__")

    @pytest.mark.parametrize("by_other", [False, True])
    def test_torchs_check_is_replaced_and_kept_as_the_cause(self, capturing, by_other):
        capturing("global", by_other)
        error = RuntimeError("called a synchronizing CUDA operation")
        with pytest.raises(HostSyncError, match="boolean-mask index") as refused:
            refusals.explain(error, METHODS["__getitem__"])
        assert refused.value.__cause__ is error


def test_the_text_of_a_lost_capture():
    report = LostCaptureReport(
        901, "the capture was lost earlier", ("ValueError: no",), Site("model.py", 40, "forward"), True, "capture 7",
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
