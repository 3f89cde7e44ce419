"""Host syncs inside a capture on a GPU: what happens to each row of sync_rows.py, without the shim and with it."""

import functools
import gc
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import sync_rows
import torch
from sync_rows import MODES, N, outcome, rows

import streamshim
from streamshim.guards import sync_mode

LOST, FINE, RAISED, REFUSED = ("lost",) * 3, ("fine",) * 3, ("raised",) * 3, ("refused",) * 3
#: CUDA allows these in a relaxed capture, and so do we.
LOST_OR_RELAXED, REFUSED_OR_RELAXED = ("lost", "lost", "fine"), ("refused", "refused", "fine")
#: Waits in C++, and functions that compiled code holds: torch's own check refuses them in a global capture, and nothing
#: can in the others.
RAISED_OR_LOST, RAISED_OR_RELAXED = ("raised", "lost", "lost"), ("raised", "lost", "fine")

#: Row -> (without the shim in each of `MODES`, with it, words that the refusal must contain).
TABLE = {
    ".item()": (LOST, REFUSED, r"\.item\(\) on a CUDA tensor"),
    "int()": (LOST, REFUSED, r"int\(\) of a CUDA tensor"),
    "float()": (LOST, REFUSED, r"float\(\) of a CUDA tensor"),
    "bool()": (LOST, REFUSED, "truth value"),
    "if": (LOST, REFUSED, "truth value"),
    "in": (LOST, REFUSED, "`in` on a CUDA tensor"),
    "format": (LOST, REFUSED, "CUDA tensor"),
    "list index": (LOST, REFUSED, "index or a size"),
    "slice": (LOST, REFUSED, "index or a size"),
    "is_nonzero": (LOST, REFUSED, "is_nonzero"),
    "arange": (LOST, RAISED_OR_LOST, "synchronizing CUDA operation"),
    ".tolist()": (RAISED, REFUSED, r"\.tolist\(\)"),
    ".cpu()": (RAISED, RAISED, "during CUDA graph capture"),
    ".to('cpu')": (RAISED, RAISED, "during CUDA graph capture"),
    ".to('cpu', non_blocking)": (FINE, FINE, ""),
    "numpy.asarray(x.cpu())": (RAISED, RAISED, "during CUDA graph capture"),
    "torch.tensor(list)": (RAISED, RAISED, "during CUDA graph capture"),
    "host.cuda()": (RAISED, RAISED, "during CUDA graph capture"),
    "host.cuda(non_blocking)": (RAISED, RAISED, "during CUDA graph capture"),
    "pinned.cuda(non_blocking)": (FINE, FINE, ""),
    "x[:] = host": (RAISED, RAISED, "during CUDA graph capture"),
    "nonzero": (LOST, REFUSED, "nonzero: its result's size"),
    "torch.nonzero": (LOST, REFUSED, "nonzero: its result's size"),
    "argwhere": (LOST, REFUSED, "argwhere"),
    "where(condition)": (LOST, RAISED_OR_LOST, "synchronizing CUDA operation"),
    "x[mask]": (LOST, REFUSED, "boolean-mask index"),
    "masked_select": (LOST, REFUSED, "masked_select"),
    "x[mask] = tensor": (LOST, REFUSED, "assignment through a boolean mask"),
    "x[mask] = scalar": (FINE, FINE, ""),
    "x[mask] = number on the device": (LOST, REFUSED, "assignment through a boolean mask"),
    "unique": (LOST, REFUSED, "unique"),
    "unique_consecutive": (LOST, REFUSED, "unique"),
    "bincount": (RAISED, REFUSED, "bincount"),
    "repeat_interleave": (LOST, RAISED_OR_LOST, "synchronizing CUDA operation"),
    "repeat_interleave(output_size)": (FINE, FINE, ""),
    "equal": (LOST, REFUSED, r"torch\.equal"),
    "equal of other shapes": (FINE, FINE, ""),
    "allclose": (LOST, REFUSED, "allclose"),
    "assert_close": (LOST, REFUSED, ""),
    "repr": (LOST, REFUSED, "print or repr"),
    "print": (LOST, REFUSED, "CUDA tensor"),
    "deepcopy": (FINE, FINE, ""),
    "pickle": (RAISED, RAISED, ""),
    "torch.save": (RAISED, RAISED, ""),
    "share_memory_": (FINE, FINE, ""),
    "linalg.inv": (LOST, RAISED_OR_LOST, "synchronizing CUDA operation"),
    "linalg.inv_ex": (FINE, FINE, ""),
    "cuda.synchronize": (LOST, REFUSED, r"torch\.cuda\.synchronize"),
    "accelerator.synchronize": (LOST, REFUSED, r"torch\.accelerator\.synchronize"),
    "current_stream().synchronize": (LOST, REFUSED, r"Stream\.synchronize"),
    "current_stream().query": (LOST, REFUSED, r"Stream\.query"),
    "side.synchronize": (LOST_OR_RELAXED, REFUSED_OR_RELAXED, r"Stream\.synchronize"),
    "side.query": (LOST_OR_RELAXED, REFUSED_OR_RELAXED, r"Stream\.query"),
    "torch.Stream.synchronize": (LOST_OR_RELAXED, RAISED_OR_RELAXED, "synchronizing CUDA operation"),
    "event.synchronize": (LOST_OR_RELAXED, REFUSED_OR_RELAXED, r"Event\.synchronize"),
    "event.query": (LOST_OR_RELAXED, REFUSED_OR_RELAXED, r"Event\.query"),
    "event.elapsed_time": (LOST_OR_RELAXED, REFUSED_OR_RELAXED, r"Event\.elapsed_time"),
    "unrecorded event.synchronize": (FINE, FINE, ""),
    "empty_cache": (FINE, FINE, ""),
    "memory_stats": (FINE, FINE, ""),
    "memory._snapshot": (FINE, FINE, ""),
    "pin_memory": (FINE, FINE, ""),
    "multinomial": (FINE, FINE, ""),
    # cuda-python
    "cuCtxSynchronize": (LOST, REFUSED, r"driver\.cuCtxSynchronize"),
    "cuStreamSynchronize(current)": (LOST, REFUSED, r"driver\.cuStreamSynchronize"),
    "cuStreamSynchronize(side)": (LOST_OR_RELAXED, REFUSED_OR_RELAXED, r"driver\.cuStreamSynchronize"),
    # Under the shim stream 0 means torch's current stream too, and that captures.
    "cuStreamSynchronize(0)": (LOST_OR_RELAXED, REFUSED, r"driver\.cuStreamSynchronize"),
    "cuStreamQuery(side)": (LOST_OR_RELAXED, REFUSED_OR_RELAXED, r"driver\.cuStreamQuery"),
    "cuEventSynchronize": (LOST_OR_RELAXED, REFUSED_OR_RELAXED, r"driver\.cuEventSynchronize"),
    "cuEventQuery": (LOST_OR_RELAXED, REFUSED_OR_RELAXED, r"driver\.cuEventQuery"),
    "cuEventElapsedTime": (FINE, FINE, ""),
    # These run at once and are missing from the graph, without any error.
    "cuMemcpyDtoD": (FINE, REFUSED, "takes no stream"),
    "cuMemcpyDtoH": (FINE, REFUSED, "takes no stream"),
    "cuMemsetD8": (FINE, REFUSED, "takes no stream"),
    "cuMemAlloc": (LOST_OR_RELAXED, REFUSED_OR_RELAXED, r"driver\.cuMemAlloc"),
    "cuMemFree": (LOST_OR_RELAXED, REFUSED_OR_RELAXED, r"driver\.cuMemFree"),
    "cuMemHostAlloc": (LOST_OR_RELAXED, REFUSED_OR_RELAXED, r"driver\.cuMemHostAlloc"),
    "cudaDeviceSynchronize": (LOST, REFUSED, r"runtime\.cudaDeviceSynchronize"),
    "cudaStreamSynchronize(current)": (LOST, REFUSED, r"runtime\.cudaStreamSynchronize"),
    "cudaStreamSynchronize(side)": (LOST_OR_RELAXED, REFUSED_OR_RELAXED, r"runtime\.cudaStreamSynchronize"),
    "cudaStreamQuery(side)": (LOST_OR_RELAXED, REFUSED_OR_RELAXED, r"runtime\.cudaStreamQuery"),
    "cudaEventSynchronize": (LOST_OR_RELAXED, REFUSED_OR_RELAXED, r"runtime\.cudaEventSynchronize"),
    "cudaEventQuery": (LOST_OR_RELAXED, REFUSED_OR_RELAXED, r"runtime\.cudaEventQuery"),
    "cudaMemcpy": (FINE, REFUSED, "takes no stream"),
    "cudaMemset": (FINE, REFUSED, "takes no stream"),
    "cudaMalloc": (LOST_OR_RELAXED, REFUSED_OR_RELAXED, r"runtime\.cudaMalloc"),
    "cudaFree": (LOST_OR_RELAXED, REFUSED_OR_RELAXED, r"runtime\.cudaFree"),
    "cudaHostAlloc": (LOST_OR_RELAXED, REFUSED_OR_RELAXED, r"runtime\.cudaHostAlloc"),
    # other libraries
    "cupy Stream.synchronize": (LOST_OR_RELAXED, REFUSED_OR_RELAXED, r"cupy\.cuda\.Stream\.synchronize"),
    "cupy Stream.done": (LOST_OR_RELAXED, REFUSED_OR_RELAXED, r"cupy\.cuda\.Stream\.done"),
    "cupy Event.synchronize": (LOST_OR_RELAXED, REFUSED_OR_RELAXED, r"cupy\.cuda\.Event\.synchronize"),
    "cupy Event.done": (LOST_OR_RELAXED, REFUSED_OR_RELAXED, r"cupy\.cuda\.Event\.done"),
    "cupy runtime.deviceSynchronize": (LOST, REFUSED, "deviceSynchronize"),
    "cupy .get()": (LOST_OR_RELAXED, REFUSED_OR_RELAXED, "CuPy array"),
    "cupy asnumpy": (LOST_OR_RELAXED, REFUSED_OR_RELAXED, "CuPy array"),
    "cupy .item()": (LOST_OR_RELAXED, REFUSED_OR_RELAXED, "CuPy array"),
    "cupy float()": (LOST_OR_RELAXED, REFUSED_OR_RELAXED, "CuPy array"),
    "numba synchronize": (LOST, REFUSED, r"numba\.cuda\.synchronize"),
    "numba stream.synchronize": (LOST_OR_RELAXED, REFUSED_OR_RELAXED, r"numba\.cuda stream"),
    "numba event.synchronize": (LOST_OR_RELAXED, REFUSED_OR_RELAXED, r"numba\.cuda event"),
    "numba event.query": (LOST_OR_RELAXED, REFUSED_OR_RELAXED, r"numba\.cuda event"),
    "triton, first call": (FINE, FINE, ""),
    "triton, autotune": (LOST, REFUSED, "autotuning a Triton kernel"),
}

