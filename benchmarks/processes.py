"""Group "process": what importing and installing take, and what a million launches leave behind."""

from __future__ import annotations

import gc
import importlib.resources
import importlib.util
import os
import subprocess
import sys
import tempfile
import time
import timeit
from pathlib import Path

from .machine import Machine
from .measuring import BIND, Form, Result, installed

GROUP = "process"
LAUNCHES = 1_000_000
#: Of those that do nothing, in pairs.
PROCESSES = 300

_INSTALL = """
import sys, time
{imports}
start = time.perf_counter()
import streamshim
{install}
print((time.perf_counter() - start) * 1e3)
"""


def run(machine: Machine, forms: list[Form], rounds: int) -> list[Result]:
    """Times of fresh processes, and the blocks that launches keep."""
    heavy = [name for name in ("torch", "cutlass", "tvm_ffi") if importlib.util.find_spec(name)]
    cases = [
        ("import streamshim", "", "", rounds),
        ("import streamshim, install()", "", "streamshim.install()", rounds),
        (f"the same with {', '.join(heavy)} imported", f"import {', '.join(heavy)}", "streamshim.install()", 3),
    ]
    results = [Result(GROUP, name, "shim", "ms", _times(imports, install, n)) for name, imports, install, n in cases]
    return [*results, *_start_up(), *_kept(machine, forms)]


def _start_up() -> list[Result]:
    """The whole of a process that does nothing, with and without the start-up file, which nobody has switched on."""
    file = importlib.resources.files("streamshim.startup") / "streamshim.pth"
    results = [Result(GROUP, "a process that does nothing", name, "ms") for name in ("bare", "start-up file, inactive")]
    env = {name: value for name, value in os.environ.items() if name != "STREAMSHIM"}
    with tempfile.TemporaryDirectory() as empty, tempfile.TemporaryDirectory() as filled:
        (Path(filled) / "streamshim.pth").write_text(file.read_text())
        for folder in (empty, filled):
            # Python imports a codec at the first such file, and there is another one in every environment.
            (Path(folder) / "another.pth").write_text("# nothing\n")
        for turn in range(PROCESSES):
            for result, folder in list(zip(results, (empty, filled), strict=True))[:: -1 if turn % 2 else 1]:
                # As Python does it for site-packages: without -S it would do so for the real ones, too.
                code = f"import site; site.addsitedir({folder!r})"
                start = time.perf_counter()
                subprocess.run([sys.executable, "-S", "-c", code], env=env, check=True)
                result.samples.append((time.perf_counter() - start) * 1e3)
    return results


def _times(imports: str, install: str, count: int) -> list[float]:
    """Milliseconds inside processes of their own; the first one fills the caches of files and is left out."""
    code = _INSTALL.format(imports=imports, install=install)
    root = Path(__file__).parents[1]
    return [_one(code, root) for _ in range(count + 1)][1:]


def _one(code: str, root: Path) -> float:
    # With this set, each process would compile all of a checkout anew; what is installed has its bytecode.
    env = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    done = subprocess.run([sys.executable, "-c", code], cwd=root, env=env, check=True, capture_output=True, text=True)
    return float(done.stdout)


def _kept(machine: Machine, forms: list[Form]) -> list[Result]:
    """Blocks of memory that Python has more of after a million launches than before."""
    results = []
    with installed(BIND):
        for form in forms:
            shim = next((v for v in form.variants if v.name == "shim"), None)
            if shim is None or form.name not in ("ctypes", "CuTe TVM-FFI, stream argument"):
                continue
            timer = timeit.Timer(shim.statement, globals=dict(shim.names))
            timer.timeit(1_000)
            gc.collect()
            before = sys.getallocatedblocks()
            for _ in range(LAUNCHES // 100_000):
                timer.timeit(100_000)
                machine.settle()
            gc.collect()
            kept = float(sys.getallocatedblocks() - before)
            results.append(Result(GROUP, f"memory kept per million launches, {form.name}", "shim", "blocks", [kept]))
    return results
