"""Group "launch": one launch in every form, in every way that people write it, and under streamshim."""

from __future__ import annotations

import ctypes
import timeit
from collections.abc import Callable, Iterator
from typing import Any

import torch
import wrapt

import streamshim

from .machine import Machine, N
from .measuring import BIND, OFF, STRICT, Form, Variant, installed

GROUP = "launch"


def forms(machine: Machine) -> list[Form]:
    """The forms that this machine can make; what it cannot is noted in ``machine.missing``."""
    made: list[Form] = []
    for make in (_cute_tvm_ffi, _cute_plain, _ctypes, _tvm_ffi, _cu_launch_kernel, _cuda_core):
        try:
            for form in make(machine):
                _prove(machine, form)
                made.append(form)
        except Exception as error:  # noqa: BLE001, the others can still be measured, and this one is listed as missing
            machine.missing[make.__name__.strip("_")] = f"{type(error).__name__}: {error}"
    return made


def _prove(machine: Machine, form: Form) -> None:
    """Run each variant once; on a GPU it must have launched the kernel.

    Raises:
        RuntimeError: if it has not.
    """
    for variant in form.variants:
        with installed(variant.state):
            machine.out.zero_()
            machine.settle()
            timeit.Timer(variant.statement, globals=dict(variant.names)).timeit(1)
            machine.settle()
            if machine.gpu and machine.out.tolist() != [1.0] * N:
                raise RuntimeError(f"{form.name}, {variant.name}: the kernel was not launched")


def _form(name: str, names: dict[str, Any], variants: dict[tuple[str, str], str], machine: Machine) -> Form:
    """A form out of ``{(variant, state): statement}``; torch's streams are left out where there are none."""
    shared = {"torch": torch, "raw": _raw(machine), "handle": machine.handle, **names}
    return Form(
        GROUP, name,
        tuple(
            Variant(variant, state, statement, shared)
            for (variant, state), statement in variants.items()
            if machine.gpu or "torch.cuda" not in statement
        ),
    )  # fmt: skip


def _raw(machine: Machine) -> Callable[[int], int]:
    """The cheapest question for the current stream: what a very careful author writes."""
    if machine.gpu:
        return torch._C._cuda_getCurrentRawStream  # type: ignore[no-any-return]
    return streamshim.runtime.get().current_handle  # type: ignore[attr-defined, no-any-return]


