"""``torch.cuda.graph`` puts the current stream back also when its capture fails at the beginning or at the end."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from .. import gate, runtime
from ..patching import Patch
from ..streams import LEGACY


def patches(block: Any) -> list[Patch]:
    """The patches on the block of a capture.

    Target: ``torch.cuda.graph.__enter__`` and ``__exit__`` (torch 2.6 to 2.13). Needed because torch leaves the capture
    stream current when ``capture_begin`` or ``capture_end`` raises, and we make them raise more often: whoever catches
    that would go on there, and capture again there. Ends when torch restores the stream in a ``finally``.

    Args:
        block: ``torch.cuda.graph``; nothing is patched if it is None.
    """
    if block is None:
        return []
    return [Patch(block, "__enter__", _enter), Patch(block, "__exit__", _exit)]


def _enter(original: Callable[..., Any]) -> Callable[..., Any]:
    def __enter__(self: Any) -> Any:
        before = _current()
        try:
            return original(self)
        except BaseException:
            if gate.active and _current() != before:
                _end_what_began(self)
                self.stream_ctx.__exit__(None, None, None)
            raise

    return __enter__


def _exit(original: Callable[..., Any]) -> Callable[..., Any]:
    def __exit__(self: Any, *args: Any) -> Any:
        captured_on = _current()
        try:
            return original(self, *args)
        except BaseException:
            if gate.active and _current() == captured_on == getattr(self.capture_stream, "cuda_stream", None):
                self.stream_ctx.__exit__(None, None, None)
            raise

    return __exit__


def _end_what_began(block: Any) -> None:
    """torch can fail after CUDA has begun to capture, and has no block then that would end it."""
    current = _current()
    state = runtime.get().capture_state(current) if current > LEGACY else None
    if state is not None and (state or not state.valid):
        with contextlib.suppress(RuntimeError):
            block.cuda_graph.capture_end()


def _current() -> int:
    """The handle of the current stream; 0 where there is no CUDA."""
    asked = runtime.found()
    return asked.current_handle(asked.current_device()) if asked is not None else 0
