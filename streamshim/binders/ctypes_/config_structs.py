"""Launches whose stream is in a structure: ``CUlaunchConfig`` and ``cudaLaunchConfig_t``.

Callers keep such a structure and use it again, so what is changed is a copy.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

from .values import address_of, as_argument

#: Of both structures, on 64-bit machines (cuda.h and driver_types.h, CUDA 12 and 13): seven 32-bit numbers and the
#: shared memory come before the stream, a pointer and a number after it.
STREAM_OFFSET, SIZE = 32, 56


def with_stream(
    given: Any, offset: int, kind: Any, where: str, resolve: Callable[[int], int]
) -> tuple[Any, ctypes.Array[ctypes.c_char] | None]:
    """The argument with the stream that it is to have.

    Args:
        given: what the caller passed: a pointer to the structure, in any form.
        offset: where the stream is.
        kind: the argument's declared type, or None.
        where: for messages.
        resolve: from the stream given to the stream to use.

    Returns:
        What to pass, and what has to live until the call is over. Where nothing changes, what the caller passed.

    Raises:
        TypeError: if the value is no pointer.
    """
    try:
        address = address_of(given)
    except (TypeError, ctypes.ArgumentError):
        kind_given = type(given)
        raise TypeError(
            f"{where}: got {kind_given.__module__}.{kind_given.__qualname__}; accepted: a pointer to the launch's "
            "configuration (byref(), pointer(), c_void_p, an int), or the structure itself"
        ) from None
    if not address:
        return given, None  # an error, which CUDA reports better
    stream = ctypes.c_uint64.from_address(address + offset).value
    handle = resolve(stream)
    if handle == stream:
        return given, None
    copy = ctypes.create_string_buffer(ctypes.string_at(address, SIZE), SIZE)
    ctypes.c_uint64.from_buffer(copy, offset).value = handle
    return as_argument(kind, ctypes.addressof(copy), where), copy
