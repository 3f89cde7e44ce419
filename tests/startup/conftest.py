"""A virtual environment with the built wheel in it, made once for all tests here, and one without."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import environments
import pytest
from environments import Environment


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built wheel."""
    return environments.build_wheel(tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="session")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """An environment with the wheel installed by pip."""
    made = environments.make(tmp_path_factory.mktemp("installed"))
    environments.install(made, wheel)
    return made


@pytest.fixture(scope="session")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """An environment without streamshim."""
    return environments.make(tmp_path_factory.mktemp("bare"))


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    """``write({"name": "text"})`` writes files into ``tmp_path`` and returns that folder."""

    def to_disk(*files: dict[str, str]) -> Path:
        for name, text in [item for some in files for item in some.items()]:
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text)
        return tmp_path

    return to_disk


#: A job of its own (`make test-engines`), since the engines are large.
collect_ignore = [] if "STREAMSHIM_ENGINES" in os.environ else ["test_engines.py"]
