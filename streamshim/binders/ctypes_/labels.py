"""Libraries and functions in words, for messages: file names and symbols, as ctypes and the linker know them."""

from __future__ import annotations

import ctypes
import os
from typing import Any


def has(library: Any, name: str) -> bool:
    """Whether the library has a function of this name; unlike ``hasattr`` it leaves nothing on the library."""
    try:
        library._FuncPtr((name, library))
    except AttributeError:
        return False
    return True


def label_of(library: Any) -> str:
    """A library in words: its file name."""
    name = getattr(library, "_name", None)
    if isinstance(name, (str, bytes, os.PathLike)) and name:
        return _file_name(os.fsdecode(name))
    return "the main program"


def label_of_function(function: Any) -> str:
    """A function pointer in words: library and symbol, as far as the dynamic linker knows them."""
    name = getattr(function, "__name__", None)
    library = next((o for o in (function._objects or {}).values() if isinstance(o, ctypes.CDLL)), None)
    if isinstance(name, str) and library is not None:
        return f"{label_of(library)}: {name}"
    address = ctypes.cast(function, ctypes.c_void_p).value or 0
    file, symbol = _linker_knows(address)
    return f"{file or 'ctypes function'}: {symbol or name or hex(address)}"


class _Found(ctypes.Structure):
    """``Dl_info`` of dladdr(3)."""

    _fields_ = [
        ("file", ctypes.c_char_p), ("base", ctypes.c_void_p), ("symbol", ctypes.c_char_p), ("start", ctypes.c_void_p)
    ]  # fmt: skip


def _linker_knows(address: int) -> tuple[str, str]:
    try:
        dladdr = ctypes.CDLL(None).dladdr
    except (OSError, AttributeError, TypeError):
        return "", ""
    found = _Found()
    if not dladdr(ctypes.c_void_p(address), ctypes.byref(found)):
        return "", ""
    exact = found.symbol and found.start == address
    return _file_name((found.file or b"").decode(errors="replace")), found.symbol.decode() if exact else ""


def _file_name(path: str) -> str:
    from pathlib import PurePath  # here, since `install` loads this module and needs no name yet

    return PurePath(path).name
