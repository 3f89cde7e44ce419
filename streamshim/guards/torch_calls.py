"""torch's calls that let the host wait, patched so that `syncs` is asked first.

Two kinds. Waiting calls (synchronise, query) are patched while streamshim is installed, since torch's own check does
not know them. Tensor methods and some functions of torch are patched only while a capture is open: then they name the
operation, and where torch's check is not armed they are the check.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from .. import fork, gate, runtime
from ..capture import Window, windows
from ..errors import NoCudaError
from ..loading import is_initializing
from ..patching import Patch, PatchSet
from ..streams import LEGACY
from . import refusals, syncs
from .sync_table import (
    ALWAYS,
    EVENT_METHODS,
    FUNCTIONS,
    METHODS,
    STREAM_METHODS,
    SYNCHRONIZE,
    Operation,
    on_device,
)

_lock = fork.Lock()
#: The ids of the open captures; a guard may be told twice that one ends.
_open: set[int] = set()
#: The patches on what is named while a capture is open, and the torch that they are for. Kept between captures: to make
#: the replacements takes five times as long as to put them in place.
_named: tuple[ModuleType | None, PatchSet] = (None, PatchSet([]))


class HostSyncs:
    """The guard that names torch's synchronising operations while any capture is open."""

    def opened(self, window: Window) -> None:
        global _named
        with _lock:
            is_first = not _open
            _open.add(window.id)
            if not is_first:
                return
            torch = sys.modules.get("torch")
            if torch is not _named[0]:
                # A torch that is being imported may lack some of it still.
                _named = (None if is_initializing(torch) else torch, PatchSet(_patches_while_open(torch)))
            _named[1].apply()

    def closing(self, window: Window) -> None:
        with _lock:
            _open.discard(window.id)
            if not _open:
                _named[1].undo()


def patches(torch_cuda: ModuleType) -> list[Patch]:
    """The patches on torch's waiting calls, for as long as streamshim is installed.

    Targets: ``torch._C._cuda_synchronize`` and ``torch._C._accelerator_synchronizeDevice``, which every alias of both
    synchronize functions calls, and ``synchronize``, ``query``, ``elapsed_time`` of ``torch.cuda.Event`` and
    ``torch.cuda.Stream`` (torch 2.6 to 2.13). Needed because torch's sync debug mode does not know them, so that a
    capture would be lost without a line. Ends when it does.
    """
    c = getattr(sys.modules.get("torch"), "_C", None)
    event, stream = getattr(torch_cuda, "Event", None), getattr(torch_cuda, "Stream", None)
    wanted: list[tuple[Any, str, Callable[[Callable[..., Any]], Callable[..., Any]]]] = [
        (c, "_cuda_synchronize", waiting_for_the_device),
        (c, "_accelerator_synchronizeDevice", waiting_for_the_device),
        *((event, name, waiting_for_an_event(operation)) for name, operation in EVENT_METHODS.items()),
        *((stream, name, waiting_for_a_stream(operation)) for name, operation in STREAM_METHODS.items()),
    ]
    return [Patch(owner, name, make) for owner, name, make in wanted if hasattr(owner, name)]


def waiting_for_the_device(original: Callable[..., Any]) -> Callable[..., Any]:
    """The replacement of a call that waits for the current device, or for the one whose index is its argument.

    What is written out here and below is `syncs.run` while no capture is open, when engines wait and poll in loops.
    """

    def synchronize(*args: Any, **kwargs: Any) -> Any:
        if not gate.active:
            return original(*args, **kwargs)
        device = args[0] if args and type(args[0]) is int else None
        try:
            handle = gate.current_handle(gate.current_device() if device is None else device)
        except NoCudaError:
            handle = 0  # other accelerators wait, too
        if windows or kwargs or (handle > LEGACY and gate.capture_state(handle).id):
            return syncs.run(SYNCHRONIZE, 0, original, args, kwargs, device)
        try:
            return original(*args)
        except Exception as error:
            syncs.blame(SYNCHRONIZE, error)
            raise

    return synchronize


def waiting_for_an_event(operation: Operation) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Makes the replacement of a method of events."""

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def wait(self: Any, *args: Any, **kwargs: Any) -> Any:
            # An event that was never recorded has no handle, and waits for nothing.
            if windows and gate.active and self.cuda_event:
                return syncs.run(operation, 0, original, (self, *args), kwargs)
            try:
                return original(self, *args, **kwargs) if args or kwargs else original(self)
            except Exception as error:
                syncs.blame(operation, error)
                raise

        return wait

    return make


def waiting_for_a_stream(operation: Operation) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Makes the replacement of a method of streams."""

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def wait(self: Any, *args: Any, **kwargs: Any) -> Any:
            if not gate.active:
                return original(self, *args, **kwargs)
            handle = self.cuda_stream
            if windows or args or kwargs or (handle > LEGACY and gate.capture_state(handle).id):
                return syncs.run(operation, handle, original, (self, *args), kwargs)
            try:
                return original(self)
            except Exception as error:
                syncs.blame(operation, error)
                raise

        return wait

    return make


def _patches_while_open(torch: Any) -> list[Patch]:
    if not hasattr(torch, "Tensor"):
        return []
    tables: tuple[tuple[Any, Mapping[str, Operation]], ...] = ((torch.Tensor, METHODS), (torch, FUNCTIONS))
    return [
        Patch(owner, name, wanting_a_value(operation))
        for owner, table in tables
        for name, operation in table.items()
        if hasattr(owner, name)
    ]


def wanting_a_value(operation: Operation) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Makes the replacement of an operation that needs a value on the host: refused, or torch's refusal explained."""
    always = operation.when == ALWAYS

    def waits_on(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int | None:
        """The device that a call with these arguments waits for; None if it is not known to wait."""
        given = args or ((kwargs["input"],) if "input" in kwargs else ())
        waits = (always and bool(given) and on_device(given[0])) or (
            operation.needs is not None and operation.needs(given, kwargs)
        )
        return _device_of(given[0]) if waits else None

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        from torch.overrides import handle_torch_function, has_torch_function

        torch: Any = sys.modules["torch"]

        def synchronising(*args: Any, **kwargs: Any) -> Any:
            # Compiled code must not see that sizes are looked at. Then the arguments, before a question to the driver.
            asks = gate.active and not _is_compiling()
            device = None
            if asks and not torch._C._is_torch_function_mode_enabled():
                device = waits_on(args, kwargs)
            elif asks:
                # The modes are the user's, and would be told of each attribute that is read here.
                with torch._C.DisableTorchFunction():
                    device = waits_on(args, kwargs)
            if device is not None:
                syncs.check(operation, runtime.get().current_handle(device))
            try:
                values = [*args, *kwargs.values()]
                values += [item for value in values if type(value) is tuple for item in value]
                if has_torch_function(values):
                    # torch would look the method up by its name and hand our replacement to __torch_function__, where
                    # tables of a subclass or a mode know the original only.
                    return handle_torch_function(original, values, *args, **kwargs)
                return original(*args, **kwargs)
            except RuntimeError as error:
                if gate.active:
                    refusals.explain(error, operation)
                raise

        return synchronising

    return make


def _device_of(tensor: Any) -> int:
    index = tensor.device.index
    return runtime.get().current_device() if index is None else int(index)


def _is_compiling() -> bool:
    compiler = getattr(sys.modules.get("torch"), "compiler", None)
    return bool(compiler is not None and compiler.is_compiling())
