"""`streamshim.Stream`: a ctypes type for ``argtypes``, whose argument follows torch."""

from __future__ import annotations

import ctypes
from typing import Any

from ... import gate
from ...gate import Launch
from .devices import current_device
from .values import Resolved, given_handle

_LAUNCH = Launch("a ctypes function with an argument of type streamshim.Stream")
_WHERE = "an argument of type streamshim.Stream"


class Stream(ctypes.c_void_p):
    """The type of a stream argument, for people who declare: ``lib.f.argtypes = [c_void_p, c_int, streamshim.Stream]``.

    The rule decides about what is passed: None, 0, an int, ``c_void_p``, a torch stream, anything with
    ``__cuda_stream__``. The device is the current one. While nothing is installed, every value is passed as it is.

    ctypes turns whatever a type raises into ``ctypes.ArgumentError``, whose text is then that of the
    `WrongStreamError`. A function that is bound too (`streamshim.bind`) raises the latter itself.
    """

    #: For `values.as_argument`: the binder passes a handle about which it has asked the rule already.
    takes_resolved = True

    @classmethod
    def from_param(cls, value: Any) -> Any:
        """What ctypes calls to convert an argument.

        Raises:
            TypeError: if this is no stream.
            WrongStreamError: if the rule refuses the launch.
        """
        if type(value) is Resolved:
            return value
        given = given_handle(value, _WHERE)
        if not gate.active:
            return ctypes.c_void_p(given)
        return ctypes.c_void_p(gate.resolve(given, current_device(), _LAUNCH, "stream"))
