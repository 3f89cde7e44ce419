"""SGLang's entry point, of the group ``sglang.srt.plugins`` (SGLang 0.5.11 and newer).

SGLang calls it in the engine, and first of all in each scheduler process. It logs what a plugin raises and goes on, so
a failure in strict mode ends the process from inside `boot.activate`.
"""

from __future__ import annotations

from .. import boot


def activate() -> None:
    """Install streamshim in this process, unless ``STREAMSHIM=0``; may be called any number of times.

    The mode is that of the environment. In strict mode a failure ends the process (see `boot.activate`). CUDA is not
    initialised.
    """
    boot.activate_by_default("the SGLang plugin")
