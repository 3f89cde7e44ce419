"""cuda.bindings and cuda.core without a GPU: their functions replaced by recorders, before streamshim is installed."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any

from streamshim.streams import handle_of


class Recorder:
    """A function of a module that writes down its calls and does nothing else.

    Attributes:
        calls: the arguments of each call as they came, positional ones and those by keyword.
    """

    def __init__(self, monkeypatch: Any, module: Any, name: str) -> None:
        self.module, self.name = module, name
        self.calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
        self.result = object()
        self.error: Exception | None = None

        @functools.wraps(getattr(module, name))
        def record(*args: Any, **kwargs: Any) -> Any:
            self.calls.append((args, kwargs))
            if self.error is not None:
                raise self.error
            return self.result

        self.function = record
        monkeypatch.setattr(module, name, record)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call what the module holds now."""
        return getattr(self.module, self.name)(*args, **kwargs)

    @property
    def last(self) -> tuple[Any, ...]:
        """The positional arguments of the last call."""
        return self.calls[-1][0]


class Form:
    """One form of launch: how it is called with a stream, and which stream arrived.

    Args:
        recorder: the function.
        arguments: all its arguments, with the place of the stream as ``STREAM``.
    """

    def __init__(self, recorder: Recorder, *arguments: Any) -> None:
        self.recorder, self._arguments = recorder, arguments
        self.place = next(i for i, a in enumerate(arguments) if a is STREAM)

    def __call__(self, stream: Any) -> Any:
        return self.recorder(*self.arguments(stream))

    def arguments(self, stream: Any) -> tuple[Any, ...]:
        return tuple(stream if a is STREAM else a for a in self._arguments)

    @property
    def handle(self) -> int:
        """The handle that the last call arrived with."""
        return self.handle_in(self.recorder.last)

    def handle_in(self, arrived: tuple[Any, ...]) -> int:
        """The handle among arguments that arrived."""
        return handle_of(arrived[self.place])


class ConfigForm(Form):
    """``cuLaunchKernelEx``: the stream is in a config."""

    def arguments(self, stream: Any) -> tuple[Any, ...]:
        config = self.recorder.module.CUlaunchConfig()
        config.gridDimX, config.hStream = 3, stream
        return super().arguments(config)

    def handle_in(self, arrived: tuple[Any, ...]) -> int:
        return int(arrived[0].hStream)


STREAM: Any = object()


class Protocol:
    """A stream of some library."""

    def __init__(self, handle: int) -> None:
        self.handle = handle

    def __cuda_stream__(self) -> tuple[int, int]:
        return (0, self.handle)


def forms(monkeypatch: Any) -> dict[str, Callable[[], Form]]:
    """Makers of the forms, by name; each records only the function that it is about."""
    from cuda.bindings import driver, runtime

    def of(module: Any, name: str, *arguments: Any, kind: type[Form] = Form) -> Callable[[], Form]:
        return lambda: kind(Recorder(monkeypatch, module, name), *arguments)

    def core() -> Form:
        from cuda.core import _launcher

        return Form(Recorder(monkeypatch, _launcher, "launch"), STREAM, "config", "kernel", 1, 2.0)

    return {
        "cuLaunchKernel": of(driver, "cuLaunchKernel", "f", 1, 2, 3, 4, 5, 6, 7, STREAM, "params", 0),
        "cuLaunchKernelEx": of(driver, "cuLaunchKernelEx", STREAM, "f", "params", 0, kind=ConfigForm),
        "cuMemcpyDtoDAsync": of(driver, "cuMemcpyDtoDAsync", 1, 2, 3, STREAM),
        "cuLaunchHostFunc": of(driver, "cuLaunchHostFunc", STREAM, "function", "data"),
        "cudaMemsetAsync": of(runtime, "cudaMemsetAsync", 1, 2, 3, STREAM),
        "cudaGraphLaunch": of(runtime, "cudaGraphLaunch", "exec", STREAM),
        "cuda.core.launch": core,
    }


FORMS = (
    "cuLaunchKernel", "cuLaunchKernelEx", "cuMemcpyDtoDAsync", "cuLaunchHostFunc", "cudaMemsetAsync",
    "cudaGraphLaunch", "cuda.core.launch",
)  # fmt: skip


def void_p(handle: int) -> ctypes.c_void_p:
    """A handle as ctypes has it."""
    return ctypes.c_void_p(handle)
