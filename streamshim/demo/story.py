"""The story, told once for every machine: four acts, each with its tokens and what was seen of the kernel."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from ..errors import WrongStreamError
from ..findings import LaunchReport
from .machine import Kernel, Layer, Machine, Step
from .model import TOKENS


@dataclass(frozen=True)
class Refusal:
    """A launch that was refused, as strings: an error object would keep its frames, and so their tensors, alive.

    Attributes:
        text: the whole message.
        called_at: file, line and function of the launch.
        given: the stream that was passed.
        expected: the stream that it should have been.
    """

    text: str
    called_at: str
    given: str
    expected: str


@dataclass(frozen=True)
class Act:
    """What came out of one act.

    Attributes:
        name: a short name, for programs.
        tokens: the tokens.
        wrong_at: the places (from 0) where they differ from the tokens with graphs off.
        ran_while_capturing: the kernel ran, there and then, while the graph was captured; None without a graph.
        ran_in_replay: the kernel ran in a replay of the graph; None without a graph.
        refusal: the launch that strict mode refused.
        problem: what is not as it should be, or an empty string.
    """

    name: str
    tokens: list[int]
    wrong_at: list[int]
    ran_while_capturing: bool | None = None
    ran_in_replay: bool | None = None
    refusal: Refusal | None = None
    problem: str = ""


def tell(machine: Machine) -> list[Act]:
    """All four acts, in order. streamshim must not be installed; it is not afterwards either."""
    kernel = machine.kernel()
    layer = _layer(machine, kernel)
    eager = _graphs_off(machine, layer)
    bare = _graphs_on("graphs_on", machine, layer, eager.tokens)
    if not bare.wrong_at:
        bare = replace(bare, problem="right without streamshim, so there is nothing that it could repair")

    with machine.shim("bind"):
        # Compiled again: what a kernel does about its stream is settled when it is compiled.
        shimmed = _graphs_on("graphs_on_with_shim", machine, _layer(machine, machine.kernel()), eager.tokens)
    if shimmed.wrong_at:
        shimmed = replace(shimmed, problem="wrong tokens although streamshim is installed")

    with machine.shim("strict"):
        keeping = KeepingLayer(machine, machine.kernel_with_stream())
        strict = replace(_graphs_on("strict", machine, keeping, eager.tokens), refusal=keeping.refusal)
    if strict.refusal is None:
        strict = replace(strict, problem="a launch that escapes the capture was not refused")
    elif strict.wrong_at:
        strict = replace(strict, problem="wrong tokens after the refused launch was repeated on the right stream")
    return [eager, bare, shimmed, strict]


class KeepingLayer:
    """A layer that takes its stream when it is first called and keeps it, which is how most escapes are written.

    The first call is the warm-up's, on another stream than the capture's.

    Attributes:
        refusal: what strict mode said. From then on the layer takes the stream at each call.
    """

    def __init__(self, machine: Machine, kernel: Kernel) -> None:
        self._machine = machine
        self._kernel = kernel
        self._kept: Any = None
        self.refusal: Refusal | None = None

    def __call__(self) -> None:
        if self._kept is None:
            self._kept = self._machine.current_stream()
        if self.refusal is None:
            try:
                self._kernel(*self._machine.buffers, self._kept)
                return
            except WrongStreamError as error:
                report = error.report
                assert isinstance(report, LaunchReport)
                self.refusal = Refusal(str(error), str(report.site), report.given, report.expected)
        self._kernel(*self._machine.buffers, self._machine.current_stream())


def _layer(machine: Machine, kernel: Kernel) -> Layer:
    def layer() -> None:
        kernel(*machine.buffers)

    return layer


def _graphs_off(machine: Machine, layer: Layer) -> Act:
    def step() -> None:
        machine.step(layer)

    return Act("graphs_off", _decode(machine, step, step), [])


def _graphs_on(name: str, machine: Machine, layer: Layer, right: list[int]) -> Act:
    def step() -> None:
        machine.step(layer)

    machine.warm_up(step)
    machine.reset()
    machine.poison()
    replay = machine.capture(step)
    # Capturing records and executes nothing, so NaN is still there unless the kernel went elsewhere and ran.
    ran_while_capturing = not machine.poisoned()
    machine.poison()
    replay()
    ran_in_replay = not machine.poisoned()
    tokens = _decode(machine, step, replay)
    wrong_at = [i for i, (token, wanted) in enumerate(zip(tokens, right, strict=True)) if token != wanted]
    return Act(name, tokens, wrong_at, ran_while_capturing, ran_in_replay)


def _decode(machine: Machine, prompt: Step, step: Step) -> list[int]:
    """Write the tokens: the first with one kind of step, as an engine reads its prompt, all others with another."""
    machine.reset()
    tokens = []
    for i in range(TOKENS):
        # In every act, so that a kernel that does not run shows at once, and in the same way each time.
        machine.poison()
        (step if i else prompt)()
        tokens.append(machine.token())
    return tokens