#: Where a call comes from Python code of a library, its line is that library's.
LINES = ("sync_rows.py", "numeric.py", "_comparison.py", "tensor.py")


#: torch's refusals of these get their note at the end of the capture, if they come so far.
UNNOTED = ("torch.tensor(list)", "x[:] = host")


@functools.cache
def bare():
    """What each row does in a process that knows nothing of streamshim; what that process said, if it failed."""
    here = Path(sync_rows.__file__)
    done = subprocess.run([sys.executable, here], capture_output=True, text=True, cwd=here.parent, timeout=100)
    return json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else done.stderr


@functools.cache
def calls():
    """The rows, made once."""
    return rows()


def test_the_table_has_every_row():
    assert set(calls()) <= set(TABLE)
    assert len(calls()) > len(TABLE) - 16, "more is missing than CuPy, Numba and Triton"


@pytest.mark.parametrize("row", TABLE)
def test_without_the_shim(row):
    assert isinstance(bare(), dict), bare()
    if row not in bare():
        pytest.skip("its library is not installed")
    assert tuple(bare()[row]) == TABLE[row][0]


@functools.cache
def under(mode):
    """What each row does in each capture mode under the shim, and the error."""
    found = {}
    with streamshim.install(mode):
        for row, (_, expected, _) in TABLE.items():
            for error_mode, wanted in zip(MODES, expected, strict=True):
                # What nothing in Python can see is left out: see RAISED_OR_LOST.
                if row in calls() and wanted != "lost":
                    gc.collect()
                    found[row, error_mode] = outcome(calls()[row], error_mode)
    return found


