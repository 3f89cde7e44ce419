"""The results as pictures: SVG, written by hand so that nothing has to be installed, readable on light and dark pages.

    python -m benchmarks.charts benchmarks/results/h200.json docs/

writes ``launch.svg`` and ``threads.svg`` into that folder.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

_WIDTH, _LEFT, _RIGHT, _BAR, _GAP, _TITLE = 860, 245, 130, 18, 5, 30
_STYLE = """
text { font: 13px system-ui, "Segoe UI", Helvetica, Arial, sans-serif; fill: #1f2328; }
.title { font-size: 17px; font-weight: 600; } .form { font-weight: 600; } .faint { fill: #656d76; }
.bare { fill: #9aa4af; } .native { fill: #6ea8fe; } .hand { fill: #f0883e; } .shim { fill: #2da44e; }
.whisker { stroke: #1f2328; stroke-opacity: .55; } .axis { stroke: #656d76; stroke-opacity: .35; }
@media (prefers-color-scheme: dark) { text { fill: #e6edf3; } .faint { fill: #9198a1; } .whisker { stroke: #e6edf3; } }
"""
#: Variant -> what it is called in a chart, and its class.
_VARIANTS = {
    "bare": ("without, known handle", "bare"),
    "native": ("without, best native way", "native"),
    "hand-written": ("without, current_stream()", "hand"),
    "wrapt": ("a wrapt wrapper", "hand"),
    "shim": ("with streamshim", "shim"),
    "shim, None": ("with streamshim, None passed", "shim"),
    "shim, 0": ("with streamshim, 0 passed", "shim"),
    "shim, default stream": ("with streamshim, default stream", "shim"),
}


@dataclass(frozen=True)
class Bar:
    """A bar with its spread."""

    label: str
    kind: str
    value: float
    low: float
    high: float


def chart(title: str, note: str, groups: Iterable[tuple[str, list[Bar]]], unit: str) -> str:
    """Horizontal bars in groups, as one SVG document."""
    groups = [(name, bars) for name, bars in groups if bars]
    most = max(bar.high for _, bars in groups for bar in bars)
    scale = (_WIDTH - _LEFT - _RIGHT) / most
    parts, y = [_text(16, 28, title, "title"), _text(16, 48, note, "faint")], 66
    for name, bars in groups:
        parts.append(_text(16, y + 16, name, "form"))
        y += _TITLE - 4
        for bar in bars:
            middle, end = y + _BAR / 2, _LEFT + bar.value * scale
            low, high = _LEFT + bar.low * scale, _LEFT + bar.high * scale
            parts += [
                _text(_LEFT - 8, middle + 4.5, bar.label, "faint", "end"),
                f'<rect class="{bar.kind}" x="{_LEFT}" y="{y}" width="{end - _LEFT:.1f}" height="{_BAR}" rx="2"/>',
                f'<line class="whisker" x1="{low:.1f}" x2="{high:.1f}" y1="{middle}" y2="{middle}"/>',
                _text(max(end, high) + 8, middle + 4.5, f"{_short(bar.value)} {unit}"),
            ]
            y += _BAR + _GAP
        y += 12
    axis = f'<line class="axis" x1="{_LEFT}" x2="{_LEFT}" y1="66" y2="{y - 12}"/>'
    size = f'viewBox="0 0 {_WIDTH} {y}" width="{_WIDTH}" height="{y}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img"><title>{escape(title)}</title>'
    return "\n".join([head, f"<style>{_STYLE}</style>", axis, *parts, "</svg>"]) + "\n"


def launches(run: Mapping[str, Any]) -> str:
    """The group "launch"."""
    groups: dict[str, list[Bar]] = {}
    for r in _of(run, "launch"):
        if r["variant"] in _VARIANTS:
            label, kind = _VARIANTS[r["variant"]]
            bar = Bar(label, kind, r["median"] / 1e3, r["p10"] / 1e3, r["p90"] / 1e3)
            groups.setdefault(r["form"], []).append(bar)
    return chart("Host time of one launch", _note(run), groups.items(), "µs")


def threads(run: Mapping[str, Any]) -> str:
    """The group "threads"."""
    groups: dict[str, list[Bar]] = {}
    for r in _of(run, "threads"):
        label = "with streamshim" if r["variant"] == "shim" else "without, known handle"
        bar = Bar(label, r["variant"], r["median"] / 1e3, r["p10"] / 1e3, r["p90"] / 1e3)
        groups.setdefault(r["form"], []).append(bar)
    return chart("Launches per second, all threads together", _note(run), groups.items(), "thousand/s")


def _of(run: Mapping[str, Any], group: str) -> list[Mapping[str, Any]]:
    return [r for r in run["results"] if r["group"] == group]


def _note(run: Mapping[str, Any]) -> str:
    machine, settings = run["machine"], run["settings"]
    where = machine.get("gpu") or f"{machine['cpu']}, no GPU: calls of functions that launch nothing"
    return f"{where}; torch {machine['torch']}; medians of {settings['rounds']} bursts, with their 10% to 90%"


def _text(x: float, y: float, words: str, kind: str = "", anchor: str = "start") -> str:
    style = f' class="{kind}"' if kind else ""
    return f'<text{style} x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(words)}</text>'


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.2f}"


def main() -> None:
    """Write the charts of a run."""
    if len(sys.argv) != 3:
        sys.exit("usage: python -m benchmarks.charts RESULTS.json FOLDER")
    run, folder = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    for name, draw in (("launch", launches), ("threads", threads)):
        if _of(run, name):
            (folder / f"{name}.svg").write_text(draw(run))
            print(f"written: {folder / name}.svg")


if __name__ == "__main__":
    main()
