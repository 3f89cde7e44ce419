"""cuda-python's bindings: launches, copies and sets through ``cuda.bindings`` follow torch's current stream.

Which functions, and where each has its stream, is data in `cuda_functions`. They launch into the current context, so
the device is the current one, whatever the pointers among the arguments belong to.
"""

from __future__ import annotations

import ctypes
import dataclasses
import inspect
import sys
import textwrap
from collections.abc import Callable, Mapping
from types import MappingProxyType, ModuleType, NoneType
from typing import Any

from .. import gate
from ..errors import WrongStreamError
from ..findings import LaunchReport
from ..gate import Launch
from ..patching import Patch
from ..settings import Mode
from ..streams import LAST_DEFAULT, handle_of
from . import cuda_waits
from .cuda_functions import BY_CONFIG, DRIVER, ESSENTIAL, TABLES, Function, Kind
from .holders import Holders
from .stream_objects import by_handle, stream_object


class CudaBindingsBinder:
    """The binder of cuda-python's bindings.

    The functions below are module attributes, and are replaced by plain functions. Names that other modules imported
    before are replaced as well (`holders`). Needed because the stream is whatever number the caller passes, most often
    0. Tested versions, without a GPU: cuda-bindings 12.8.0, 12.9.4, 13.0.3, 13.3.1 and 13.4.4. A function that the
    installed version does not have is left out, unless it is one without which the module is unknown. It ends when
    cuda-python takes torch's current stream where none is given.
    """

    name = "cuda_bindings"
    packages: Mapping[str, str] = MappingProxyType({"cuda-bindings": ">=12.8,<13.5"})

    def __init__(self) -> None:
        self._holders = Holders()

    def patches(self, module: ModuleType) -> list[Patch]:
        """One patch for each function that exists; `LookupError` where one has no stream that could be found."""
        patches = []
        for name, function in TABLES[module.__name__].items():
            original = getattr(module, name, None)
            if original is None and name not in ESSENTIAL:
                continue
            if original is not None:
                function = _as_installed(original, name, function)
            patches.append(Patch(module, name, _maker(module, name, function)))
        return [*patches, *cuda_waits.patches(module)]

    def applied(self, module: ModuleType) -> None:
        """Replace what was imported by name before."""
        names = (*TABLES[module.__name__], *cuda_waits.names(module.__name__))
        self._holders.take(module, [vars(module)[name] for name in names if name in vars(module)])

    def removed(self) -> None:
        """Give the originals back to whoever holds a replacement."""
        self._holders.give_back()

    def notes(self) -> list[str]:
        """What a user should know."""
        return self._holders.notes("cuda.bindings")


# The list is data, and is shown by help() with the rest.
_LISTED = ", ".join(
    f"``{module}.{name}``" for module in TABLES for name in (*TABLES[module], *cuda_waits.names(module))
)
CudaBindingsBinder.__doc__ = f"{CudaBindingsBinder.__doc__}\n" + textwrap.fill(
    f"Targets: {_LISTED}.", 116, initial_indent="    ", subsequent_indent="    ", break_long_words=False
)

binder = CudaBindingsBinder()


def _as_installed(original: Any, name: str, function: Function) -> Function:
    """The function with the place of its stream as the installed version has it."""
    try:
        parameters = inspect.signature(original).parameters
    except (TypeError, ValueError):
        return function
    if any(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in parameters.values()):
        return function  # somebody's wrapper, which says nothing
    names = list(parameters)
    argument = next((n for n in (function.argument, "hStream", "stream") if n in names), None)
    if argument is None and len(names) == function.count:
        return function
    if argument is None:
        raise LookupError(f"{name} has no parameter {function.argument!r}")
    return dataclasses.replace(function, argument=argument, place=names.index(argument), count=len(names))


def _maker(module: ModuleType, name: str, function: Function) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    launch = Launch(f"{module.__name__}.{name}")
    if name == BY_CONFIG:
        return lambda original: _by_config(original, module, function, launch)
    if name == "cuLaunchKernel" and function == DRIVER[name]:
        return lambda original: _launch_kernel(original, module, function, launch)
    return lambda original: _by_argument(original, module, function, launch)


