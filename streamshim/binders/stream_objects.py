"""Handles as exact ``CUstream`` objects, one for each handle, never freed.

CuTe DSL finds an argument's adapter by exact type, so a subclass, a torch stream or None is silently dropped or
misread; and a plain compiled function receives the *address* of the object's storage, which callers keep in cached
argument lists. Objects that live for ever make both safe, and make it possible to recognise a stream among the
addresses of such a list (there are as many objects as the process has streams: dozens). cuda.bindings takes the same
objects without converting them.
"""

from __future__ import annotations

from typing import Any

from .. import fork

_lock = fork.Lock()
#: Handle -> the object that holds it, and the address of its storage. Read on the launch path, filled by the functions.
by_handle: dict[int, Any] = {}
addresses: dict[int, int] = {}
#: Address of an object's storage -> the handle it holds.
by_address: dict[int, int] = {}
#: The class ``CUstream`` once an object of it was made; read on the launch path.
stream_type: Any = None


def stream_object(handle: int) -> Any:
    """The ``CUstream`` that holds this handle."""
    found = by_handle.get(handle)
    return found if found is not None else _make(handle)


def address_of(handle: int) -> int:
    """The address of the storage that holds this handle, as a plain compiled function takes it."""
    if handle not in addresses:
        _make(handle)
    return addresses[handle]


def _make(handle: int) -> Any:
    global stream_type
    from cuda.bindings import driver

    stream_type = driver.CUstream
    with _lock:
        if handle not in by_handle:
            made = driver.CUstream(handle)
            addresses[handle] = int(made.getPtr())
            by_address[addresses[handle]] = handle
            by_handle[handle] = made
        return by_handle[handle]
