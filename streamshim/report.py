"""The answer to "what is the shim doing here?", as an object that prints well."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from . import binders
from .settings import Settings
from .state import State

#: How many targets of a binder the text names.
LISTED = 10


@dataclass(frozen=True)
class BinderStatus:
    """One binder.

    Attributes:
        name: the binder's name.
        state: "bound", "waiting" (its library is not imported yet), "off" or "skipped".
        reason: why it is off or skipped.
        versions: the installed version of each of its packages, None if it is not installed.
        tested: the tested range of each.
        patched: the targets in place.
        notes: what else a user should know.
    """

    name: str
    state: str
    reason: str = ""
    versions: dict[str, str | None] = field(default_factory=dict)
    tested: dict[str, str] = field(default_factory=dict)
    patched: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Status:
    """The whole installation.

    Attributes:
        version: streamshim's version.
        installed: whether `install` is in force.
        mode: the mode in force.
        source: where the mode came from.
        started_by: who installed it: "the start-up file", "the vLLM plugin", ...; empty if the program did.
        reason: why nothing is installed.
        torch: torch's version, None if it is not imported.
        guards_off: which of the patches that watch captures could not be applied, and why.
        binders: one entry a binder.
        captures: the captures that are open now, in words.
        events: how many launches were rescued, refused or allowed in captures.
        shadowed: targets that could not be put back, because someone else has wrapped them since.
    """

    version: str
    installed: bool
    mode: str
    source: str
    started_by: str
    reason: str
    torch: str | None
    guards_off: str
    binders: list[BinderStatus]
    captures: list[str]
    events: dict[str, int]
    shadowed: list[str]

    def to_dict(self) -> dict[str, Any]:
        """The same as plain dicts and lists, for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        head = f"streamshim {self.version}: "
        by = f" by {self.started_by}" if self.started_by else ""
        head += (
            f"installed{by}, mode {self.mode} ({self.source})" if self.installed else f"not installed ({self.reason})"
        )
        lines = [head, f"  torch     {self.torch or 'not imported yet'}"]
        if self.guards_off:
            lines.append(f"            guards off: {self.guards_off}")
        width = max([9, *(len(b.name) for b in self.binders)])
        for b in self.binders:
            versions = ", ".join(f"{p} {v or 'not installed'}" for p, v in b.versions.items())
            lines.append(f"  {b.name:<{width}} {b.state}{': ' + b.reason if b.reason else ''} ({versions})")
            lines += [f"            patched {target}" for target in b.patched[:LISTED]]
            if len(b.patched) > LISTED:
                lines.append(f"            patched {len(b.patched) - LISTED} more; to_dict() and --json have all")
            lines += [f"            note: {note}" for note in b.notes]
        lines += [f"  capturing {text}" for text in self.captures]
        lines += [f"  noticed   {kind}: {count}" for kind, count in self.events.items()]
        lines += [f"  shadowed  {target}: wrapped by someone else since; it passes through" for target in self.shadowed]
        return "\n".join(lines)


def binder_status(name: str, settings: Settings, state: State | None) -> BinderStatus:
    """What is to be said of a binder.

    Args:
        name: the binder.
        settings: those in force, or those that would be.
        state: the installation; None if there is none.
    """
    binder = binders.load(name)
    versions = {package: binders.version_of(package) for package in binder.packages}
    tested = dict(binder.packages)
    if not settings.wants(name):
        return BinderStatus(name, "skipped", "left out by install()", versions, tested)
    if state is None:
        return BinderStatus(name, "off", "", versions, tested)
    problem = state.problems.get(name, "")
    sets = state.sets.get(name, [])
    patched = [patch.target for patches in sets for patch in patches.patches if patch.in_place]
    lost = [patch.target for patches in sets for patch in patches.patches if not patch.in_place]
    notes = binder.notes() + [f"{target} was replaced or wrapped by someone else" for target in lost]
    now = "off" if problem else "bound" if sets else "waiting"
    return BinderStatus(name, now, problem, versions, tested, patched, notes)