def _by_argument(original: Callable[..., Any], module: Any, function: Function, launch: Launch) -> Callable[..., Any]:
    """The replacement of a function whose stream is an argument of its own."""
    argument, place, count = function.argument, function.place, function.count
    where = f"{launch.what}, argument {argument!r}"
    native = _native_types(module)

    def replacement(*args: Any, **kwargs: Any) -> Any:
        # With any other number of arguments it is the original's to complain.
        if not gate.active or len(args) + len(kwargs) != count:
            return original(*args, **kwargs)
        if place < len(args):
            value = args[place]
        elif argument in kwargs:
            value = kwargs[argument]
        else:
            return original(*args, **kwargs)
        given = handle_of(value, where)
        try:
            handle = gate.resolve(given, gate.current_device(), launch, argument)
        except WrongStreamError as error:
            raise _named(error, function, args, kwargs) from None
        if handle == given and (type(value) in native or gate.mode() is Mode.CHECK):
            return original(*args, **kwargs)
        bound = stream_object(handle)
        if place < len(args):
            arguments = [*args]
            arguments[place] = bound
            return original(*arguments, **kwargs)
        return original(*args, **{**kwargs, argument: bound})

    return replacement


def _native_types(module: Any) -> frozenset[type]:
    """The types of streams that the functions of a module take as they are; all others are converted."""
    stream_type = sys.modules["cuda.bindings.driver"].CUstream
    return frozenset({int, NoneType, stream_type, getattr(module, "cudaStream_t", stream_type)})


_ABSENT: Any = object()
#: The parameters of ``cuLaunchKernel``, as `_launch_kernel` spells them out.
_LAUNCH_KERNEL = (
    "f", "gridDimX", "gridDimY", "gridDimZ", "blockDimX", "blockDimY", "blockDimZ", "sharedMemBytes", "hStream",
    "kernelParams", "extra",
)  # fmt: skip


def _launch_kernel(original: Callable[..., Any], module: Any, function: Function, launch: Launch) -> Callable[..., Any]:
    """`_by_argument` for ``cuLaunchKernel``, with the parameters spelt out: copying a tuple of eleven costs more than
    all the rest."""
    rare = _by_argument(original, module, function, launch)
    stream_type = module.CUstream

    def replacement(
        f: Any = _ABSENT,
        gridDimX: Any = _ABSENT,
        gridDimY: Any = _ABSENT,
        gridDimZ: Any = _ABSENT,
        blockDimX: Any = _ABSENT,
        blockDimY: Any = _ABSENT,
        blockDimZ: Any = _ABSENT,
        sharedMemBytes: Any = _ABSENT,
        hStream: Any = _ABSENT,
        kernelParams: Any = _ABSENT,
        extra: Any = _ABSENT,
        *more: Any,
        **others: Any,
    ) -> Any:
        # `gate.resolve` spelt out, as far as it needs no question to the driver.
        if gate._binds and extra is not _ABSENT and not more and not others:
            kind = type(hStream)
            if kind is stream_type:
                given = int(hStream)
            elif kind is int:
                given = hStream
            else:
                given = 0 if hStream is None else -1
            current = gate.current_handle(0 if gate.one_device else gate.current_device())
            if given == current or 0 <= given <= LAST_DEFAULT:
                if given != current:
                    hStream = by_handle.get(current) or stream_object(current)
                return original(
                    f, gridDimX, gridDimY, gridDimZ, blockDimX, blockDimY, blockDimZ, sharedMemBytes, hStream,
                    kernelParams, extra,
                )  # fmt: skip
        values = (f, gridDimX, gridDimY, gridDimZ, blockDimX, blockDimY, blockDimZ, sharedMemBytes, hStream)
        return rare(*_as_called((*values, kernelParams, extra), others), *more, **others)

    return replacement


def _as_called(values: tuple[Any, ...], others: dict[str, Any]) -> tuple[Any, ...]:
    """The leading arguments that were given; those behind a gap came by keyword, and are added to ``others``."""
    count = next((i for i, value in enumerate(values) if value is _ABSENT), len(values))
    behind = zip(_LAUNCH_KERNEL[count:], values[count:], strict=True)
    others.update({name: value for name, value in behind if value is not _ABSENT})
    return values[:count]


