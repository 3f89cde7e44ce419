"""`streamshim explain`: what the capture errors in a log mean, in its order, with the line that raised each."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any

import click

from ..callsite import MACHINERY
from .console import Console
from .wordings import WORDINGS, Wording, numbers_in

# A frame of a traceback, whatever a log puts before it.
_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<function>\S+)')
#: How far before an error its traceback may begin.
_REACH = 400


@dataclass
class Finding:
    """One wording that is in the log.

    Attributes:
        wording: what was found.
        lines: the numbers of the lines that say it, from 1 on.
        raised_at: the innermost line of the user's own code in the traceback before the first of them, or "".
    """

    wording: Wording
    lines: list[int] = field(default_factory=list)
    raised_at: str = ""

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        w = self.wording
        return {
            "key": w.key, "title": w.title, "lines": self.lines, "raised_at": self.raised_at, "meaning": w.meaning,
            "cause": w.cause, "remedy": list(w.remedy), "is_consequence": w.is_consequence,
        }  # fmt: skip


def find(log: Iterable[str]) -> list[Finding]:
    """What the log says, in the order in which it says it for the first time."""
    found: dict[str, Finding] = {}
    lines = list(log)
    for number, line in enumerate(lines, 1):
        numbers = numbers_in(line)
        for wording in WORDINGS:
            if wording.number in numbers or wording.pattern.search(line):
                finding = found.get(wording.key)
                if finding is None:
                    finding = found[wording.key] = Finding(wording, raised_at=_raised_at(lines, number - 1))
                finding.lines.append(number)
    return list(found.values())


def _raised_at(lines: list[str], error: int) -> str:
    """The innermost frame before an error that is not of the machinery, within the same traceback."""
    for number in range(error, max(-1, error - _REACH), -1):
        if "Traceback (most recent call last)" in lines[number]:
            break
        frame = _FRAME.search(lines[number])
        if frame is not None and not _is_machinery(frame["file"]):
            return f"{frame['file']}:{frame['line']} in {frame['function']}"
    return ""


def _is_machinery(file: str) -> bool:
    parts = PurePath(file).parts
    return any(part in ("site-packages", "dist-packages") for part in parts) and bool(MACHINERY & set(parts))


def print_explanation(log: Iterable[str], as_json: bool) -> int:
    """Print what `find` finds; returns the exit status: 1 if that is nothing."""
    found = find(log)
    if as_json:
        click.echo(json.dumps([finding.to_dict() for finding in found], indent=2))
        return 0 if found else 1
    console = Console()
    if not found:
        console.text("Nothing in this log is an error around CUDA graph captures that streamshim knows.")
        return 1
    first = next((finding for finding in found if not finding.wording.is_consequence), None)
    console.text(
        f"Begin with line {first.lines[0]}: {first.wording.title}."
        if first is not None
        else f"The first cause is not among what is known: line {found[0].lines[0]} only follows from another error."
    )
    for finding in found:
        w = finding.wording
        console.heading(w.title)
        console.row("in the log", _where(finding.lines))
        if finding.raised_at:
            console.row("raised at", finding.raised_at)
        console.row("meaning", w.meaning)
        console.row("usual cause", w.cause)
        for number, step in enumerate(w.remedy):
            console.row("" if number else "what to do", step)
    return 0


def _where(lines: list[int], shown: int = 5) -> str:
    text = f"line{'s' if len(lines) > 1 else ''} {', '.join(map(str, lines[:shown]))}"
    return text + (f" and {len(lines) - shown} more" if len(lines) > shown else "")
