"""What a refusal or a rescue says: enough to go to the line and change it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from worlds import Worker, World

from streamshim import RescuedLaunchWarning, WrongStreamError, current_handle, ledger, runtime

FILE = Path(__file__)


def line_below(distance: int = 1) -> int:
    """The number of a line below the caller's."""
    return sys._getframe(1).f_lineno + distance


def at(line: int, function: str) -> str:
    """How a line of this file reads in a report, up to the part of the path that depends on the working directory."""
    return f"{FILE.name}:{line} in {function}"


def test_a_refused_launch(world: World) -> None:
    x, graph, side = world.buffer([0.0]), world.graph(), world.new_stream()
    with world.installed("strict"):
        begun = line_below()
        with world.capture(graph):
            world.launch(x)
            main = current_handle()
            capture = runtime.get().capture_state(main).id
            line = line_below(2)
            with pytest.raises(WrongStreamError) as caught:
                world.launch(x, side)
        event = ledger.events()[-1]
    report, text = caught.value.report, str(caught.value)
    assert text.startswith("Launch refused")
    assert at(line, "test_a_refused_launch") in text
    assert "world.launch(x, side)" in text
    assert "add_one" in report.launch or "with_stream" in report.launch
    assert hex(side.cuda_stream) in report.given
    assert "not capturing" in report.given
    assert hex(main) in report.expected
    assert "cuda:0" in report.expected
    assert f"capture {capture} " in report.capture
    assert at(begun, "test_a_refused_launch") in report.capture
    assert "MainThread" in report.capture
    assert report.mode == "strict"
    assert "streamshim.allow" in text
    assert (event.kind, event.given, event.current, event.capture) == (
        "refused launch",
        side.cuda_stream,
        main,
        capture,
    )
    assert event.site.line == line


def test_a_rescued_launch(world: World) -> None:
    x, graph, side = world.buffer([0.0]), world.graph(), world.new_stream()
    with world.installed("bind"), world.capture(graph):
        main = current_handle()
        line = line_below(2)
        with pytest.warns(RescuedLaunchWarning) as caught:
            world.launch(x, side)
    (warning,) = caught
    text = str(warning.message)
    assert (Path(warning.filename).name, warning.lineno) == (FILE.name, line)
    assert at(line, "test_a_rescued_launch") in text
    assert hex(side.cuda_stream) in text
    assert hex(main) in text
    assert "moved onto the capturing stream" in text


def test_a_launch_without_a_stream_in_check_mode(world: World) -> None:
    x, marker, graph = world.buffer([0.0]), world.buffer([0.0]), world.graph()
    with world.installed("check"), world.capture(graph):
        world.fill(marker, 5.0)
        line = line_below(2)
        with pytest.raises(WrongStreamError) as caught:
            world.launch(x, 0)
    assert at(line, "test_a_launch_without_a_stream_in_check_mode") in str(caught.value)
    assert "the NULL stream (0)" in caught.value.report.given
    assert caught.value.report.mode == "check"
    assert any("bind mode" in step for step in caught.value.report.remedy)


def test_a_kernel_that_cannot_be_bound(world: World) -> None:
    x, marker, graph = world.buffer([0.0]), world.buffer([0.0]), world.graph()
    with world.installed("bind"), world.capture(graph):
        world.fill(marker, 5.0)
        line = line_below(2)
        with pytest.raises(WrongStreamError) as caught:
            world.launch_without_stream(x)
    assert at(line, "test_a_kernel_that_cannot_be_bound") in str(caught.value)
    assert "built in" in caught.value.report.given
    assert caught.value.report.remedy


def test_the_stream_of_another_capture(world: World, worker: Worker) -> None:
    x, marker, mine, theirs = world.buffer([0.0]), world.buffer([0.0]), world.graph(), world.graph()
    state = runtime.get().capture_state
    with world.installed("bind"), world.capture(mine, "thread_local"):
        world.fill(marker, 5.0)
        here = state(current_handle()).id
        with worker.inside(world.capture(theirs, "thread_local", world.new_stream())):
            worker(world.fill, marker, 7.0)
            other = worker(current_handle)
            there = state(other).id
            with pytest.raises(WrongStreamError) as caught:
                world.launch(x, other)
    report = caught.value.report
    assert hex(other) in report.given
    assert f"capture {there} " in report.given
    assert "second_0" in report.given
    assert f"capture {here} " in report.capture
