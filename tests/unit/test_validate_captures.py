"""A validated call inside a capture, with a tape of torch operations in the place of the graph."""

from __future__ import annotations

import random
from contextlib import contextmanager, nullcontext

import pytest
import torch
from device_tape import Tape

import streamshim
from streamshim import capture, installer
from streamshim.runtime import CaptureState
from streamshim.validation import calls, report, stats
from streamshim.validation.stats import Position


@pytest.fixture(autouse=True)
def where(monkeypatch):
    """No functions and no counters from before; returns what says on which stream and in which capture a call is."""
    monkeypatch.delenv("STREAMSHIM_VALIDATE", raising=False)
    monkeypatch.delenv("STREAMSHIM_REPORT_DIR", raising=False)
    calls.functions.clear()
    report._told.clear()
    stats.forget()
    now = [Position(0, 0)]
    monkeypatch.setattr(calls, "_position", lambda given: now[0])
    yield now
    calls.functions.clear()
    stats.forget()


@pytest.fixture
def captured(where):
    """A context: what is done in it is on a tape."""
    ids = iter(range(7, 1000))
    stats.arena(torch.device("cpu")).prepare(1)

    @contextmanager
    def record():
        before, where[0] = where[0], Position(5, next(ids))
        tape = Tape()
        try:
            with tape:
                yield tape
        finally:
            where[0] = before

    return record


def kernel(x, fault):
    return x * 2 + fault


def reference(x, fault):
    return x + x


def only_row():
    (row,) = streamshim.validation_report().rows
    return row


def test_1000_replays_with_faults_in_chosen_ones_are_counted_exactly(captured):
    verify = streamshim.validate(kernel, reference, name="verify")
    x, fault = torch.zeros(4, 8), torch.zeros(4, 8)
    for context in (nullcontext(), captured()):
        with context as tape:
            out = verify(x, fault)
    rng = random.Random(3)
    chosen = sorted(rng.sample(range(1, 1001), 25))
    for number in range(1, 1001):
        x.fill_(float(number))
        out.fill_(float("nan"))
        fault.zero_()
        if number in chosen:
            fault[2, number % 8 :] = 0.5
        tape.replay()
        assert out[0, 0] == 2 * number
    row = only_row()
    # What ran while it was recorded is a run too here; in a capture nothing runs.
    assert (row.calls, row.captured, row.replays, row.checked) == (1, 1, 1001, 1002)
    assert (row.mismatches, row.max_abs) == (25, 0.5)
    assert row.bad_elements == sum(8 - number % 8 for number in chosen)
    (place,) = row.bad
    assert place.where == "replays of captured call 1 (capture 7)"
    assert (place.first, place.index) == (chosen[0] + 1, (2, chosen[0] % 8))


def test_captures_and_calls_of_one_line_are_told_apart(captured):
    verify = streamshim.validate(kernel, reference)
    x, faults = torch.ones(3), [torch.zeros(3) for _ in range(4)]
    tapes = []
    for capture_number in range(2):
        with captured() as tape:
            for call in range(2):
                verify(x, faults[2 * capture_number + call])
        tapes.append(tape)
    faults[3][1] = 1.0
    for tape in (tapes[0], tapes[1], tapes[1]):
        tape.replay()
    row = only_row()
    assert (row.captured, row.replays, row.mismatches) == (4, 4 + 6, 2)
    assert [(p.where, p.count, p.first, p.index) for p in row.bad] == [
        ("replays of captured call 4 (capture 8)", 2, 2, (1,))
    ]


def test_streams_have_counters_of_their_own(where):
    verify = streamshim.validate(kernel, reference)
    for stream in (1, 2, 1):
        where[0] = Position(stream, 0)
        verify(torch.ones(2), torch.full((2,), float(stream == 2)))
    row = only_row()
    assert (row.calls, row.checked, row.mismatches) == (3, 3, 1)
    assert row.bad[0].where == "eager calls on stream 2 of 2"


