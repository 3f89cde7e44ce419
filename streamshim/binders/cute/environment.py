"""The TVM-FFI environment stream: what ``TVMFFIEnvGetStream`` answers inside a kernel's host code.

It is thread-local, one for each device, and 0 unless somebody sets it. TVM-FFI sets it for the length of a call when
an argument is a torch tensor on a GPU; for every other kind of argument, and for plain compiled functions, this does.
What the user has set with ``tvm_ffi.use_raw_stream`` counts as a given stream, so the rule decides about it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from ... import gate
from ...gate import Launch

_CUDA = 2  # kDLCUDA of dlpack.h

_T = TypeVar("_T")
_set: Callable[[int, int, int], Any] | None = None
_get: Callable[[int, int], int] | None = None


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
    """Call with the device's environment stream as the rule wants it; the one before is back afterwards."""
    if _get is None or _set is None:
        return call(*args, **kwargs)
    given = _get(_CUDA, device)
    handle = gate.resolve(given, device, launch, "the TVM-FFI environment stream")
    if handle == given:
        return call(*args, **kwargs)
    _set(_CUDA, device, handle)
    try:
        return call(*args, **kwargs)
    finally:
        _set(_CUDA, device, given)
