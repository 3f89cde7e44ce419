"""`streamshim doctor`: would streamshim work here, with the settings of this environment?"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import click
from packaging.specifiers import SpecifierSet

from .. import boot
from .._version import __version__
from ..binders import version_of
from ..settings import Mode, Settings
from ..validation import environment as validation
from .console import Console
from .running import starts

#: Packages beside those of the binders, with the range that was tested.
TESTED = {"torch": ">=2.6,<2.14", "vllm": ">=0.22,<0.34", "sglang": ">=0.5.11,<0.6"}
PLUGINS = {
    "vllm": ("vllm.general_plugins", "VLLM_PLUGINS"),
    "sglang": ("sglang.srt.plugins", "SGLANG_PLUGINS"),
}
#: All that are read beside ``STREAMSHIM``.
VARIABLES = tuple(
    f"STREAMSHIM_{name}"
    for name in ("MODE", "STRICT", "DISABLE", "WATCH", "REDIRECT", "CTYPES", "VALIDATE", "REPORT_DIR", "REPORT_SECONDS")
)
#: Seconds for importing everything and for the self-tests, which compile a kernel.
PATIENCE = 300


@dataclass(frozen=True)
class Check:
    """One thing that was looked at.

    Attributes:
        name: what was looked at.
        state: "ok", "warn", "fail" (something that was asked for would not work) or "skipped" (could not be looked at,
            or is not there).
        text: what was seen.
        hint: what to do, if anything.
    """

    name: str
    state: str
    text: str
    hint: str = ""


def examine(as_json: bool, gpu: bool) -> int:
    """Look at everything and print it; returns the exit status: 1 if a check failed."""
    checks = look(os.environ, gpu)
    bad = [check for check in checks if check.state == "fail"]
    if as_json:
        click.echo(json.dumps({"ok": not bad, "checks": [asdict(check) for check in checks]}, indent=2))
        return 1 if bad else 0
    console = Console()
    console.text(f"streamshim {__version__}, {Path(__file__).parents[1]}")
    for check in checks:
        console.row(check.state, f"{check.name}: {check.text}" + (f"\n{check.hint}" if check.hint else ""), check.state)
    warned = sum(check.state == "warn" for check in checks)
    console.heading(
        f"{len(bad)} failed, {warned} warnings" if bad or warned else "Everything that was looked at is fine"
    )
    return 1 if bad else 0


def look(environ: Mapping[str, str], gpu: bool) -> list[Check]:
    """All checks, in the order in which they are shown."""
    asked = environ.get(boot.VARIABLE, "").lower() not in boot.OFF
    try:
        settings: Settings | None = Settings.read(environ=environ)
        validation.asked_for(environ)
        validation.report_seconds(environ)
        checks = [_of_settings(settings, environ, asked)] if settings is not None else []
    except ValueError as error:
        settings, checks = None, [Check("settings", "fail", str(error))]
    strict = settings is not None and settings.mode is Mode.STRICT
    checks += [_of_start_up(environ, asked), *(_of_plugin(engine, environ) for engine in PLUGINS)]
    checks.append(Check("python", "ok", f"{platform.python_version()}, {sys.executable}"))
    checks += [_of_version(package, tested) for package, tested in TESTED.items()]
    found = _survey(environ, gpu)
    if isinstance(found, Check):
        return [*checks, found]
    return [*checks, *_of_binders(found, strict), *_of_gpu(found, gpu)]


def _of_settings(settings: Settings, environ: Mapping[str, str], asked: bool) -> Check:
    said = ", ".join(f"{name}={value}" for name, value in sorted(environ.items()) if name.startswith("STREAMSHIM"))
    text = f"mode {settings.mode} ({settings.source})" + (f"; {said}" if said else "; no variable is set")
    unknown = sorted(name for name in environ if name.startswith("STREAMSHIM_") and name not in VARIABLES)
    if settings.active and unknown:
        return Check("settings", "warn", text, f"Nothing reads {', '.join(unknown)}; there are {', '.join(VARIABLES)}.")
    if settings.active:
        return Check("settings", "ok", text)
    why = settings.disabled or "the mode is off"
    hint = f"Nothing is installed while this is so ({why})." + (" Unset it, or unset STREAMSHIM." if asked else "")
    return Check("settings", "fail" if asked else "warn", text, hint)


def _of_start_up(environ: Mapping[str, str], asked: bool) -> Check:
    name = "start-up file"
    off = not asked and environ.get(boot.VARIABLE)
    if starts([sys.executable], {**environ, boot.VARIABLE: environ[boot.VARIABLE] if asked else boot.ON[0]}):
        if off:
            return Check(name, "ok", f"in place, and switched off by {boot.VARIABLE}={off}")
        when = ", since STREAMSHIM is set" if asked else " once STREAMSHIM=1 is set, which it is not"
        return Check(name, "ok", f"in place; every Python process of this environment starts streamshim{when}")
    hint = (
        "Install the package itself (pip install .), not a copy on PYTHONPATH, or start programs with "
        "`python -m streamshim run`."
    )
    return Check(name, "fail" if asked else "warn", "a new Python process does not start this streamshim", hint)


def _of_plugin(engine: str, environ: Mapping[str, str]) -> Check:
    group, variable = PLUGINS[engine]
    name = f"{engine} plugin"
    if version_of(engine) is None:
        return Check(name, "skipped", f"{engine} is not installed")
    if "streamshim" not in {entry.name for entry in metadata.entry_points(group=group)}:
        hint = "Install the package itself (pip install .), not a copy on PYTHONPATH."
        return Check(name, "warn", f"{engine} does not see it: no entry point of the group {group}", hint)
    allowed = environ.get(variable)
    if allowed is not None and "streamshim" not in [part.strip() for part in allowed.split(",")]:
        return Check(name, "warn", f"left out by {variable}={allowed}", f"Add streamshim to {variable}.")
    if (environ.get(boot.VARIABLE) or boot.ON[0]).lower() in boot.OFF:
        return Check(name, "ok", f"visible, and switched off by {boot.VARIABLE}={environ[boot.VARIABLE]}")
    return Check(name, "ok", "visible, and active in each of its processes")


def _of_version(package: str, tested: str) -> Check:
    version = version_of(package)
    if version is None:
        return Check(package, "skipped", "not installed")
    return _within(package, version, tested)


def _within(package: str, version: str, tested: str) -> Check:
    if SpecifierSet(tested).contains(version, prereleases=True):
        return Check(package, "ok", version)
    return Check(package, "warn", f"{version}, which is outside the tested range {tested}")


def _survey(environ: Mapping[str, str], gpu: bool) -> dict[str, Any] | Check:
    """What `survey` found in a process of its own, where no setting but the ctypes patterns holds."""
    keep = {n: v for n, v in environ.items() if not n.startswith("STREAMSHIM") or n == "STREAMSHIM_CTYPES"}
    command = [sys.executable, "-m", "streamshim.cli.survey", *(["--gpu"] if gpu else [])]
    root = str(Path(__file__).parents[2])
    path = os.pathsep.join(filter(None, [root, keep.get("PYTHONPATH")]))
    try:
        done = subprocess.run(
            command, env={**keep, "PYTHONPATH": path}, capture_output=True, text=True, timeout=PATIENCE
        )
    except subprocess.TimeoutExpired:
        return Check("libraries", "fail", f"importing and trying them took more than {PATIENCE} s")
    if done.returncode != 0:
        last = (done.stderr.strip() or "nothing on stderr").splitlines()[-1]
        return Check("libraries", "fail", f"importing and trying them ended with status {done.returncode}: {last}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def _of_binders(found: dict[str, Any], strict: bool) -> list[Check]:
    checks = [
        Check(module, "warn", f"is installed and cannot be imported: {why}")
        for module, why in found["imports_failed"].items()
    ]
    for binder in found["status"]["binders"]:
        name = f"binder {binder['name']}"
        versions = {p: v for p, v in binder["versions"].items() if v is not None}
        listed = ", ".join(f"{p} {v}" for p, v in versions.items())
        if binder["state"] == "off":
            hint = "Use a version within the tested range, or leave the binder out with install(skip=[...])."
            checks.append(Check(name, "fail" if strict else "warn", f"off: {binder['reason']} ({listed})", hint))
        elif binder["state"] == "waiting":
            checks.append(Check(name, "skipped", f"its library is not installed ({', '.join(binder['versions'])})"))
        else:
            checks.append(Check(name, "ok", f"{listed}; functions patched: {len(binder['patched'])}"))
        for package, version in versions.items():
            outside = _within(package, version, binder["tested"][package])
            if outside.state != "ok":
                checks.append(outside)
    if found["status"]["guards_off"]:
        checks.append(Check("guards", "fail" if strict else "warn", f"off: {found['status']['guards_off']}"))
    return checks


def _of_gpu(found: dict[str, Any], gpu: bool) -> list[Check]:
    if not found["gpus"]:
        return [Check("GPU", "skipped", f"{found['no_gpu']}; the self-tests were not run")]
    checks = [Check("GPU", "ok", f"{', '.join(found['gpus'])}; torch is built for CUDA {found['cuda']}")]
    if not gpu:
        return [*checks, Check("self-tests", "skipped", "--no-gpu was given")]
    for words, problem in found["tests"].items():
        checks.append(Check("self-test", "fail" if problem else "ok", f"{words}{': ' if problem else ''}{problem}"))
    return checks
