"""GPU markers, and skips that count.

Tests marked ``gpu`` need a CUDA device, tests marked ``two_gpus`` need two; elsewhere they are skipped. With
``STREAMSHIM_FAIL_ON_SKIP=1`` every skip is a failure, so that a GPU run cannot be green because nothing ran. Only
``two_gpus`` on a machine with one GPU is excused, unless ``STREAMSHIM_TWO_GPUS=1`` says that there must be two.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest

_excused = pytest.StashKey[bool]()


def _on(variable: str) -> bool:
    return os.environ.get(variable) == "1"


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    needs = 2 if item.get_closest_marker("two_gpus") else 1 if item.get_closest_marker("gpu") else 0
    if needs == 0:
        return
    import torch  # only here: most tests need no torch

    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    if torch.cuda.device_count() < needs:
        item.stash[_excused] = not _on("STREAMSHIM_TWO_GPUS")
        pytest.skip(f"needs {needs} CUDA devices")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    report: Any = yield
    # An expected failure is reported as a skip too, but that test did run.
    if report.skipped and not hasattr(report, "wasxfail") and not item.stash.get(_excused, False):
        _fail_if_skips_count(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Iterator[None]:
    report: Any = yield
    if report.outcome == "skipped":
        _fail_if_skips_count(report)
    return report


def _fail_if_skips_count(report: Any) -> None:
    if _on("STREAMSHIM_FAIL_ON_SKIP"):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
        report.outcome = "failed"
        report.longrepr = f"STREAMSHIM_FAIL_ON_SKIP=1, and this was skipped: {reason}"