def _by_config(original: Callable[..., Any], module: Any, function: Function, launch: Launch) -> Callable[..., Any]:
    """The replacement of ``cuLaunchKernelEx``, whose stream is a field of a config that callers keep and reuse."""
    argument, place, count = function.argument, function.place, function.count
    config_type = module.CUlaunchConfig
    check_layout(config_type)

    def replacement(*args: Any, **kwargs: Any) -> Any:
        config = args[place] if place < len(args) else kwargs.get(argument)
        if not gate.active or not isinstance(config, config_type) or len(args) + len(kwargs) != count:
            return original(*args, **kwargs)
        given = int(config.hStream)
        try:
            handle = gate.resolve(given, gate.current_device(), launch, "config.hStream")
        except WrongStreamError as error:
            raise _named(error, function, args, kwargs) from None
        if handle != given:
            bound = _with_stream(config, config_type, handle)
            if place < len(args):
                args = (*args[:place], bound, *args[place + 1 :])
            else:
                kwargs = {**kwargs, argument: bound}
        return original(*args, **kwargs)

    return replacement


class _ConfigLayout(ctypes.Structure):
    """``CUlaunchConfig`` of cuda.h; the same since CUDA 11.8."""

    _fields_ = [
        ("gridDimX", ctypes.c_uint),
        ("gridDimY", ctypes.c_uint),
        ("gridDimZ", ctypes.c_uint),
        ("blockDimX", ctypes.c_uint),
        ("blockDimY", ctypes.c_uint),
        ("blockDimZ", ctypes.c_uint),
        ("sharedMemBytes", ctypes.c_uint),
        ("hStream", ctypes.c_void_p),
        ("attrs", ctypes.c_void_p),
        ("numAttrs", ctypes.c_uint),
    ]


_SIZE = ctypes.sizeof(_ConfigLayout)


def check_layout(config_type: Any) -> None:
    """Whether a config has exactly the known fields at the known places.

    Raises:
        LookupError: if not.
    """
    known = [field[0] for field in _ConfigLayout._fields_]
    found = {n for n in dir(config_type) if not n.startswith("_") and not callable(getattr(config_type, n))}
    if found != set(known):
        raise LookupError(f"CUlaunchConfig has the fields {', '.join(sorted(found))}")
    probe = config_type()
    numbers = [name for name in known if name != "attrs"]
    for value, name in enumerate(numbers, 1):
        setattr(probe, name, value)
    raw = _ConfigLayout.from_address(int(probe.getPtr()))
    if [getattr(raw, name) for name in numbers] != list(range(1, len(numbers) + 1)) or raw.attrs is not None:
        raise LookupError("CUlaunchConfig has another layout than that of cuda.h")


def _with_stream(config: Any, config_type: Any, handle: int) -> Any:
    """A copy of a config with another stream; the attributes are copied too."""
    copy = config_type()
    # All fields at once, and also the attributes of a config that is a view of somebody's C struct: Python does not
    # see these. The pointer stays good, since the caller holds the config until the call is over.
    ctypes.memmove(int(copy.getPtr()), int(config.getPtr()), _SIZE)
    attributes = config.attrs
    if attributes:
        copy.attrs = attributes
    copy.hStream = stream_object(handle)
    return copy


def _named(
    error: WrongStreamError, function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> WrongStreamError:
    """The error with the name of the kernel, where there is one; asked from the driver only now."""
    place = 1 if function.place == 0 else 0  # after the config, where there is one
    kernel = args[place] if place < len(args) else kwargs.get("f")
    name = _kernel_name(kernel) if function.kind is Kind.KERNEL else ""
    report = error.report
    if not name or not isinstance(report, LaunchReport):
        return error
    return WrongStreamError(dataclasses.replace(report, launch=f"{report.launch}, kernel {name!r}"))


def _kernel_name(kernel: Any) -> str:
    driver: Any = sys.modules["cuda.bindings.driver"]
    ask = {"CUfunction": "cuFuncGetName", "CUkernel": "cuKernelGetName"}.get(type(kernel).__name__, "")
    try:
        status, name = getattr(driver, ask)(kernel)
        return bytes(name).decode() if int(status) == 0 else ""
    except Exception:  # noqa: BLE001, a name is a courtesy
        return ""
