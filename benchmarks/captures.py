"""Group "in capture": what a launch, a capture's begin and end, and a large capture cost; and group "replay".

The variants "watch" and "redirect" are in bind mode, which does neither by itself; "redirect" launches on NULL, from a
library that streamshim does not know. Strict mode watches, and reads the graph when its capture ends.
"""

from __future__ import annotations

import contextlib
import gc
import timeit
from collections.abc import Iterator
from time import perf_counter_ns
from typing import Any

import torch

from streamshim import capture, gate, runtime
from streamshim.patching import PatchSet
from streamshim.runtime import CaptureState
from streamshim.runtime.simulated import Graph, Simulator

from .machine import STAND_IN, Machine
from .measuring import BIND, BURST, OFF, REDIRECT, STATES, STRICT, WATCH, Form, Result, Variant, installed, measure

GROUP, REPLAY = "in capture", "replay"
ONE = "capture of one launch"
LARGE, REPLAYED = 5_000, 1_000
PAIR = (("bare", OFF), ("shim", BIND))
WATCHED = (*PAIR, ("strict", STRICT), ("watch", WATCH), ("redirect", REDIRECT))
#: A launch on NULL of the form "ctypes", which is moved into the capture.
_ON_NULL = "bare(x, out, n, None)"


def run(machine: Machine, forms: list[Form], rounds: int) -> list[Result]:
    """All of the group that this machine can show.

    Args:
        forms: of the group "launch"; those whose variants bare and shim exist are launched in captures too.
    """
    chosen = [f for f in forms if {"bare", "shim"} <= {v.name for v in f.variants}]
    if machine.gpu:
        results = _launches(machine, chosen, rounds)
        of_ctypes = next((f for f in forms if f.name == "ctypes"), None)
        if of_ctypes is None:
            machine.missing["replay, whole captures"] = "they are made of ctypes calls"
            return results
        return [*results, *_whole(machine, of_ctypes, rounds), *_replay(machine, of_ctypes, rounds)]
    machine.missing["replay, launches in a capture"] = "needs a GPU"
    return [*_rows_of_the_rule(machine, rounds), *_whole_on_simulator(rounds)]


@contextlib.contextmanager
def _captured(machine: Machine) -> Iterator[Any]:
    """A capture, without what `torch.cuda.graph` does before: a garbage collection takes longer than all the rest.

    None may come by itself either: the DSL unloads the kernels of what is collected, which no capture survives.
    """
    graph = torch.cuda.CUDAGraph()
    machine.settle()
    gc.disable()
    try:
        with torch.cuda.stream(machine.side):
            graph.capture_begin()
            try:
                yield graph
            finally:
                graph.capture_end()
    finally:
        gc.enable()


def _launches(machine: Machine, forms: list[Form], rounds: int) -> list[Result]:
    """One launch in an open capture: the same statements as outside, but for the one that stays outside it."""
    forms = [f for f in forms if f.name != "TVM-FFI function, addresses"]
    chosen = [(f, v) for f in forms for v in f.variants if v.name in ("bare", "shim", "shim, None", "strict")]
    for form in forms:
        if form.name == "ctypes":
            shim = next(v for v in form.variants if v.name == "shim")
            chosen.append((form, Variant("watch", WATCH, shim.statement, shim.names)))
            chosen.append((form, Variant("redirect", REDIRECT, _ON_NULL, shim.names)))
    results = {(f.name, v.name): Result(GROUP, f.name, v.name, "ns") for f, v in chosen}
    for turn in range(rounds):
        for state in (*STATES[turn % len(STATES) :], *STATES[: turn % len(STATES)]):
            with installed(state):
                for form, variant in chosen:
                    if variant.state == state:
                        timer = timeit.Timer(variant.statement, globals=dict(variant.names))
                        timer.timeit(10)
                        with _captured(machine):
                            timer.timeit(10)
                            taken = timer.timeit(BURST) / BURST * 1e9
                        results[form.name, variant.name].samples.append(taken)
    return list(results.values())


