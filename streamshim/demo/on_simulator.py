"""The demo's machine without a GPU: the simulator of streams, captures and graphs."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

from .. import capture, gate, runtime
from ..installer import install
from ..patching import PatchSet
from ..runtime.simulated import Buffer, Graph, Simulator
from .foreign import ForeignKernel
from .machine import Layer, Step
from .model import CHANNELS, PROMPT, weights


class SimulatedMachine:
    """`Machine` over `Simulator`. What torch would do is done by kernels that go to the current stream."""

    def __init__(self) -> None:
        self._sim = Simulator()
        self._weights = w = weights()
        self._token = self._sim.buffer([PROMPT])
        blank = [0.0] * CHANNELS
        self.buffers = tuple(self._sim.buffer(values) for values in (blank, blank, w.a, w.b, w.c, blank))
        self._x, self._h, *_, self._y = self.buffers

    def kernel(self) -> ForeignKernel:
        return ForeignKernel(self._sim)

    kernel_with_stream = kernel

    def current_stream(self) -> int:
        return self._sim.current_stream().cuda_stream

    @contextmanager
    def shim(self, mode: str) -> Iterator[None]:
        """streamshim over the simulator: its graphs take the place of torch's, and `ForeignKernel` binds itself."""
        before = runtime.use(self._sim)
        gate.connect(self._sim)
        graphs = PatchSet(capture.patches(Graph))
        try:
            graphs.apply()
            # No other library is to be bound: a binder that is off for its own reasons is not part of this story. Nor
            # is the watch, since nothing here launches below Python: without CUPTI it would say that it is off.
            with install(mode, only=(), watch=False):
                yield
        finally:
            graphs.undo()
            runtime.use(before)
            gate.connect(before)

    def reset(self) -> None:
        self._h.fill(0.0)
        self._token.fill(PROMPT)

    def step(self, layer: Layer) -> None:
        self._sim.launch(self._look_up, self._token, self._x, stream=self.current_stream(), name="look_up")
        layer()
        self._sim.launch(self._choose, self._y, self._token, stream=self.current_stream(), name="choose")

    def token(self) -> int:
        return int(self._sim.read(self._token)[0])

    def poison(self) -> None:
        self._y.fill(math.nan)

    def poisoned(self) -> bool:
        return all(math.isnan(value) for value in self._sim.read(self._y))

    def warm_up(self, step: Step) -> None:
        side, current = self._sim.new_stream(), self._sim.current_stream()
        side.wait_stream(current)
        with self._sim.stream(side):
            for _ in range(2):
                step()
        current.wait_stream(side)
        self._sim.synchronize()

    def capture(self, step: Step) -> Step:
        graph = self._sim.graph()
        with self._sim.capture(graph):
            step()
        self._sim.synchronize()
        return graph.replay

    def _look_up(self, token: Buffer, x: Buffer) -> None:
        x.values[:] = self._weights.embedding[int(token.values[0])]

    def _choose(self, y: Buffer, token: Buffer) -> None:
        rows = zip(self._weights.projection, self._weights.bias, strict=True)
        logits = [sum((p * v for p, v in zip(row, y.values, strict=True)), bias) for row, bias in rows]
        # As torch's argmax: NaN is the largest, and the first of several wins.
        nan = next((i for i, value in enumerate(logits) if math.isnan(value)), None)
        token.values[0] = float(nan if nan is not None else logits.index(max(logits)))
