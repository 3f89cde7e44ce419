"""Values on their way through a call: a stream read from whatever was passed, and an address as ctypes takes it."""

from __future__ import annotations

import ctypes
import sys
from typing import Any

from ...streams import handle_of

_module: Any = ctypes  # its base classes are private, though documented
FunctionPointer: Any = _module._CFuncPtr
_Simple, _Pointer = _module._SimpleCData, _module._Pointer

#: Beyond this an int is no handle.
LIMIT = 1 << 64


class Resolved(ctypes.c_void_p):
    """A handle about which the rule has decided already; `streamshim.Stream` takes it as it is."""


def given_handle(value: Any, where: str) -> int:
    """The handle of what was passed as a stream: what `streams.handle_of` accepts, and what ctypes itself would take.

    Raises:
        TypeError: for anything else, naming ``where`` and what is accepted.
    """
    if type(value) is int:
        return handle_of(value, where)
    if isinstance(value, _Simple) and not isinstance(value, ctypes.c_void_p):
        number = value.value
        if number is None or isinstance(number, int):
            # A signed type holds the upper half of the addresses as negative numbers.
            return (number or 0) % LIMIT if ctypes.sizeof(value) == 8 else handle_of(number, where)
    if isinstance(value, _Pointer):
        return address_of(value)
    parameter = getattr(value, "_as_parameter_", None)
    return handle_of(value, where) if parameter is None else given_handle(parameter, where)


def as_argument(kind: Any, address: int, where: str) -> Any:
    """An address as an argument of a declared type; the type decides what ctypes accepts there.

    Args:
        kind: the element of ``argtypes``, or None where nothing is declared: ctypes makes a C int of a bare int then.
        address: a handle, or a tensor's address.
        where: for the error's text.

    Raises:
        TypeError: if the declared type is an integer that is too small for it.
    """
    if kind is None:
        return ctypes.c_void_p(address)
    if not isinstance(kind, type):
        return address  # ctypes takes any object that has a from_param
    if issubclass(kind, ctypes.c_void_p):
        return Resolved(address) if getattr(kind, "takes_resolved", False) else address
    if issubclass(kind, (_Pointer, ctypes.c_char_p, ctypes.c_wchar_p, FunctionPointer)):
        return ctypes.cast(ctypes.c_void_p(address), kind)
    if issubclass(kind, _Simple):
        bits = 8 * int(_module.sizeof(kind))
        if bits < 64 and address >> (bits - 1):
            raise TypeError(
                f"{where} is declared as {kind.__name__}, which would cut {address:#x} to {bits} bits; declare it as "
                "ctypes.c_void_p in argtypes"
            )
    return address


def address_of(value: Any) -> int:
    """The address that ctypes would pass for a pointer argument; 0 for None.

    Accepts None, an int, and whatever `ctypes.cast` accepts: pointers, arrays, byref(), c_void_p; also a structure,
    which ctypes passes by reference where a pointer to it is declared.
    """
    value = getattr(value, "_as_parameter_", value)
    if value is None or isinstance(value, int):
        return value or 0
    if isinstance(value, (ctypes.Structure, ctypes.Union)):
        return ctypes.addressof(value)
    return ctypes.cast(value, ctypes.c_void_p).value or 0


def tensor_type() -> Any:
    """``torch.Tensor``, or a class that has no instances while torch is not imported."""
    torch = sys.modules.get("torch")
    return getattr(torch, "Tensor", _NoTensor)


class _NoTensor:
    """Stands for torch's tensor type."""
