"""The guards of captures, put in place together before the first capture of an installation can begin.

Apart from `installer`, so that a process which imports nothing that can capture loads no guard.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

from .. import capture, gate
from ..capture import Window
from ..patching import Patch
from ..runtime.null_launch import self_test
from ..settings import Mode
from ..state import State
from . import LIBRARIES, blocks, forks, libraries, lost, profiler, refusals, sync_mode, torch_calls
from .redirect import Redirect
from .watch import Source, Watch


def arm(state: State) -> Watch:
    """Put the guards of an installation in place, unless they are already. Returns the watch among them."""
    if state.watch is not None:
        return state.watch
    mode = state.settings.mode
    reads = mode in (Mode.STRICT, Mode.CHECK)
    state.redirect = Redirect(self_test, state.settings.redirect) if mode is not Mode.CHECK else None
    watch = gate.mover = Watch(_cupti, state.watches, state.redirect, compares=reads)
    capture.guards[:] = [sync_mode.SyncMode(), forks.Forks(), torch_calls.HostSyncs(), refusals.Refusals(), watch]
    capture.readers[:] = [_reader(watch)] if reads else []
    capture.judges[:] = [watch.judge]
    capture.explain = lost.explained
    capture.after_loss[:] = [_settle_generators]
    # Last: whoever finds it may begin a capture.
    state.watch = watch
    return watch


def disarm(watch: Watch) -> None:
    """Take the guards away; no window is open any more, and no patch in place."""
    libraries.removed()
    capture.guards.clear()
    watch.end()
    capture.judges.clear()
    gate.mover = None
    capture.readers.clear()
    capture.explain = None
    capture.after_loss.clear()


def patches(module: ModuleType, watch: Watch | None) -> list[Patch]:
    """The patches for one of `guards.MODULES`; without a watch nothing is installed, and none are needed."""
    if watch is None:
        return []
    if module.__name__ in LIBRARIES:
        return libraries.patches(module)
    if module.__name__ == "torch.cuda.graphs":
        return [*capture.patches(module.CUDAGraph), *blocks.patches(getattr(module, "graph", None))]
    if module.__name__ == "torch.cuda":
        return [*torch_calls.patches(module), *forks.patches(module)]
    return profiler.patches(getattr(module, "profile", None), watch.give_way)


def applied(module: ModuleType) -> None:
    """Called once the patches for one of `guards.MODULES` are in place."""
    if module.__name__ in LIBRARIES:
        libraries.applied(module)


def _reader(watch: Watch) -> Callable[[Any, Window], None]:
    """What reads the graph of each capture; made at the first one."""

    def read(graph: Any, window: Window) -> None:
        from ..graph_audit import read

        found = read(graph, window)
        if found is not None:
            watch.compare(window, found.nodes)

    return read


def _settle_generators(device: int) -> None:
    """After a capture that was lost."""
    from ..runtime.generators import settle

    settle(device)


def _cupti() -> Source:
    """What the watch is told by; looked for at the first capture, when torch has mapped the library."""
    from ..runtime import cupti

    return cupti.found()
