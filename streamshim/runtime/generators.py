"""torch's random numbers after a capture that was lost: they take it to be going on still."""

from __future__ import annotations

from typing import Any


def settle(device: int) -> None:
    """Let torch's default generator of a device know that no capture is open.

    ``capture_end`` raises before torch has told the generator that the capture is over, so that outside captures
    ``torch.rand``, dropout and everything else that draws numbers fail with "Offset increment outside graph capture
    encountered unexpectedly" until a capture has ended well (seen with torch 2.11). This is such a capture, on a stream
    of its own, with one kernel that does nothing. No guard is told of it.

    Args:
        device: its index.

    Raises:
        RuntimeError: if CUDA refuses it.
    """
    import torch

    c: Any = torch._C  # partly untyped, as is torch.cuda
    cuda: Any = torch.cuda
    graph = c._CUDAGraph()
    with cuda.device(device), cuda.stream(cuda.Stream(device)):
        graph.capture_begin(pool=c._graph_pool_handle(), capture_error_mode="thread_local")
        try:
            cuda._sleep(0)
        finally:
            graph.capture_end()
