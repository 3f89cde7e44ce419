"""The table of `streamshim.guards.syncs` as it is seen from outside: which calls break which captures, from which
thread, without streamshim and with it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from worlds import Worker, World

from streamshim import CaptureInvalidatedError, HostSyncError, allow, capture, ledger, runtime

MODES = ("global", "thread_local", "relaxed")

#: What a row has at hand: the world, a buffer, the capturing stream, another stream, and an event that was recorded.
Scene = tuple[World, Any, Any, Any, Any]

#: Row -> (the call, in which modes it breaks the capture when its own thread calls, the same for another thread).
ROWS: dict[str, tuple[Callable[..., object], str, str]] = {
    "wait for the device": (lambda w, x, main, side, event: w.synchronize(), "gtr", "gtr"),
    "wait for the capturing stream": (lambda w, x, main, side, event: main.synchronize(), "gtr", "gtr"),
    "ask the capturing stream": (lambda w, x, main, side, event: main.query(), "gtr", "gtr"),
    "wait for another stream": (lambda w, x, main, side, event: side.synchronize(), "gt", "g"),
    "ask another stream": (lambda w, x, main, side, event: side.query(), "gt", "g"),
    "wait for an event": (lambda w, x, main, side, event: event.synchronize(), "gt", "g"),
    "ask an event": (lambda w, x, main, side, event: event.query(), "gt", "g"),
    "wait for an event that was never recorded": (lambda w, x, main, side, event: w.event().synchronize(), "", ""),
    "read a value": (lambda w, x, main, side, event: w.value(x), "gtr", "g"),
    "allocate": (lambda w, x, main, side, event: w.malloc(), "gt", "g"),
}


def scene(world: World) -> Scene:
    """What the rows need, made before the capture."""
    event = world.event()
    world.current_stream().record_event(event)
    world.synchronize()
    return world, world.buffer([0.0]), world.new_stream(), world.new_stream(), event


def breaks(row: str, by_other: bool, error_mode: str) -> bool:
    return error_mode[0] in ROWS[row][2 if by_other else 1]


@pytest.mark.parametrize("by_other", [False, True])
@pytest.mark.parametrize("error_mode", MODES)
@pytest.mark.parametrize("row", ROWS)
def test_without_streamshim(world: World, worker: Worker, row: str, error_mode: str, by_other: bool) -> None:
    at_hand = scene(world)
    y, graph, call = world.buffer([0.0]), world.graph(), ROWS[row][0]

    def capture_it() -> None:
        with world.capture(graph, error_mode, at_hand[2]):
            world.fill(y, 5.0)
            worker(call, *at_hand) if by_other else call(*at_hand)

    if breaks(row, by_other, error_mode):
        with pytest.raises(RuntimeError):
            capture_it()
        return
    capture_it()
    world.fill(y, 10.0)
    graph.replay()
    assert world.read(y) == [5.0]


@pytest.mark.parametrize("by_other", [False, True])
@pytest.mark.parametrize("error_mode", MODES)
@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("mode", ["bind", "strict", "check"])
def test_what_would_break_the_capture_is_refused_and_the_capture_goes_on(
    world: World, worker: Worker, row: str, error_mode: str, by_other: bool, mode: str
) -> None:
    at_hand = scene(world)
    y, graph, call = world.buffer([0.0]), world.graph(), ROWS[row][0]
    with world.installed(mode), world.capture(graph, error_mode, at_hand[2]):
        world.fill(y, 5.0)
        if breaks(row, by_other, error_mode):
            with pytest.raises(HostSyncError) as refused:
                worker(call, *at_hand) if by_other else call(*at_hand)
            assert refused.value.report.site.file.endswith("test_sync_table.py")
            assert refused.value.report.thread == ("second_0" if by_other else "")
        else:
            worker(call, *at_hand) if by_other else call(*at_hand)
        assert runtime.get().capture_state(at_hand[2].cuda_stream).valid
        world.launch(y, at_hand[2])
    world.fill(y, 10.0)
    graph.replay()
    assert world.read(y) == [6.0]


def test_what_is_allowed_reaches_cuda_and_is_named_as_the_cause(world: World) -> None:
    at_hand, y = scene(world), world.buffer([0.0])
    main, again = at_hand[2], world.graph()

    def capture_it() -> None:
        with world.capture(world.graph(), "global", main):
            world.fill(y, 5.0)
            with allow("sync", reason="to see what happens"):
                main.synchronize()

    with world.installed("bind"):
        with pytest.raises(CaptureInvalidatedError) as lost:
            capture_it()
        assert ledger.counts()["allowed sync"] == 1
        assert capture.open_windows() == []
        assert "Stream.synchronize(), at " in str(lost.value)
        assert "which streamshim.allow let through" in " ".join(str(lost.value).split())
        with world.capture(again, "global", main):
            world.launch(y)
    world.fill(y, 10.0)
    again.replay()
    assert world.read(y) == [11.0]
