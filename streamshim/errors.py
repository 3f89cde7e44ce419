"""Errors and warnings. Each renders its own report, so that what is raised tells everything.

    StreamShimError                 root of all errors
    ├── WrongStreamError            a launch would escape the capture, or land in another one
    ├── CompiledInCaptureError      strict mode: a kernel was compiled inside a capture
    ├── BinderError                 a binder could not be applied, and the user must know
    ├── AlreadyInstalledError       install() again with other settings
    └── NoCudaError                 a question about streams was asked where torch has no CUDA
    StreamShimWarning (UserWarning)
    ├── RescuedLaunchWarning        a launch was moved into the capture
    └── CompiledInCaptureWarning    a kernel was compiled inside a capture

No tensor and no stream object is ever formatted here: formatting a tensor synchronises.
"""

from __future__ import annotations

import textwrap
from dataclasses import dataclass

from .callsite import Site


class StreamShimError(Exception):
    """Root of everything that streamshim raises on its own account."""


class StreamShimWarning(UserWarning):
    """Root of everything that streamshim warns about."""


@dataclass(frozen=True)
class LaunchReport:
    """Everything that is known about a launch that was refused or rescued.

    Attributes:
        headline: one sentence: what happened.
        launch: what was launched, for instance "CuTe kernel 'gate' (TVM-FFI), argument 'stream'".
        site: the user's line.
        given: the stream that the caller passed, in words.
        expected: the stream that it should have been, in words.
        capture: what is capturing, in words.
        mode: the mode in force.
        why: what would happen, in one or two sentences.
        remedy: what to do, one line each.
    """

    headline: str
    launch: str
    site: Site
    given: str
    expected: str
    capture: str
    mode: str
    why: str
    remedy: tuple[str, ...]

    def __str__(self) -> str:
        source = self.site.source
        rows = [
            ("launch", self.launch),
            ("called at", str(self.site) + (f"\n{source}" if source else "")),
            ("stream given", self.given),
            ("stream expected", self.expected),
            ("capturing", self.capture),
            ("streamshim mode", self.mode),
        ]
        lines = [self.headline, ""]
        for label, text in rows:
            first, *rest = text.splitlines()
            lines.append(f"  {label:<16} {first}")
            lines += [f"  {'':<16}     {line}" for line in rest]
        lines += ["", *_wrapped(self.why), "What to do:"]
        for step in self.remedy:
            lines += _wrapped(step, "  * ", "    ")
        return "\n".join(lines)


def _wrapped(text: str, first: str = "", later: str = "") -> list[str]:
    return textwrap.wrap(text, 110, initial_indent=first, subsequent_indent=later, break_long_words=False)


class WrongStreamError(StreamShimError):
    """A launch was refused before anything was launched: its stream would keep it out of the graph being captured.

    The capture itself is untouched: the caller may catch this, go on, end the capture and replay.

    Attributes:
        report: the `LaunchReport` that is the text of the error.
    """

    def __init__(self, report: LaunchReport) -> None:
        super().__init__(str(report))
        self.report = report


class RescuedLaunchWarning(StreamShimWarning):
    """A launch with a stream outside the capture was moved onto the capturing stream."""


class CompiledInCaptureError(StreamShimError):
    """Strict mode: a kernel would have been compiled inside a capture."""


class CompiledInCaptureWarning(StreamShimWarning):
    """A kernel was compiled inside a capture; it works, but it is slow and some drivers refuse the module load."""


class BinderError(StreamShimError):
    """A binder could not be applied although it was asked for by name, or strict mode is on."""


class AlreadyInstalledError(StreamShimError):
    """`install` was called again with settings that conflict with those in force."""


class NoCudaError(StreamShimError):
    """torch has no CUDA here, so there is no current stream to ask for."""
