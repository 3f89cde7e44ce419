"""The block of a capture that fails: torch's shape of it, over invented streams."""

from __future__ import annotations

import pytest

from streamshim import gate
from streamshim.guards import blocks
from streamshim.patching import PatchSet
from streamshim.runtime import CaptureState
from streamshim.settings import Mode

BEFORE, STREAM = 0x7F0030, 0x7F0010


@pytest.fixture
def block(cuda):
    """A class like ``torch.cuda.graph``, patched; ``block(begin=..., end=...)`` says what the graph does."""
    gate.set_mode(Mode.BIND)
    cuda.current = BEFORE

    class Context:
        def __enter__(self):
            self.before, cuda.current = cuda.current, STREAM

        def __exit__(self, *args):
            cuda.current = self.before

    class Stream:
        cuda_stream = STREAM

    class Graph:
        def __init__(self, begin, end):
            self.begin, self.end, self.ended = begin, end, 0

        def capture_begin(self):
            self.begin()

        def capture_end(self):
            self.ended += 1
            cuda.captures.clear()
            self.end()

    class graph:
        def __init__(self, begin=lambda: None, end=lambda: None):
            self.cuda_graph, self.stream_ctx, self.capture_stream = Graph(begin, end), Context(), Stream

        def __enter__(self):
            self.stream_ctx.__enter__()
            self.cuda_graph.capture_begin()

        def __exit__(self, *args):
            self.cuda_graph.capture_end()
            self.stream_ctx.__exit__(*args)

    patches = PatchSet(blocks.patches(graph))
    assert patches.probe() == []
    patches.apply()
    yield graph
    patches.undo()


def fail():
    raise RuntimeError("lost")


def test_a_good_capture_is_as_it_was(block, cuda):
    with block():
        assert cuda.current == STREAM
    assert cuda.current == BEFORE


def run(block, body=lambda: None):
    with block:
        body()


@pytest.mark.parametrize("body", [lambda: None, lambda: 1 / 0])
def test_a_capture_that_fails_at_its_end_puts_the_stream_back(block, cuda, body):
    with pytest.raises(RuntimeError, match="lost"):
        run(block(end=fail), body)
    assert cuda.current == BEFORE


def test_a_capture_that_cannot_begin_puts_the_stream_back(block, cuda):
    made = block(begin=fail)
    with pytest.raises(RuntimeError, match="lost"):
        run(made)
    assert cuda.current == BEFORE
    assert made.cuda_graph.ended == 0


@pytest.mark.parametrize("state", [CaptureState(7), CaptureState(0, valid=False)])
def test_what_cuda_had_begun_is_ended(block, cuda, state):
    def begin():
        cuda.captures[STREAM] = state
        fail()

    made = block(begin=begin, end=fail)
    with pytest.raises(RuntimeError, match="lost"):
        run(made)
    assert made.cuda_graph.ended == 1
    assert cuda.current == BEFORE


def test_a_body_that_changes_the_stream_keeps_its_choice(block, cuda):
    """As without streamshim: what is current at the end is not the stream of the capture."""

    def body():
        cuda.current = 0x7F0050

    with pytest.raises(RuntimeError, match="lost"):
        run(block(end=fail), body)
    assert cuda.current == 0x7F0050


def test_in_mode_off_everything_passes(block, cuda):
    gate.set_mode(Mode.OFF)
    with pytest.raises(RuntimeError, match="lost"):
        run(block(end=fail))
    assert cuda.current == STREAM


def test_without_torchs_block_there_is_nothing_to_patch():
    assert blocks.patches(None) == []
