"""What a call costs, counted in bytecodes and Python calls: the same on every machine, however busy."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from typing import Any


def count(call: Callable[[], Any]) -> tuple[int, int]:
    """Python calls and bytecodes of a call."""
    calls = codes = 0

    def trace(frame: Any, event: str, _: Any) -> Any:
        nonlocal calls, codes
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        calls += event == "call"
        codes += event == "opcode"
        return trace

    before, collects = sys.gettrace(), gc.isenabled()
    # A collection would be counted where it happens to begin: it calls finalizers that other tests have left.
    gc.disable()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
        if collects:
            gc.enable()
    return calls, codes


def warm_count(call: Callable[[], Any]) -> tuple[int, int]:
    """The same once everything is warm."""
    for _ in range(3):
        call()
    count(call)  # CPython 3.13 counts nothing of code that it traces for the first time
    return count(call)
