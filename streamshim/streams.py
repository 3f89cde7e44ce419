"""What a stream handle is: any value that people pass as a stream, as one integer.

A handle is the ``cudaStream_t`` / ``CUstream`` pointer as a Python int. Three small values are special in CUDA
(https://docs.nvidia.com/cuda/cuda-driver-api/stream-sync-behavior.html): 0 is the NULL stream, 1 the legacy default
stream and 2 the per-thread default stream. They are *default-class*: whoever passes one has not chosen a stream.
"""

from __future__ import annotations

import ctypes
import numbers
import sys
from collections.abc import Callable
from typing import Any

NULL, LEGACY, PER_THREAD = 0, 1, 2
#: The largest default-class handle; everything above is a stream that somebody created.
LAST_DEFAULT = PER_THREAD

_NAMES = {
    NULL: "the NULL stream (0)",
    LEGACY: "the legacy default stream (1)",
    PER_THREAD: "the per-thread default stream (2)",
}

ACCEPTED = (
    "None, an int handle, ctypes.c_void_p, torch.cuda.Stream, cuda.bindings CUstream or cudaStream_t, a CuTe fake "
    "stream, or any object with __cuda_stream__"
)

#: Readers by exact type, so that the launch path needs one dictionary look-up. Filled as types are met.
_readers: dict[type, Callable[[Any], int]] = {}


def handle_of(value: Any, where: str = "stream") -> int:
    """The handle of anything that is accepted as a stream.

    Args:
        value: None (handle 0), an int from 0 to 2**64 - 1, ``ctypes.c_void_p``, a torch stream, ``CUstream`` or
            ``cudaStream_t``, a CuTe fake stream (handle 0), or an object with ``__cuda_stream__``
            (https://nvidia.github.io/cuda-python/cuda-core/latest/interoperability.html).
        where: what the value was passed as, for the error's text.

    Raises:
        TypeError: for anything else; the text names ``where``, the type that came and what is accepted. The value
            itself is never formatted, since formatting a tensor or a stream can synchronise.
    """
    reader = _readers.get(type(value))
    if reader is None:
        reader = _reader(value, where)
    try:
        handle = reader(value)
    except _NoHandle as error:
        raise _refusal(value, where, str(error)) from None
    if 0 <= handle < 1 << 64:
        return handle
    raise TypeError(f"{where}: {handle} is not a stream handle (negative or beyond 64 bits); accepted: {ACCEPTED}")


def describe(handle: int) -> str:
    """The handle as a person reads it: ``0x7f12ab30``, or the name of a default stream."""
    return _NAMES.get(handle) or hex(handle)


def is_stream_like(value: Any) -> bool:
    """Whether the value can only have been meant as a stream (so not None and not an int)."""
    if value is None or isinstance(value, (numbers.Integral, ctypes.c_void_p)):
        return False
    return _classify(value) is not None


class _NoHandle(Exception):
    """A value of a type that is accepted has no handle after all."""


def _refusal(value: Any, where: str, detail: str = "") -> TypeError:
    kind = type(value)
    return TypeError(f"{where}: got {kind.__module__}.{kind.__qualname__}{detail}; accepted: {ACCEPTED}")


def _reader(value: Any, where: str) -> Callable[[Any], int]:
    reader = _classify(value)
    if reader is None:
        raise _refusal(value, where)
    _readers[type(value)] = reader
    return reader


def _classify(value: Any) -> Callable[[Any], int] | None:
    kind = type(value)
    if value is None or _is_fake_stream(kind):
        return _null
    if isinstance(value, bool):
        return None
    if isinstance(value, numbers.Integral):
        return int
    if isinstance(value, ctypes.c_void_p):
        return _of_void_p
    if _inherits(kind, "cuda.bindings", ("CUstream", "cudaStream_t")):
        return int
    if hasattr(kind, "cuda_stream"):
        return _of_torch_cuda
    if hasattr(kind, "__cuda_stream__"):
        return _of_protocol
    if _inherits(kind, "torch", ("Stream",)):
        return _of_torch_generic
    return None


def _inherits(kind: type, package: str, names: tuple[str, ...]) -> bool:
    return any(c.__name__ in names and c.__module__.startswith(package) for c in kind.__mro__)


def _is_fake_stream(kind: type) -> bool:
    return kind.__name__ == "_FakeStream" and kind.__module__.startswith("cutlass")


def _null(_: Any) -> int:
    return NULL


def _of_void_p(value: ctypes.c_void_p) -> int:
    return value.value or NULL


def _of_torch_cuda(value: Any) -> int:
    return int(value.cuda_stream)


def _of_protocol(value: Any) -> int:
    # The protocol is a method that returns (version, handle); early cuda.core had it as a property.
    answer = value.__cuda_stream__
    answer = answer() if callable(answer) else answer
    # The usual answer first: to ask an abstract class takes longer than all the rest of a launch's check.
    if type(answer) is tuple and len(answer) == 2 and type(answer[1]) is int:
        return answer[1]
    if isinstance(answer, tuple) and len(answer) == 2 and isinstance(answer[1], numbers.Integral):
        return int(answer[1])
    raise _NoHandle(", whose __cuda_stream__ did not answer (version, handle)")


def _torch_cuda_device_type() -> int:
    return int(sys.modules["torch"]._C._autograd.DeviceType.CUDA.value)


def _of_torch_generic(value: Any) -> int:
    if value.device_type != _torch_cuda_device_type():
        raise _NoHandle
    stream = sys.modules["torch"].cuda.Stream(
        stream_id=value.stream_id, device_index=value.device_index, device_type=value.device_type
    )
    return int(stream.cuda_stream)
