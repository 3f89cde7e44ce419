"""What the environment says about validation."""

from __future__ import annotations

import os
from collections.abc import Mapping
from enum import Enum
from pathlib import Path

VARIABLE = "STREAMSHIM_VALIDATE"
REPORT_DIR = "STREAMSHIM_REPORT_DIR"


class Run(str, Enum):
    """What a validated function runs."""

    OFF = "off"
    """`validate` returns the kernel itself."""
    KERNEL = "kernel"
    """The kernel only, through the wrapper: torch.compile makes the same graphs as for BOTH."""
    REFERENCE = "reference"
    """The reference only, to tell whether the kernel is what is wrong."""
    BOTH = "both"
    """Both, compared."""


def asked_for(environ: Mapping[str, str] | None = None) -> Run:
    """What ``STREAMSHIM_VALIDATE`` asks for; BOTH without it.

    Raises:
        ValueError: if it is none of those, naming them.
    """
    said = (os.environ if environ is None else environ).get(VARIABLE) or Run.BOTH.value
    try:
        return Run(said.lower())
    except ValueError:
        allowed = ", ".join(repr(run.value) for run in Run)
        raise ValueError(f"{VARIABLE} is {said!r}; allowed values: {allowed}, or unset") from None


def report_dir() -> Path | None:
    """Where each process writes its report; None if nobody asked for it."""
    said = os.environ.get(REPORT_DIR)
    return Path(said) if said else None
