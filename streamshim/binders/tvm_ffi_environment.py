"""The TVM-FFI environment stream: what ``TVMFFIEnvGetStream`` answers inside a kernel's host code.

It is thread-local, one for each device, and 0 unless somebody sets it. TVM-FFI sets it for the length of a call when
an argument is a torch tensor on a GPU. For every other kind of argument there are two ways here: `follow` keeps it
equal to torch's current stream from one stream switch to the next (that is what functions called straight from C
need), and `following` sets it for the length of one call (exact also where torch's stream was switched in C++).

A value that neither torch's switches nor TVM-FFI put there is the user's own (``tvm_ffi.use_raw_stream``): it counts as
a given stream, and the rule decides about it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

from .. import gate
from ..gate import Launch

CUDA = 2  # kDLCUDA of dlpack.h

_T = TypeVar("_T")
_set: Callable[[int, int, int], Any] | None = None
_get: Callable[[int, int], int] | None = None


class _Thread(threading.local):
    """What this thread's environment streams hold because of us, and in which blocks the user has set one."""

    def __init__(self) -> None:
        self.written: dict[int, int] = {}
        self.blocks: dict[int, int] = {}


#: Made anew by `forget`, so that no thread keeps what belonged to an installation that is over.
_thread = _Thread()


def available() -> bool:
    """Whether libtvm_ffi can be used. Importing tvm_ffi makes its symbols visible to every engine of the DSL."""
    global _set, _get
    if _set is None:
        try:
            from tvm_ffi import core
        except ImportError:
            return False
        _set, _get = core._env_set_current_stream, core._env_get_current_stream
    return True


def following(launch: Launch, device: int, call: Callable[..., _T], *args: Any, **kwargs: Any) -> _T:
    """Call with the device's environment stream as the rule wants it; the one before is back afterwards.

    Raises:
        WrongStreamError: if the rule refuses the launch; nothing has been called then.
    """
    if _get is None or _set is None:
        return call(*args, **kwargs)
    present = _get(CUDA, device)
    given = 0 if present == _thread.written.get(device) else present
    handle = gate.resolve(given, device, launch, "the TVM-FFI environment stream")
    if handle == present:
        return call(*args, **kwargs)
    _set(CUDA, device, handle)
    try:
        return call(*args, **kwargs)
    finally:
        _set(CUDA, device, present)


def follow(device: int) -> None:
    """Make the calling thread's environment stream of the device torch's current stream, now.

    Does nothing inside a block in which the user has set the environment stream, and in check mode, which binds
    nothing.
    """
    if _set is None or not gate.binds() or device in _thread.blocks:
        return
    handle = gate.current_handle(device)
    _set(CUDA, device, handle)
    _thread.written[device] = handle


def forget() -> None:
    """Take away what `follow` has put into the calling thread's environment streams."""
    global _thread
    if _set is not None and _get is not None:
        for device, handle in _thread.written.items():
            if _get(CUDA, device) == handle:
                _set(CUDA, device, 0)
    _thread = _Thread()


def enter_block(device: int) -> object:
    """The user sets the environment stream of the device for a block; returns what `leave_block` wants to see."""
    _thread.blocks[device] = _thread.blocks.get(device, 0) + 1
    return _thread


def leave_block(device: int, entered: object) -> None:
    """The user's block is over: TVM-FFI has put back what was there when it began, which may be out of date."""
    if entered is not _thread:
        return
    left = _thread.blocks.get(device, 0) - 1
    if left > 0:
        _thread.blocks[device] = left
    else:
        _thread.blocks.pop(device, None)
        follow(device)
