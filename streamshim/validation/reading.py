"""What a report says, as objects, as text and as JSON."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

#: How many places of mismatches the text names for each output.
SHOWN = 5


@dataclass(frozen=True)
class Mismatch:
    """Where an output was wrong: in the eager calls on one stream, or in the replays of one captured call.

    Attributes:
        where: in words, for instance "replays of captured call 2 (capture 7)".
        count: how many of them were wrong.
        first: the number of the first wrong one, from 1.
        index: the first wrong element of that one; a number in row-major order where the shape is not known.
    """

    where: str
    count: int
    first: int
    index: tuple[int, ...] | int

    def __str__(self) -> str:
        index = list(self.index) if isinstance(self.index, tuple) else self.index
        return f"{self.count} in {self.where}; the first is number {self.first}, from element {index} on"


@dataclass(frozen=True)
class Row:
    """The counts of one output, for one call site and one set of shapes.

    Attributes:
        function: the name of the validated function.
        site: the user's line; "other call sites and shapes" where they are counted together.
        inputs: the input tensors, in words.
        output: the name of the output.
        tensor: its type and shape, in words.
        calls: how many eager calls were compared.
        captured: how many calls were captured into graphs.
        replays: how often these were replayed, compared or not.
        checked: how many calls and replays were compared.
        mismatches: how many of these were wrong.
        bad_elements: how many elements were wrong, of all of these together.
        max_abs, max_rel: the greatest errors of all that was compared, within the tolerance or not.
        rtol, atol: the tolerances.
        bad: where it was wrong.
    """

    function: str
    site: str
    inputs: str
    output: str
    tensor: str
    calls: int
    captured: int
    replays: int
    checked: int
    mismatches: int
    bad_elements: int
    max_abs: float
    max_rel: float
    rtol: float
    atol: float
    bad: tuple[Mismatch, ...] = ()

    def __str__(self) -> str:
        captured = (
            f", {_times(self.replays, 'replay')} of {_times(self.captured, 'captured call')}" if self.captured else ""
        )
        lines = [
            f"{self.output}  {self.tensor}: {_times(self.mismatches, 'mismatch', 'es')} in {self.checked} checked "
            f"({_times(self.calls, 'eager call')}{captured})",
            f"    max abs error {self.max_abs:.3g}, max rel error {self.max_rel:.3g} (atol {self.atol:g}, rtol "
            f"{self.rtol:g})",
        ]
        if self.mismatches:
            lines[1] += f", {_times(self.bad_elements, 'bad element')}"
        lines += [f"    {place}" for place in self.bad[:SHOWN]]
        if len(self.bad) > SHOWN:
            lines.append(f"    and in {len(self.bad) - SHOWN} more places")
        return "\n".join(lines)


@dataclass(frozen=True)
class FunctionReport:
    """One validated function.

    Attributes:
        name: its name.
        run: what a call runs: "kernel", "reference" or "both".
        use: whose result is used.
        sample: every how many calls it is compared.
        skipped: how many eager calls were left out for that.
        kept: how many bad calls were kept.
        not_kept: why some were not, although they were asked for.
        rows: one for each call site, set of shapes and output.
    """

    name: str
    run: str
    use: str
    sample: int
    skipped: int
    kept: int
    not_kept: str
    rows: tuple[Row, ...]

    @property
    def mismatches(self) -> int:
        """How many calls and replays were wrong, counted for each output."""
        return sum(row.mismatches for row in self.rows)

    def __str__(self) -> str:
        if self.run != "both":
            return f"{self.name}: not validated, only the {self.run} is called"
        head = f"{self.name}: the {self.use}'s result is used"
        if self.sample > 1:
            head += f", one call in {self.sample} is compared ({self.skipped} eager calls were not)"
        lines, place = [head if self.rows else f"{head}; no call was compared yet"], None
        for row in self.rows:
            if (row.site, row.inputs) != place:
                place = (row.site, row.inputs)
                lines.append(f"  at {row.site}" + (f", called with {row.inputs}" if row.inputs else ""))
            lines += [f"    {line}" for line in str(row).splitlines()]
        if self.kept:
            lines.append(f"  {_times(self.kept, 'bad call')} kept; save_samples(path) writes them to a file")
        if self.not_kept:
            lines.append(f"  some calls could not be kept: {self.not_kept}")
        return "\n".join(lines)


@dataclass(frozen=True)
class ValidationReport:
    """All validated functions of this process. Prints well; has ``to_dict()``.

    Attributes:
        functions: in the order in which they were made.
        process: which process this is.
    """

    functions: tuple[FunctionReport, ...]
    process: dict[str, Any]

    @property
    def rows(self) -> tuple[Row, ...]:
        """The rows of all functions."""
        return tuple(row for function in self.functions for row in function.rows)

    @property
    def mismatches(self) -> int:
        """How many calls and replays were wrong, counted for each output."""
        return sum(function.mismatches for function in self.functions)

    def to_dict(self) -> dict[str, Any]:
        """The same as plain dicts and lists for JSON; "inf" and "nan" are strings in it."""
        plain: dict[str, Any] = _plain(asdict(self))
        return plain

    def __str__(self) -> str:
        if not self.functions:
            return (
                "Nothing is validated in this process: streamshim.validate was not called, or STREAMSHIM_VALIDATE=off."
            )
        return "\n".join(map(str, self.functions))


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def _times(number: int, what: str, ending: str = "s") -> str:
    return f"{number or 'no'} {what}" + (ending if number != 1 else "")
