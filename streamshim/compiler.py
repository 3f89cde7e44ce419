"""`streamshim.compile`: a ``@cute.jit`` function that takes torch tensors as they are and runs on torch's stream."""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from . import fork, gate, ledger, runtime
from .binders import tvm_ffi_environment as environment
from .binders.cute.slots import is_stream_annotation
from .binders.stream_objects import stream_object
from .callsite import user_site
from .errors import CompiledInCaptureError, CompiledInCaptureWarning
from .gate import Launch
from .installer import install
from .settings import Mode
from .streams import LAST_DEFAULT, handle_of, is_stream_like

_FFI = "--enable-tvm-ffi"

#: torch's dtype -> the DSL's type of the same bits, both by name.
_DTYPES = {
    "bool": "Boolean", "uint8": "Uint8", "int8": "Int8", "int16": "Int16", "uint16": "Uint16", "int32": "Int32",
    "uint32": "Uint32", "int64": "Int64", "uint64": "Uint64", "float16": "Float16", "bfloat16": "BFloat16",
    "float32": "Float32", "float64": "Float64", "float8_e4m3fn": "Float8E4M3FN", "float8_e5m2": "Float8E5M2",
    "float8_e8m0fnu": "Float8E8M0FNU",
}  # fmt: skip


def compile(function: Any = None, /, *, options: str | None = None, stream: str | None = None) -> Any:
    """Compile a CuTe DSL host function when it is called, and launch it on torch's current stream.

    A decorator for a ``@cute.jit`` function, with or without arguments; also a plain function for an instance whose
    class has a ``@cute.jit __call__``. It calls `streamshim.install` if nothing is installed.

    At a call, torch tensors are passed as they are. The function is compiled once for each signature: dtype, rank,
    device, the dimension of stride 1 and 16-byte alignment of every tensor (its sizes and other strides stay dynamic),
    the type of every number, and the value of every ``Constexpr`` and of every other object. The stream parameter is
    filled in and may be left out; a stream that is passed is treated by the rule. No reference to a tensor is kept.

    Args:
        function: the ``@cute.jit`` function or instance.
        options: compile options as for ``cute.compile``; the default is ``--enable-tvm-ffi`` where tvm_ffi is there.
        stream: the name of the stream parameter. Only needed for one without annotation that is not called
            ``stream``.

    Returns:
        A callable with the same parameters.

    Raises:
        TypeError: if ``function`` is something else, or at a call if an argument cannot be passed to a kernel.
        ValueError: at a call, if a tensor is not on a GPU, or tensors are on several.
        CompiledInCaptureError: at a call, in strict mode, if it would have to compile inside a capture. In the other
            modes that is a `CompiledInCaptureWarning`.

    Example:
        >>> @streamshim.compile
        ... @cute.jit
        ... def scale(x: cute.Tensor, out: cute.Tensor, factor: cutlass.Float32, stream: cuda.CUstream):
        ...     scale_kernel(x, out, factor).launch(grid=[1, 1, 1], block=[32, 1, 1], stream=stream)
        >>> scale(x, out, 2.0)
    """
    if function is None:
        return functools.partial(compile, options=options, stream=stream)
    return CompiledOnCall(function, options, stream)


@dataclass(frozen=True)
class _Compiled:
    """The DSL's compiled function for one signature, and whether its stream parameter is the environment stream."""

    function: Any
    by_environment: bool


