"""Group "threads": launches per second from several threads, each with a stream of its own."""

from __future__ import annotations

import contextlib
import threading
import timeit
from time import perf_counter
from typing import Any

import torch

from .machine import Machine
from .measuring import BIND, BURST, OFF, Form, Result, Variant, installed

GROUP = "threads"
COUNTS = (1, 2, 4, 8)
_BURSTS = 5


def run(machine: Machine, forms: list[Form], rounds: int) -> list[Result]:
    """ctypes, whose C function runs without the GIL."""
    form = next((f for f in forms if f.name == "ctypes"), None)
    if form is None:
        return []
    variants = {v.name: v for v in form.variants}
    pair = {OFF: variants["bare"], BIND: variants["shim, None"]}
    results = {
        (state, count): Result(
            GROUP, f"{count} thread{'s' * (count > 1)}, ctypes", "bare" if state == OFF else "shim", "1/s"
        )
        for count in COUNTS
        for state in (OFF, BIND)
    }
    for turn in range(rounds):
        for state in (OFF, BIND) if turn % 2 else (BIND, OFF):
            with installed(state):
                for count in COUNTS:
                    results[state, count].samples.append(_rate(machine, pair[state], count))
    return list(results.values())


def _rate(machine: Machine, variant: Variant, count: int) -> float:
    """Launches per second of so many threads together; each waits for its stream after a burst, outside the timing."""
    barrier = threading.Barrier(count)
    # From the first start to the last end: who gets the GIL first is over before others have begun.
    starts, ends = [[0.0] * count for _ in range(_BURSTS)], [[0.0] * count for _ in range(_BURSTS)]
    failed: list[BaseException] = []

    def work(number: int) -> None:
        try:
            with _stream(machine):
                names = {**variant.names, "handle": variant.names["raw"](0)}
                timer = timeit.Timer(variant.statement, globals=names)
                timer.timeit(30)
                for burst in range(_BURSTS):
                    machine.settle()
                    barrier.wait(timeout=60)
                    starts[burst][number] = perf_counter()
                    timer.timeit(BURST)
                    ends[burst][number] = perf_counter()
                    barrier.wait(timeout=60)
        except BaseException as error:  # noqa: BLE001, raised in the thread that asked
            failed.append(error)
            barrier.abort()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]
    taken = sorted(max(end) - min(start) for start, end in zip(starts, ends, strict=True))
    return count * BURST / taken[_BURSTS // 2]


def _stream(machine: Machine) -> Any:
    return torch.cuda.stream(torch.cuda.Stream()) if machine.gpu else contextlib.nullcontext()
