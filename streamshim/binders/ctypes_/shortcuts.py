"""A ``__call__`` with a function's parameters spelt out: the rows of the rule that need no question to the driver.

Taking whatever comes as a tuple, and handing that on with another stream in it, costs more than all the rest of a call.
So a bound function whose argtypes are plain gets a class of its own, below the class on which `hooks` has set its
``__call__``, with as many parameters as the function has; the text is made as `collections.namedtuple` makes its own.
Every call that it does not answer itself goes to the ``__call__`` above, as if there were no shortcut.
"""

from __future__ import annotations

import functools
import linecache
import weakref
from collections.abc import Callable
from typing import Any

from ... import fork, gate, runtime
from ...streams import LAST_DEFAULT
from .calls import Path, quick_place

_ABSENT: Any = object()
#: In a shortcut's class: the ``__call__`` that we have put there, and what it was made for.
_CALL, _FOR = "_streamshim_call", "_streamshim_for"

# This is `gate.resolve` spelt out, so that the rows which need no question to the driver are answered here; a test
# holds the two together. It is made in a mode that binds and for the argtypes that there are, and put out of use by
# ``off``. ``question`` is asked no more once there is another runtime. ``call`` is the original bound to the function,
# which saves packing the arguments once more.
_SOURCE = """
def make(above, call, launch, argument, question, gate, ABSENT, LAST_DEFAULT):
    resolve_rare = gate._resolve_rare

    def __call__(self, {parameters}, /, *more, **kwargs):
        if gate.current_handle is question and not more and not kwargs{complete}:
            if stream is None:
                return call({before}question({device}){after})
            if stream.__class__ is int:
                current = question({device})
                if stream == current or 0 <= stream <= LAST_DEFAULT:
                    return call({before}current{after})
                if 0 < stream < 1 << 64:
                    return call({before}resolve_rare(stream, current, {device}, launch, argument){after})
            elif {left_out}:
                return call({before}question({device}){after})
        given = [value for value in ({before}stream{after},) if value is not ABSENT]
        return above.__call__(self, *given, *more, **kwargs)

    def off():
        nonlocal question
        question = ABSENT

    return __call__, off
"""

#: Re-entrant, since a finaliser may run inside and call a bound function.
_lock = fork.Lock()


class Shortcuts:
    """The shortcuts of the functions of one class.

    Args:
        above: the class, which has our ``__call__``.
        find: the path of a function now, by ``key``; None once it is not bound.
        in_place: whether the ``__call__`` of that class is ours right now.
    """

    def __init__(self, above: Any, find: Callable[[str], Path | None], in_place: Callable[[], bool]) -> None:
        self._above, self._find, self._in_place = above, find, in_place
        # By the function's id, since function pointers have no hash.
        self._made: dict[int, tuple[weakref.ref[Any], Callable[[], None]]] = {}

    def offer(self, function: Any, key: str, path: Path, original: Callable[..., Any]) -> None:
        """Give the function a shortcut, if it can have one and has none that fits.

        Args:
            function: the function, which is about to be called.
            key: what ``find`` knows it by.
            path: the way that its calls take.
            original: the ``__call__`` below ours.
        """
        types = function.argtypes
        place = quick_place(path, types)
        if place < 0 or not gate.binds() or not hasattr(original, "__get__"):
            return
        asked = runtime.get()
        question = gate.current_handle
        made_for = (types, path, question)
        # Connected, which is done at the first question, and without a shortcut that fits.
        if question != asked.current_handle or vars(type(function)).get(_FOR) == made_for:
            return
        with _lock:
            # Someone else's wrapper wants to see every call.
            if self._find(key) is path and self._in_place() and self._drop(function):
                make = _maker(len(types), place, asked.device_count() == 1)
                bound = original.__get__(function, self._above)
                launch: Any = path  # it has what `_quick` has put there
                call, off = make(
                    self._above, bound, launch.launch, launch.argument, question, gate, _ABSENT, LAST_DEFAULT
                )
                mark = id(function)
                self._made[mark] = weakref.ref(function, lambda _: self._made.pop(mark, None)), off
                own = {_CALL: call, _FOR: made_for, "__new__": self._another, "argtypes": self._argtypes(off)}
                function.__class__ = subclass(self._above, call, **own)
                # Another thread may have set others before there was a property that waits for us.
                if function.argtypes is not types:
                    off()
                    self._drop(function)

    def _another(self, kind: Any, *args: Any, **kwargs: Any) -> Any:
        """``type(function)(address)``, or a cast to that: the shortcut is the function's alone."""
        return self._above(*args, **kwargs)

    def _argtypes(self, off: Callable[[], None]) -> property:
        """``argtypes`` of a function that has a shortcut, which others would not fit."""
        types = self._above.argtypes

        def change(function: Any, *new: Any) -> None:
            with _lock:
                off()
                self._drop(function)
                (types.__set__ if new else types.__delete__)(function, *new)

        return property(types.__get__, change, change)

    def withdraw(self) -> None:
        """Take all shortcuts away. Those that someone else has wrapped stay, and pass through."""
        with _lock:
            for ref, off in list(self._made.values()):
                off()
                function = ref()
                if function is not None:
                    self._drop(function)
            self._made.clear()

    def _drop(self, function: Any) -> bool:
        """Take the function's shortcut away; False if it has a class of somebody else's, or a wrapped shortcut."""
        kind = type(function)
        if kind is not self._above:
            own = vars(kind)
            if kind.__base__ is not self._above or own.get(_CALL) is not own["__call__"]:
                return False
            function.__class__ = self._above
        return True


def class_of(function: Any) -> Any:
    """The function's class, or the one above if that is a shortcut which nobody has wrapped."""
    own = vars(type(function))
    return type(function).__base__ if _CALL in own and own[_CALL] is own["__call__"] else type(function)


@functools.cache
def _maker(count: int, place: int, one_device: bool) -> Callable[..., Any]:
    """What makes the ``__call__`` of a function with so many parameters and the stream at this place."""
    before, after = [f"a{i}" for i in range(place)], [f"a{i}" for i in range(place + 1, count)]
    source = _SOURCE.format(
        parameters=", ".join(f"{name}=ABSENT" for name in (*before, "stream", *after)),
        # The stream may be left out if it is the last one; anywhere else the others would move up.
        complete=f" and {after[-1]} is not ABSENT" if after else "",
        left_out="False" if after else f"stream is ABSENT and {['self', *before][-1]} is not ABSENT",
        before="".join(f"{name}, " for name in before),
        after="".join(f", {name}" for name in after),
        device="0" if one_device else "gate.current_device()",
    )
    # Named for callsite, which leaves out our frames, and for tracebacks.
    file = f"<streamshim: {count} arguments, stream {place}, {'one device' if one_device else 'several devices'}>"
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    names: dict[str, Any] = {"__name__": __name__, "ABSENT": _ABSENT}
    exec(compile(source, file, "exec"), names)
    made: Callable[..., Any] = names["make"]
    return made


def subclass(base: Any, call: Callable[..., Any], **names: Any) -> Any:
    """A subclass with this ``__call__`` that ctypes treats as the base: what it reads from there is said again."""
    said = {name: getattr(base, name) for name in ("_flags_", "_restype_", "_argtypes_") if hasattr(base, name)}
    shown = {"__module__": base.__module__, "__qualname__": base.__qualname__, "__doc__": base.__doc__}
    return type(base)(base.__name__, (base,), {**said, **shown, **names, "__slots__": (), "__call__": call})