#: CUDA allows these in a relaxed capture, and they are copies on the NULL stream: strict mode, which watches, tells so.
ON_NULL = ("cupy .get()", "cupy asnumpy", "cupy .item()", "cupy float()")


@pytest.mark.parametrize("row", TABLE)
@pytest.mark.parametrize("mode", ["bind", "strict"])
def test_with_the_shim(row, mode):
    """Whatever is not lost is replayed, so the capture is valid after the refusal."""
    if row not in calls():
        pytest.skip("its library is not installed")
    _, expected, words = TABLE[row]
    for error_mode, wanted in zip(MODES, expected, strict=True):
        if wanted == "lost":
            continue
        what, error = under(mode)[row, error_mode]
        if mode == "strict" and wanted == "fine" and row in ON_NULL:
            assert isinstance(error, streamshim.WrongStreamError)
            (found,) = error.report.escapes
            assert found.site.file.endswith("sync_rows.py")
            continue
        assert what == wanted, error
        if what in ("refused", "raised"):
            assert re.search(words, str(error))
        if what == "refused":
            assert error.report.site.file.endswith(LINES)
        if what == "raised" and "during CUDA graph capture" in words and row not in UNNOTED:
            (note,) = error.__notes__
            assert note.startswith("streamshim: ")
            assert "sync_rows.py" in note


