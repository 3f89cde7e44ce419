"""Virtual environments for tests of what is installed: with the built wheel, and everything else borrowed, so that
nothing is downloaded."""

from __future__ import annotations

import os
import site
import subprocess
import sys
import venv
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]

#: A torch that is imported in no time, with the classes that streamshim patches.
FAKE_TORCH = {
    "torch/__init__.py": "__version__ = '2.99'\nfrom . import cuda\nclass version:\n    cuda = None\n",
    "torch/cuda/__init__.py": "from .graphs import CUDAGraph\n",
    "torch/cuda/graphs.py": (
        "class CUDAGraph:\n"
        "    def capture_begin(self, *args, **kwargs):\n        pass\n"
        "    def capture_end(self):\n        pass\n"
    ),
}


def in_the_middle_of(module: str) -> str:
    """Code that starts a ``thread`` which imports a module and is in the middle of it; it may end in a hang."""
    return f"""
import builtins, os, sys, threading, time
inside, original = threading.Event(), builtins.__import__
def slow(name, globals=None, *more):
    if globals and globals.get("__name__") == {module!r} and not inside.is_set():
        inside.set()
        time.sleep(0.5)
    return original(name, globals, *more)
assert {module!r} not in sys.modules
builtins.__import__ = slow
timer = threading.Timer(20, os._exit, [3])
timer.daemon = True
timer.start()
thread = threading.Thread(target=__import__, args=[{module!r}])
thread.start()
inside.wait()
"""


@dataclass(frozen=True)
class Environment:
    """A virtual environment.

    Attributes:
        python: its interpreter.
        site: its site-packages.
    """

    python: Path
    site: Path

    def run(
        self, *arguments: str | Path, cwd: Path, status: int = 0, **variables: str
    ) -> subprocess.CompletedProcess[str]:
        """Run Python with these arguments, and no setting of streamshim but those given here."""
        env = {n: v for n, v in os.environ.items() if not n.startswith(("STREAMSHIM", "PYTHON", "PYTEST"))}
        command = [str(self.python), *map(str, arguments)]
        done = subprocess.run(command, cwd=cwd, env={**env, **variables}, capture_output=True, text=True, timeout=100)
        assert done.returncode == status, f"exit status {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done


def make(folder: Path) -> Environment:
    """A new environment that sees the packages of the one that runs the tests, except this project."""
    venv.create(folder, with_pip=False)
    (packages,) = folder.glob("lib/python*/site-packages")
    borrowed, lines = folder / "borrowed", []
    borrowed.mkdir()
    for entry in [entry for place in site.getsitepackages() for entry in Path(place).glob("*")]:
        # An editable install of this project is not to be seen, nor what pip knows of it.
        if "streamshim" in entry.name or (borrowed / entry.name).exists():
            continue
        (borrowed / entry.name).symlink_to(entry)
        if entry.suffix == ".pth":
            lines += [
                n if n.startswith("import") else str(entry.parent / n) for n in entry.read_text().split("\n") if n
            ]
    lines.insert(0, str(borrowed))
    (packages / "zz_borrowed.pth").write_text("\n".join(lines) + "\n")
    return Environment(folder / "bin" / "python", packages)


def build_wheel(folder: Path) -> Path:
    """Build the wheel of this project."""
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert built.returncode == 0, built.stdout + built.stderr
    (found,) = folder.glob("*.whl")
    return found


def install(environment: Environment, wheel: Path) -> None:
    """Install a wheel with pip, without its requirements."""
    pip = [sys.executable, "-m", "pip", "--python", str(environment.python), "install", "-qq", "--no-index"]
    done = subprocess.run([*pip, "--no-deps", str(wheel)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
