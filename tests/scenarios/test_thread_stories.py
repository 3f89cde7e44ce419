"""Captures, current streams and allowances belong to threads."""

from __future__ import annotations

import pytest
from worlds import Worker, World

from streamshim import WrongStreamError, allow, capture, current_handle, ledger, runtime


@pytest.mark.parametrize("mode", ["bind", "strict"])
def test_two_captures_do_not_see_each_other(world: World, worker: Worker, mode: str) -> None:
    x, y, mine, theirs = world.buffer([0.0]), world.buffer([0.0]), world.graph(), world.graph()
    state = runtime.get().capture_state
    with world.installed(mode):
        with world.capture(mine, "thread_local"):
            with worker.inside(world.capture(theirs, "thread_local", world.new_stream())):
                for _ in range(3):
                    world.launch(x)
                    worker(world.launch, y)
                here, there = state(current_handle()), state(worker(current_handle))
                assert len({here.id, there.id, 0}) == 3
                assert {window.id: window.thread for window in capture.open_windows()} == {
                    here.id: "MainThread",
                    there.id: "second_0",
                }
            assert [window.id for window in capture.open_windows()] == [here.id]
        assert ledger.counts() == {}
    assert (world.read(x), world.read(y)) == ([0.0], [0.0])
    world.fill(x, 10.0)
    world.fill(y, 20.0)
    mine.replay()
    assert (world.read(x), world.read(y)) == ([13.0], [20.0])
    theirs.replay()
    assert (world.read(x), world.read(y)) == ([13.0], [23.0])


@pytest.mark.parametrize("mode", ["bind", "strict", "check"])
def test_the_stream_of_the_other_capture_is_refused(world: World, worker: Worker, mode: str) -> None:
    x, y, mine, theirs = world.buffer([0.0]), world.buffer([0.0]), world.graph(), world.graph()
    with world.installed(mode):
        with world.capture(mine, "thread_local"):
            with worker.inside(world.capture(theirs, "thread_local", world.new_stream())):
                world.launch(x, world.current_stream())
                worker(lambda: world.launch(y, world.current_stream()))
                with pytest.raises(WrongStreamError):
                    world.launch(x, worker(current_handle))
                with pytest.raises(WrongStreamError):
                    worker(world.launch, y, current_handle())
    world.fill(x, 10.0)
    world.fill(y, 20.0)
    mine.replay()
    theirs.replay()
    world.synchronize()
    assert (world.read(x), world.read(y)) == ([11.0], [21.0])


@pytest.mark.parametrize("mode", ["bind", "strict", "check"])
@pytest.mark.parametrize("error_mode", ["global", "thread_local", "relaxed"])
def test_a_thread_that_does_not_capture_launches_eagerly(
    world: World, worker: Worker, mode: str, error_mode: str
) -> None:
    x, y, graph, side = world.buffer([0.0]), world.buffer([0.0]), world.graph(), world.new_stream()
    with world.installed(mode):
        with world.capture(graph, error_mode):
            world.launch(x, world.current_stream())
            # Its own current stream does not capture, so a launch there is nobody's business, in every mode of capture.
            worker(world.launch, y)
            worker(world.launch_without_stream, y)
            worker(world.launch, y, side)
        assert ledger.counts() == {}
    world.synchronize()
    assert world.read(y)[0] > 0.0
    world.fill(x, 10.0)
    world.fill(y, 20.0)
    graph.replay()
    assert (world.read(x), world.read(y)) == ([11.0], [20.0])


def test_each_thread_follows_its_own_current_stream(world: World, worker: Worker) -> None:
    x, y, mine, theirs = world.buffer([0.0]), world.buffer([0.0]), world.new_stream(), world.new_stream()
    with world.installed("strict"), world.on(mine), worker.inside(world.on(theirs)):
        for do in (lambda function, *args: function(*args), worker):
            buffer = y if do is worker else x
            do(world.delay)
            do(world.fill, buffer, 5.0)
            do(world.launch, buffer)
        assert (current_handle(), worker(current_handle)) == (mine.cuda_stream, theirs.cuda_stream)
        assert (world.read(x), worker(world.read, y)) == ([6.0], [6.0])


def test_allow_holds_for_its_own_thread_only(world: World, worker: Worker) -> None:
    x, graph, side = world.buffer([0.0]), world.graph(), world.new_stream()
    with world.installed("strict"):
        with world.capture(graph, "thread_local"):
            world.launch(x)
            with worker.inside(allow("launch", reason="the other thread's")):
                with pytest.raises(WrongStreamError):
                    world.launch(x, side)
        assert ledger.counts() == {"refused launch": 1}
    world.fill(x, 10.0)
    graph.replay()
    assert world.read(x) == [11.0]
