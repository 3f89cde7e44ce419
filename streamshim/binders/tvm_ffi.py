"""TVM-FFI (apache-tvm-ffi): every function sees torch's current stream as its environment stream.

``tvm_ffi.Function`` is an immutable C type, and functions are called straight into C, so a call cannot be caught. What
can be caught is the moment when torch's current stream changes: the environment stream is written through then, for
functions fetched before and after ``install`` and for every kind of argument, and no call becomes slower.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from types import MappingProxyType, ModuleType
from typing import Any

from .. import gate, runtime
from ..errors import NoCudaError
from ..patching import Patch
from . import tvm_ffi_environment as environment


class TvmFfiBinder:
    """The binder of TVM-FFI.

    What it patches (tested versions: apache-tvm-ffi 0.1.15.post2, torch 2.11 and 2.13), and why:

    * ``torch._C._cuda_setStream`` and ``torch._C._accelerator_setStream``, which all of torch's Python ways to switch
      the stream call, and ``torch.cuda.streams.Stream.__enter__`` and ``__exit__``, which switch it in C;
    * ``BackwardCFunction.apply`` and ``BackwardCFunction.apply_boxed`` of torch.autograd: the autograd engine switches
      the stream in C++ before it runs a backward written in Python;
    * ``StreamContext.__enter__`` and ``StreamContext.__exit__`` of tvm_ffi: inside such a block the user's stream wins,
      and after it TVM-FFI puts back a stream that may no longer be torch's.

    It ends when TVM-FFI asks torch for its current stream whatever the arguments are.
    """

    name = "tvm_ffi"
    packages: Mapping[str, str] = MappingProxyType({"apache-tvm-ffi": ">=0.1.9,<0.2"})

    def patches(self, module: ModuleType) -> list[Patch]:
        """The patches on TVM-FFI's stream blocks, and on torch's stream switches as far as this torch has them."""
        from tvm_ffi.stream import StreamContext

        patches = [Patch(StreamContext, "__enter__", _enter_block), Patch(StreamContext, "__exit__", _leave_block)]
        torch = sys.modules.get("torch")
        if torch is not None:
            from torch.autograd.function import BackwardCFunction

            wanted: list[tuple[Any, str, Callable[[Callable[..., Any]], Callable[..., Any]]]] = [
                (torch._C, "_cuda_setStream", _after_set_stream),
                (torch._C, "_accelerator_setStream", _after_accelerator_set_stream),
                (torch.cuda.Stream, "__enter__", _after_stream_block),
                (torch.cuda.Stream, "__exit__", _after_stream_block),
                (BackwardCFunction, "apply", _in_backward),
                (BackwardCFunction, "apply_boxed", _in_backward),
            ]
            patches += [Patch(owner, name, make) for owner, name, make in wanted if hasattr(owner, name)]
        return patches

    def applied(self, module: ModuleType) -> None:
        """Write the streams that are current now, in this thread, if torch has anything but default streams yet."""
        environment.available()
        torch = sys.modules.get("torch")
        if torch is not None and torch.cuda.is_initialized():
            _follow_all()

    def removed(self) -> None:
        """Take back what was written in this thread."""
        environment.forget()

    def notes(self) -> list[str]:
        """What a user should know."""
        return []


def _follow_all() -> None:
    try:
        count = runtime.get().device_count()
    except NoCudaError:
        return
    for device in range(count):
        environment.follow(device)


def _after_set_stream(original: Callable[..., Any]) -> Callable[..., Any]:
    def _cuda_setStream(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        if gate.active:
            environment.follow(kwargs["device_index"] if "device_index" in kwargs else args[1])
        return result

    return _cuda_setStream


def _after_accelerator_set_stream(original: Callable[..., Any]) -> Callable[..., Any]:
    def _accelerator_setStream(stream: Any) -> Any:
        result = original(stream)
        if gate.active and stream.device.type == "cuda":
            environment.follow(stream.device_index)
        return result

    return _accelerator_setStream


def _after_stream_block(original: Callable[..., Any]) -> Callable[..., Any]:
    def switch(self: Any, *args: Any) -> Any:
        result = original(self, *args)
        if gate.active:
            # Leaving can make a stream of another device current again, which only torch knows.
            _follow_all()
        return result

    return switch


def _in_backward(original: Callable[..., Any]) -> Callable[..., Any]:
    def apply(self: Any, *args: Any) -> Any:
        if gate.active:
            _follow_all()
        return original(self, *args)

    return apply


def _enter_block(original: Callable[..., Any]) -> Callable[..., Any]:
    def __enter__(self: Any) -> Any:
        result = original(self)
        if gate.active and self.device_type == environment.CUDA:
            self._streamshim_block = environment.enter_block(self.device_id)
        return result

    return __enter__


def _leave_block(original: Callable[..., Any]) -> Callable[..., Any]:
    def __exit__(self: Any, *exc: Any) -> Any:
        result = original(self, *exc)
        entered = self.__dict__.pop("_streamshim_block", None)
        if entered is not None:
            environment.leave_block(self.device_id, entered)
        return result

    return __exit__


binder = TvmFfiBinder()
