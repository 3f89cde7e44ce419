"""Reading the counters, which waits for the device, and what follows from them: reports, warnings, errors, files."""

from __future__ import annotations

import atexit
import functools
import json
import os
import socket
import sys
import time
import warnings

import torch

from .. import capture, fork, log
from ..errors import ValidationError, ValidationMismatchError, ValidationMismatchWarning
from . import calls, stats
from .entries import Entry, Output
from .environment import REPORT_DIR, report_dir, report_seconds
from .reading import FunctionReport, Mismatch, Row, ValidationReport
from .settings import RAISE, RECORD
from .stats import BAD_ELEMENTS, CHECKED, FIRST_INDEX, FIRST_RUN, MAX_ABS, MAX_REL, MISMATCHES, RUNS, Slot
from .structure import tensor_words

#: When an eager call may read the counters again.
_next_checkpoint = 0.0
#: How many mismatches of each function have been told, so that each is told once.
_told: dict[str, int] = {}
#: Why reports could not be written during eager calls; each reason is logged once.
_logged: set[str] = set()
_lock = fork.Lock()


def validation_report() -> ValidationReport:
    """What was counted so far, by all validated functions of this process. Waits for the device.

    Writes the report into ``STREAMSHIM_REPORT_DIR`` too, if that is set.

    Returns:
        The `ValidationReport`.

    Raises:
        ValidationError: inside a CUDA graph capture, of this thread or a known one of another thread: reading waits,
            which would break it. Nothing has been touched then. Also if the report cannot be written.
        ValidationMismatchError: if a function with ``on_mismatch="raise"`` was wrong, and that was not told before.
            It has the report.

    Warns:
        ValidationMismatchWarning: the same for ``on_mismatch="warn"``.
    """
    ensure_outside_captures("streamshim.validation_report()")
    report = read()
    _write(report)
    tell(report)
    return report


def checkpoint() -> None:
    """Called before an eager call is compared: read the counters from time to time, where anybody wants to know."""
    global _next_checkpoint
    if time.monotonic() < _next_checkpoint or capture.any_open():
        return
    _next_checkpoint = time.monotonic() + report_seconds()
    if report_dir() is None and all(f.settings.on_mismatch == RECORD for f in list(calls.functions.values())):
        return
    report = read()
    try:
        _write(report)
    except ValidationError as error:
        # A full disk is no reason for the model to stop; who asks for a report is told.
        if str(error) not in _logged:
            _logged.add(str(error))
            log.warning("streamshim: %s", error)
    tell(report)


def ensure_outside_captures(what: str) -> None:
    """ValidationError if a capture is open that reading the counters would break."""
    windows = capture.open_windows()
    if windows:
        raise ValidationError(
            f"{what} was called while a CUDA graph is being captured: {windows[-1]}. It waits for the device, which "
            "would break the capture. Call it after the capture; the counters go on counting at each replay."
        )
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():  # type: ignore[no-untyped-call]
        raise ValidationError(
            f"{what} was called inside a CUDA graph capture. It waits for the device, which would break the capture. "
            "Call it after the capture; the counters go on counting at each replay."
        )


def read() -> ValidationReport:
    """The report; waits for every device that has counters."""
    values = _Values()
    found = [
        FunctionReport(
            name=function.name,
            run=function.run.value,
            use=function.settings.use,
            sample=function.settings.sample,
            skipped=function.skipped,
            kept=sum(samples.full() for samples in list(function.samples.values())),
            not_kept=function.not_kept,
            rows=tuple(
                _row(function.name, entry, output, values)
                for entry in list(function.entries.values())
                for output in entry.outputs
            ),
        )
        for function in list(calls.functions.values())
    ]
    process = {
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "rank": os.environ.get("RANK"),
        "command": sys.argv[:1],
    }
    return ValidationReport(tuple(found), process)


class _Values:
    """All counters, copied to the CPU."""

    def __init__(self) -> None:
        self._chunks: dict[torch.device, list[tuple[torch.Tensor, torch.Tensor]]] = {}
        for arena in stats.arenas():
            if arena.device.type == "cuda":
                torch.cuda.synchronize(arena.device)
            self._chunks[arena.device] = [(ints.cpu(), floats.cpu()) for ints, floats in list(arena.chunks)]

    def of(self, slot: Slot) -> tuple[list[int], list[float]]:
        """The ints and the floats of a slot."""
        chunk, row = slot.place
        chunks = self._chunks[slot.device]
        if chunk >= len(chunks):
            return [0] * len(slot.ints), [0.0] * len(slot.floats)  # made while this was being read
        ints, floats = chunks[chunk]
        return ints[row].tolist(), floats[row].tolist()