def _whole(machine: Machine, ctypes_form: Form, rounds: int) -> list[Result]:
    """A capture with one launch from begin to end, and one with 5,000."""
    names = dict(ctypes_form.variants[0].names)
    statements = {v.name: v.statement for v in ctypes_form.variants}
    statements |= {"watch": statements["shim"], "redirect": _ON_NULL}
    results = []
    for count, name, unit, scale in ((1, ONE, "us", 1e3), (LARGE, f"capture of {LARGE:,} launches", "ms", 1e6)):
        pair = {state: Result(GROUP, name, variant, unit) for variant, state in WATCHED}
        for turn in range(rounds):
            for variant, state in WATCHED[:: -1 if turn % 2 else 1]:
                with installed(state):
                    timer = timeit.Timer(statements[variant], globals=names)
                    timer.timeit(10)
                    # What is done once in a process, or after each install, is done now.
                    with _captured(machine):
                        timer.timeit(1)
                    machine.settle()
                    start = perf_counter_ns()
                    with _captured(machine):
                        timer.timeit(count)
                    pair[state].samples.append((perf_counter_ns() - start) / scale)
        results += pair.values()
    return results


def _replay(machine: Machine, ctypes_form: Form, rounds: int) -> list[Result]:
    """A graph of 1,000 launches, captured without and with streamshim; the time that the GPU takes for it."""
    variants, graphs = {v.name: v for v in ctypes_form.variants}, {}
    for name, state in PAIR:
        with installed(state):
            timer = timeit.Timer(variants[name].statement, globals=dict(variants[name].names))
            timer.timeit(10)
            with _captured(machine) as graphs[name]:
                timer.timeit(REPLAYED)
    results = {name: Result(REPLAY, f"graph of {REPLAYED:,} launches", name, "us") for name, _ in PAIR}
    for turn in range(2 * rounds):
        for name, state in PAIR[:: -1 if turn % 2 else 1]:
            with installed(state):
                begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                graphs[name].replay()
                begin.record()
                graphs[name].replay()
                end.record()
                end.synchronize()
                results[name].samples.append(begin.elapsed_time(end) * 1e3)
    return list(results.values())


def _rows_of_the_rule(machine: Machine, rounds: int) -> list[Result]:
    """Without a GPU: the rule's rows while the current stream captures, asked of a stand-in for the driver."""
    asked: Any = runtime.get()
    fork, other = STAND_IN + 0x100, STAND_IN + 0x200
    names = {"resolve": gate.resolve, "launch": gate.Launch("a kernel"), "now": STAND_IN, "fork": fork, "other": other}
    rows = {
        "the current stream": "resolve(now, 0, launch)",
        "a default stream": "resolve(0, 0, launch)",
        "a stream of the same capture": "resolve(fork, 0, launch)",
    }
    form = Form(GROUP, "the rule", tuple(Variant(name, BIND, row, names) for name, row in rows.items()))
    asked.captures.update({STAND_IN: CaptureState(7), fork: CaptureState(7)})
    try:
        return measure([form], rounds, machine.settle)
    finally:
        asked.captures.clear()


def _whole_on_simulator(rounds: int) -> list[Result]:
    """Without a GPU: begin and end of a capture on the simulator, whose own cost is the same in both variants."""
    simulator = Simulator()
    results = {name: Result(GROUP, "capture of nothing, simulated", name, "us") for name, _ in PAIR}
    with _connected(simulator):
        for turn in range(rounds):
            for name, state in PAIR[:: -1 if turn % 2 else 1]:
                with installed(state):
                    patches = PatchSet(capture.patches(Graph) if name == "shim" else [])
                    patches.apply()
                    try:
                        results[name].samples.append(_begin_and_end(simulator) / 1e3)
                    finally:
                        patches.undo()
    return list(results.values())


def _begin_and_end(simulator: Any) -> float:
    stream, times = simulator.new_stream(), []
    for _ in range(20):
        graph = simulator.graph()
        start = perf_counter_ns()
        with simulator.capture(graph, stream):
            pass
        times.append(perf_counter_ns() - start)
    return sorted(times)[len(times) // 2]


@contextlib.contextmanager
def _connected(other: Any) -> Iterator[None]:
    before = runtime.use(other)
    gate.connect(other)
    try:
        yield
    finally:
        runtime.use(before)
        gate.connect(before)
