"""Captures as people write them. Inputs change between capture and replay, so that what ran once cannot look right."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
from worlds import World

from streamshim import RescuedLaunchWarning, WrongStreamError, allow, capture, current_handle, ledger, runtime


class CachingLauncher:
    """Keeps the stream of its first call, as launchers do that cache their arguments."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._stream: Any = None

    def __call__(self, x: Any) -> None:
        if self._stream is None:
            self._stream = self._world.current_stream()
        self._world.launch(x, self._stream)


def capture_id() -> int:
    """The id of the capture that the current stream is in."""
    return runtime.get().capture_state(current_handle()).id


def replayed(world: World, graph: Any, x: Any, start: float) -> float:
    """What is in the buffer after a replay that began with ``start`` in it."""
    world.fill(x, start)
    graph.replay()
    return world.read(x)[0]


def test_without_streamshim_the_launch_is_missing_from_the_graph(world: World) -> None:
    x, marker, graph = world.buffer([0.0]), world.buffer([0.0]), world.graph()
    with world.capture(graph):
        world.fill(marker, 5.0)
        world.launch(x, 0)
    assert world.read(x) == [1.0]
    assert replayed(world, graph, x, 10.0) == 10.0
    assert world.read(marker) == [5.0]


@pytest.mark.parametrize("mode", ["bind", "strict", "check"])
def test_mode_off_again_after_the_block(world: World, mode: str) -> None:
    x, marker, graph = world.buffer([0.0]), world.buffer([0.0]), world.graph()
    with world.installed(mode):
        pass
    with world.capture(graph):
        world.fill(marker, 5.0)
        world.launch_without_stream(x)
    assert world.read(x) == [1.0]
    assert capture.open_windows() == []


def test_a_stream_cached_in_the_warm_up_is_rescued(world: World) -> None:
    x, graph, warm_up = world.buffer([0.0]), world.graph(), world.new_stream()
    launch = CachingLauncher(world)
    with world.installed("bind"):
        with world.on(warm_up):
            launch(x)
        world.synchronize()
        assert world.read(x) == [1.0]
        with world.capture(graph), pytest.warns(RescuedLaunchWarning, match="cached before the capture"):
            launch(x)
    assert world.read(x) == [1.0]
    assert [replayed(world, graph, x, start) for start in (10.0, 20.0)] == [11.0, 21.0]


def test_a_stream_cached_in_the_warm_up_is_refused_in_strict_mode(world: World) -> None:
    x, marker, graph, warm_up = world.buffer([0.0]), world.buffer([0.0]), world.graph(), world.new_stream()
    launch = CachingLauncher(world)
    with world.installed("strict"):
        with world.on(warm_up):
            launch(x)
        world.synchronize()
        with world.capture(graph):
            world.fill(marker, 5.0)
            with pytest.raises(WrongStreamError, match="cached before the capture"):
                launch(x)
    assert world.read(x) == [1.0]
    assert replayed(world, graph, x, 10.0) == 10.0


def by_event(first: Any, then: Any) -> None:
    then.wait_event(first.record_event())


def by_wait_stream(first: Any, then: Any) -> None:
    then.wait_stream(first)


@pytest.mark.parametrize("order", [by_event, by_wait_stream])
@pytest.mark.parametrize("mode", ["bind", "strict", "check"])
def test_a_fork_is_left_alone(world: World, mode: str, order: Callable[[Any, Any], None]) -> None:
    x, y, graph, side = world.buffer([0.0]), world.buffer([0.0]), world.graph(), world.new_stream()
    with world.installed(mode), warnings.catch_warnings():
        warnings.simplefilter("error", RescuedLaunchWarning)
        with world.capture(graph):
            main = world.current_stream()
            world.launch(x, main)
            order(main, side)
            world.launch(x, side)
            with world.on(side):
                world.launch(x, side)
            world.launch(y, main)
            order(side, main)
            world.launch(x, main)
        assert ledger.counts() == {}
    assert (world.read(x), world.read(y)) == ([0.0], [0.0])
    world.fill(y, 30.0)
    assert replayed(world, graph, x, 10.0) == 14.0
    assert world.read(y) == [31.0]


