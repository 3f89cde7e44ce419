"""What was refused, rescued, seen below Python or lost: facts that render the text of an error or a warning.

No tensor and no stream object is ever formatted here: formatting a tensor synchronises.
"""

from __future__ import annotations

import textwrap
from dataclasses import dataclass

from .callsite import Site


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
        rows = [
            ("launch", self.launch),
            ("called at", _with_source(self.site)),
            ("stream given", self.given),
            ("stream expected", self.expected),
            ("capturing", self.capture),
            ("streamshim mode", self.mode),
        ]
        return _rendered(self.headline, rows, self.why, self.remedy)


@dataclass(frozen=True)
class Escape:
    """A launch that a capturing thread has made outside the capture, seen below Python.

    Attributes:
        what: the function of the driver, with the kernel's name where there is one.
        site: the user's line.
        given: the stream that it was launched on, in words.
        expected: the stream that it should have been, in words.
        capture: the driver's id of the capture.
        count: how often this line did it.
    """

    what: str
    site: Site
    given: str
    expected: str
    capture: int
    count: int = 1


#: How many escapes a report tells of in full.
SHOWN = 5


@dataclass(frozen=True)
class EscapeReport:
    """The launches that are missing from a graph, seen below Python.

    Attributes:
        escapes: one for each line and kernel.
        capture: the capture, in words.
        mode: the mode in force.
        is_over: whether the capture has ended.
    """

    escapes: tuple[Escape, ...]
    capture: str
    mode: str
    is_over: bool = True

    def __str__(self) -> str:
        first, rows = self.escapes[0], []
        for escape in self.escapes[:SHOWN]:
            times = f" ({escape.count} times)" if escape.count > 1 else ""
            rows += [
                ("launch", f"{escape.what}{times}"),
                ("called at", _with_source(escape.site)),
                ("stream", escape.given),
                ("stream expected", escape.expected),
            ]
        if len(self.escapes) > SHOWN:
            rows.append(("and", f"{len(self.escapes) - SHOWN} more"))
        rows += [("captured", self.capture), ("streamshim mode", self.mode)]
        which = "that was captured" if self.is_over else "being captured"
        return _rendered(
            f"Launches are missing from the CUDA graph {which}; the first was made at {first.site}.",
            rows,
            "They were made below Python on a stream outside the capture, so they ran once and are not in the graph: "
            "the first result is right and every replay wrong.",
            (
                "Give the code that launches torch's current stream (in C++: at::cuda::getCurrentCUDAStream()), for "
                "every launch inside it.",
                "If a launch is meant to stay outside the graph, say so: with streamshim.allow('launch', "
                "reason='...').",
            ),
        )


@dataclass(frozen=True)
class Missing:
    """Launches that CUDA took into a capture, and that its graph lacks.

    Attributes:
        what: the kernel's name, or "copy" or "set".
        launched: how often it was launched.
        nodes: how many nodes the graph has for it.
        site: the line that launched it first.
    """

    what: str
    launched: int
    nodes: int
    site: Site


@dataclass(frozen=True)
class MissingReport:
    """What a graph lacks of the launches that went into its capture.

    Attributes:
        kernels: one for each kernel.
        capture: the capture, in words.
        mode: the mode in force.
    """

    kernels: tuple[Missing, ...]
    capture: str
    mode: str

    def __str__(self) -> str:
        first, rows = self.kernels[0], []
        for missing in self.kernels[:SHOWN]:
            rows += [
                ("missing", missing.what),
                ("launched", f"{missing.launched} times; the graph has {missing.nodes} nodes for it"),
                ("first at", _with_source(missing.site)),
            ]
        if len(self.kernels) > SHOWN:
            rows.append(("and", f"{len(self.kernels) - SHOWN} more"))
        rows += [("captured", self.capture), ("streamshim mode", self.mode)]
        return _rendered(
            f"The captured CUDA graph lacks launches of {first.what}, which was launched first at {first.site}.",
            rows,
            "They were made on a stream of the capture, without an error, and the graph has fewer nodes for them than "
            "that: every replay would be wrong.",
            (
                "If they were moved into the capture below Python (redirect, or bind with None), the driver did not "
                "take that: give the function a stream parameter, and do without (STREAMSHIM_REDIRECT=0).",
                "Otherwise tell us of it, with this text and the output of `streamshim doctor`.",
            ),
        )


@dataclass(frozen=True)
class SyncReport:
    """A host synchronisation that was refused.

    Attributes:
        operation: what was called, in the user's words.
        site: the user's line.
        thread: the name of the calling thread, if another one has begun the capture; else an empty string.
        capture: what is capturing, in words.
        mode: the mode in force.
        why: what would happen, in one or two sentences.
        remedy: what to do, one line each.
    """

    operation: str
    site: Site
    thread: str
    capture: str
    mode: str
    why: str
    remedy: tuple[str, ...]

    def __str__(self) -> str:
        rows = [
            ("operation", self.operation),
            ("called at", _with_source(self.site)),
            ("in thread", self.thread),
            ("capturing", self.capture),
            ("streamshim mode", self.mode),
        ]
        where = "during another thread's" if self.thread else "inside a"
        return _rendered(
            f"Host sync refused {where} CUDA graph capture: {self.operation}, at {self.site}.",
            [row for row in rows if row[1]],
            f"{self.why} Nothing has been touched, and the capture is still valid.",
            (*self.remedy, "If it is known to be harmless: with streamshim.allow('sync', reason='...')."),
        )


@dataclass(frozen=True)
class LostCaptureReport:
    """A capture that was lost.

    Attributes:
        code: the number of CUDA's error.
        meaning: what it means.
        culprits: what is known of who did it, most likely first.
        site: the line of the first error inside the capture, if there was one.
        is_cause: whether that error is the cause; False if it only says that the capture was lost before.
        capture: the capture, in words.
        remedy: what to do, one line each.
    """

    code: int
    meaning: str
    culprits: tuple[str, ...]
    site: Site | None
    is_cause: bool
    capture: str
    remedy: tuple[str, ...]

    def __str__(self) -> str:
        unknown = "not seen: a call below Python (a library, a C++ extension, another thread), or a swallowed error"
        rows = [
            ("capture", self.capture),
            ("CUDA error", f"{self.code}: {self.meaning}"),
            ("cause", "\n".join(self.culprits) or unknown),
        ]
        if self.site is not None:
            rows.append(("raised at" if self.is_cause else "noticed at", _with_source(self.site)))
        where = "" if self.site is None else f" at {self.site}" if self.is_cause else f", as was noticed at {self.site}"
        return _rendered(
            f"The CUDA graph capture was lost{where}.",
            rows,
            "The graph cannot be used. The process can capture again.",
            self.remedy,
        )


def _with_source(site: Site) -> str:
    source = site.source
    return str(site) + (f"\n{source}" if source else "")


def _rendered(headline: str, rows: list[tuple[str, str]], why: str, remedy: tuple[str, ...]) -> str:
    lines = [headline, ""]
    for label, text in rows:
        first, *rest = text.splitlines()
        lines.append(f"  {label:<16} {first}")
        lines += [f"  {'':<16}     {line}" for line in rest]
    lines += ["", *_wrapped(why), "What to do:"]
    for step in remedy:
        lines += _wrapped(step, "  * ", "    ")
    return "\n".join(lines)


def _wrapped(text: str, first: str = "", later: str = "") -> list[str]:
    return textwrap.wrap(text, 110, initial_indent=first, subsequent_indent=later, break_long_words=False)
