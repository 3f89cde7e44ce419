"""The results as a table: for a terminal, and as Markdown for ``docs/performance.md``.

python -m benchmarks.tables benchmarks/results/h200.json > table.md
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

Row = tuple[str, ...]
_UNITS = {"ns": "ns", "us": "µs", "ms": "ms", "1/s": "launches/s", "blocks": "blocks"}


def text(run: Mapping[str, Any]) -> str:
    """For a terminal."""
    return "\n\n".join(f"{title}\n{_aligned(head, rows)}" for title, head, rows in _tables(run))


def markdown(run: Mapping[str, Any]) -> str:
    """For a document: what ``docs/performance.md`` holds between its two marks."""
    return "\n\n".join(f"### {title}\n\n{_piped(head, rows)}" for title, head, rows in _tables(run)) + "\n"


def _tables(run: Mapping[str, Any]) -> Iterator[tuple[str, Row, list[Row]]]:
    yield "Machine", ("", ""), [(name, str(value)) for name, value in run["machine"].items() if value]
    for group in dict.fromkeys(r["group"] for r in run["results"]):
        results = [r for r in run["results"] if r["group"] == group]
        rows = []
        for result in results:
            reference = _reference(results, result["form"])
            ratio = result["median"] / reference if reference and result["variant"] not in ("bare", "native") else 0
            unit = _UNITS[result["unit"]]
            spread = f"{_number(result['p10'])} to {_number(result['p90'])}"
            shown = f"{ratio:.2f}" if ratio else ""
            rows.append((result["form"], result["variant"], f"{_number(result['median'])} {unit}", spread, shown))
        yield group.capitalize(), ("form", "variant", "median", "10% to 90%", "of bare"), rows
    rows = []
    for b in run["budgets"]:
        limit = f"{b['at_most']:g}" + (f" {b['unit']} more" if b["kind"] == "added" else "")
        measured = f"{b['value']:.3g} ({b['p10']:.3g} to {b['p90']:.3g})"
        rows.append((b["budget"], limit, measured, "met" if b["met"] else "MISSED"))
    yield "Budgets", ("budget", "at most", "measured", ""), rows
    if run["missing"]:
        yield "Not measured", ("what", "why"), list(run["missing"].items())


def _reference(results: list[Mapping[str, Any]], form: str) -> float:
    """The median of what is called without streamshim and with a stream that is known."""
    found = {r["variant"]: r["median"] for r in results if r["form"] == form}
    return float(found.get("bare", found.get("native", 0)))


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _aligned(head: Row, rows: list[Row]) -> str:
    lines = [row for row in (head, *rows) if any(row)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    return "\n".join(
        "  " + "  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)).rstrip() for line in lines
    )


def _piped(head: Row, rows: list[Row]) -> str:
    lines = ["| " + " | ".join(row) + " |" for row in (head, ("---",) * len(head), *rows)]
    return "\n".join(lines)


def fill(document: Path, name: str, table: str) -> None:
    """Replace what stands between the marks of this name in a document.

    Raises:
        ValueError: if it has no such marks.
    """
    begin, end = f"<!-- table: {name} -->", f"<!-- end: {name} -->"
    words = document.read_text()
    before, found, rest = words.partition(begin)
    _, found_end, after = rest.partition(end)
    if not found or not found_end:
        raise ValueError(f"{document} has no marks {begin} and {end}")
    document.write_text(f"{before}{begin}\n{table}{end}{after}")


def main() -> None:
    """Print the table of a run, or put it into a document."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tables", description=main.__doc__)
    parser.add_argument("results", type=Path, help="what `python -m benchmarks --json` has written")
    parser.add_argument("--into", type=Path, help="a document with marks of the same name as the results")
    wish = parser.parse_args()
    table = markdown(json.loads(wish.results.read_text()))
    if wish.into is None:
        print(table, end="")
    else:
        fill(wish.into, wish.results.stem, table)


if __name__ == "__main__":
    main()
