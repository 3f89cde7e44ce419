"""The tree of errors and warnings.

    StreamShimError                 root of all errors
    ├── WrongStreamError            a launch would escape the capture, or land in another one
    ├── MissingFromGraphError       strict and check mode: CUDA took a launch into a capture, and the graph lacks it
    ├── HostSyncError               the host would wait for the device inside a capture (also a RuntimeError)
    ├── CaptureInvalidatedError     a capture was lost; raised from torch's error (also a RuntimeError)
    ├── CompiledInCaptureError      strict mode: a kernel was compiled inside a capture
    ├── BinderError                 a binder could not be applied, and the user must know
    ├── AlreadyInstalledError       install() again with other settings
    ├── NoCudaError                 a question about streams was asked where torch has no CUDA
    ├── ValidationError             a kernel cannot be validated as it is, or the counters cannot be read now
    └── ValidationMismatchError     a validated kernel was wrong, where that is to be raised (also an AssertionError)
    StreamShimWarning (UserWarning)
    ├── RescuedLaunchWarning        a launch was moved into the capture
    ├── EscapedLaunchWarning        a launch below Python is missing from a graph
    ├── CompiledInCaptureWarning    a kernel was compiled inside a capture
    └── ValidationMismatchWarning   a validated kernel was wrong, where that is to be warned of

Each that is about a launch, a wait or a capture carries the facts (`findings`), and has their text.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

# What is raised brings its report along; `install` imports this file, and needs none.
if TYPE_CHECKING:
    from .findings import EscapeReport, LaunchReport, LostCaptureReport, MissingReport, SyncReport


class StreamShimError(Exception):
    """Root of everything that streamshim raises on its own account."""


class StreamShimWarning(UserWarning):
    """Root of everything that streamshim warns about."""


class WrongStreamError(StreamShimError):
    """A launch was refused before anything was launched: its stream would keep it out of the graph being captured.

    The capture itself is untouched: the caller may catch this, go on, end the capture and replay. What is only seen
    below Python is told at the end of the capture instead, before its graph can be used.

    Attributes:
        report: the `LaunchReport`, or at the end of a capture the `EscapeReport`, that is the text of the error.
    """

    def __init__(self, report: LaunchReport | EscapeReport) -> None:
        super().__init__(str(report))
        self.report = report


class MissingFromGraphError(StreamShimError):
    """Strict and check mode: a graph that was captured has fewer nodes than launches went into its capture.

    Raised at the end of the capture, before the graph can be used.

    Attributes:
        report: the `MissingReport` that is the text of the error.
    """

    def __init__(self, report: MissingReport) -> None:
        super().__init__(str(report))
        self.report = report


class HostSyncError(StreamShimError, RuntimeError):
    """A host synchronisation that would break a capture was refused before CUDA was touched: it is still valid.

    Attributes:
        report: the `SyncReport` that is the text of the error.
    """

    def __init__(self, report: SyncReport) -> None:
        super().__init__(str(report))
        self.report = report


class CaptureInvalidatedError(StreamShimError, RuntimeError):
    """A capture was lost, and this says why, as far as is known; torch's own error is its ``__cause__``.

    Attributes:
        report: the `LostCaptureReport` that is the text of the error.
    """

    def __init__(self, report: LostCaptureReport) -> None:
        super().__init__(str(report))
        self.report = report


class RescuedLaunchWarning(StreamShimWarning):
    """A launch with a stream outside the capture was moved onto the capturing stream."""


class EscapedLaunchWarning(StreamShimWarning):
    """Launches below Python are missing from a graph that was captured."""


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


class ValidationError(StreamShimError):
    """A kernel cannot be compared with its reference as they are, or the counters cannot be read now."""


class ValidationMismatchError(StreamShimError, AssertionError):
    """A validated kernel did not agree with its reference; raised outside captures, where ``on_mismatch="raise"``.

    Attributes:
        report: the `ValidationReport` that the text is made from.
    """

    # None only for a moment, when it is unpickled.
    def __init__(self, text: str, report: object = None) -> None:
        super().__init__(text)
        self.report = report


class ValidationMismatchWarning(StreamShimWarning):
    """A validated kernel did not agree with its reference."""