@pytest.mark.parametrize("given", [None, 0, 1, 2])
def test_a_launch_without_a_stream_follows_a_fork(world: World, given: int | None) -> None:
    x, graph, side = world.buffer([0.0]), world.graph(), world.new_stream()
    with world.installed("strict"):
        with world.capture(graph):
            main = world.current_stream()
            side.wait_stream(main)
            with world.on(side):
                world.fill(x, 3.0)
                world.launch(x, given)
            main.wait_stream(side)
    assert replayed(world, graph, x, 10.0) == 4.0


@pytest.mark.parametrize("order", [by_event, by_wait_stream])
def test_nested_forks(world: World, order: Callable[[Any, Any], None]) -> None:
    x, graph, outer, inner = world.buffer([0.0]), world.graph(), world.new_stream(), world.new_stream()
    with world.installed("strict"):
        with world.capture(graph):
            main = world.current_stream()
            begun = capture_id()
            order(main, outer)
            world.launch(x, outer)
            order(outer, inner)
            world.launch(x, inner)
            with world.on(inner):
                assert capture_id() == begun
                world.launch(x)
            order(inner, outer)
            order(outer, main)
            world.launch(x)
    assert world.read(x) == [0.0]
    assert [replayed(world, graph, x, start) for start in (10.0, 20.0)] == [14.0, 24.0]


def test_a_stream_is_no_fork_any_more_after_the_capture(world: World) -> None:
    x, graphs, side = world.buffer([0.0]), [world.graph(), world.graph()], world.new_stream()
    with world.installed("strict"):
        with world.capture(graphs[0]):
            side.wait_stream(world.current_stream())
            world.launch(x, side)
            world.current_stream().wait_stream(side)
        with world.capture(graphs[1]):
            world.launch(x)
            with pytest.raises(WrongStreamError):
                world.launch(x, side)
    assert [replayed(world, graph, x, 10.0) for graph in graphs] == [11.0, 11.0]


@pytest.mark.parametrize("mode", ["strict", "check"])
def test_after_a_refusal_the_capture_goes_on(world: World, mode: str) -> None:
    x, graph, side = world.buffer([0.0]), world.graph(), world.new_stream()
    with world.installed(mode):
        with world.capture(graph):
            world.launch(x, world.current_stream())
            for _ in range(3):
                with pytest.raises(WrongStreamError):
                    world.launch(x, side)
                with pytest.raises(WrongStreamError):
                    world.launch_without_stream(x)
            assert runtime.get().capture_state(current_handle()).valid
            world.launch(x, world.current_stream())
        assert ledger.counts() == {"refused launch": 6}
    assert world.read(x) == [0.0]
    assert [replayed(world, graph, x, start) for start in (10.0, 20.0)] == [12.0, 22.0]


def test_an_uncaught_refusal_ends_the_capture_cleanly(world: World) -> None:
    x, graph, again = world.buffer([0.0]), world.graph(), world.graph()

    def step() -> None:
        with world.capture(graph):
            world.launch(x)
            world.launch_without_stream(x)

    with world.installed("bind"):
        with pytest.raises(WrongStreamError):
            step()
        assert capture.open_windows() == []
        assert current_handle() == 0
        with world.capture(again):
            world.launch(x)
    assert [replayed(world, again, x, start) for start in (10.0, 20.0)] == [11.0, 21.0]


def sync_the_device(world: World, x: Any, side: Any) -> None:
    world.synchronize()


def read_a_value(world: World, x: Any, side: Any) -> None:
    world.read(x)


def forget_the_join(world: World, x: Any, side: Any) -> None:
    side.wait_stream(world.current_stream())
    world.launch(x, side)


def wait_for_eager_work(world: World, x: Any, side: Any) -> None:
    world.current_stream().wait_stream(side)


