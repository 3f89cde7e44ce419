"""Names that other modules hold: ``from cuda.bindings.driver import cuLaunchKernel`` copies the function.

A copy that was made before a patch does not see it. Copies that are attributes of loaded modules, which is what
``from ... import ...`` makes at the top of a file, can be found and replaced. Copies in closures, class attributes,
default arguments and containers cannot. A copy made while the patch is in place is a copy of the replacement: it needs
nothing, and gets the original back at the end like the others.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any

from ..loading import is_initializing

Function = Callable[..., Any]


class Holders:
    """The copies of some patched functions, in all loaded modules."""

    def __init__(self) -> None:
        self._swaps: list[tuple[Function, Function]] = []
        #: How many attributes of modules were replaced.
        self.replaced = 0
        #: Whether there can be copies that were made before the patch.
        self.late = False

    def take(self, module: ModuleType, replacements: Iterable[Function]) -> None:
        """Replace what other modules hold.

        Args:
            module: the patched module. While it is being imported nobody can hold anything of it, so nothing is
                searched then.
            replacements: what it holds now; each has its original as ``__wrapped__``, as `patching.Patch` sets it.
        """
        swaps = [(ours.__wrapped__, ours) for ours in replacements if hasattr(ours, "__wrapped__")]
        self._swaps += swaps
        if not is_initializing(module):
            self.late = True
            self.replaced += _swap(swaps)

    def give_back(self) -> None:
        """Put the originals back wherever a module holds a replacement, however it got it."""
        _swap([(ours, original) for original, ours in self._swaps])
        self._swaps, self.replaced, self.late = [], 0, False

    def notes(self, library: str) -> list[str]:
        """What `status` says about copies."""
        if not self.late:
            return []
        return [
            f"{library} was imported before install(): {self.replaced} copies of its functions in other modules were "
            "replaced; copies in closures, class attributes and containers from that time are not found"
        ]


def _swap(swaps: Iterable[tuple[Function, Function]]) -> int:
    """Replace the first of each pair by the second in every loaded module; returns how many attributes that were."""
    table = {id(old): (old, new) for old, new in swaps}
    if not table:
        return 0
    count = 0
    for module in list(sys.modules.values()):
        if not issubclass(type(module), ModuleType):
            continue
        # Not by the module's own attribute access: lazy modules would be loaded by it.
        namespace = object.__getattribute__(module, "__dict__")
        # Nearly every module holds none of them, which is told three times as fast without a loop of Python's.
        if table.keys().isdisjoint(map(id, list(namespace.values()))):
            continue
        for name, value in list(namespace.items()):
            found = table.get(id(value))
            # The module where somebody's wrapper is defined goes on calling its own.
            if found is not None and getattr(value, "__globals__", None) is not namespace:
                namespace[name] = found[1]
                count += 1
    return count