def _row(function: str, entry: Entry, output: Output, values: _Values) -> Row:
    eager = [("eager calls", *values.of(slot)) for slot in list(output.eager.values())]
    if len(eager) > 1:
        eager = [(f"eager calls on stream {n} of {len(eager)}", i, f) for n, (_, i, f) in enumerate(eager, 1)]
    replays = [
        (f"replays of captured call {number} (capture {id_})", *values.of(slot))
        for number, (id_, slot) in enumerate(list(output.captured), 1)
    ]
    every = eager + replays
    shape = output.shape
    return Row(
        function=function,
        site=str(entry.site) if entry.site is not None else "other call sites and shapes",
        inputs=entry.inputs,
        output=output.name,
        tensor=tensor_words(output.dtype, shape, output.device),
        calls=entry.calls,
        captured=entry.captured,
        replays=sum(ints[RUNS] for _, ints, _ in replays),
        checked=sum(ints[CHECKED] for _, ints, _ in every),
        mismatches=sum(ints[MISMATCHES] for _, ints, _ in every),
        bad_elements=sum(ints[BAD_ELEMENTS] for _, ints, _ in every),
        max_abs=max((floats[MAX_ABS] for _, _, floats in every), default=0.0),
        max_rel=max((floats[MAX_REL] for _, _, floats in every), default=0.0),
        rtol=output.tolerance.rtol,
        atol=output.tolerance.atol,
        bad=tuple(
            Mismatch(where, ints[MISMATCHES], ints[FIRST_RUN], _index(ints[FIRST_INDEX], shape))
            for where, ints, _ in every
            if ints[MISMATCHES]
        ),
    )


def _index(flat: int, shape: tuple[int, ...] | None) -> tuple[int, ...] | int:
    """The index of an element, from its number in row-major order."""
    if shape is None:
        return flat
    index = []
    for size in reversed(shape):
        flat, place = divmod(flat, size)
        index.append(place)
    return tuple(reversed(index))


def tell(report: ValidationReport) -> None:
    """Warn of mismatches that were not told before, or raise, as their functions say."""
    with _lock:
        new = []
        for function in report.functions:
            if function.mismatches > _told.get(function.name, 0):
                _told[function.name] = function.mismatches
                new.append(function)
    wanted = {found.name: calls.functions[found.name].settings.on_mismatch for found in new}
    loud = [found for found in new if wanted[found.name] != RECORD]
    if not loud:
        return
    names = ", ".join(repr(found.name) for found in loud)
    text = f"A validated kernel does not agree with its reference: {names}.\n" + "\n".join(map(str, loud))
    if any(wanted[found.name] == RAISE for found in loud):
        raise ValidationMismatchError(text, report)
    warnings.warn(text, ValidationMismatchWarning, stacklevel=3)


def _write(report: ValidationReport) -> None:
    folder = report_dir()
    if folder is None:
        return
    target = folder / f"validation-{report.process['host']}-{report.process['pid']}.json"
    # Another process may be merging the folder.
    unfinished = target.with_suffix(".tmp")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        unfinished.write_text(json.dumps(report.to_dict(), indent=1))
        unfinished.replace(target)
    except OSError as error:
        raise ValidationError(f"{REPORT_DIR} is {str(folder)!r}, where no report can be written: {error}") from error


@functools.cache
def write_at_exit() -> None:
    """Have this process write its report when it ends, and tell of what nobody has been told."""
    global _next_checkpoint
    _next_checkpoint = time.monotonic() + report_seconds()
    atexit.register(_at_exit)


def _at_exit() -> None:
    if not any(function.entries for function in calls.functions.values()):
        return
    if report_dir() is None and all(f.settings.on_mismatch == RECORD for f in calls.functions.values()):
        return
    try:
        report = read()
        _write(report)
        tell(report)
    except (ValidationError, ValidationMismatchError) as error:
        # The exit status cannot be changed any more.
        sys.stderr.write(f"streamshim: {error}\n")
    except Exception:
        log.exception("streamshim: the validation report could not be written")


@fork.in_child
def _forget() -> None:
    """A forked child counts from zero: it cannot use its parent's CUDA memory."""
    stats.forget()
    _told.clear()
    for function in calls.functions.values():
        function.entries.clear()
        function.samples.clear()
