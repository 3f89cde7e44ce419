"""torch's profiler is let have CUPTI when it starts, which the watch has kept since the first capture.

CUPTI has one subscriber for the process. A profiler that finds it taken when it starts for the first time goes without
its CUDA events, then and ever after, and only logs a line (seen with torch 2.11).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..patching import Patch


def patches(profile: Any, give_way: Callable[[str], None]) -> list[Patch]:
    """The patch on the profiler.

    Target: ``torch.autograd.profiler.profile._prepare_trace`` (torch 2.6 to 2.13), which ``torch.profiler`` and the
    older interface both call before they touch CUPTI. Needed because nothing else tells that a profiler is about to
    start. Ends when CUPTI has several subscribers, or torch's profiler a hook.

    Args:
        profile: the class; nothing is patched if it is None.
        give_way: called with who wants CUPTI, in words.
    """
    if profile is None:
        return []

    def prepare(original: Callable[..., Any]) -> Callable[..., Any]:
        def _prepare_trace(self: Any, *args: Any, **kwargs: Any) -> Any:
            give_way("torch.profiler")
            return original(self, *args, **kwargs)

        return _prepare_trace

    return [Patch(profile, "_prepare_trace", prepare)]
