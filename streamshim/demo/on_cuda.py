"""The demo's machine with a GPU: torch, and a CuTe DSL kernel compiled with TVM-FFI."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager
from typing import Any

import torch
from cuda.bindings import driver

from ..installer import install
from . import kernels
from .machine import Kernel, Layer, Step
from .model import CHANNELS, PROMPT, weights


class CudaMachine:
    """`Machine` over torch, on the current device.

    All tensors of a step are made here, so that a graph and the eager steps work on the same memory.
    """

    def __init__(self) -> None:
        w = weights()
        self._embedding, self._projection, self._bias = map(_on_gpu, (w.embedding, w.projection, w.bias))
        self._token = torch.full((1,), PROMPT, dtype=torch.int64, device="cuda")
        self._row = _on_gpu([[0.0] * CHANNELS])
        x, h, y = self._row[0], _on_gpu([0.0] * CHANNELS), _on_gpu([0.0] * CHANNELS)
        self.buffers = (x, h, _on_gpu(w.a), _on_gpu(w.b), _on_gpu(w.c), y)
        self._h, self._y = h, y

    def kernel(self) -> Kernel:
        compiled: Kernel = kernels.compile_update()
        return compiled

    def kernel_with_stream(self) -> Kernel:
        compiled: Kernel = kernels.compile_update_with_stream()
        return compiled

    def current_stream(self) -> Any:
        return driver.CUstream(torch.cuda.current_stream().cuda_stream)

    def shim(self, mode: str) -> AbstractContextManager[object]:
        # Only CuTe DSL is to be bound: in strict mode, any other library of a version that streamshim does not know
        # would be an error, and that is not part of this story.
        return install(mode, only=["cute"])

    def reset(self) -> None:
        self._h.zero_()
        self._token.fill_(PROMPT)

    def step(self, layer: Layer) -> None:
        torch.index_select(self._embedding, 0, self._token, out=self._row)
        layer()
        logits = torch.addmv(self._bias, self._projection, self._y)
        self._token.copy_(logits.argmax(dim=0, keepdim=True))

    def token(self) -> int:
        return int(self._token.item())

    def poison(self) -> None:
        self._y.fill_(math.nan)

    def poisoned(self) -> bool:
        # The whole device: without streamshim the kernel runs on a stream that the current one does not wait for.
        torch.cuda.synchronize()
        return bool(self._y.isnan().all().item())

    def warm_up(self, step: Step) -> None:
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        current = torch.cuda.current_stream()
        side.wait_stream(current)
        with torch.cuda.stream(side):
            for _ in range(2):
                step()
        current.wait_stream(side)
        torch.cuda.synchronize()

    def capture(self, step: Step) -> Step:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        torch.cuda.synchronize()
        replay: Step = graph.replay
        return replay


def _on_gpu(values: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32, device="cuda")
