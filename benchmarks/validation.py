"""Group "validation": one layer of attention with its kernel alone, validated, and with a sample of it validated.

On a GPU what a replay takes, which is where the check goes on; without one what an eager call takes on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter_ns
from typing import Any

import torch

import streamshim

from .machine import Machine
from .measuring import OFF, Result, installed

GROUP, LAYERS, SAMPLE = "validation", 10, 10
#: The first is what the others are compared with.
ALONE, VALIDATED, SAMPLED = "bare", "validated", f"validated, sample={SAMPLE}"


def run(machine: Machine, rounds: int) -> list[Result]:
    """All variants, in turns."""
    device, dtype = ("cuda", torch.float16) if machine.gpu else ("cpu", torch.float32)
    q, k, v = (torch.randn(1, 8, 128, 64, device=device, dtype=dtype) for _ in range(3))
    kernel = torch.nn.functional.scaled_dot_product_attention
    loose = {"rtol": 1e-2, "atol": 1e-2}
    variants: dict[str, Callable[..., Any]] = {
        ALONE: kernel,
        VALIDATED: streamshim.validate(kernel, _reference, name="validated", **loose),
        SAMPLED: streamshim.validate(kernel, _reference, name="sampled", sample=SAMPLE, **loose),
    }
    with installed(OFF):
        if machine.gpu:
            results = _replays(machine, variants, (q, k, v), rounds)
        else:
            machine.missing["validation, replays"] = "needs a GPU"
            results = _calls(variants, (q, k, v), rounds)
    wrong = streamshim.validation_report().mismatches
    if wrong:
        raise RuntimeError(f"torch's attention and its reference differ:\n{streamshim.validation_report()}")
    return results


def _reference(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    scores = torch.matmul(q.float(), k.float().transpose(-1, -2)) * q.shape[-1] ** -0.5
    return torch.matmul(scores.softmax(-1), v.float()).to(q.dtype)


def _replays(
    machine: Machine, variants: dict[str, Callable[..., Any]], inputs: tuple[torch.Tensor, ...], rounds: int
) -> list[Result]:
    """The time that the GPU takes for a graph of some layers, for each layer."""
    graphs = {}
    for name, function in variants.items():
        function(*inputs)
        machine.settle()
        graphs[name] = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graphs[name]):
            for _ in range(LAYERS):
                function(*inputs)
    results = {name: Result(GROUP, f"replay of {LAYERS} layers, each", name, "us") for name in variants}
    for turn in range(rounds):
        for name in list(variants)[:: -1 if turn % 2 else 1]:
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            graphs[name].replay()
            begin.record()
            graphs[name].replay()
            end.record()
            end.synchronize()
            results[name].samples.append(begin.elapsed_time(end) * 1e3 / LAYERS)
    return list(results.values())


def _calls(variants: dict[str, Callable[..., Any]], inputs: tuple[torch.Tensor, ...], rounds: int) -> list[Result]:
    """The time of an eager call, of as many as one sample takes."""
    results = {name: Result(GROUP, "eager call on the CPU", name, "us") for name in variants}
    for turn in range(rounds):
        for name in list(variants)[:: -1 if turn % 2 else 1]:
            function = variants[name]
            start = perf_counter_ns()
            for _ in range(SAMPLE):
                function(*inputs)
            results[name].samples.append((perf_counter_ns() - start) / SAMPLE / 1e3)
    return list(results.values())
