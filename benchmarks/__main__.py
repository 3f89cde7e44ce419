"""``python -m benchmarks``, which ``make bench`` calls: measures, prints the table, and writes the JSON."""

from __future__ import annotations

import argparse
import datetime
import json
import re
import sys
from pathlib import Path
from typing import Any

import torch

from . import captures, launches, processes, tables, threads, validation, waits, watching
from .budgets import check
from .machine import Machine
from .measuring import BURST, Result, measure

GROUPS = ("launch", "capture", "waits", "process", "threads", "validation", "watch")


def main() -> int:
    """Returns 1 if a budget was missed and that was asked for, else 0."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--json", type=Path, help="where to write the results (default: none are written)")
    parser.add_argument("--rounds", type=int, default=21, help="bursts of each variant (default: %(default)s)")
    parser.add_argument("--only", choices=GROUPS, nargs="+", default=GROUPS, help="the groups (default: all)")
    parser.add_argument("--no-gpu", action="store_true", help="use the stand-ins even where there is a GPU")
    parser.add_argument("--fail", action="store_true", help="exit with 1 if a budget is missed")
    wish = parser.parse_args()
    if wish.rounds < 1:
        parser.error(f"argument --rounds: {wish.rounds} is less than 1")

    machine = Machine(torch.cuda.is_available() and not wish.no_gpu)
    results: list[Result] = []
    with machine.on_stream():
        forms = launches.forms(machine)
        if "launch" in wish.only:
            results += measure(forms, wish.rounds, machine.settle)
        if "capture" in wish.only:
            results += captures.run(machine, forms, max(3, wish.rounds // 3))
        if "waits" in wish.only:
            results += waits.run(machine, wish.rounds)
        if "threads" in wish.only:
            results += threads.run(machine, forms, max(3, wish.rounds // 3))
        if "validation" in wish.only:
            results += validation.run(machine, wish.rounds)
        if "watch" in wish.only:
            results += watching.run(machine)
        if "process" in wish.only:
            results += processes.run(machine, forms, max(3, wish.rounds // 3))
    listed = [result.to_dict() for result in results]
    run = {
        "when": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "machine": machine.describe(),
        "settings": {"burst": BURST, "rounds": wish.rounds},
        "missing": machine.missing,
        "budgets": check(listed, machine.gpu),
        "results": listed,
    }
    print(tables.text(run))
    if wish.json is not None:
        wish.json.parent.mkdir(parents=True, exist_ok=True)
        wish.json.write_text(_dumped(run))
        print(f"\nwritten to {wish.json}")
    missed = [b["budget"] for b in run["budgets"] if not b["met"]]
    return 1 if wish.fail and missed else 0


def _dumped(run: dict[str, Any]) -> str:
    """As JSON, with the samples of a variant on one line."""
    text = json.dumps(run, indent=1, ensure_ascii=False)
    return re.sub(r"\[\s+([-\d.,\s]+?)\s+\]", lambda found: f"[{' '.join(found[1].split())}]", text) + "\n"


if __name__ == "__main__":
    sys.exit(main())