def _filling(function: Any, place: int, stream: Callable[[], Any]) -> Any:
    """The function behind wrapt, with another stream at a place: how a wrapper library would do it."""

    @wrapt.decorator
    def fill(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return wrapped(*args[:place], stream(), *args[place + 1 :], **kwargs)

    return fill(function)


def _converter(raw: Callable[[int], int]) -> type:
    """A type for ``argtypes`` that puts the current stream in place of a default one: another way than a wrapper.

    It cannot be taken: ctypes refuses a call that leaves the stream out before it asks a converter, and makes an
    `ArgumentError` of whatever that raises.
    """
    pointer = ctypes.c_void_p.from_param

    def from_param(given: int | None) -> Any:
        current = raw(0)
        if given is None or given == current or 0 <= given <= 2:
            return pointer(current)
        return pointer(given)

    return type("Stream", (), {"from_param": staticmethod(from_param)})


def _cute_tvm_ffi(machine: Machine) -> Iterator[Form]:
    from . import cute_kernels
    from .cute_kernels import cuda

    with installed(OFF):
        environment = cute_kernels.tvm_ffi_kernel(machine, "environment")
        explicit = cute_kernels.tvm_ffi_kernel(machine, "argument")
    with installed(BIND):
        streamless = cute_kernels.tvm_ffi_kernel(machine, "none")
        bound = cute_kernels.tvm_ffi_kernel(machine, "argument")
    names: dict[str, Any] = {
        "environment": environment, "explicit": explicit, "streamless": streamless, "bound": bound,
        "x": machine.x, "out": machine.out, "CUstream": cuda.CUstream, "stream": cuda.CUstream(machine.handle),
    }  # fmt: skip
    raw = _raw(machine)
    names["wrapped"] = _filling(explicit, 2, lambda: cuda.CUstream(raw(0)))
    yield _form("CuTe TVM-FFI, no stream", names, {
        ("native", OFF): "environment(x, out)",
        ("shim", BIND): "streamless(x, out)",
        ("shim, environment stream", BIND): "environment(x, out)",
        ("strict", STRICT): "streamless(x, out)",
    }, machine)  # fmt: skip
    yield _form("CuTe TVM-FFI, stream argument", names, {
        ("bare", OFF): "explicit(x, out, stream)",
        ("hand-written", OFF): "explicit(x, out, CUstream(torch.cuda.current_stream().cuda_stream))",
        ("native", OFF): "explicit(x, out, CUstream(raw(0)))",
        ("shim", BIND): "bound(x, out, stream)",
        ("shim, None", BIND): "bound(x, out, None)",
        ("strict", STRICT): "bound(x, out, stream)",
        ("wrapt", OFF): "wrapped(x, out, None)",
    }, machine)  # fmt: skip


def _cute_plain(machine: Machine) -> Iterator[Form]:
    from . import cute_kernels
    from .cute_kernels import cuda

    with installed(OFF):
        plain = cute_kernels.plain_kernel(machine)
    with installed(BIND):
        bound = cute_kernels.plain_kernel(machine)
    x, out = cute_kernels.cute_tensors(machine)
    names = {
        "plain": plain,
        "bound": bound,
        "x": x,
        "out": out,
        "CUstream": cuda.CUstream,
        "stream": cuda.CUstream(machine.handle),
    }
    raw = _raw(machine)
    names["wrapped"] = _filling(plain, 2, lambda: cuda.CUstream(raw(0)))
    yield _form("CuTe plain, stream argument", names, {
        ("bare", OFF): "plain(x, out, stream)",
        ("hand-written", OFF): "plain(x, out, CUstream(torch.cuda.current_stream().cuda_stream))",
        ("native", OFF): "plain(x, out, CUstream(raw(0)))",
        ("shim", BIND): "bound(x, out, stream)",
        ("shim, None", BIND): "bound(x, out, None)",
        ("strict", STRICT): "bound(x, out, stream)",
        ("wrapt", OFF): "wrapped(x, out, None)",
    }, machine)  # fmt: skip


def _ctypes(machine: Machine) -> Iterator[Form]:
    bare, bound, other = machine.library, machine.bound, machine.another_library()
    streamshim.bind(bound, {"launch": -1})
    raw = _raw(machine)
    other.launch.argtypes = [*other.launch.argtypes[:-1], _converter(raw)]
    names = {
        "bare": bare.launch, "bound": bound.launch, "x": machine.x.data_ptr(), "out": machine.out.data_ptr(), "n": N,
        "converting": other.launch, "wrapped": _filling(bare.launch, 3, lambda: raw(0)),
    }  # fmt: skip
    compiled = {}
    if machine.compiled is not None:
        names["compiled"] = machine.compiled.bind(bare.launch, 3, raw, bare.launch)
        compiled = {
            ("compiled", OFF): "compiled(x, out, n, handle)",
            ("compiled, None", OFF): "compiled(x, out, n, None)",
        }  # fmt: skip
    yield _form("ctypes", names, {
        ("bare", OFF): "bare(x, out, n, handle)",
        ("hand-written", OFF): "bare(x, out, n, torch.cuda.current_stream().cuda_stream)",
        ("native", OFF): "bare(x, out, n, raw(0))",
        ("shim", BIND): "bound(x, out, n, handle)",
        ("shim, None", BIND): "bound(x, out, n, None)",
        ("shim, left out", BIND): "bound(x, out, n)",
        ("strict", STRICT): "bound(x, out, n, handle)",
        ("wrapt", OFF): "wrapped(x, out, n, None)",
        ("converter", OFF): "converting(x, out, n, handle)",
        **compiled,
    }, machine)  # fmt: skip


def _tvm_ffi(machine: Machine) -> Iterator[Form]:
    import tvm_ffi

    names = {
        "tensors": machine.tvm_ffi_function("ffi_tensors"), "addresses": machine.tvm_ffi_function("ffi_addresses"),
        "x": machine.x, "out": machine.out, "px": machine.x.data_ptr(), "pout": machine.out.data_ptr(), "n": N,
        "use_raw_stream": tvm_ffi.use_raw_stream, "device": tvm_ffi.device("cuda:0"),
    }  # fmt: skip
    yield _form("TVM-FFI function, torch tensors", names, {
        ("bare", OFF): "tensors(x, out)",
        ("shim", BIND): "tensors(x, out)",
        ("strict", STRICT): "tensors(x, out)",
    }, machine)  # fmt: skip
    yield _form("TVM-FFI function, addresses", names, {
        ("bare", OFF): "addresses(px, pout, n)",
        ("hand-written", OFF): (
            "with use_raw_stream(device, torch.cuda.current_stream().cuda_stream): addresses(px, pout, n)"
        ),
        ("native", OFF): "with use_raw_stream(device, raw(0)): addresses(px, pout, n)",
        ("shim", BIND): "addresses(px, pout, n)",
        ("strict", STRICT): "addresses(px, pout, n)",
    }, machine)  # fmt: skip


def _cu_launch_kernel(machine: Machine) -> Iterator[Form]:
    driver, raw = machine.driver, _raw(machine)
    values = (machine.x.data_ptr(), machine.out.data_ptr(), N)
    names = {
        # The module, since a copy of the function would be replaced by install() like anybody's.
        "driver": driver, "function": machine.function, "CUstream": driver.CUstream,
        "stream": driver.CUstream(machine.handle),
        "parameters": (values, (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int)),
        "wrapped": _filling(driver.cuLaunchKernel, 8, lambda: driver.CUstream(raw(0))),
    }  # fmt: skip
    call = "driver.cuLaunchKernel(function, 1, 1, 1, 128, 1, 1, 0, {}, parameters, 0)"
    yield _form("cuLaunchKernel", names, {
        ("bare", OFF): call.format("stream"),
        ("hand-written", OFF): call.format("CUstream(torch.cuda.current_stream().cuda_stream)"),
        ("native", OFF): call.format("CUstream(raw(0))"),
        ("shim", BIND): call.format("stream"),
        ("shim, 0", BIND): call.format("0"),
        ("strict", STRICT): call.format("stream"),
        ("wrapt", OFF): call.format("0").replace("driver.cuLaunchKernel", "wrapped"),
    }, machine)  # fmt: skip


def _cuda_core(machine: Machine) -> Iterator[Form]:
    if not machine.gpu:
        raise OSError("cuda.core has no launch without a GPU")
    from cuda import core

    core.Device().set_current()
    kernel = core.ObjectCode.from_cubin(machine.cubin).get_kernel("add_one")
    names = {
        "core": core, "config": core.LaunchConfig(grid=1, block=128), "kernel": kernel,
        "px": machine.x.data_ptr(), "pout": machine.out.data_ptr(), "n": ctypes.c_int(N),
        "stream": core.Stream.from_handle(machine.handle), "default": core.Device().default_stream,
        "wrapped": _filling(core.launch, 0, lambda: core.Stream.from_handle(_raw(machine)(0))),
    }  # fmt: skip
    call = "core.launch({}, config, kernel, px, pout, n)"
    yield _form("cuda.core.launch", names, {
        ("bare", OFF): call.format("stream"),
        ("hand-written", OFF): call.format("torch.cuda.current_stream()"),
        ("native", OFF): call.format("core.Stream.from_handle(raw(0))"),
        ("shim", BIND): call.format("stream"),
        ("shim, default stream", BIND): call.format("default"),
        ("strict", STRICT): call.format("stream"),
        ("wrapt", OFF): call.format("default").replace("core.launch", "wrapped"),
    }, machine)  # fmt: skip
