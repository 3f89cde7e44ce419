"""Where a real CuTe kernel takes its stream from, before and after: read from the module that the DSL traces.

Works without a GPU, since nothing is launched. The module is seen before it is lowered, through the DSL's own
``trace_finalize_hooks``.
"""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from ..binders import version_of
from ..installer import install

PACKAGES = ("nvidia-cutlass-dsl", "apache-tvm-ffi")

_ARCH = "CUTE_DSL_ARCH"
#: The one ``stream = %x`` operand of a launch.
_LAUNCH = re.compile(r"(\S+ = cuda\.launch_cfg\.create)\b.*\bstream = (%\w+)")
_DEFINES = re.compile(r"\s*(%\w+) = ")


@dataclass(frozen=True)
class Comparison:
    """The lines that decide about the stream.

    Attributes:
        package: the DSL and its version.
        before: without streamshim.
        after: with streamshim.
        skipped: why there are no lines, or an empty string.
        problem: what is not as it should be, or an empty string.
    """

    package: str
    before: list[str] = field(default_factory=list)
    after: list[str] = field(default_factory=list)
    skipped: str = ""
    problem: str = ""


def missing() -> str:
    """Which library is missing for a CuTe kernel compiled with TVM-FFI, in words; an empty string if none is."""
    return next((f"{package} is not installed" for package in PACKAGES if version_of(package) is None), "")


def compare() -> Comparison:
    """Compile the demo's kernel without and with streamshim, which must not be installed."""
    package = f"{PACKAGES[0]} {version_of(PACKAGES[0])}"
    if missing():
        return Comparison(package, skipped=missing())
    try:
        with _architecture():
            if not _has_hooks():
                return Comparison(package, skipped=f"{package} does not show the traced module (4.8 does)")
            before = _stream_lines(_traced())
            with install("bind", only=["cute"]):
                after = _stream_lines(_traced())
    except Exception as error:  # noqa: BLE001
        # Whatever keeps the DSL from compiling on this machine, the story itself was told without it.
        return Comparison(package, skipped=f"{package} cannot compile here: {type(error).__name__}: {error}")
    if not before:
        return Comparison(package, skipped=f"no launch was found in the module traced by {package}")
    followed = any("TVMFFIEnvGetStream" in line for line in after)
    problem = "" if followed else "the CuTe kernel compiled with streamshim does not ask for torch's stream"
    return Comparison(package, before, after, problem=problem)


@contextmanager
def _architecture() -> Iterator[None]:
    """Tell the DSL a GPU to compile for, where there is none to ask; it reads the variable when it is imported."""
    import torch

    if _ARCH in os.environ or torch.cuda.is_available():
        yield
        return
    os.environ[_ARCH] = "sm_90a"
    try:
        from . import kernels  # noqa: F401

        yield
    finally:
        del os.environ[_ARCH]


def _has_hooks() -> bool:
    from cutlass.base_dsl.dsl import BaseDSL

    return inspect.isroutine(getattr(BaseDSL, "trace_finalize_hooks", None))


def _traced() -> str:
    """The module of the kernel without a stream parameter, as text."""
    from . import kernels

    modules: list[str] = []

    def keep(owner: Any, module: Any, function_name: str) -> None:
        modules.append(str(module))

    kernels.compile_update(trace_finalize_hooks=keep)
    return modules[-1]


def _stream_lines(module: str) -> list[str]:
    """The launch, before it what its stream is made from, and the helper that this calls, if any."""
    lines = module.splitlines()
    launch = next((i for i, line in enumerate(lines) if _LAUNCH.search(line)), None)
    if launch is None:
        return []
    # Names are unique within a function only: look from its beginning on.
    begin = max(i for i in range(launch) if "func.func" in lines[i])
    definitions = {m.group(1): i for i in range(begin, launch) if (m := _DEFINES.match(lines[i]))}
    config, stream = _LAUNCH.findall(lines[launch])[0]
    wanted, needed = {stream}, set()
    while wanted:
        i = definitions.get(wanted.pop())
        if i is not None:
            needed.add(i)
            wanted |= set(re.findall(r"%\w+", lines[i].partition(" = ")[2]))
    found = [lines[i].strip() for i in sorted(needed)] + [f"{config} (..., stream = {stream})"]
    for callee in re.findall(r"llvm\.call (@\w+)", "\n".join(found)):
        found += _helper(lines, callee)
    return found


def _helper(lines: list[str], name: str) -> list[str]:
    """The head of a function of the module, and its line that asks TVM-FFI."""
    head = next((i for i, line in enumerate(lines) if "llvm.func" in line and f"{name}(" in line), None)
    if head is None:
        return []
    body = []
    for line in lines[head + 1 :]:
        if "func" in line.split("@")[0]:
            break
        if "TVMFFIEnvGetStream" in line:
            body += ["  ...", f"  {line.strip()}"]
    return [lines[head].strip(), *body]