def test_the_sync_debug_mode_is_back(shim):
    torch.cuda.set_sync_debug_mode("warn")
    try:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            assert torch.cuda.get_sync_debug_mode() == 2
            torch.zeros(N, device="cuda")
        assert torch.cuda.get_sync_debug_mode() == 1
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert not sync_mode._armed_for


def test_a_thread_that_excused_itself_may_allocate(shim):
    """flashinfer and torch itself do so: cuThreadExchangeStreamCaptureMode is CUDA's own way out."""
    from cuda.bindings import runtime

    relaxed = runtime.cudaStreamCaptureMode.cudaStreamCaptureModeRelaxed

    def allocate(x):
        _, before = runtime.cudaThreadExchangeStreamCaptureMode(relaxed)
        try:
            error, pointer = runtime.cudaMalloc(1024)
            assert int(error) == 0
            runtime.cudaFree(pointer)
        finally:
            runtime.cudaThreadExchangeStreamCaptureMode(before)

    assert outcome(allocate, "global") == ("fine", None)


def test_a_note_is_added_on_the_way_out_of_the_capture(shim):
    def capture_a_copy():
        with torch.cuda.stream(torch.cuda.current_stream()):
            with torch.cuda.graph(torch.cuda.CUDAGraph(), stream=torch.cuda.Stream()):
                torch.ones(N, device="cuda")
                torch.tensor([1.0], device="cuda")

    with pytest.raises(RuntimeError, match="during CUDA graph capture") as error:
        capture_a_copy()
    (note,) = error.value.__notes__
    assert "test_capture_guards.py" in note
