"""`streamshim replay`: the bad calls of a validated function, made again."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import click

from ..errors import ValidationError
from ..validation import saved
from .console import Console


def replay_file(path: str, kernel: str | None, reference: str | None, device: str | None) -> int:
    """Print what is in a file, and what the functions give now; returns the exit status."""
    try:
        content = saved.load(path)
        outcomes = saved.again(
            content, _imported(kernel, "--kernel"), _imported(reference, "--reference"), _device(device)
        )
    except ValidationError as error:
        raise click.ClickException(str(error)) from None
    console = Console()
    number = len(content["calls"])
    console.text(f"{content['function']}: {number} bad {'call' if number == 1 else 'calls'} in {path}")
    for outcome in outcomes:
        console.heading(f"call {outcome.call}, {outcome.output}: {outcome.what}")
        if outcome.bad:
            text = f"{outcome.bad} of {outcome.elements} elements differ, the first is number {outcome.index}"
            console.row("differ", text, "fail")
        else:
            console.row("agree", f"all of {outcome.elements} elements", "ok")
        console.row("errors", f"max abs {outcome.max_abs:.3g}, max rel {outcome.max_rel:.3g}")
    if number and kernel is None and reference is None:
        options = [f"--{side} {_to_import(content[side])}" for side in ("kernel", "reference")]
        console.text(f"\nOnly what was saved was compared. To call them again: {' '.join(options)}")
    return 1 if any(outcome.bad for outcome in outcomes) else 0


def _to_import(name: str) -> str:
    """What to give for a function that had this name; its place is open where that cannot be imported."""
    module, _, path = name.partition(":")
    return "MODULE:NAME" if module == "__main__" or "<" in path else name


def _device(name: str | None) -> str:
    """Where to call functions, tried with a tensor."""
    import torch

    if name is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.empty(1, device=name)
    except Exception as error:  # noqa: BLE001 - torch raises another type for each reason
        why = str(error).partition("\n")[0]
        raise click.BadParameter(f"{name!r} cannot be used: {why}", param_hint="--device") from None
    return name


def _imported(name: str | None, option: str) -> Any:
    """The object that MODULE:NAME says; modules are also found in the current folder, as by `python -m`."""
    if name is None:
        return None
    module, _, path = name.partition(":")
    if not module or not path:
        raise click.BadParameter(f"{name!r} is not of the form MODULE:NAME", param_hint=option)
    if str(Path.cwd()) not in sys.path and "" not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        found: Any = importlib.import_module(module)
        for part in path.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        raise click.BadParameter(f"{name!r} cannot be imported: {error}", param_hint=option) from None
    if not callable(found):
        raise click.BadParameter(f"{name!r} is a {type(found).__name__}, which cannot be called", param_hint=option)
    return found
