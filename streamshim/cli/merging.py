"""`streamshim report`: the reports of many processes as one table."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

#: What tells rows apart; all other columns are summed up, or their greatest value is taken.
KEY = ("function", "site", "inputs", "output", "tensor")
SUMMED = ("calls", "captured", "replays", "checked", "mismatches", "bad_elements")
GREATEST = ("max_abs", "max_rel")
#: Columns where the output is no terminal; the table has more to say than other commands.
WIDTH = 160


def print_reports(folder: Path, as_json: bool) -> int:
    """Merge the reports in a folder and print them; returns the exit status: 1 if there was a mismatch."""
    reports = read(folder)
    rows = merged(reports)
    if as_json:
        click.echo(json.dumps({"processes": [report["process"] for report in reports], "rows": rows}, indent=1))
    else:
        _print(reports, rows)
    return 1 if any(row["mismatches"] for row in rows) else 0


def read(folder: Path) -> list[dict[str, Any]]:
    """The reports in a folder.

    Raises:
        click.ClickException: if there are none, or one cannot be read.
    """
    paths = sorted(folder.glob("validation-*.json"))
    if not paths:
        raise click.ClickException(
            f"There are no reports (validation-*.json) in {str(folder)!r}. Each process writes one into "
            "STREAMSHIM_REPORT_DIR when it ends, when it calls streamshim.validation_report(), and every few seconds "
            "of eager calls."
        )
    reports = []
    for path in paths:
        try:
            report = json.loads(path.read_text())
            missing = {"functions", "process"} - report.keys()
            if missing:
                raise KeyError(*missing)
        except (ValueError, KeyError, AttributeError) as error:
            raise click.ClickException(f"{path} is no validation report: {type(error).__name__}: {error}") from None
        reports.append(report)
    return reports


def merged(reports: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row for each function, call site, set of shapes and output of all processes, worst first."""
    rows: dict[tuple[str, ...], dict[str, Any]] = {}
    for report in reports:
        process = report["process"]
        who = f"rank {process['rank']}" if process.get("rank") else f"{process['host']} pid {process['pid']}"
        for row in (row for function in report["functions"] for row in function["rows"]):
            key = tuple(str(row[name]) for name in KEY)
            total = rows.setdefault(
                key, {**dict(zip(KEY, key, strict=True)), **dict.fromkeys(SUMMED, 0), "processes": 0, "bad": []}
            )
            total["processes"] += 1
            for name in SUMMED:
                total[name] += row[name]
            for name in GREATEST:
                total[name] = str(max(float(total.get(name, 0.0)), float(row[name])))
            total["bad"] += [{"process": who, **place} for place in row["bad"]]
    return sorted(rows.values(), key=lambda row: -row["mismatches"])


def _print(reports: list[dict[str, Any]], rows: list[dict[str, Any]]) -> None:
    terminal = Console()
    if not terminal.is_terminal:
        terminal = Console(width=WIDTH)
    table = Table(title=f"{len(reports)} {'process' if len(reports) == 1 else 'processes'}")
    for name in ("function", "at", "output", "checked", "replays", "mismatches", "max abs", "max rel", "first bad"):
        table.add_column(name, overflow="fold", justify="left" if name in ("function", "at", "output") else "right")
    for row in rows:
        first = row["bad"][0] if row["bad"] else None
        where = (
            f"{first['process']}: number {first['first']} of {first['where']}, from {first['index']}" if first else ""
        )
        table.add_row(
            row["function"],
            row["site"],
            f"{row['output']} {row['tensor']}",
            str(row["checked"]),
            str(row["replays"]),
            str(row["mismatches"]),
            f"{float(row['max_abs']):.3g}",
            f"{float(row['max_rel']):.3g}",
            where,
            style="bold red" if row["mismatches"] else None,
        )
    terminal.print(table)
