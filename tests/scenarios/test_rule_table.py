"""Every row of the rule, in every mode, by what becomes of the launch and not by what is said about it.

The kernel adds 1 in place, so it shows where it went: in a capture it either ran at once, or at replay, or not at all;
eagerly it either waited its turn on the current stream or ran ahead.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from worlds import Worker, World

from streamshim import RescuedLaunchWarning, WrongStreamError, ledger
from streamshim.gate import Verdict

PASS, BIND, RESCUE = Verdict.PASS, Verdict.BIND, Verdict.RESCUE
ESCAPE, OTHER, UNBOUND = Verdict.REFUSE_ESCAPE, Verdict.REFUSE_OTHER_CAPTURE, Verdict.REFUSE_UNBOUND
REFUSALS = (ESCAPE, OTHER, UNBOUND)

MODES = ("bind", "strict", "check")
CURRENT, FORK = "the current stream", "a fork"
RULE = {
    #                        current stream not capturing   capturing
    # given                   bind  strict check             bind     strict   check
    CURRENT: ((PASS, PASS, PASS), (PASS, PASS, PASS)),
    "nothing": ((BIND, BIND, PASS), (BIND, BIND, ESCAPE)),
    "NULL": ((BIND, BIND, PASS), (BIND, BIND, ESCAPE)),
    "legacy": ((BIND, BIND, PASS), (BIND, BIND, ESCAPE)),
    "per-thread default": ((BIND, BIND, PASS), (BIND, BIND, ESCAPE)),
    "a side stream": ((PASS, PASS, PASS), (RESCUE, ESCAPE, ESCAPE)),
    FORK: (None, (PASS, PASS, PASS)),
    "another capture": (None, (OTHER, OTHER, OTHER)),
    "no parameter": ((PASS, PASS, PASS), (UNBOUND, UNBOUND, UNBOUND)),
}
EAGER = [(given, *case) for given, (eager, _) in RULE.items() if eager for case in zip(MODES, eager, strict=True)]
CAPTURING = [(given, *case) for given, (_, capturing) in RULE.items() for case in zip(MODES, capturing, strict=True)]


def call(world: World, given: str) -> Callable[[Any, Any], None]:
    """How the kernel is called; the second argument is the stream that is not the current one."""
    handles = {"NULL": 0, "legacy": 1, "per-thread default": 2}
    if given == "no parameter":
        return lambda x, other: world.launch_without_stream(x)
    if given == "nothing":
        return lambda x, other: world.launch(x)
    if given == CURRENT:
        return lambda x, other: world.launch(x, world.current_stream())
    return lambda x, other: world.launch(x, handles.get(given, other))


@contextmanager
def rescues(expected: int) -> Iterator[None]:
    """The block warns of this many rescued launches."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        yield
    assert len([w for w in seen if w.category is RescuedLaunchWarning]) == expected


def follows(given: str, verdict: Verdict) -> bool:
    """Whether the launch goes where torch's current work goes. One that passes does so only if it was right before."""
    return verdict in (BIND, RESCUE) or (verdict is PASS and given in (CURRENT, FORK))


@pytest.mark.parametrize(("given", "mode", "verdict"), EAGER)
def test_eager(world: World, given: str, mode: str, verdict: Verdict) -> None:
    x = world.buffer([0.0])
    current, side = world.new_stream(), world.new_stream()
    launch = call(world, given)
    with world.installed(mode), rescues(0), world.on(current):
        world.delay()
        world.fill(x, 5.0)
        launch(x, side)
        assert world.current_stream() == current
    world.synchronize()
    assert world.read(x) == [6.0 if follows(given, verdict) else 5.0]


@pytest.mark.parametrize(("given", "mode", "verdict"), CAPTURING)
def test_capturing(world: World, worker: Worker, given: str, mode: str, verdict: Verdict) -> None:
    x, marker = world.buffer([1.0]), world.buffer([0.0])
    side = world.new_stream()
    graph, other_graph = world.graph(), world.graph()
    launch = call(world, given)
    with world.installed(mode), rescues(int(verdict is RESCUE)):
        with world.capture(graph, error_mode="thread_local"):
            world.fill(marker, 5.0)
            main = world.current_stream()
            if given == FORK:
                side.wait_stream(main)
            if given == "another capture":
                with worker.inside(world.capture(other_graph, "thread_local", side)):
                    worker(world.fill, marker, 7.0)
                    with pytest.raises(WrongStreamError):
                        launch(x, side)
            elif verdict in REFUSALS:
                with pytest.raises(WrongStreamError):
                    launch(x, side)
            else:
                launch(x, side)
            if given == FORK:
                main.wait_stream(side)
        counts = ledger.counts()
    expected = {RESCUE: {"rescued launch": 1}, PASS: {}, BIND: {}}.get(verdict, {"refused launch": 1})
    assert counts == expected

    # Nothing ran while capturing, whatever the verdict: what would have was bound, moved or refused.
    assert world.read(x) == [1.0]
    assert world.read(marker) == [0.0]
    world.fill(x, 10.0)
    graph.replay()
    assert world.read(marker) == [5.0]
    assert world.read(x) == [11.0 if follows(given, verdict) else 10.0]
