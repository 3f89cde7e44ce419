"""cuda.core: ``launch`` follows torch's current stream.

``cuda.core.launch`` calls the driver from C, below ``cuda.bindings``, so it needs a patch of its own. It takes a
stream first: a ``cuda.core.Stream`` (default streams have the handles 0, 1 and 2), a graph builder, or any object with
``__cuda_stream__``. A graph builder is its own capture on its own stream, and is left alone.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from enum import Enum
from types import MappingProxyType, ModuleType
from typing import Any

from .. import gate
from ..gate import Launch
from ..patching import Patch
from ..settings import Mode
from ..streams import handle_of
from .holders import Holders


class CudaCoreBinder:
    """The binder of cuda.core.

    It patches ``cuda.core._launcher.launch``, and replaces its copies, of which ``cuda.core.launch`` is the first
    (`holders`). Needed because there is no launch without a stream, and the default streams are the obvious ones to
    pass. Tested versions, without a GPU: cuda-core 0.5.1, 0.7.0, 1.0.1 and 1.2.2. It ends when cuda.core takes torch's
    current stream for a default one.

    ``Buffer.copy_to``, ``Buffer.copy_from``, ``Buffer.fill`` and allocations by memory resources are methods of types
    that cannot be patched: they go to the stream that they are given.
    """

    name = "cuda_core"
    packages: Mapping[str, str] = MappingProxyType({"cuda-core": ">=0.5,<1.3"})

    def __init__(self) -> None:
        self._holders = Holders()

    def patches(self, module: ModuleType) -> list[Patch]:
        """The patch on ``launch``."""
        return [Patch(module, "launch", _launch)]

    def applied(self, module: ModuleType) -> None:
        """Replace ``cuda.core.launch`` and what else was imported by name before."""
        self._holders.take(module, [vars(module)["launch"]])

    def removed(self) -> None:
        """Give the original back to whoever holds the replacement."""
        self._holders.give_back()

    def notes(self) -> list[str]:
        """What a user should know."""
        notes = self._holders.notes("cuda.core")
        if "cuda.core.experimental._launcher" in sys.modules:
            notes.append("cuda.core before 0.5, whose launch is cuda.core.experimental.launch, is not bound")
        return notes


binder = CudaCoreBinder()

_LAUNCH = Launch("cuda.core.launch")
_WHERE = "cuda.core.launch, argument 'stream'"


class TorchStream:
    """A handle as an object that ``launch`` accepts."""

    __slots__ = ("_answer",)

    def __init__(self, handle: int) -> None:
        self._answer = (0, handle)

    def __cuda_stream__(self) -> tuple[int, int]:
        """The protocol: its version, and the handle."""
        return self._answer


_streams: dict[int, TorchStream] = {}


class _Kind(Enum):
    """What a type is to ``launch``."""

    BUILDER = "cuda.core's graph builder"
    STREAM = "accepted as a stream"
    OTHER = "no stream to cuda.core"


_kinds: dict[type, _Kind] = {}
_BUILDER, _STREAM = _Kind.BUILDER, _Kind.STREAM


def _launch(original: Callable[..., Any]) -> Callable[..., Any]:
    def launch(*args: Any, **kwargs: Any) -> Any:
        # Without a config and a kernel it is the original's to complain.
        if not gate.active or len(args) + len(kwargs) < 3 or (not args and "stream" not in kwargs):
            return original(*args, **kwargs)
        stream = args[0] if args else kwargs["stream"]
        kind = _kinds.get(type(stream)) or _kind_of(type(stream))
        if kind is _BUILDER:
            return original(*args, **kwargs)
        given, device = handle_of(stream, _WHERE), 0 if gate.one_device else gate.current_device()
        # `gate.resolve` spelt out for the usual row.
        handle = given if given == gate.current_handle(device) else gate.resolve(given, device, _LAUNCH, "stream")
        if handle == given and (kind is _STREAM or gate.mode() is Mode.CHECK):
            return original(*args, **kwargs)
        bound = _streams.get(handle) or _streams.setdefault(handle, TorchStream(handle))
        if args:
            return original(bound, *args[1:], **kwargs)
        return original(**{**kwargs, "stream": bound})

    return launch


def _kind_of(kind: type) -> _Kind:
    if any(c.__name__ == "GraphBuilder" and c.__module__.startswith("cuda.core") for c in kind.__mro__):
        found = _Kind.BUILDER
    else:
        found = _Kind.STREAM if hasattr(kind, "__cuda_stream__") else _Kind.OTHER
    _kinds[kind] = found
    return found
