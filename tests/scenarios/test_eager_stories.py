"""Without a graph there is nothing to refuse: a launch has to come in its turn."""

from __future__ import annotations

import pytest
from worlds import World

from streamshim import current_handle, ledger

ROUNDS = 200


@pytest.mark.parametrize("given", [None, 0, 1, 2])
@pytest.mark.parametrize("mode", ["bind", "strict"])
def test_a_launch_without_a_stream_comes_after_the_producer(world: World, mode: str, given: int | None) -> None:
    x, stream = world.buffer([0.0]), world.new_stream()
    wrong = []
    with world.installed(mode), world.on(stream):
        for i in range(ROUNDS):
            world.delay()
            world.fill(x, float(i))
            world.launch(x, given)
            if world.read(x) != [i + 1.0]:
                wrong.append(i)
        assert current_handle() == stream.cuda_stream
    assert wrong == []


def test_the_race_is_real_without_streamshim(world: World) -> None:
    x, stream = world.buffer([0.0]), world.new_stream()
    with world.on(stream):
        world.delay()
        world.fill(x, 5.0)
        world.launch(x, 0)
        # The launch did not wait for the producer, which then wrote over its result.
        assert world.read(x) == [5.0]


@pytest.mark.parametrize("mode", ["bind", "strict", "check"])
def test_an_explicit_side_stream_is_left_alone(world: World, mode: str) -> None:
    x, main, side = world.buffer([0.0]), world.new_stream(), world.new_stream()
    with world.installed(mode), world.on(main):
        with world.on(side):
            world.delay()
        world.fill(x, 5.0)
        side.wait_stream(main)
        world.launch(x, side)
        # The launch is behind the delay on the side stream, so the current stream does not wait for it.
        assert world.read(x) == [5.0]
        side.synchronize()
        assert world.read(x) == [6.0]
        assert ledger.counts() == {}


@pytest.mark.parametrize("mode", ["bind", "strict", "check"])
def test_on_the_default_stream_nothing_changes(world: World, mode: str) -> None:
    x, side = world.buffer([0.0]), world.new_stream()
    with world.installed(mode):
        for given in (None, 0, 1):
            world.launch(x, given)
        world.launch_without_stream(x)
        world.synchronize()
        world.launch(x, side)
        world.synchronize()
        assert ledger.counts() == {}
    assert world.read(x) == [5.0]


def test_current_stream_follows_nested_blocks(world: World) -> None:
    x, outer, inner = world.buffer([0.0]), world.new_stream(), world.new_stream()
    with world.installed("strict"), world.on(outer):
        with world.on(inner):
            world.delay()
            world.fill(x, 1.0)
            world.launch(x)
            assert current_handle() == inner.cuda_stream
        outer.wait_stream(inner)
        world.launch(x)
        assert current_handle() == outer.cuda_stream
        assert world.read(x) == [3.0]