class CompiledOnCall:
    """What `compile` returns.

    Attributes:
        signatures: how many signatures have been compiled.
    """

    def __init__(self, function: Any, options: str | None, stream: str | None) -> None:
        body = _jit_body(function)
        self._function = function
        self._options = options
        signature = inspect.signature(function)
        _refuse_variadic(signature)
        self._with_stream = signature
        self._stream = _stream_parameter(signature, stream)
        others = [p for p in signature.parameters.values() if p.name != self._stream]
        self._without_stream = signature.replace(parameters=others)
        self._names = tuple(p.name for p in others)
        self._keyword_only = frozenset(p.name for p in signature.parameters.values() if p.kind is p.KEYWORD_ONLY)
        self._constexpr = tuple(_is_constexpr(p.annotation) for p in others)
        self._launch = Launch(f"CuTe kernel {getattr(body, '__qualname__', '?').rpartition('<locals>.')[2]!r}")
        self._compiled: dict[Any, _Compiled] = {}
        self._lock = fork.Lock()
        if inspect.isfunction(function):
            functools.update_wrapper(self, function)

    @property
    def signatures(self) -> int:
        """How many signatures have been compiled."""
        return len(self._compiled)

    def __repr__(self) -> str:
        return f"<streamshim.compile of {self._launch.what}, {self.signatures} signatures>"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if kwargs or len(args) != len(self._names) or self._keyword_only:
            values, given = self._bind(args, kwargs)
        else:
            values, given = args, None
        explicit = given is not None and handle_of(given, str(self._stream)) > LAST_DEFAULT
        device = self._device(values)
        key = (device, explicit, *map(self._key, values, self._constexpr, self._names))
        compiled = self._compiled.get(key)
        if compiled is None:
            compiled = self._compile(key, values, device, explicit)
        runtime_values = {n: v for n, v, fixed in zip(self._names, values, self._constexpr, strict=True) if not fixed}
        if self._stream is not None and (explicit or not compiled.by_environment):
            runtime_values[self._stream] = self._stream_object(given, device)
        positional, keywords = self._split(runtime_values)
        return compiled.function(*positional, **keywords)

    def _bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], Any]:
        """The arguments in the order of the parameters, without the stream, and the stream."""
        signature = self._with_stream if self._passes_stream(args, kwargs) else self._without_stream
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return tuple(bound.arguments[name] for name in self._names), bound.arguments.get(str(self._stream))

    def _passes_stream(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether a stream is among the arguments: it may be left out wherever it stands."""
        if self._stream is None or self._stream in kwargs:
            return True
        if self._stream in self._keyword_only:
            return False
        names = [name for name in self._with_stream.parameters if name not in self._keyword_only]
        place = names.index(self._stream)
        return len(args) == len(names) or (len(args) > place and is_stream_like(args[place]))

    def _split(self, values: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        """Values by name as positional and keyword-only arguments, in the order of the parameters."""
        positional, keywords = [], {}
        for name in self._with_stream.parameters:
            if name in self._keyword_only and name in values:
                keywords[name] = values[name]
            elif name in values:
                positional.append(values[name])
        return positional, keywords

    def _device(self, values: tuple[Any, ...]) -> int:
        """The index of the one device of all tensors; of the current device if there is no tensor."""
        found: dict[int, str] = {}
        for name, value in zip(self._names, values, strict=True):
            for tensor in _tensors(value):
                if not tensor.is_cuda:
                    raise ValueError(f"argument {name!r} is a tensor on {tensor.device}; a kernel takes CUDA tensors")
                found.setdefault(tensor.get_device(), name)
        if len(found) > 1:
            listed = ", ".join(f"{name!r} on cuda:{index}" for index, name in found.items())
            raise ValueError(f"the tensors are on several devices ({listed}); a launch needs all of them on one")
        return next(iter(found)) if found else runtime.get().current_device()

    def _key(self, value: Any, fixed: bool, name: str) -> Any:
        if _is_tensor(value):
            return (value.dtype, value.dim(), _leading(value), value.data_ptr() % 16 == 0)
        if isinstance(value, (tuple, list)):
            return (type(value), *(self._key(item, fixed, name) for item in value))
        if isinstance(value, (bool, int, float)) and not fixed:
            return type(value)
        try:
            hash(value)
        except TypeError:
            kind = type(value)
            raise TypeError(
                f"argument {name!r} is a {kind.__module__}.{kind.__qualname__}, which cannot be hashed; accepted: "
                "torch tensors, numbers, tuples and lists of them, and hashable objects, which are compiled in as is"
            ) from None
        return value

    def _compile(self, key: Any, values: tuple[Any, ...], device: int, explicit: bool) -> _Compiled:
        with self._lock:
            if key not in self._compiled:
                install()
                self._tell_if_capturing(device)
                self._compiled[key] = self._compile_now(values, explicit)
            return self._compiled[key]

    def _compile_now(self, values: tuple[Any, ...], explicit: bool) -> _Compiled:
        import cutlass.cute as cute
        from cutlass.cute.runtime import make_fake_stream

        options = self._options if self._options is not None else _FFI if environment.available() else ""
        examples = {name: _example(value) for name, value in zip(self._names, values, strict=True)}
        # Without a tensor, TVM-FFI does not know which device's environment stream to take.
        by_environment = _FFI in options and not explicit and next(_tensors(values), None) is not None
        if self._stream is not None:
            examples[self._stream] = make_fake_stream(use_tvm_ffi_env_stream=by_environment)
        positional, keywords = self._split(examples)
        made = cute.compile(self._function, *positional, options=options or None, **keywords)
        return _Compiled(made, by_environment)

    def _tell_if_capturing(self, device: int) -> None:
        asked = runtime.get()
        current = asked.current_handle(device)
        state = asked.capture_state(current) if current > LAST_DEFAULT else runtime.NOT_CAPTURING
        if not state or gate.mode() is Mode.OFF:
            return
        site = user_site()
        ledger.add(ledger.Event("compile in capture", self._launch.what, site, 0, current, state.id))
        text = (
            f"{self._launch.what} is compiled inside a capture, at {site}, because it was not called with these "
            "dtypes, ranks and static arguments before. Call it once before capturing (warm up), so that the capture "
            "holds launches only."
        )
        if gate.mode() is Mode.STRICT:
            raise CompiledInCaptureError(text)
        warnings.warn_explicit(text, CompiledInCaptureWarning, site.file, site.line)

    def _stream_object(self, given: Any, device: int) -> Any:
        handle = handle_of(given, str(self._stream))
        if gate.mode() is Mode.OFF and handle <= LAST_DEFAULT:
            return stream_object(runtime.get().current_handle(device))
        return stream_object(gate.resolve(handle, device, self._launch, str(self._stream)))


def _jit_body(function: Any) -> Any:
    """The undecorated host function; a TypeError if this was not made by ``@cute.jit``."""
    target: Any = function if inspect.isroutine(function) else getattr(type(function), "__call__", None)  # noqa: B004
    if not inspect.isclass(function) and hasattr(target, "__wrapped__"):
        return inspect.unwrap(target)
    if inspect.isclass(function):
        got = f"the class {function.__qualname__}"
    elif inspect.isroutine(function):
        got = f"the function {function.__qualname__} without @cute.jit"
    else:
        got = f"a {type(function).__module__}.{type(function).__qualname__}"
    raise TypeError(
        f"streamshim.compile: got {got}; accepted: a @cute.jit function, or an instance of a class with a @cute.jit "
        "__call__"
    )


def _stream_parameter(signature: inspect.Signature, named: str | None) -> str | None:
    if named is not None:
        if named not in signature.parameters:
            raise ValueError(f"stream={named!r}; the function's parameters are {', '.join(signature.parameters)}")
        return named
    annotated = [name for name, p in signature.parameters.items() if is_stream_annotation(p.annotation)]
    return annotated[0] if annotated else "stream" if "stream" in signature.parameters else None


def _refuse_variadic(signature: inspect.Signature) -> None:
    variadic = [str(p) for p in signature.parameters.values() if p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    if variadic:
        raise TypeError(f"streamshim.compile: the function takes {', '.join(variadic)}; name its parameters")


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def _tensors(value: Any) -> Iterator[Any]:
    if _is_tensor(value):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors(item)


def _leading(tensor: Any) -> int:
    """The last dimension of stride 1, which is compiled in; -1 if there is none."""
    return max((i for i, stride in enumerate(tensor.stride()) if stride == 1), default=-1)


def _example(value: Any) -> Any:
    """What stands for a value at compile time; tensors are never handed over, so no reference to one can be kept."""
    if _is_tensor(value):
        return _fake_tensor(value)
    if isinstance(value, (tuple, list)):
        items = [_example(item) for item in value]
        return value._make(items) if hasattr(value, "_make") else type(value)(items)
    return value


def _fake_tensor(tensor: Any) -> Any:
    import cutlass
    from cutlass.cute import sym_int, sym_int64
    from cutlass.cute.runtime import make_fake_tensor

    name = str(tensor.dtype).removeprefix("torch.")
    if name not in _DTYPES:
        raise TypeError(f"a tensor has dtype {tensor.dtype}; accepted: {', '.join(_DTYPES)}")
    leading = _leading(tensor)
    strides = tuple(1 if i == leading else sym_int64() for i in range(tensor.dim()))
    align = 16 if tensor.data_ptr() % 16 == 0 else tensor.element_size()
    shape = tuple(sym_int() for _ in range(tensor.dim()))
    return make_fake_tensor(getattr(cutlass, _DTYPES[name]), shape, strides, assumed_align=align)


def _is_constexpr(annotation: Any) -> bool:
    name = annotation if isinstance(annotation, str) else str(annotation)
    return "Constexpr" in name
