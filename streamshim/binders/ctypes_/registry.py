"""What is bound: libraries, lone function pointers, and file name patterns; and putting it in place and away.

What a user binds is remembered, whether anything is installed or not: it takes effect at ``install()``, is taken away
by ``uninstall()``, and comes back at the next ``install()``. Only weak references to libraries and functions are kept.
"""

from __future__ import annotations

import ctypes
import gc
import weakref
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

from ... import fork, log
from . import VARIABLE, in_place, tables
from .entries import Library, Pattern, Pointer
from .environment import patterns_from
from .labels import has, label_of, label_of_function
from .specs import Spec

_lock = fork.Lock()
_libraries: dict[int, Library] = {}
_pointers: dict[int, Pointer] = {}
_asked: dict[str, Pattern] = {}
_from_environment: dict[str, Pattern] = {}


def add_library(library: Any, functions: Mapping[str, Spec]) -> None:
    """Bind functions of a library.

    Raises:
        AttributeError: if the library has no function of that name.
        ValueError: if one of them is bound already, in another way.
    """
    with _lock:
        entry = _libraries.get(id(library)) or Library(_forgetting(library, _libraries), label_of(library))
        missing = sorted(repr(name) for name in functions if not has(library, name))
        if missing:
            raise AttributeError(f"{entry.label} has no function {', '.join(missing)}; nothing was bound")
        _refuse_conflict(entry.label, entry.specs, functions)
        single = _single(library._FuncPtr, functions, entry.label)
        entry.asked.update(functions)
        _libraries[id(library)] = entry
        for key, pointer in single:
            _drop_pointer(key, pointer)
        entry.update(in_place.applied)


def add_pointer(function: Any, spec: Spec) -> None:
    """Bind one function pointer.

    Raises:
        ValueError: if it is bound already, in another way.
    """
    with _lock:
        label = label_of_function(function)
        known = _pointers.get(id(function))
        owner = _owner(function)
        if known is not None and known.spec is not None:
            _refuse_conflict("", {label: known.spec}, {label: spec})
            return
        name = getattr(function, "__name__", "")
        if owner is not None and name in owner.specs:
            _refuse_conflict(owner.label, owner.specs, {name: spec})
            return
        if known is None:
            known = _pointers[id(function)] = Pointer(_forgetting(function, _pointers), label, spec)
        known.spec = spec
        known.update(in_place.applied)


def add_pattern(text: str, functions: Mapping[str, Spec]) -> None:
    """Bind functions of every library whose file name matches, whether it is loaded already or later.

    Raises:
        ValueError: if one of them is bound for this pattern already, in another way.
    """
    with _lock:
        known = _asked.get(text)
        if known is None:
            known = _asked[text] = Pattern(text, dict(functions))
        else:
            if bool(known.specs) is not bool(functions):
                was, now = ("with", "without") if known.specs else ("without", "with")
                raise ValueError(
                    f"the pattern {text!r} is bound already, {was} a map of functions, and now {now} one; call "
                    "streamshim.unbind first"
                )
            _refuse_conflict(f"the pattern {text!r}", known.specs, functions)
            if functions.keys() <= known.specs.keys():
                return
            known.specs.update(functions)
        _match_again()


def remove_library(library: Any) -> None:
    """Forget what was said about a library. ValueError if nothing was."""
    with _lock:
        entry = _libraries.get(id(library))
        if entry is None or not entry.asked:
            why = "only a pattern that it matches is: unbind that" if entry and entry.matched else "nothing of it is"
            raise ValueError(f"target: {label_of(library)} is not bound ({why})")
        entry.asked.clear()
        _match_again()


def remove_pointer(function: Any) -> None:
    """Forget what was said about a function pointer. ValueError if nothing was."""
    with _lock:
        entry = _pointers.get(id(function))
        if entry is None or entry.spec is None:
            owner = _owner(function)
            name = getattr(function, "__name__", "")
            why = " by itself: unbind its library" if owner is not None and name in owner.specs else ""
            raise ValueError(f"target: {label_of_function(function)} is not bound{why}")
        _drop_pointer(id(function), entry)


def remove_pattern(text: str) -> None:
    """Forget a pattern. ValueError if nothing was said about it."""
    with _lock:
        if _asked.pop(text, None) is None:
            source = f": {VARIABLE} says it" if text in _from_environment else ""
            listed = ", ".join(map(repr, _asked)) or "none"
            raise ValueError(f"target: the pattern {text!r} is not bound{source}; patterns that are: {listed}")
        _match_again()


def apply() -> None:
    """Put everything in place, and read the environment; once `in_place.applied` is true."""
    with _lock:
        _from_environment.clear()
        _from_environment.update({text: Pattern(text, specs) for text, specs in patterns_from().items()})
        for pointer in list(_pointers.values()):
            pointer.update(in_place.applied)
        _match_again()


