"""Functions to be called through ctypes, with and without a compiler, and a runtime with invented streams."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path
from typing import Any

from streamshim import gate, runtime
from streamshim.binders.ctypes_ import devices, in_place, registry
from streamshim.runtime import NOT_CAPTURING, CaptureState

STREAM, OTHER, THIRD = 0x7F5512345678, 0x7F5587654321, 0x7F55AAAAAAAA

Pointer, Int, Long = ctypes.c_void_p, ctypes.c_int, ctypes.c_long

#: Each returns the stream that it was given, and writes what else it was given.
SOURCE = """
long calls, last_a, last_b;
long first(void *stream, long a, long b) { calls++; last_a = a; last_b = b; return (long)stream; }
long middle(long a, void *stream, long b) { calls++; last_a = a; last_b = b; return (long)stream; }
long last(long a, long b, void *stream) { calls++; last_a = a; last_b = b; return (long)stream; }
long only(void *stream) { calls++; return (long)stream; }
long none(long a, long b) { calls++; last_a = a; last_b = b; return a + b; }
int back(long (*function)(long, long, void *), long a, long b, void *stream) {
    return function(a, b, stream) == (long)stream;
}
"""


class Streams:
    """A runtime: what is current is what a test says, and what was asked and ordered is written down."""

    name = "invented"

    def __init__(self, devices: int = 1) -> None:
        self.current: dict[int, int] = {}
        self.device = 0
        self.devices = devices
        self.captures: dict[int, CaptureState] = {}
        self.ordered: list[tuple[int, int, int]] = []
        self.asked = 0

    def use(self) -> Streams:
        runtime.use(self)
        gate.connect(self)
        devices.single = object()
        return self

    def capture(self, *handles: int, id: int = 7) -> None:
        self.captures.update(dict.fromkeys(handles, CaptureState(id)))

    def current_handle(self, device: int) -> int:
        self.asked += 1
        return self.current.get(device, 0)

    def current_device(self) -> int:
        return self.device

    def device_count(self) -> int:
        return self.devices

    def set_device(self, device: int) -> None:
        self.device = device

    def order(self, first: int, then: int, device: int) -> None:
        self.ordered.append((first, then, device))

    def capture_state(self, handle: int) -> CaptureState:
        return self.captures.get(handle, NOT_CAPTURING)

    def thread_mode(self) -> str:
        return "global"


def recorder(*kinds: Any, prototype: Any = ctypes.CFUNCTYPE) -> tuple[Any, list[tuple[Any, ...]]]:
    """A lone function pointer of these argument types that writes down what the C side gets; returns 1."""
    seen: list[tuple[Any, ...]] = []

    def write_down(*args: Any) -> int:
        seen.append(args)
        return 1

    return prototype(ctypes.c_int, *kinds)(write_down), seen


def undeclared(function: Any) -> Any:
    """Another pointer to the same C function, without argtypes. Keep the first one alive."""
    made = ctypes.CDLL(None)._FuncPtr(ctypes.cast(function, Pointer).value)
    made.restype = Long
    return made


def build(folder: Path, name: str = "libplain.so", source: str = SOURCE) -> Path:
    """Compile a shared object; its path. The test is skipped where there is no gcc."""
    gcc = shutil.which("gcc")
    if gcc is None:
        import pytest

        pytest.skip("needs gcc")
    (folder / f"{name}.c").write_text(source)
    subprocess.run([gcc, "-O1", "-shared", "-fPIC", "-o", folder / name, folder / f"{name}.c"], check=True)
    return folder / name


def declare(library: Any) -> Any:
    """Give the functions of `SOURCE` their types."""
    library.first.argtypes = [Pointer, Long, Long]
    library.middle.argtypes = [Long, Pointer, Long]
    library.last.argtypes = [Long, Long, Pointer]
    library.only.argtypes = [Pointer]
    library.none.argtypes = [Long, Long]
    for name in ("first", "middle", "last", "only", "none"):
        getattr(library, name).restype = Long
    return library


def forget_everything() -> None:
    """Nothing stays bound."""
    registry._asked.clear()
    registry._from_environment.clear()
    for library in list(registry._libraries.values()):
        library.asked.clear()
        library.matched.clear()
        library.update(in_place.applied)
    for key, pointer in list(registry._pointers.items()):
        registry._drop_pointer(key, pointer)
    registry._libraries.clear()
    registry._pointers.clear()
    registry._match_again()
