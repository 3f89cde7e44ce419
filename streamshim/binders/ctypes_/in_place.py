"""Whether this binder is in place, and what a library that ctypes loads is held against.

Apart from `registry`, which has all else: most processes load libraries and bind none, and those import no more of
this binder than this.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .entries import Pattern

#: Whether what is bound is to be in place; set by `install` and `uninstall`.
applied = False
#: All patterns in force; read without a lock whenever ctypes loads a library.
patterns: tuple[Pattern, ...] = ()
