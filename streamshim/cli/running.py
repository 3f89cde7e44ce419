"""`streamshim run`: an environment in which every Python process starts streamshim, and the program in it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

import click

from .. import boot
from ..settings import Settings

_PACKAGE = Path(__file__).parents[1]
#: Holds a sitecustomize.py, for environments without the start-up file.
STARTUP_FOLDER = _PACKAGE / "startup"

# Prints which streamshim a new process starts with, or an empty line: its last line, whoever else prints at its end.
_PROBE = (
    "import os, sys; b = sys.modules.get('streamshim.boot'); "
    "print('', b.__file__ if b and b.started else '', sep='\\n', flush=True); os._exit(0)"
)


def run_python(mode: str | None, watch: bool | None, arguments: Sequence[str]) -> NoReturn:
    """Become Python with these arguments, with streamshim active there and in all that it starts.

    Args:
        mode: "bind", "strict", "check", or None for what the environment says.
        watch: whether captures are watched; None for what the environment says.
        arguments: Python's command line.

    Raises:
        click.ClickException: if the settings contradict each other, or nothing can start streamshim there.
    """
    asked = {} if watch is None else {"STREAMSHIM_WATCH": str(int(watch))}
    environ = environment(mode, {**os.environ, **asked})
    python = [sys.executable, *subprocess._args_from_interpreter_flags()]  # type: ignore[attr-defined]
    if not starts(python, environ):
        environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(STARTUP_FOLDER), environ.get("PYTHONPATH")]))
        if not starts(python, environ):
            raise click.ClickException(
                "streamshim cannot be started in a new process: its start-up file is not installed in this "
                "environment, and PYTHONPATH has no effect, as with the flags -I, -E and -S. Install streamshim "
                "(pip install .), or leave the flags out."
            )
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(sys.executable, [*python, *arguments], environ)


def environment(mode: str | None, environ: Mapping[str, str]) -> dict[str, str]:
    """The environment with ``STREAMSHIM`` set.

    Raises:
        click.ClickException: for settings that contradict each other or switch streamshim off.
    """
    asked = environ.get(boot.VARIABLE, "").lower()
    new = {**environ, boot.VARIABLE: mode or (asked if asked not in boot.OFF else boot.ON[0])}
    try:
        settings = Settings.read(environ=new)
    except ValueError as error:
        raise click.ClickException(str(error)) from None
    if not settings.active:
        why = settings.disabled or "STREAMSHIM_MODE=off"
        raise click.ClickException(f"{why} is set, so streamshim would do nothing; unset it, or run the program itself")
    return new


def starts(python: Sequence[str], environ: Mapping[str, str]) -> bool:
    """Whether a new Python with this environment starts streamshim, this very copy of it; asks one."""
    environ = {**environ, boot.VARIABLE: environ.get(boot.VARIABLE) or boot.ON[0]}
    asked = subprocess.run([*python, "-c", _PROBE], env=environ, capture_output=True, text=True, cwd="/")
    # Other tools' start-up files print, too.
    found = asked.stdout.splitlines()[-1] if asked.stdout else ""
    return bool(found) and Path(found).resolve().parent == _PACKAGE.resolve()
