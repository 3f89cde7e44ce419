"""The lines at which side streams were forked into a capture, for the error of one that is never joined."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

from .. import capture, gate, runtime
from ..callsite import Site, user_site
from ..capture import Window
from ..patching import Patch
from ..streams import LEGACY

_forks: dict[int, dict[int, Site]] = {}


class Forks:
    """The guard that forgets a capture's forks when the next one opens."""

    def opened(self, window: Window) -> None:
        live = {w.id for w in capture.open_windows()}
        for gone in [id_ for id_ in list(_forks) if id_ not in live]:
            _forks.pop(gone, None)  # other threads do the same

    def closing(self, window: Window) -> None:
        """They are kept until the next capture: the end of this one may need them."""


def of(window: Window) -> list[tuple[int, Site]]:
    """The streams that were forked into a capture, with the line of each."""
    return list(_forks.get(window.id, {}).items())


def patches(torch_cuda: ModuleType) -> list[Patch]:
    """The patch that sees a stream join a capture.

    Target: ``torch.cuda.Event.wait``, which ``Stream.wait_event`` and ``Stream.wait_stream`` go through (torch 2.6 to
    2.13). Needed because CUDA's error 904 names neither the stream nor the line. Ends when it does.
    """
    event = getattr(torch_cuda, "Event", None)
    return [Patch(event, "wait", _wait)] if hasattr(event, "wait") else []


def _wait(original: Callable[..., Any]) -> Callable[..., Any]:
    def wait(self: Any, stream: Any = None) -> Any:
        result = original(self, stream)
        if gate.active and capture.any_open():
            asked = runtime.get()
            handle = stream.cuda_stream if stream is not None else asked.current_handle(asked.current_device())
            window = capture.window(asked.capture_state(handle).id) if handle > LEGACY else None
            if window is not None and window.stream != handle:
                _forks.setdefault(window.id, {}).setdefault(handle, user_site())
        return result

    return wait
