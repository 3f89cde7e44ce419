"""The device of a launch is that of its tensors, not the current one."""

from __future__ import annotations

import pytest
from worlds import World

from streamshim import WrongStreamError, current_handle, runtime


def test_eager_work_follows_the_stream_of_the_buffers_device(two_devices: World) -> None:
    world = two_devices
    x, stream = world.buffer([0.0], device=1), world.new_stream(1)
    with world.installed("strict"), world.on(stream), world.device(0):
        for i in range(20):
            with world.device(1):
                world.delay()
            world.fill(x, float(i))
            world.launch(x)
            assert world.read(x) == [i + 1.0]
        assert runtime.get().current_device() == 0
        assert (current_handle(0), current_handle(1)) == (0, stream.cuda_stream)


def test_a_capture_on_the_other_device(two_devices: World) -> None:
    world = two_devices
    x, graph, stream = world.buffer([0.0], device=1), world.graph(), world.new_stream(1)
    with world.installed("strict"):
        with world.capture(graph, stream=stream), world.device(0):
            world.launch(x)
            world.launch(x, 0)
            world.launch(x, stream)
            assert runtime.get().current_device() == 0
            with pytest.raises(WrongStreamError, match="cuda:1"):
                world.launch_without_stream(x)
    assert world.read(x) == [0.0]
    world.fill(x, 10.0)
    graph.replay()
    assert world.read(x) == [13.0]


def test_a_capture_says_nothing_about_launches_on_the_other_device(two_devices: World) -> None:
    world = two_devices
    x, y, graph = world.buffer([0.0], device=0), world.buffer([0.0], device=1), world.graph()
    side = world.new_stream(1)
    with world.installed("check"):
        with world.capture(graph):
            world.launch(x, world.current_stream())
            with world.device(1):
                world.launch(y, side)
    world.synchronize(1)
    assert world.read(y) == [1.0]
    world.fill(x, 10.0)
    world.fill(y, 20.0)
    graph.replay()
    assert (world.read(x), world.read(y)) == ([11.0], [20.0])