@pytest.mark.parametrize("spoil", [sync_the_device, read_a_value, forget_the_join, wait_for_eager_work])
def test_after_a_lost_capture_the_process_captures_again(
    world: World, spoil: Callable[[World, Any, Any], None]
) -> None:
    x, lost, graph, side = world.buffer([0.0]), world.graph(), world.graph(), world.new_stream()

    def lose_a_capture() -> None:
        with world.capture(lost):
            world.launch(x)
            spoil(world, x, side)

    with world.installed("bind"):
        with pytest.raises(RuntimeError):
            lose_a_capture()
        assert capture.open_windows() == []
        assert not runtime.get().capture_state(side.cuda_stream)
        with world.capture(graph):
            world.launch(x)
            assert [window.id for window in capture.open_windows()] == [capture_id()]
            side.wait_stream(world.current_stream())
            world.launch(x, side)
            world.current_stream().wait_stream(side)
        assert capture.open_windows() == []
    assert world.read(x) == [0.0]
    assert [replayed(world, graph, x, start) for start in (10.0, 20.0)] == [12.0, 22.0]


def test_capturing_twice_gives_two_ids(world: World) -> None:
    x, stream = world.buffer([0.0]), world.new_stream()
    graphs, ids = [world.graph(), world.graph()], []
    with world.installed("strict"):
        for graph in graphs:
            with world.capture(graph, stream=stream):
                world.launch(x)
                ids.append(capture_id())
        # The same graph once more: what counts is the driver's id, not the object.
        graphs[0].reset()
        with world.capture(graphs[0], stream=stream):
            world.launch(x)
            world.launch(x, stream)
            ids.append(capture_id())
    assert len({*ids, 0}) == 4
    assert [replayed(world, graph, x, 10.0) for graph in graphs] == [12.0, 11.0]


@pytest.mark.parametrize("error_mode", ["global", "thread_local", "relaxed"])
def test_every_error_mode(world: World, error_mode: str) -> None:
    x, graph = world.buffer([0.0]), world.graph()
    with world.installed("strict"), world.capture(graph, error_mode):
        world.launch(x)
        assert [window.error_mode for window in capture.open_windows()] == [error_mode]
        with pytest.raises(WrongStreamError):
            world.launch_without_stream(x)
    assert world.read(x) == [0.0]
    assert replayed(world, graph, x, 10.0) == 11.0


@pytest.mark.parametrize("mode", ["bind", "strict", "check"])
def test_allow_lets_a_launch_escape(world: World, mode: str) -> None:
    x, y, graph, side = world.buffer([0.0]), world.buffer([0.0]), world.graph(), world.new_stream()
    with world.installed(mode), warnings.catch_warnings():
        warnings.simplefilter("error", RescuedLaunchWarning)
        with world.capture(graph):
            world.launch(x, world.current_stream())
            with allow("launch", reason="counted outside the graph"):
                world.launch(x, side)
                world.launch_without_stream(y)
        assert ledger.counts() == {"allowed launch": 2}
    world.synchronize()
    assert (world.read(x), world.read(y)) == ([1.0], [1.0])
    world.fill(y, 30.0)
    assert [replayed(world, graph, x, start) for start in (10.0, 20.0)] == [11.0, 21.0]
    assert world.read(y) == [30.0]


def test_allow_can_be_nested_and_ends_with_its_outermost_region(world: World) -> None:
    x, graph, side = world.buffer([0.0]), world.graph(), world.new_stream()
    with world.installed("strict"), world.capture(graph):
        world.launch(x)
        with allow("launch", reason="outer"):
            with allow("launch", reason="inner"):
                world.launch(x, side)
            world.launch(x, side)
        with pytest.raises(WrongStreamError):
            world.launch(x, side)
    world.synchronize()
    assert world.read(x) == [2.0]
    assert replayed(world, graph, x, 10.0) == 11.0


def test_allow_does_not_undo_what_is_bound(world: World) -> None:
    x, graph = world.buffer([0.0]), world.graph()
    with world.installed("bind"), world.capture(graph), allow("launch", reason="meant for others"):
        world.launch(x)
        world.launch(x, 0)
    assert world.read(x) == [0.0]
    assert replayed(world, graph, x, 10.0) == 12.0
