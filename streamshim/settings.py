"""What the user asked for, read once: arguments win over the environment, the environment over the defaults."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from enum import Enum
from typing import NamedTuple

from . import boot

#: The binders that exist, by the name used in ``only=`` and ``skip=``, with the module that holds each.
BINDERS: Mapping[str, str] = {
    "cute": "streamshim.binders.cute",
    "tvm_ffi": "streamshim.binders.tvm_ffi",
    "cuda_bindings": "streamshim.binders.cuda_bindings",
    "cuda_core": "streamshim.binders.cuda_core",
    "ctypes": "streamshim.binders.ctypes_",
}


class Mode(str, Enum):
    """How strictly launches are treated; the table in the README gives the meaning of each for every case."""

    BIND = "bind"
    """Bind what can be bound, warn about what had to be rescued, raise where the graph would be wrong."""
    STRICT = "strict"
    """As ``bind``, but raise for everything that had to be rescued. For CI."""
    CHECK = "check"
    """Bind nothing; raise where the program is wrong without the shim."""
    OFF = "off"
    """Patch nothing."""

    def __str__(self) -> str:
        return self.value


class Settings(NamedTuple):
    """The settings of one installation.

    Attributes:
        mode: how launches are treated.
        only: names of the only binders to apply, or None for all.
        skip: names of binders to leave out.
        watch: whether launches below Python are watched in captures; None: in strict and check mode.
        redirect: whether every default-class launch of a capturing thread is moved into the capture.
        disabled: why nothing is to be installed (a variable's name and value), or an empty string.
        source: where ``mode`` came from: "argument", a variable's name, or "default".
    """

    mode: Mode = Mode.BIND
    only: frozenset[str] | None = None
    skip: frozenset[str] = frozenset()
    watch: bool | None = None
    redirect: bool = False
    disabled: str = ""
    source: str = "default"

    @property
    def active(self) -> bool:
        """Whether anything is to be patched at all."""
        return not self.disabled and self.mode is not Mode.OFF

    @property
    def watches(self) -> bool:
        """Whether launches below Python are watched in captures."""
        return self.mode in (Mode.STRICT, Mode.CHECK) if self.watch is None else self.watch

    def wants(self, binder: str) -> bool:
        """Whether the binder of this name is to be applied."""
        return (self.only is None or binder in self.only) and binder not in self.skip

    def differences(self, new: Settings, arguments: Mapping[str, object]) -> list[str]:
        """What was said as an argument and is not what these settings say, in words.

        Args:
            new: what was asked for.
            arguments: the arguments by the names of their settings; None for what was not given.
        """
        return [
            f"{name}={_said(getattr(new, name))} (in force: {_said(getattr(self, name))})"
            for name, argument in arguments.items()
            if argument is not None and getattr(self, name) != getattr(new, name)
        ]

    @classmethod
    def read(
        cls,
        mode: str | Mode | None = None,
        only: Iterable[str] | None = None,
        skip: Iterable[str] | None = None,
        watch: bool | None = None,
        redirect: bool | None = None,
        environ: Mapping[str, str] | None = None,
    ) -> Settings:
        """Combine arguments and environment.

        Args:
            mode: "bind", "strict", "check", "off", a `Mode`, or None to take it from ``STREAMSHIM_MODE``,
                ``STREAMSHIM_STRICT`` or ``STREAMSHIM``.
            only: names of binders, or None.
            skip: names of binders, or None.
            watch: True, False, or None to take it from ``STREAMSHIM_WATCH``.
            redirect: True, False, or None to take it from ``STREAMSHIM_REDIRECT``.
            environ: the environment to read; ``os.environ`` if None.

        Raises:
            ValueError: for a value that is not allowed, naming the argument or variable and the allowed values.
        """
        env = os.environ if environ is None else environ
        if mode is not None:
            chosen, source = _mode(mode, "mode"), "argument"
            _said_by(env)
        else:
            chosen, source = _said_by(env)
        if env.get("STREAMSHIM_CTYPES"):
            # Wrong syntax is told here; the binder reads it again when it is applied.
            from .binders.ctypes_.environment import patterns_from

            patterns_from(env)
        watch = _switch(watch, "watch", env)
        redirect = _switch(redirect, "redirect", env)
        disabled = f"STREAMSHIM_DISABLE={env['STREAMSHIM_DISABLE']}" if _flag(env, "STREAMSHIM_DISABLE") else ""
        left_out = _names(skip, "skip") or frozenset()
        return cls(chosen, _names(only, "only"), left_out, watch, bool(redirect), disabled, source)


def _said(value: Mode | frozenset[str] | bool | None) -> str:
    """A setting as the user would write it."""
    return str(sorted(value)) if isinstance(value, frozenset) else str(value)


def _said_by(env: Mapping[str, str]) -> tuple[Mode, str]:
    """The mode that the environment asks for, and the variable that does; ValueError if two of them disagree."""
    said = {}
    if env.get("STREAMSHIM_MODE"):
        said["STREAMSHIM_MODE"] = _mode(env["STREAMSHIM_MODE"], "STREAMSHIM_MODE")
    if _flag(env, "STREAMSHIM_STRICT"):
        said["STREAMSHIM_STRICT"] = Mode.STRICT
    started = env.get(boot.VARIABLE, "").lower()
    if started in boot.MODES:
        said[boot.VARIABLE] = Mode(started)
    elif started not in boot.ON + boot.OFF:
        raise ValueError(f"{boot.VARIABLE} is {env[boot.VARIABLE]!r}; allowed values: {boot.ALLOWED}")
    if len(set(said.values())) > 1:
        listed = " and ".join(f"{name}={env[name]}" for name in said)
        raise ValueError(f"{listed} ask for different modes: unset all but one of them")
    return next(((mode, name) for name, mode in said.items()), (Mode.BIND, "default"))


def _mode(value: str | Mode, where: str) -> Mode:
    try:
        return Mode(value.lower() if isinstance(value, str) else value)
    except ValueError:
        allowed = ", ".join(repr(m.value) for m in Mode)
        raise ValueError(f"{where} is {value!r}; allowed values: {allowed}") from None


def _flag(env: Mapping[str, str], name: str) -> bool:
    value = env.get(name, "")
    if value.lower() in boot.ON:
        return True
    if value.lower() in boot.OFF:
        return False
    raise ValueError(f"{name} is {value!r}; allowed values: {', '.join(map(repr, boot.ON + boot.OFF[1:]))}, or unset")


def _switch(value: bool | None, name: str, env: Mapping[str, str]) -> bool | None:
    """An argument that is True, False or None; for None what its variable says, and None if that is not set."""
    if value is not None and not isinstance(value, bool):
        raise ValueError(f"{name} is {value!r}; allowed values: True, False, None")
    variable = f"STREAMSHIM_{name.upper()}"
    return _flag(env, variable) if value is None and env.get(variable) else value


def _names(value: Iterable[str] | None, where: str) -> frozenset[str] | None:
    if value is None:
        return None
    if not isinstance(value, Iterable):
        raise ValueError(f"{where} is {value!r}; accepted: names of binders: {', '.join(map(repr, BINDERS))}")
    names = [value] if isinstance(value, str) else list(value)
    unknown = sorted({repr(n) for n in names if n not in BINDERS})
    if unknown:
        raise ValueError(f"{where} names {', '.join(unknown)}; binders that exist: {', '.join(map(repr, BINDERS))}")
    return frozenset(names)
