"""What the environment says about validation."""

from __future__ import annotations

import os
from collections.abc import Mapping
from enum import Enum
from pathlib import Path

VARIABLE = "STREAMSHIM_VALIDATE"
REPORT_DIR = "STREAMSHIM_REPORT_DIR"
REPORT_SECONDS = "STREAMSHIM_REPORT_SECONDS"
#: Without the variable.
SECONDS = 5.0


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


def report_seconds(environ: Mapping[str, str] | None = None) -> float:
    """Eager calls read the counters at most once in so many seconds, where somebody wants to know what they say.

    Raises:
        ValueError: if ``STREAMSHIM_REPORT_SECONDS`` is no number, or negative.
    """
    said = (os.environ if environ is None else environ).get(REPORT_SECONDS) or str(SECONDS)
    try:
        seconds = float(said)
    except ValueError:
        seconds = -1.0
    if not seconds >= 0:
        raise ValueError(f"{REPORT_SECONDS} is {said!r}; allowed: a number of seconds from 0 on, or unset")
    return seconds
