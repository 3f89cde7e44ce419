"""`python -m streamshim demo`: why a custom kernel goes missing from a CUDA graph, and what streamshim does about it.

The story (`story`) is told once, for a `machine.Machine`: torch and a CuTe DSL kernel on a GPU (`on_cuda`, `kernels`),
or the simulator (`on_simulator`, `foreign`) where there is none. The model (`model`) is the same on both.
"""

from __future__ import annotations

import contextlib
import json
import platform
import sys
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from .. import __version__, binders, ledger
from ..installer import install, status, uninstall
from ..settings import Settings
from . import ir, story, text
from .machine import Machine


def run(as_json: bool = False, force_simulator: bool = False) -> int:
    """Tell the story on standard output.

    The process is left as it was found: what is installed at the beginning is set aside and put back.

    Args:
        as_json: print one JSON object and nothing else.
        force_simulator: use the simulator also where there is a GPU.

    Returns:
        The exit status: 0 if everything was as it should be, 1 if not, 2 if the environment keeps streamshim from
        working at all.
    """
    try:
        settings = Settings.read()
    except ValueError as error:
        print(f"streamshim demo: {error}", file=sys.stderr)
        return 2
    if settings.disabled:
        print(f"streamshim demo: {settings.disabled} is set, so streamshim would do nothing; unset it", file=sys.stderr)
        return 2
    # Libraries that print while they are imported or compile must not get into the JSON.
    with contextlib.redirect_stdout(sys.stderr), _set_aside():
        result = _tell(force_simulator)
    print(json.dumps(result) if as_json else text.render(result))
    return 0 if result["ok"] else 1


def _tell(force_simulator: bool) -> dict[str, Any]:
    """Everything that was seen, as it is printed with ``--json``."""
    why = "--simulator was given" if force_simulator else _why_not_cuda()
    acts = story.tell(_machine(simulated=bool(why)))
    lines = ir.compare() if why else None
    problems = [f"act {number}: {act.problem}" for number, act in enumerate(acts, 1) if act.problem]
    if lines is not None and lines.problem:
        problems.append(lines.problem)
    return {
        "backend": "simulator" if why else "cuda",
        "why_simulator": why,
        "versions": _versions(),
        "acts": [{**asdict(act), "wrong": len(act.wrong_at), "ok": not act.problem} for act in acts],
        "ir": asdict(lines) if lines is not None else None,
        "ok": not problems,
        "problems": problems,
    }


def _machine(simulated: bool) -> Machine:
    if simulated:
        from .on_simulator import SimulatedMachine

        return SimulatedMachine()
    from .on_cuda import CudaMachine

    return CudaMachine()


def _why_not_cuda() -> str:
    """Why the story cannot be told for real here; an empty string if it can."""
    import torch

    if torch.version.cuda is None or not torch.cuda.is_available():
        return f"torch {torch.__version__} sees no CUDA GPU"
    if torch.cuda.get_device_capability() < (8, 0):
        return f"CuTe DSL does not support the {torch.cuda.get_device_name()}"
    missing = ir.missing()
    return f"{missing}: pip install 'streamshim[cute]'" if missing else ""


def _versions() -> dict[str, str | None]:
    import torch

    own = {"streamshim": __version__, "python": platform.python_version(), "torch": str(torch.__version__)}
    return {**own, **{package: binders.version_of(package) for package in ir.PACKAGES}}


@contextlib.contextmanager
def _set_aside() -> Iterator[None]:
    """Begin with nothing installed, and put back at the end what was."""
    before = install().settings if status().installed else None
    uninstall()
    try:
        yield
    finally:
        uninstall()
        ledger.clear()
        if before is not None:
            install(before.mode, only=before.only, skip=before.skip or None)
