"""``STREAMSHIM_CTYPES``: what `bind` says for file name patterns, said in the environment."""

from __future__ import annotations

import os
from collections.abc import Mapping

from . import VARIABLE
from .specs import SYNCS, Spec, Syncs, spec_of

SYNTAX = (
    "PATTERN:FUNCTION=STREAM[,FUNCTION=STREAM...][;PATTERN:...], where PATTERN is a file name with wildcards and "
    "STREAM the index of the stream argument, none, or syncs for a function that waits; for instance "
    "libscale-*.so:scale_on=-1,scale=none"
)


def patterns_from(environ: Mapping[str, str] | None = None) -> dict[str, dict[str, Spec]]:
    """The patterns of the environment, each with its functions.

    Args:
        environ: the environment to read; ``os.environ`` if None.

    Raises:
        ValueError: for wrong syntax, naming the variable, the part and the syntax.
    """
    text = (os.environ if environ is None else environ).get(VARIABLE, "")
    patterns: dict[str, dict[str, Spec]] = {}
    for part in filter(None, map(str.strip, text.split(";"))):
        pattern, colon, functions = (piece.strip() for piece in part.partition(":"))
        if not pattern or not colon or not functions:
            raise _wrong(part, "is not PATTERN:FUNCTION=STREAM")
        if "/" in pattern:
            raise _wrong(part, "has a folder in its pattern, which matches file names only")
        known = patterns.setdefault(pattern, {})
        for item in functions.split(","):
            name, equals, stream = (piece.strip() for piece in item.partition("="))
            if not name or not equals or ":" in name:
                raise _wrong(part, f"has {item.strip()!r}, which is not FUNCTION=STREAM")
            spec = spec_of(_stream(part, stream))
            if known.setdefault(name, spec) != spec:
                raise _wrong(part, f"names {name!r} again, with another stream")
    return patterns


def _stream(part: str, text: str) -> int | Syncs | None:
    if text.lower() in ("none", "syncs"):
        return None if text.lower() == "none" else SYNCS
    try:
        return int(text)
    except ValueError:
        raise _wrong(part, f"has the stream {text!r}, which is neither an index nor none nor syncs") from None


def _wrong(part: str, problem: str) -> ValueError:
    return ValueError(f"{VARIABLE}: the part {part!r} {problem}; the syntax is {SYNTAX}")
