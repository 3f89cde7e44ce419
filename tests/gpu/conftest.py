"""What only a GPU can show. Every capture here changes its input and poisons its output before replay."""

import pytest
import torch

pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")

import streamshim


def pytest_collection_modifyitems(items):
    for item in items:
        if "tests/gpu/" in str(item.path).replace("\\", "/"):
            item.add_marker(pytest.mark.gpu)


@pytest.fixture
def shim():
    """streamshim installed in bind mode."""
    with streamshim.install("bind") as installation:
        yield installation


@pytest.fixture(autouse=True)
def _clean():
    yield
    streamshim.uninstall()
    torch.cuda.synchronize()
