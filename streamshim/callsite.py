"""The line of the user's own code that led here; computed only when something is reported."""

from __future__ import annotations

import os
import sys
from types import FrameType
from typing import NamedTuple

#: Frames of these top-level packages are machinery between the user's line and the launch, never the culprit.
MACHINERY = frozenset(
    {"streamshim", "torch", "cutlass", "tvm_ffi", "cuda", "wrapt", "contextlib", "functools", "ctypes", "concurrent"}
    | {"threading", "triton", "cupy", "cupyx", "cupy_backends", "numba", "numba_cuda", "warp"}
)


class Site(NamedTuple):
    """A line of source: file, 1-based line number, and the function around it."""

    file: str
    line: int
    function: str

    @property
    def source(self) -> str:
        """The text of the line, or an empty string where it cannot be read."""
        import linecache  # not before there is something to tell: it brings tokenize

        return linecache.getline(self.file, self.line).strip()

    def __str__(self) -> str:
        return f"{self.file}:{self.line} in {self.function}"


UNKNOWN = Site("<no Python frame>", 0, "?")


def user_site() -> Site:
    """The innermost frame outside `MACHINERY`; the innermost that is not ours if there is no such frame.

    Threads that were not started by Python (autograd's) may have no frame at all: `UNKNOWN` then.
    """
    try:
        frame: FrameType | None = sys._getframe(1)
    except ValueError:
        return UNKNOWN
    innermost = None
    while frame is not None:
        if not _is_machinery(frame):
            return _site(frame)
        if innermost is None and not _is_ours(frame):
            innermost = frame
        frame = frame.f_back
    return _site(innermost) if innermost is not None else UNKNOWN


def site_of_traceback(error: BaseException) -> Site | None:
    """The innermost line outside `MACHINERY` in the traceback of an exception; None if it has none."""
    found, step = None, error.__traceback__
    while step is not None:
        if found is None or not _is_machinery(step.tb_frame):
            frame = step.tb_frame
            found = Site(short(frame.f_code.co_filename), step.tb_lineno, frame.f_code.co_name)
        step = step.tb_next
    return found


def is_in_traceback(error: BaseException, module: str) -> bool:
    """Whether an exception came through a module of this name, or through one below it."""
    step = error.__traceback__
    while step is not None:
        name = str(step.tb_frame.f_globals.get("__name__", ""))
        if name == module or name.startswith(f"{module}."):
            return True
        step = step.tb_next
    return False


def _is_ours(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0] == "streamshim"


def _is_machinery(frame: FrameType) -> bool:
    name = str(frame.f_globals.get("__name__", ""))
    if name.partition(".")[0] in MACHINERY:
        # A program started with `python -m streamshim ...` or an example inside the package is still the user's.
        return not name.startswith("streamshim.demo") or name == "streamshim.demo.foreign"
    # Functions that a library writes and compiles belong to no module: TVM-FFI's around CuTe kernels, for instance.
    return frame.f_code.co_filename.startswith("<" if not name else "<frozen")


def _site(frame: FrameType) -> Site:
    return Site(short(frame.f_code.co_filename), frame.f_lineno, frame.f_code.co_name)


def short(file: str) -> str:
    """A file's path, from the current folder if it is in it."""
    # Every begin of a capture comes by here, and pathlib takes ten times as long.
    try:
        folder = os.getcwd().rstrip(os.sep) + os.sep  # noqa: PTH109
    except OSError:
        return file
    return file[len(folder) :] if file.startswith(folder) else file
