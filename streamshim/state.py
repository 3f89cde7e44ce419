"""What an installation has put in place, and what it could not."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from . import gate, log
from .patching import Patch, PatchSet
from .settings import BINDERS, Settings

if TYPE_CHECKING:
    from .guards.redirect import Redirect
    from .guards.watch import Watch


class State:
    """What one installation has done.

    Args:
        settings: the settings in force.
        by: who installed, in words; empty for the program itself.
        shadowed: where the targets are noted that cannot be put back.

    Attributes:
        sets: binder or guard -> its patches.
        problems: binder or guard -> why it is off.
        applied: the binders that have been told that they are in place.
        watch: what sees launches below Python; None until something is imported that can capture.
        redirect: what moves them; None in check mode, and until then.
    """

    def __init__(self, settings: Settings, by: str, shadowed: list[str]) -> None:
        self.settings = settings
        self.by = by
        self._shadowed = shadowed
        self.sets: dict[str, list[PatchSet]] = {}
        self.problems: dict[str, str] = {}
        self.applied: set[str] = set()
        self.watch: Watch | None = None
        self.redirect: Redirect | None = None

    def moves(self) -> bool:
        """Whether there is something to be moved into captures below Python."""
        return self.redirect is not None and (self.settings.redirect or gate.needs_mover)

    def watches(self) -> bool:
        """Whether captures are to be watched."""
        return self.settings.watches or self.moves()

    @property
    def guards_off(self) -> str:
        """What watches captures and could not be applied, in words."""
        off = [f"{name}: {problem}" for name, problem in self.problems.items() if name not in BINDERS]
        if self.watch is not None and self.watch.off:
            off.append(f"watch: {self.watch.off}")
        if self.redirect is not None and self.redirect.off:
            off.append(f"redirect: {self.redirect.off}")
        return "; ".join(off)

    def apply(self, binder: str, make: Callable[[], list[Patch]]) -> None:
        """Apply a set of patches, unless this binder is off already. A problem takes the whole binder off."""
        if binder in self.problems:
            return
        try:
            patches = PatchSet(make())
            problem = "; ".join(patches.probe())
            if not problem:
                patches.apply()
                self.sets.setdefault(binder, []).append(patches)
        except Exception as error:  # noqa: BLE001, an unknown shape can fail in any way
            problem = f"{type(error).__name__}: {error}"
        if problem:
            # One half of a binder would bind some launches and not others.
            self.problems[binder] = problem
            self.undo(binder)
            kind = "binder" if binder in BINDERS else "guard of"
            log.warning("streamshim: %s %s is off: %s", kind, binder, problem)

    def undo(self, binder: str) -> None:
        """Undo what a binder has patched."""
        for patches in reversed(self.sets.pop(binder, [])):
            self._shadowed.extend(patches.undo())

    @property
    def problems_text(self) -> str:
        """All problems, for an error."""
        binding = [f"  {name}: {problem}" for name, problem in self.problems.items() if name in BINDERS]
        watching = [f"  {name}: {problem}" for name, problem in self.problems.items() if name not in BINDERS]
        lines = []
        if binding:
            lines += ["A binder could not be applied, so launches through it would not follow torch's current stream:"]
            lines += [
                *binding,
                "Use a version within the tested range (streamshim.status() lists it), leave a binder out with "
                "install(skip=[...]), or use bind mode, which goes on without it.",
            ]
        if watching:
            lines += ["Calls that captures are guarded by could not be patched, so what they break would not be named:"]
            lines += [*watching, "Use another version of the library, or bind mode, which goes on without them."]
        return "\n".join(lines)