def test_a_sample_of_the_replays_is_chosen_on_the_device(captured):
    verify = streamshim.validate(kernel, reference, sample=3)
    x, fault = torch.ones(2), torch.zeros(2)
    with captured() as tape:
        verify(x, fault)  # run 1: checked
    fault.fill_(float("inf"))
    for _ in range(2):
        tape.replay()  # runs 2 and 3: not checked
    row = only_row()
    assert (row.replays, row.checked, row.mismatches, row.max_abs) == (3, 1, 0, 0.0)
    for _ in range(5):
        tape.replay()  # runs 4 to 8: 4 and 7 are checked
    row = only_row()
    assert (row.replays, row.checked, row.mismatches, row.bad[0].first) == (8, 3, 2, 4)


def test_written_arguments_start_from_the_same_at_each_replay(captured):
    def add(x, out):
        out.add_(x)

    verify = streamshim.validate(add, lambda x, out: (out.copy_(out + x), None)[1], inplace="out")
    x, out = torch.ones(2), torch.zeros(2)
    with captured() as tape:
        verify(x, out)
    for _ in range(3):
        tape.replay()
    assert out.tolist() == [4, 4]
    assert [(row.output, row.replays, row.mismatches) for row in streamshim.validation_report().rows] == [("out", 4, 0)]


TYPES = [torch.bfloat16, torch.int64, torch.uint64, torch.bool, torch.complex64, torch.float8_e4m3fn]


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_types_in_captures(captured, dtype):
    verify = streamshim.validate(lambda x, y: x.clone(), lambda x, y: y.clone(), keep=1)
    x, y = torch.zeros(4).to(dtype), torch.zeros(4).to(dtype)
    for context in (nullcontext(), captured()):
        with context as tape:
            verify(x, y)
    x.copy_(torch.tensor([0.0, 0.0, 1.0, 0.0]).to(dtype))
    tape.replay()
    row = only_row()
    assert (row.mismatches, row.max_abs, row.bad[0].index) == (1, 1.0, (2,))
    (samples,) = verify.samples.values()
    assert torch.equal(samples.read()[0][0].view(torch.uint8), x.view(torch.uint8))


def test_the_first_bad_calls_are_kept(captured):
    def wrong(x, scale, fault, out):
        out.copy_(x * scale + fault)

    def right(x, scale, fault, out):
        out.copy_(x * scale)

    verify = streamshim.validate(wrong, right, inplace="out", keep=2, name="verify")
    x, fault, out = torch.zeros(2, dtype=torch.bfloat16), torch.zeros(2), torch.zeros(2)
    verify(x, 2.0, fault, out)
    with captured() as tape:
        verify(x, 2.0, fault, out)
    for number in range(1, 8):
        x.fill_(float(number))
        fault.fill_(float(number % 3 == 0 or number == 7))
        out.fill_(float(-number))
        tape.replay()
    (function,) = streamshim.validation_report().functions
    assert (function.kept, function.not_kept) == (2, "")
    (samples,) = verify.samples.values()
    kept = samples.read()
    assert [[tensor.tolist() for tensor in sample] for sample in kept] == [
        [[n, n], [1, 1], [-n, -n], [2 * n + 1] * 2, [2 * n] * 2] for n in (3, 6)
    ]
    assert kept[0][0].dtype is torch.bfloat16


def test_an_object_among_the_arguments_is_never_printed(captured):
    """Its text may be that of tensors, which no capture survives."""

    class Batch:
        def __repr__(self):
            raise AssertionError("printed")

    verify = streamshim.validate(lambda batch, x: x + 1, lambda batch, x: x + 0, keep=1)
    for context in (nullcontext(), captured()):
        with context:
            verify(Batch(), torch.ones(2))
    (samples,) = verify.samples.values()
    assert samples.full() == 1
    assert f"{__name__}.test_an_object" in repr(samples.structure)


