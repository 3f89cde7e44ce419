"""vLLM's entry point, of the group ``vllm.general_plugins``.

vLLM calls it in each of its processes before CUDA is initialised: where the engine's arguments are made, in the engine
core, in each worker, and in the process that inspects models. A worker that is forked inherits what it did.
"""

from __future__ import annotations

from .. import boot


def activate() -> None:
    """Install streamshim in this process, unless ``STREAMSHIM=0``; may be called any number of times.

    The mode is that of the environment. In strict mode a failure ends the process (see `boot.activate`). CUDA is not
    initialised.
    """
    boot.activate_by_default("the vLLM plugin")
