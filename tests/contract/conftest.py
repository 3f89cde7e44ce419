"""The clean slate of the contract tests: nothing of a test stays installed, and no variable comes from outside."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import streamshim
from streamshim import installer, ledger


@pytest.fixture(autouse=True)
def clean_slate(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("STREAMSHIM_MODE", "STREAMSHIM_STRICT", "STREAMSHIM_DISABLE", "STREAMSHIM_CTYPES"):
        monkeypatch.delenv(name, raising=False)
    streamshim.uninstall()
    yield
    streamshim.uninstall()
    installer._shadowed.clear()
    installer._asked = None
    ledger.clear()
