"""What a launch may cost, as data. A budget is missed by finding out why and trying another way, not by raising it.

On a GPU budgets are ratios in one run, where a launch takes 5 to 10 µs. Without one there is no launch, so the same
work weighs more; there they are nanoseconds that are added to a call of a no-op of the same library.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from .measuring import spread

RATIO, LEAST, ADDED, VALUE = "ratio", "least", "added", "value"


@dataclass(frozen=True)
class Budget:
    """One limit.

    Attributes:
        group, form, variant: what is limited.
        kind: `RATIO` and `ADDED` are against another variant of the same form, round by round; `LEAST` is the ratio of
            the 10th percentiles of both, where a machine's noise, which only adds, is more than what is measured;
            `VALUE` is the median.
        at_most: the limit.
        against: the variant that it is compared with.
        gpu: whether it holds on a GPU or without one; None: on both.
        unit: of the limit, for `ADDED`.
    """

    group: str
    form: str
    variant: str
    kind: str
    at_most: float
    against: str = ""
    gpu: bool | None = True
    unit: str = "ns"

    @property
    def words(self) -> str:
        """The budget as a person reads it."""
        against = f" against {self.against}" if self.against else ""
        return f"{self.form}: {self.variant}{against}"


_FFI, _FFI_STREAM, _PLAIN = "CuTe TVM-FFI, no stream", "CuTe TVM-FFI, stream argument", "CuTe plain, stream argument"
_TENSORS, _ADDRESSES = "TVM-FFI function, torch tensors", "TVM-FFI function, addresses"
_FORMS = (_FFI_STREAM, _PLAIN, "ctypes", _TENSORS, _ADDRESSES, "cuLaunchKernel", "cuda.core.launch")

BUDGETS = (
    Budget("launch", _FFI, "shim", RATIO, 1.02, "native"),
    Budget("launch", _FFI, "shim, environment stream", RATIO, 1.02, "native"),
    Budget("launch", _FFI_STREAM, "shim", RATIO, 1.10, "bare"),
    Budget("launch", _FFI_STREAM, "shim", RATIO, 0.60, "hand-written"),
    Budget("launch", _PLAIN, "shim", RATIO, 0.80, "hand-written"),
    Budget("launch", "ctypes", "shim", RATIO, 1.10, "bare"),
    Budget("launch", "ctypes", "shim", RATIO, 0.60, "hand-written"),
    Budget("launch", _TENSORS, "shim", RATIO, 1.02, "bare"),
    Budget("launch", _ADDRESSES, "shim", RATIO, 1.15, "bare"),
    Budget("launch", "cuLaunchKernel", "shim", RATIO, 1.15, "bare"),
    *(Budget("launch", form, "strict", RATIO, 1.05, "shim") for form in (_FFI, *_FORMS)),
    Budget("launch", "ctypes", "shim", ADDED, 250, "bare", gpu=False),
    Budget("launch", "ctypes", "shim, None", ADDED, 250, "bare", gpu=False),
    Budget("launch", _TENSORS, "shim", ADDED, 20, "bare", gpu=False),
    Budget("launch", _ADDRESSES, "shim", ADDED, 400, "bare", gpu=False),
    Budget("launch", "cuLaunchKernel", "shim", ADDED, 250, "bare", gpu=False),
    Budget("launch", "cuLaunchKernel", "shim, 0", ADDED, 250, "bare", gpu=False),
    Budget("in capture", "ctypes", "watch", ADDED, 6_000, "shim"),
    Budget("in capture", "capture of one launch", "watch", ADDED, 150, "shim", unit="us"),
    # Within noise: the two graphs are the same.
    Budget("replay", "graph of 1,000 launches", "shim", RATIO, 1.01, "bare"),
    Budget("process", "import streamshim, install()", "shim", VALUE, 15, gpu=None),
    # Not to be told from noise.
    Budget("process", "a process that does nothing", "start-up file, inactive", LEAST, 1.02, "bare", gpu=None),
    # One block in ten thousand launches would be noise of the interpreter; a leak keeps one at each.
    *(
        Budget("process", f"memory kept per million launches, {form}", "shim", VALUE, 100, gpu=None)
        for form in ("ctypes", _FFI_STREAM)
    ),
)


def check(results: Iterable[Mapping[str, Any]], gpu: bool) -> list[dict[str, Any]]:
    """Each budget that holds here, with what was measured and whether it was met.

    Args:
        results: as `Result.to_dict` makes them.
        gpu: whether they were measured on a GPU.
    """
    samples = {(r["group"], r["form"], r["variant"]): r["samples"] for r in results}
    checked = []
    for budget in BUDGETS:
        mine = samples.get((budget.group, budget.form, budget.variant))
        other = samples.get((budget.group, budget.form, budget.against))
        if mine is None or (budget.against and other is None) or budget.gpu not in (None, gpu):
            continue
        low, value, high = spread(_compared(budget.kind, mine, other or mine))
        checked.append(
            {
                "budget": budget.words, "kind": budget.kind, "at_most": budget.at_most, "unit": budget.unit,
                "value": round(value, 3), "p10": round(low, 3), "p90": round(high, 3), "met": value <= budget.at_most,
            }
        )  # fmt: skip
    return checked


def _compared(kind: str, mine: list[float], other: list[float]) -> list[float]:
    if kind == VALUE:
        return mine
    if kind == LEAST:
        return [spread(mine)[0] / spread(other)[0]]
    pairs = list(zip(mine, other, strict=True))
    return [a / b for a, b in pairs] if kind == RATIO else [a - b for a, b in pairs]