def test_bad_calls_of_a_shape_that_was_first_seen_in_a_capture_are_not_kept(captured):
    verify = streamshim.validate(kernel, reference, keep=1)
    with captured():
        verify(torch.ones(2), torch.ones(2))
    (function,) = streamshim.validation_report().functions
    assert (function.mismatches, function.kept) == (1, 0)
    assert "some calls could not be kept: shapes or numbers were first seen inside a capture" in str(function)


def test_the_first_call_inside_a_capture_has_no_counters_unless_something_was_called_before(captured):
    """The arena cannot be made inside: it would belong to the graph, and be zeroed by each replay."""
    verify = streamshim.validate(kernel, reference)
    stats.forget()
    with captured(), pytest.raises(streamshim.ValidationError, match="There are no counters on cpu") as error:
        verify(torch.ones(2), torch.zeros(2))
    assert "Call the validated function once before the capture" in str(error.value)
    verify(torch.ones(5), torch.zeros(5))
    with captured():
        verify(torch.ones(2), torch.zeros(2))  # another shape, and counters from what was made ahead


def test_no_memory_is_made_and_no_counter_set_to_zero_inside(captured):
    verify = streamshim.validate(kernel, reference)
    x, fault = torch.ones(2), torch.zeros(2)
    verify(x, fault)
    chunks = stats.arena(torch.device("cpu")).chunks
    before = len(chunks)
    with captured() as tape:
        verify(x, fault)
    assert len(chunks) == before
    memory = {tensor.untyped_storage().data_ptr() for pair in chunks for tensor in pair}
    writes = {
        func._schema.name
        for func, args, _, _ in tape.operations
        if isinstance(args[0], torch.Tensor)
        and args[0].untyped_storage().data_ptr() in memory
        and func._schema.is_mutable
    }
    assert writes == {"aten::add_", "aten::maximum"}


def test_counters_are_made_ahead():
    arena = stats.arena(torch.device("cpu"))
    arena.take(1, is_capturing=False)
    assert arena.free == stats.CHUNK - 1
    arena.take(stats.CHUNK - stats.RESERVE, is_capturing=True)
    assert len(arena.chunks) == 1
    stats.before_capture()
    assert (len(arena.chunks), arena.free) == (2, 2 * stats.CHUNK - (stats.CHUNK - stats.RESERVE) - 1)


def test_the_installation_has_counters_made_before_a_capture_begins():
    """`installer._insist` is what `capture.before_begin` calls."""
    arena = stats.arena(torch.device("cpu"))
    installer._insist()
    assert arena.free >= stats.RESERVE


def test_counters_are_made_outside_every_mode_of_the_caller():
    with torch.inference_mode(), Tape() as tape, torch.device("meta"):
        slot = stats.Arena(torch.device("cpu")).take(1, is_capturing=False)[0]
    assert not slot.ints.is_inference()
    assert "aten::zeros" not in tape.names
    assert slot.ints.tolist() == [0] * 6


def test_an_error_while_counters_are_made_reaches_the_caller():
    with pytest.raises((RuntimeError, AssertionError)):  # the latter where torch was built without CUDA
        stats.Arena(torch.device("cuda", 77)).prepare(1)


def test_a_report_inside_a_capture_is_an_error(cuda, at_root):
    """``capture`` knows of the capture here; nothing is read."""
    verify = streamshim.validate(kernel, reference)
    verify(torch.ones(2), torch.zeros(2))
    cuda.captures[5] = CaptureState(9)
    capture.begun(5, 0, "global")
    with pytest.raises(streamshim.ValidationError) as error:
        streamshim.validation_report()
    assert "streamshim.validation_report() was called while a CUDA graph is being captured: capture 9 on" in str(
        error.value
    )
    assert "test_validate_captures.py" in str(error.value)
    capture.ended(5)
    assert streamshim.validation_report().rows[0].calls == 1
