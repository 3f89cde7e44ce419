"""Guards watch a capture from its begin to its end: what would break it is refused, and what broke it is named.

`syncs` is the rule for host synchronisation; `torch_calls` and `libraries` patch what comes to it, `sync_mode` arms
torch's own check, `refusals` explains what that says. `forks` remembers the line that forked a stream into a capture,
`lost` explains a capture that was lost all the same. `watch` sees launches below Python, `redirect` says which to move.
`arming` puts all that watches captures in place, before the first one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from ..capture import Window

#: The modules of other libraries whose waiting calls are patched (`libraries`).
LIBRARIES = (
    "cupy.cuda.stream",
    "cupy_backends.cuda.api.runtime",
    "cupy",
    "numba.cuda.cudadrv.driver",
    "warp._src.context",
    "warp.context",
    "triton.runtime.autotuner",
    "torch._inductor.runtime.triton_heuristics",
)

#: The modules that are patched for the guards, and what is guarded by that. All of this is loaded at the first of them.
MODULES: Mapping[str, str] = {
    "torch.cuda.graphs": "torch captures",
    "torch.cuda": "torch waits",
    "torch.autograd.profiler": "torch profiler",
    **{name: f"{name} waits" for name in LIBRARIES},
}


class Guard(Protocol):
    """What `capture.guards` holds; an exception in one of these is the guard's own fault, and is logged."""

    def opened(self, window: Window) -> None:
        """A capture has just begun, on this thread."""

    def closing(self, window: Window) -> None:
        """A capture is about to end; also called for one that has been invalidated."""
