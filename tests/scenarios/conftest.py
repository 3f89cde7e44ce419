"""The worlds that the scenarios run in: the simulator always, CUDA where there is a GPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import worlds

from streamshim import callsite, capture, gate, runtime


@pytest.fixture(params=["simulated", pytest.param("cuda", marks=pytest.mark.gpu)])
def world(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[worlds.World]:
    """A world in place as streamshim's runtime; nothing is installed in it."""
    yield from _in_place(request, monkeypatch)


@pytest.fixture(params=["simulated", pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.two_gpus])])
def two_devices(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[worlds.World]:
    """As `world`, with two devices at least."""
    yield from _in_place(request, monkeypatch)


@pytest.fixture
def worker() -> Iterator[worlds.Worker]:
    """A second thread."""
    with worlds.Worker() as second:
        yield second


@pytest.fixture(scope="session")
def cuda() -> worlds.World:
    """Kept for the session, since its kernels take seconds to compile."""
    return worlds.CudaWorld()


def _in_place(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[worlds.World]:
    world = worlds.SimulatedWorld(devices=2) if request.param == "simulated" else request.getfixturevalue("cuda")
    # A world stands for the foreign library, so the user's line is the test's.
    monkeypatch.setattr(callsite, "MACHINERY", callsite.MACHINERY | {worlds.__name__.partition(".")[0]})
    asked = gate.current_handle
    before = runtime.use(world.runtime)
    gate.connect(world.runtime)
    try:
        yield world
        world.tidy()
    finally:
        runtime.use(before)
        gate.current_handle = asked
        # What one scenario leaves open must not fail the next.
        capture._windows.clear()
