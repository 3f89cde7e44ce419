"""Host syncs inside a capture on a GPU: what happens to each row, in each of CUDA's capture modes.

``bare`` is what the same row does without the shim, as measured (each in a process of its own, since torch's random
generators do not survive a lost capture): "lost", "raised" (torch refuses by itself, and the capture lives) or "fine".
"""

import gc
import re
import threading

import pytest
import torch
from sync_rows import N, outcome, rows

import streamshim
from streamshim.guards import sync_mode

ALWAYS = {"global": "refused", "thread_local": "refused", "relaxed": "refused"}
TORCHS_OWN = {"global": "raised", "thread_local": "raised", "relaxed": "raised"}
FINE = {"global": "fine", "thread_local": "fine", "relaxed": "fine"}
NOT_IN_RELAXED = {"global": "refused", "thread_local": "refused", "relaxed": "fine"}

#: Row -> (without the shim, with it for each mode, words that the refusal must contain).
TABLE = {
    ".item()": ("lost", ALWAYS, r"\.item\(\) on a CUDA tensor"),
    "int()": ("lost", ALWAYS, r"int\(\) of a CUDA tensor"),
    "float()": ("lost", ALWAYS, r"float\(\) of a CUDA tensor"),
    "bool()": ("lost", ALWAYS, "truth value"),
    "if": ("lost", ALWAYS, "truth value"),
    "in": ("lost", ALWAYS, "`in` on a CUDA tensor"),
    "format": ("lost", ALWAYS, "CUDA tensor"),
    "list index": ("lost", ALWAYS, "index or a size"),
    "slice": ("lost", ALWAYS, "index or a size"),
    "is_nonzero": ("lost", ALWAYS, "is_nonzero"),
    ".tolist()": ("raised", ALWAYS, r"\.tolist\(\)"),
    ".cpu()": ("raised", TORCHS_OWN, ""),
    ".to('cpu')": ("raised", TORCHS_OWN, ""),
    "numpy.asarray(x.cpu())": ("raised", TORCHS_OWN, ""),
    "torch.tensor(list)": ("raised", TORCHS_OWN, ""),
    "host.cuda()": ("raised", TORCHS_OWN, ""),
    "host.cuda(non_blocking)": ("raised", TORCHS_OWN, ""),
    "pinned.cuda(non_blocking)": ("fine", FINE, ""),
    "x[:] = host": ("raised", TORCHS_OWN, ""),
    "nonzero": ("lost", ALWAYS, "nonzero: its result's size"),
    "torch.nonzero": ("lost", ALWAYS, "nonzero: its result's size"),
    "argwhere": ("lost", ALWAYS, "argwhere"),
    "x[mask]": ("lost", ALWAYS, "boolean-mask index"),
    "masked_select": ("lost", ALWAYS, "masked_select"),
    "x[mask] = tensor": ("lost", ALWAYS, "assignment through a boolean mask"),
    "x[mask] = scalar": ("fine", FINE, ""),
    "unique": ("lost", ALWAYS, "unique"),
    "unique_consecutive": ("lost", ALWAYS, "unique"),
    "bincount": ("raised", ALWAYS, "bincount"),
    "repeat_interleave(output_size)": ("fine", FINE, ""),
    "multinomial": ("fine", FINE, ""),
    "equal": ("lost", ALWAYS, "torch.equal"),
    "allclose": ("lost", ALWAYS, "allclose"),
    "assert_close": ("lost", ALWAYS, ""),
    "repr": ("lost", ALWAYS, "print or repr"),
    "print": ("lost", ALWAYS, "CUDA tensor"),
    "deepcopy": ("fine", FINE, ""),
    "pickle": ("raised", TORCHS_OWN, ""),
    "torch.save": ("raised", TORCHS_OWN, ""),
    "cuda.synchronize": ("lost", ALWAYS, r"torch\.cuda\.synchronize"),
    "accelerator.synchronize": ("lost", ALWAYS, r"torch\.accelerator\.synchronize"),
    "current_stream().synchronize": ("lost", ALWAYS, r"Stream\.synchronize"),
    "current_stream().query": ("lost", ALWAYS, r"Stream\.query"),
    "side.synchronize": ("lost", NOT_IN_RELAXED, r"Stream\.synchronize"),
    "side.query": ("lost", NOT_IN_RELAXED, r"Stream\.query"),
    "event.synchronize": ("lost", NOT_IN_RELAXED, r"Event\.synchronize"),
    "event.query": ("lost", NOT_IN_RELAXED, r"Event\.query"),
    "event.elapsed_time": ("lost", NOT_IN_RELAXED, r"Event\.elapsed_time"),
    "unrecorded event.synchronize": ("fine", FINE, ""),
    "empty_cache": ("fine", FINE, ""),
    "memory_stats": ("fine", FINE, ""),
}

