"""Tensors on another device than the current one; written for any number of devices, run on two."""

import cuda.bindings.driver as cuda
import cute_kernels as kernels
import pytest
import torch
import tvm_ffi
from cutlass.cute.runtime import from_dlpack, make_fake_stream
from harness import DELAY, RIGHT, N, captured

import streamshim

pytestmark = pytest.mark.two_gpus


def cute_ffi(t):
    return from_dlpack(t, enable_tvm_ffi=True).mark_layout_dynamic()


def cute_plain(t):
    # torch exports a tensor through DLPack only while its device is current.
    with torch.cuda.device(t.device):
        return from_dlpack(t).mark_layout_dynamic()


def forms():
    ffi = kernels.compile_fake(kernels.no_stream)
    explicit = kernels.compile_fake(kernels.with_stream, make_fake_stream())
    plain = kernels.compile_fake(kernels.no_stream, options="")
    plain_explicit = kernels.compile_fake(kernels.with_stream, make_fake_stream(), options="")
    return {
        "TVM-FFI, torch": ffi,
        "TVM-FFI, tvm_ffi": lambda x, out: ffi(tvm_ffi.from_dlpack(x), tvm_ffi.from_dlpack(out)),
        "TVM-FFI, cute": lambda x, out: ffi(cute_ffi(x), cute_ffi(out)),
        "TVM-FFI, CUstream(0)": lambda x, out: explicit(x, out, cuda.CUstream(0)),
        "plain, torch": plain,
        "plain, cute": lambda x, out: plain(cute_plain(x), cute_plain(out)),
        "plain, CUstream(0)": lambda x, out: plain_explicit(x, out, cuda.CUstream(0)),
        "called directly": lambda x, out: kernels.no_stream(cute_plain(x), cute_plain(out)),
        "streamshim.compile": streamshim.compile(kernels.with_stream),
    }


FORMS = (
    "TVM-FFI, torch",
    "TVM-FFI, tvm_ffi",
    "TVM-FFI, cute",
    "TVM-FFI, CUstream(0)",
    "plain, torch",
    "plain, cute",
    "plain, CUstream(0)",
    "called directly",
    "streamshim.compile",
)


@pytest.mark.parametrize("name", FORMS)
def test_tensors_on_the_last_device_while_the_first_is_current(shim, name):
    call = forms()[name]
    device = torch.device("cuda", torch.cuda.device_count() - 1)
    side = torch.cuda.Stream(device)
    x, out = torch.zeros(N, device=device), torch.zeros(N, device=device)
    torch.cuda.synchronize(device)
    with torch.cuda.stream(side):
        pass
    for i in range(20):
        with torch.cuda.device(device), torch.cuda.stream(side):
            out.fill_(float("nan"))
            torch.cuda._sleep(DELAY // 10)
            x.fill_(float(i))
            # The device's current stream stays `side` when the current device changes.
            with torch.cuda.device(0):
                call(x, out)
                assert torch.cuda.current_device() == 0
            side.synchronize()
            assert out.tolist() == [i + 1.0] * N


@pytest.mark.parametrize("name", ["TVM-FFI, torch", "TVM-FFI, CUstream(0)", "plain, torch", "called directly"])
def test_a_capture_on_the_last_device(shim, name):
    assert captured(forms()[name], device=f"cuda:{torch.cuda.device_count() - 1}") == RIGHT


def test_the_current_device_is_back_after_an_exception(shim):
    plain = kernels.compile_fake(kernels.with_stream, make_fake_stream(), options="")
    device = torch.device("cuda", torch.cuda.device_count() - 1)
    x, out = torch.zeros(N, device=device), torch.zeros(N, device=device)
    with pytest.raises(TypeError):
        plain(x, out, "not a stream")
    assert torch.cuda.current_device() == 0


def test_b05_tensors_on_several_devices_are_refused_by_name(shim):
    layer = streamshim.compile(kernels.with_stream)
    last = torch.cuda.device_count() - 1
    with pytest.raises(ValueError, match=rf"'x' on cuda:0, 'out' on cuda:{last}"):
        layer(torch.zeros(N, device="cuda:0"), torch.zeros(N, device=f"cuda:{last}"))
