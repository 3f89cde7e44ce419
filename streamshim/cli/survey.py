"""What streamshim finds when the libraries that are installed are imported, and what it does on a GPU.

For `streamshim status` in its own process, and for `streamshim doctor` in a child (`python -m streamshim.cli.survey`),
since importing a broken library or driver can end a process.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import importlib.util
import json
import sys
from collections.abc import Callable
from typing import Any

import click

from .. import binders, boot
from ..errors import BinderError, HostSyncError
from ..installer import install, status, uninstall
from ..settings import BINDERS

NUMBERS = 64


def print_status(mode: str | None, as_json: bool) -> int:
    """Install, import what is installed, and print the status; returns the exit status."""
    try:
        install(mode)
    except (ValueError, BinderError) as error:
        raise click.ClickException(str(error)) from None
    # Libraries that print while they are imported must not get into the JSON.
    with contextlib.redirect_stdout(sys.stderr):
        failed = import_libraries()
    found = status()
    if as_json:
        click.echo(json.dumps({**found.to_dict(), "imports_failed": failed}, indent=2))
    else:
        click.echo(str(found))
        for name, why in failed.items():
            click.echo(f"  {name} cannot be imported: {why}")
    return 0


def import_libraries() -> dict[str, str]:
    """Import the libraries that streamshim knows; returns those that are there and cannot be imported, and why."""
    failed = {}
    modules = [module for name in BINDERS for module in binders.MODULES[name]]
    for module in dict.fromkeys(["torch", *boot.LIBRARIES, *modules]):
        try:
            if importlib.util.find_spec(module) is not None:
                importlib.import_module(module)
        except ModuleNotFoundError as error:
            if error.name is None or not module.startswith(error.name):
                failed[module] = str(error)
        except Exception as error:  # noqa: BLE001, a broken installation can fail in any way
            failed[module] = f"{type(error).__name__}: {error}"
    return failed


def survey(gpu: bool) -> dict[str, Any]:
    """Everything as one object for JSON; see `doctor`, which reads it."""
    install("bind")
    failed = import_libraries()
    torch = sys.modules.get("torch")
    found: dict[str, Any] = {"imports_failed": failed, "status": status().to_dict(), "gpus": [], "tests": {}}
    if torch is None:
        found["no_gpu"] = "torch is not installed"
    elif torch.version.cuda is None:
        found["no_gpu"] = f"torch {torch.__version__} was built without CUDA"
    elif not torch.cuda.is_available():
        found["no_gpu"] = f"torch {torch.__version__} sees no GPU"
    else:
        found["cuda"] = torch.version.cuda
        found["gpus"] = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        found["tests"] = {words: _verdict(test) for words, test in SELF_TESTS.items()} if gpu else {}
    return found


def _verdict(test: Callable[[], str]) -> str:
    """An empty string if a self-test passed, else what was wrong."""
    try:
        return test()
    except Exception as error:  # noqa: BLE001, whatever a driver or library raises is the answer
        return f"{type(error).__name__}: {error}"


def _null_launch_is_bound() -> str:
    """A call of the driver's own library with the NULL stream, inside a capture."""
    import torch

    from ..binders.ctypes_.api import bind, unbind

    driver = ctypes.CDLL("libcuda.so.1")
    fill = driver.cuMemsetD32Async
    fill.argtypes = [ctypes.c_void_p, ctypes.c_uint, ctypes.c_size_t, ctypes.c_void_p]
    bind(driver, {"cuMemsetD32Async": -1})
    try:
        out = torch.zeros(NUMBERS, dtype=torch.int32, device="cuda")
        return _in_graph(lambda: fill(out.data_ptr(), 7, NUMBERS, None), out, 7)
    finally:
        unbind(driver)


def _cute_kernel_is_bound() -> str:
    """A CuTe DSL kernel without a stream parameter, inside a capture."""
    import torch

    from ..demo import ir, kernels

    if ir.missing():
        return ""
    kernel = kernels.compile_update()
    x, a, b, c = (torch.full((NUMBERS,), value, device="cuda") for value in (3.0, 0.0, 2.0, 1.0))
    h, y = torch.zeros_like(x), torch.zeros_like(x)
    kernel(x, h, a, b, c, torch.empty_like(y))
    return _in_graph(lambda: kernel(x, h, a, b, c, y), y, 6)


def _in_graph(launch: Callable[[], object], out: Any, right: int) -> str:
    """Whether a launch that sets every element of ``out`` is in a graph that is captured around it."""
    import torch

    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch()
    torch.cuda.synchronize()
    if bool(out.any()):
        return "it ran while the graph was being captured"
    graph.replay()
    torch.cuda.synchronize()
    return "" if bool((out == right).all()) else "it is not in the graph: a replay does not run it"


def _sync_is_refused() -> str:
    """``.item()`` inside a capture: refused, and the capture is still good."""
    import torch

    value, out = torch.ones(1, device="cuda"), torch.zeros(1, device="cuda")
    refused = False
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out.add_(value)
        try:
            value.item()
        except HostSyncError:
            refused = True
    graph.replay()
    if not refused:
        return ".item() inside a capture was not refused"
    return "" if out.item() == 1 else "the capture in which .item() was refused is not right"


def _null_launch_is_moved() -> str:
    """A launch on NULL, moved below Python: `guards.redirect` tries that before the first capture."""
    import torch

    uninstall()
    with install("bind", redirect=True):
        out = torch.zeros(1, device="cuda")
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            out.add_(1)
        return status().guards_off


SELF_TESTS: dict[str, Callable[[], str]] = {
    "a ctypes call with the NULL stream in a capture is bound": _null_launch_is_bound,
    "a CuTe kernel without a stream in a capture is bound": _cute_kernel_is_bound,
    "a host sync in a capture is refused": _sync_is_refused,
    "a launch from below Python is moved into a capture": _null_launch_is_moved,
}

if __name__ == "__main__":
    with contextlib.redirect_stdout(sys.stderr):
        everything = survey(gpu="--gpu" in sys.argv)
    print(json.dumps(everything))