#: Waits in C++, and functions that compiled code holds: torch's own check refuses them in a global capture, and nothing
#: can in the others.
IN_CPP = ("arange", "linalg.inv", "where(condition)", "repeat_interleave")


@pytest.mark.parametrize("error_mode", ["global", "thread_local", "relaxed"])
@pytest.mark.parametrize("row", TABLE)
@pytest.mark.parametrize("mode", ["bind", "strict"])
def test_every_row_with_the_capture_valid_after_it(row, error_mode, mode):
    _, expected, words = TABLE[row]
    gc.collect()
    with streamshim.install(mode):
        what, error = outcome(rows()[row], error_mode)
    assert what == expected[error_mode], error
    if what == "refused":
        assert error.report.site.file.endswith(("sync_rows.py", "numeric.py", "_comparison.py", "tensor.py"))
        assert re.search(words, str(error))


def in_a_capture(call):
    # torch.cuda.graph does not put the current stream back when a capture fails at its end.
    with torch.cuda.stream(torch.cuda.current_stream()):
        with torch.cuda.graph(torch.cuda.CUDAGraph(), stream=torch.cuda.Stream()):
            call()


@pytest.mark.parametrize("row", IN_CPP)
def test_a_wait_in_cpp_is_refused_by_torchs_own_check(shim, row):
    gc.collect()
    what, error = outcome(rows()[row], "global")
    assert what == "raised"
    assert "synchronizing CUDA operation" in str(error)


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


@pytest.mark.parametrize("error_mode", ["thread_local"])
def test_b07_other_threads_wait_legally_and_fifty_of_fifty_captures_are_valid(shim, error_mode):
    stop, errors = threading.Event(), []

    def busy():
        side, event = torch.cuda.Stream(), torch.cuda.Event()
        try:
            with torch.cuda.stream(side):
                while not stop.is_set():
                    torch.ones(4, device="cuda").sum().item()
                    torch.ones(4).pin_memory()
                    event.record()
                    event.query()
                    event.synchronize()
                    side.synchronize()
        except Exception as error:  # noqa: BLE001, whatever it is, it must not happen
            errors.append(error)

    threads = [threading.Thread(target=busy) for _ in range(3)]
    for thread in threads:
        thread.start()
    valid = 0
    try:
        for i in range(50):
            x, out = torch.full((N,), float(i), device="cuda"), torch.zeros(N, device="cuda")
            graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            # torch.cuda.graph waits for the device first, which is nobody's harm before the capture.
            with torch.cuda.stream(stream):
                graph.capture_begin(capture_error_mode=error_mode)
                torch.add(x, 1.0, out=out)
                graph.capture_end()
                x.fill_(float(i + 1))
                graph.replay()
                valid += out.tolist() == [i + 2.0] * N
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert errors == []
    assert valid == 50


def test_b08_forks_and_joins_are_legal_and_the_negative_twin_names_its_line(shim):
    side, nested = torch.cuda.Stream(), torch.cuda.Stream(priority=-1)
    x, out = torch.zeros(N, device="cuda"), torch.zeros(N, device="cuda")

    def forked(join):
        main = torch.cuda.current_stream()
        side.wait_stream(main)
        with torch.cuda.stream(side):
            y = x + 1
            nested.wait_stream(side)
            with torch.cuda.stream(nested):
                z = y * 2
            side.wait_stream(nested)
        if join:
            main.wait_stream(side)
            torch.add(z, 0, out=out)

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.Stream()):
        forked(True)
    x.fill_(20.0)
    out.fill_(float("nan"))
    graph.replay()
    torch.cuda.synchronize()
    assert out.tolist() == [42.0] * N
    with pytest.raises(streamshim.CaptureInvalidatedError, match="904") as lost:
        in_a_capture(lambda: forked(False))
    assert hex(side.cuda_stream) in str(lost.value)
    assert "test_capture_guards.py" in str(lost.value)


def test_an_allowed_sync_is_let_through_and_the_lost_capture_is_explained(shim):
    """Allowing is not making legal: CUDA loses the capture, and the error says where; then the process goes on."""
    one = torch.ones((), device="cuda")
    with pytest.raises(streamshim.CaptureInvalidatedError) as lost:
        in_a_capture(streamshim.allow("sync", reason="to see what happens")(lambda: one.item()))
    assert lost.value.report.site.file.endswith("test_capture_guards.py")
    assert lost.value.__cause__ is not None
    torch.cuda.synchronize()
    x, graph = torch.zeros(N, device="cuda"), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.Stream()):
        x.add_(1)
    x.fill_(41)
    graph.replay()
    torch.cuda.synchronize()
    assert x.tolist() == [42.0] * N