def withdraw() -> None:
    """Take everything away, once that is false; what was bound is remembered, but for the environment."""
    with _lock:
        _from_environment.clear()
        for pointer in list(_pointers.values()):
            pointer.update(in_place.applied)
        _match_again()


def loaded(library: Any) -> None:
    """Bind a library that ctypes has just loaded, if it matches a pattern. Never raises: this is the user's load."""
    try:
        with _lock:
            entry = _match(library)
            if entry is not None:
                entry.update(in_place.applied)
    except Exception:
        log.exception("streamshim: could not bind %s", label_of(library))


def notes() -> list[str]:
    """What is bound, and what could not be, in words."""
    with _lock:
        said = []
        for library in list(_libraries.values()):
            names = sorted(library.specs) if library.ref() is not None else []
            if names:
                shown = ", ".join(names) if len(names) <= 8 else f"{', '.join(names[:8])} and {len(names) - 8} more"
                said.append(f"{library.label}: {shown}{'' if in_place.applied else ' (once installed)'}")
            if library.hook is not None and library.hook.is_wrapped:
                said.append(f"{library.label}: its functions' __call__ was replaced or wrapped by someone else")
        for pointer in list(_pointers.values()):
            if pointer.ref() is not None and pointer.spec is not None:
                said.append(f"function pointer {pointer.label}{'' if in_place.applied else ' (once installed)'}")
        for pattern in in_place.patterns or _asked.values():
            if not pattern.matches:
                said.append(f"pattern {pattern.text!r}: no library loaded through ctypes matches so far")
            said += pattern.remarks
        return said


def _match_again() -> None:
    """Find the libraries of all patterns anew; a cold walk over everything that Python's collector knows."""
    in_place.patterns = (*_asked.values(), *_from_environment.values()) if in_place.applied else ()
    for entry in list(_libraries.values()):
        entry.matched.clear()
    for pattern in (*_asked.values(), *_from_environment.values()):
        pattern.matches = 0
        pattern.remarks.clear()
    if in_place.patterns:
        # Not isinstance, which asks proxies for their class and so may import or create what they stand for.
        for found in [o for o in gc.get_objects() if issubclass(type(o), ctypes.CDLL)]:
            if "_FuncPtr" in vars(found):
                _match(found)
    for entry in list(_libraries.values()):
        entry.update(in_place.applied)
    _tidy()


def _match(library: Any) -> Library | None:
    """Note what the patterns say about a library; None if they say nothing."""
    file, entry = label_of(library), _libraries.get(id(library))
    for pattern in in_place.patterns:
        if not fnmatchcase(file, pattern.text):
            continue
        pattern.matches += 1
        for name, spec in (pattern.specs or tables.functions_of(library)).items():
            known = entry.specs.get(name, spec) if entry is not None else spec
            if known != spec:
                remark = f"{file}: {name} is bound with {known.said}, not as {pattern.text!r} says"
            elif not has(library, name):
                remark = f"{file} (matched by {pattern.text!r}) has no function {name!r}"
            else:
                if entry is None:
                    entry = _libraries[id(library)] = Library(_forgetting(library, _libraries), file)
                entry.matched[name] = spec
                continue
            if remark not in pattern.remarks:
                pattern.remarks.append(remark)
    return entry


def _refuse_conflict(label: str, known: Mapping[str, Spec], new: Mapping[str, Spec]) -> None:
    for name, spec in new.items():
        if known.get(name, spec) != spec:
            raise ValueError(
                f"{label}{': ' if label else ''}{name} is bound already with {known[name].said}, and now with "
                f"{spec.said}; call streamshim.unbind first, or leave it out"
            )


def _owner(function: Any) -> Library | None:
    """The library whose own class the function is an object of, if it is one that is bound."""
    for entry in list(_libraries.values()):
        library = entry.ref()
        if library is not None and isinstance(function, library._FuncPtr):
            return entry
    return None


def _single(kind: type, functions: Mapping[str, Spec], label: str) -> list[tuple[int, Pointer]]:
    """The function pointers of a library that are bound one by one and now with the library; refuses a conflict."""
    found = []
    for key, pointer in list(_pointers.items()):
        function = pointer.ref()
        name = getattr(function, "__name__", "")
        if pointer.spec is not None and isinstance(function, kind) and name in functions:
            _refuse_conflict(label, {name: pointer.spec}, {name: functions[name]})
            found.append((key, pointer))
    return found


def _drop_pointer(key: int, pointer: Pointer) -> None:
    pointer.spec = None
    pointer.update(in_place.applied)
    if pointer.hook is None:
        _pointers.pop(key, None)


def _tidy() -> None:
    """Forget libraries of which nothing is left, not even a replacement that could not be taken away."""
    for key, entry in list(_libraries.items()):
        if not entry.specs and entry.hook is None:
            _libraries.pop(key, None)


def _forgetting(value: Any, entries: dict[int, Any]) -> weakref.ref[Any]:
    key = id(value)
    return weakref.ref(value, lambda _: entries.pop(key, None))
