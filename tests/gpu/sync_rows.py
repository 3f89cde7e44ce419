"""What Python code can do to make the host wait, one row each; used by test_capture_guards.py.

Run as a program it prints, as JSON, what each row does in each capture mode without streamshim.
"""

import copy
import ctypes
import gc
import io
import json
import pickle
import sys
import warnings

import numpy
import torch

N = 8
MODES = ("global", "thread_local", "relaxed")


def torch_rows():
    """Name -> call(x), with x a CUDA tensor of eight floats; everything that a row needs is made before a capture."""
    one = torch.ones((), device="cuda")
    index = torch.ones((), device="cuda", dtype=torch.int64)
    mask = torch.tensor([True, False] * (N // 2), device="cuda")
    some = torch.arange(N // 2, device="cuda", dtype=torch.float32)
    counts = torch.ones(N, device="cuda", dtype=torch.int64)
    some_more = torch.ones(N, device="cuda")
    matrix = torch.eye(4, device="cuda")
    on_host, pinned = torch.ones(N), torch.ones(N).pin_memory()
    event, other_event = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    event.record()
    other_event.record()
    side, generic = torch.cuda.Stream(), torch.Stream("cuda")
    torch.linalg.inv(matrix)
    torch.multinomial(some + 1, 2)
    torch.cuda.synchronize()

    def if_(x):
        return 1 if one else 2

    def assign_mask_tensor(x):
        x.clone()[mask] = some

    def assign_mask_scalar(x):
        x.clone()[mask] = 1.0

    def assign_mask_number_on_device(x):
        x.clone()[mask] = one

    def assign_host(x):
        x.clone()[:] = on_host

    return {
        ".item()": lambda x: one.item(),
        "int()": lambda x: int(one),
        "float()": lambda x: float(one),
        "bool()": lambda x: bool(one),
        "if": if_,
        "in": lambda x: 1.0 in x,
        "format": lambda x: f"{one:.2f}",
        "list index": lambda x: [1, 2, 3][index],
        "slice": lambda x: x[:index],
        "is_nonzero": lambda x: torch.is_nonzero(one),
        "arange": lambda x: torch.arange(0, index),
        ".tolist()": lambda x: x.tolist(),
        ".cpu()": lambda x: x.cpu(),
        ".to('cpu')": lambda x: x.to("cpu"),
        ".to('cpu', non_blocking)": lambda x: x.to("cpu", non_blocking=True),
        "numpy.asarray(x.cpu())": lambda x: numpy.asarray(x.cpu()),
        "torch.tensor(list)": lambda x: torch.tensor([1.0, 2.0], device="cuda"),
        "host.cuda()": lambda x: on_host.cuda(),
        "host.cuda(non_blocking)": lambda x: on_host.cuda(non_blocking=True),
        "pinned.cuda(non_blocking)": lambda x: pinned.cuda(non_blocking=True),
        "x[:] = host": assign_host,
        "nonzero": lambda x: x.nonzero(),
        "torch.nonzero": lambda x: torch.nonzero(x),
        "argwhere": lambda x: torch.argwhere(x),
        "where(condition)": lambda x: torch.where(mask),
        "x[mask]": lambda x: x[mask],
        "masked_select": lambda x: torch.masked_select(x, mask),
        "x[mask] = tensor": assign_mask_tensor,
        "x[mask] = scalar": assign_mask_scalar,
        "x[mask] = number on the device": assign_mask_number_on_device,
        "unique": lambda x: torch.unique(x),
        "unique_consecutive": lambda x: torch.unique_consecutive(x),
        "bincount": lambda x: torch.bincount(counts),
        "repeat_interleave": lambda x: torch.repeat_interleave(x, counts),
        "repeat_interleave(output_size)": lambda x: torch.repeat_interleave(x, counts, output_size=N),
        "equal": lambda x: torch.equal(x, some_more),
        "equal of other shapes": lambda x: torch.equal(x, some),
        "allclose": lambda x: torch.allclose(x, some_more),
        "assert_close": lambda x: torch.testing.assert_close(x, x),
        "repr": lambda x: repr(x),
        "print": lambda x: print(x, file=io.StringIO()),
        "deepcopy": lambda x: copy.deepcopy(x),
        "pickle": lambda x: pickle.dumps(x),
        "torch.save": lambda x: torch.save(x, io.BytesIO()),
        "share_memory_": lambda x: x.share_memory_(),
        "linalg.inv": lambda x: torch.linalg.inv(matrix),
        "linalg.inv_ex": lambda x: torch.linalg.inv_ex(matrix),
        "cuda.synchronize": lambda x: torch.cuda.synchronize(),
        "accelerator.synchronize": lambda x: torch.accelerator.synchronize(),
        "current_stream().synchronize": lambda x: torch.cuda.current_stream().synchronize(),
        "current_stream().query": lambda x: torch.cuda.current_stream().query(),
        "side.synchronize": lambda x: side.synchronize(),
        "side.query": lambda x: side.query(),
        "torch.Stream.synchronize": lambda x: generic.synchronize(),
        "event.synchronize": lambda x: event.synchronize(),
        "event.query": lambda x: event.query(),
        "event.elapsed_time": lambda x: event.elapsed_time(other_event),
        "unrecorded event.synchronize": lambda x: torch.cuda.Event().synchronize(),
        "empty_cache": lambda x: torch.cuda.empty_cache(),
        "memory_stats": lambda x: torch.cuda.memory_stats(),
        "memory._snapshot": lambda x: torch.cuda.memory._snapshot(),
        "pin_memory": lambda x: torch.ones(4).pin_memory(),
        # The generators of torch stay in their capturing state after a lost capture, so this one comes last.
        "multinomial": lambda x: torch.multinomial(some + 1, 2),
    }


def _checked(result):
    """The results of a cuda-python call; its error as an exception."""
    if int(result[0]) != 0:
        raise RuntimeError(repr(result[0]))
    return result[1:]


def cuda_python_rows():
    """The same for calls of cuda-python."""
    from cuda.bindings import driver, runtime

    def event(create, record):
        made = _checked(create())[0]
        _checked(record(made, 0))
        return made

    a, b = torch.zeros(N, device="cuda"), torch.zeros(N, device="cuda")  # makes the context, too
    driver_event = event(lambda: driver.cuEventCreate(0), driver.cuEventRecord)
    runtime_event = event(runtime.cudaEventCreate, runtime.cudaEventRecord)
    side = torch.cuda.Stream()
    host = (ctypes.c_float * N)()
    torch.cuda.synchronize()
    kinds = runtime.cudaMemcpyKind
    calls = {
        "cuCtxSynchronize": lambda: driver.cuCtxSynchronize(),
        "cuStreamSynchronize(current)": lambda: driver.cuStreamSynchronize(_current()),
        "cuStreamSynchronize(side)": lambda: driver.cuStreamSynchronize(side.cuda_stream),
        "cuStreamSynchronize(0)": lambda: driver.cuStreamSynchronize(0),
        "cuStreamQuery(side)": lambda: driver.cuStreamQuery(side.cuda_stream),
        "cuEventSynchronize": lambda: driver.cuEventSynchronize(driver_event),
        "cuEventQuery": lambda: driver.cuEventQuery(driver_event),
        "cuEventElapsedTime": lambda: driver.cuEventElapsedTime(driver_event, driver_event),
        "cuMemcpyDtoD": lambda: driver.cuMemcpyDtoD(a.data_ptr(), b.data_ptr(), 16),
        "cuMemcpyDtoH": lambda: driver.cuMemcpyDtoH(ctypes.addressof(host), a.data_ptr(), 16),
        "cuMemsetD8": lambda: driver.cuMemsetD8(a.data_ptr(), 0, 16),
        "cuMemAlloc": lambda: driver.cuMemAlloc(1024),
        "cuMemFree": lambda: driver.cuMemFree(0),
        "cuMemHostAlloc": lambda: driver.cuMemHostAlloc(1024, 0),
        "cudaDeviceSynchronize": lambda: runtime.cudaDeviceSynchronize(),
        "cudaStreamSynchronize(current)": lambda: runtime.cudaStreamSynchronize(_current()),
        "cudaStreamSynchronize(side)": lambda: runtime.cudaStreamSynchronize(side.cuda_stream),
        "cudaStreamQuery(side)": lambda: runtime.cudaStreamQuery(side.cuda_stream),
        "cudaEventSynchronize": lambda: runtime.cudaEventSynchronize(runtime_event),
        "cudaEventQuery": lambda: runtime.cudaEventQuery(runtime_event),
        "cudaMemcpy": lambda: runtime.cudaMemcpy(a.data_ptr(), b.data_ptr(), 16, kinds.cudaMemcpyDeviceToDevice),
        "cudaMemset": lambda: runtime.cudaMemset(a.data_ptr(), 0, 16),
        "cudaMalloc": lambda: runtime.cudaMalloc(1024),
        "cudaFree": lambda: runtime.cudaFree(0),
        "cudaHostAlloc": lambda: runtime.cudaHostAlloc(1024, 0),
    }
    return {name: lambda x, call=call: _checked(call()) for name, call in calls.items()}


def library_rows():
    """The same for CuPy, Numba and Triton, as far as they are installed."""
    rows = {}
    try:
        import cupy
    except ImportError:
        pass
    else:
        stream, event, array = cupy.cuda.Stream(non_blocking=True), cupy.cuda.Event(), cupy.arange(8.0)
        event.record()
        rows |= {
            "cupy Stream.synchronize": lambda x: stream.synchronize(),
            "cupy Stream.done": lambda x: stream.done,
            "cupy Event.synchronize": lambda x: event.synchronize(),
            "cupy Event.done": lambda x: event.done,
            "cupy runtime.deviceSynchronize": lambda x: cupy.cuda.runtime.deviceSynchronize(),
            "cupy .get()": lambda x: array.get(),
            "cupy asnumpy": lambda x: cupy.asnumpy(array),
            "cupy .item()": lambda x: array[0].item(),
            "cupy float()": lambda x: float(array[0]),
        }
    try:
        from numba import cuda
    except ImportError:
        pass
    else:
        numba_stream, numba_event = cuda.stream(), cuda.event()
        numba_event.record()
        rows |= {
            "numba synchronize": lambda x: cuda.synchronize(),
            "numba stream.synchronize": lambda x: numba_stream.synchronize(),
            "numba event.synchronize": lambda x: numba_event.synchronize(),
            "numba event.query": lambda x: numba_event.query(),
        }
    try:
        import triton_kernels
    except ImportError:
        pass
    else:
        out = torch.zeros(N, device="cuda")
        rows |= {
            "triton, first call": lambda x: triton_kernels.fresh()[(1,)](x, out, N, BLOCK=32),
            "triton, autotune": lambda x: triton_kernels.tuned()[(1,)](x, out, N),
        }
    torch.cuda.synchronize()
    return rows


def _current():
    return torch.cuda.current_stream().cuda_stream


def rows():
    """All of them."""
    return {**cuda_python_rows(), **library_rows(), **torch_rows()}


def outcome(call, error_mode):
    """What a row does inside a capture: "fine", "refused", "raised" (the capture is still valid) or "lost", and the
    error's text."""
    x, out = torch.zeros(N, device="cuda"), torch.zeros(N, device="cuda")
    torch.cuda.synchronize()
    graph, error = torch.cuda.CUDAGraph(), None
    try:
        with torch.cuda.stream(torch.cuda.current_stream()):
            with torch.cuda.graph(graph, stream=torch.cuda.Stream(), capture_error_mode=error_mode):
                torch.add(x, 1.0, out=out)
                try:
                    call(x)
                except Exception as caught:  # noqa: BLE001, whatever the row does
                    error = caught
                out.mul_(2.0)
    except Exception as lost:  # noqa: BLE001, whatever CUDA says
        return "lost", lost
    for value in (41.0, 7.0):
        x.fill_(value)
        out.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        if out.tolist() != [(value + 1) * 2] * N:
            return "wrong", error
    if error is None:
        return "fine", None
    refusals = ("HostSyncError", "WrongStreamError")
    return ("refused" if type(error).__name__ in refusals else "raised"), error


def measured():
    """Row -> what it does in each of `MODES`, in this process."""
    table = {}
    for name, call in rows().items():
        gc.collect()
        table[name] = [outcome(call, error_mode)[0] for error_mode in MODES]
    return table


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    json.dump(measured(), sys.stdout)
