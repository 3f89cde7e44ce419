"""Variants of the same call side by side: interleaved in one process, in bursts, as medians with their spread."""

from __future__ import annotations

import statistics
import sys
import timeit
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import streamshim

#: What is installed while a variant runs: nothing, or streamshim in a mode; in bind mode also with watch or redirect.
OFF, BIND, STRICT, WATCH, REDIRECT = "off", "bind", "strict", "watch", "redirect"
STATES = (OFF, BIND, STRICT, WATCH, REDIRECT)

#: Launches in a burst: what the launch queue holds (1,024) is not reached, so that no launch waits for the GPU.
BURST = 300
_WARM_UP = 30


@dataclass(frozen=True)
class Variant:
    """One way to do the same.

    Attributes:
        name: for instance "bare"; unique in its form.
        state: what is installed while it runs.
        statement: what is timed, as `timeit` takes it.
        names: the globals of the statement.
    """

    name: str
    state: str
    statement: str
    names: Mapping[str, Any]


@dataclass(frozen=True)
class Form:
    """What is compared: the variants of one form of launch."""

    group: str
    name: str
    variants: tuple[Variant, ...]


@dataclass
class Result:
    """The samples of one variant, one for each round, in the order of the rounds; the same round for all variants.

    Attributes:
        unit: of the samples: "ns" per call, "us", "ms", "1/s", or "blocks".
    """

    group: str
    form: str
    variant: str
    unit: str
    samples: list[float] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """For JSON, with median and spread."""
        low, middle, high = spread(self.samples)
        summary = {"median": round(middle, 3), "p10": round(low, 3), "p90": round(high, 3)}
        return {
            "group": self.group, "form": self.form, "variant": self.variant, "unit": self.unit, **summary,
            "samples": [round(sample, 3) for sample in self.samples],
        }  # fmt: skip


def spread(samples: Iterable[float]) -> tuple[float, float, float]:
    """The 10th percentile, the median and the 90th percentile."""
    values = sorted(samples)
    if len(values) < 2:
        return values[0], values[0], values[0]
    tenths = statistics.quantiles(values, n=10, method="inclusive")
    return tenths[0], statistics.median(values), tenths[-1]


@contextmanager
def installed(state: str) -> Iterator[None]:
    """streamshim in this state for a block."""
    if state == OFF:
        streamshim.uninstall()
        yield
        return
    more = {state: True} if state in (WATCH, REDIRECT) else {}
    with streamshim.install(BIND if more else state, **more):
        yield


def measure(forms: Iterable[Form], rounds: int, settle: Callable[[], Any], burst: int = BURST) -> list[Result]:
    """Time all variants of all forms, in as many rounds.

    In each round every variant runs one burst: form by form, and in each form the states in turn. So the variants of a
    form come within milliseconds of each other, what the machine does meanwhile meets them alike, and a ratio of two of
    them can be taken round by round.

    Args:
        settle: waits for the device; called outside the timing.
    """
    forms = list(forms)
    results = {(f.name, v.name): Result(f.group, f.name, v.name, "ns") for f in forms for v in f.variants}
    timers = {(f.name, v.name): timeit.Timer(v.statement, globals=dict(v.names)) for f in forms for v in f.variants}
    for turn in range(rounds):
        for form in forms:
            for state in (*STATES[turn % len(STATES) :], *STATES[: turn % len(STATES)]):
                mine = [v.name for v in form.variants if v.state == state]
                if not mine:
                    continue
                with installed(state):
                    for name in mine:
                        timer = timers[form.name, name]
                        timer.timeit(_WARM_UP)
                        settle()
                        results[form.name, name].samples.append(timer.timeit(burst) / burst * 1e9)
                        settle()
        print(".", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return list(results.values())
