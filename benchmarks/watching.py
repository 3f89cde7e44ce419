"""Group "watch": what launches outside captures cost after one was watched, which is when CUPTI is left again.

Each process measures bursts, captures once under streamshim, and measures bursts again; half of the processes watch
that capture and half do not. What CUPTI leaves behind stays, so a process can be used once.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from .machine import Machine
from .measuring import Result

GROUP = "watch"
PROCESSES = 6
FORMS = {True: "launch, before and after a watched capture", False: "the same, capture not watched"}

_CHILD = """
import gc, json, statistics, sys, time, timeit
import torch
import streamshim

x = torch.zeros(8, device="cuda")
stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
timer = timeit.Timer("x.add_(1)", globals={"x": x})

def bursts(count):
    taken = []
    for _ in range(count):
        torch.cuda.synchronize()
        timer.timeit(20)
        torch.cuda.synchronize()
        taken.append(timer.timeit(300) / 300 * 1e9)
    # Whatever else the machine does only adds to a burst; a difference of one percent would drown in it.
    return statistics.quantiles(taken, n=10)[0]

gc.disable()
bursts(100)
before = bursts(300)
with streamshim.install("bind", watch=WATCH):
    with torch.cuda.graph(graph, stream=stream):
        x.add_(1)
    assert not streamshim.status().guards_off, streamshim.status().guards_off
    # A while later CUPTI is given back.
    time.sleep(1.1)
    gc.collect()
    from streamshim.runtime import cupti
    assert not WATCH or not cupti.found()._resting
print(json.dumps([before, bursts(300)]))
"""


def run(machine: Machine) -> list[Result]:
    """Nanoseconds of a launch, for each process the 10th percentile before and after."""
    if not machine.gpu:
        machine.missing[GROUP] = "needs a GPU"
        return []
    results = {(w, v): Result(GROUP, form, v, "ns") for w, form in FORMS.items() for v in ("bare", "after")}
    for _ in range(PROCESSES):
        for watch in (True, False):
            for variant, taken in zip(("bare", "after"), _one(watch), strict=True):
                results[watch, variant].samples.append(taken)
    return list(results.values())


def _one(watch: bool) -> list[float]:
    code, root = _CHILD.replace("WATCH", str(watch)), Path(__file__).parents[1]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, check=True, capture_output=True, text=True)
    return [float(value) for value in json.loads(done.stdout)]
