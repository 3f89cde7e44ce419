"""What Python code can do to make the host wait, one row each; used by test_guards.py."""

import copy
import io
import pickle

import numpy
import torch

N = 8


def rows():
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
    side = torch.cuda.Stream()
    torch.linalg.inv(matrix)
    torch.multinomial(some + 1, 2)
    torch.cuda.synchronize()

    def if_(x):
        return 1 if one else 2

    def assign_mask_tensor(x):
        x.clone()[mask] = some

    def assign_mask_scalar(x):
        x.clone()[mask] = 1.0

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
        "unique": lambda x: torch.unique(x),
        "unique_consecutive": lambda x: torch.unique_consecutive(x),
        "bincount": lambda x: torch.bincount(counts),
        "repeat_interleave": lambda x: torch.repeat_interleave(x, counts),
        "repeat_interleave(output_size)": lambda x: torch.repeat_interleave(x, counts, output_size=N),
        "multinomial": lambda x: torch.multinomial(some + 1, 2),
        "equal": lambda x: torch.equal(x, some_more),
        "allclose": lambda x: torch.allclose(x, some_more),
        "assert_close": lambda x: torch.testing.assert_close(x, x),
        "repr": lambda x: repr(x),
        "print": lambda x: print(x, file=io.StringIO()),
        "deepcopy": lambda x: copy.deepcopy(x),
        "pickle": lambda x: pickle.dumps(x),
        "torch.save": lambda x: torch.save(x, io.BytesIO()),
        "linalg.inv": lambda x: torch.linalg.inv(matrix),
        "cuda.synchronize": lambda x: torch.cuda.synchronize(),
        "accelerator.synchronize": lambda x: torch.accelerator.synchronize(),
        "current_stream().synchronize": lambda x: torch.cuda.current_stream().synchronize(),
        "current_stream().query": lambda x: torch.cuda.current_stream().query(),
        "side.synchronize": lambda x: side.synchronize(),
        "side.query": lambda x: side.query(),
        "event.synchronize": lambda x: event.synchronize(),
        "event.query": lambda x: event.query(),
        "event.elapsed_time": lambda x: event.elapsed_time(other_event),
        "unrecorded event.synchronize": lambda x: torch.cuda.Event().synchronize(),
        "empty_cache": lambda x: torch.cuda.empty_cache(),
        "memory_stats": lambda x: torch.cuda.memory_stats(),
    }


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
    return ("refused" if type(error).__name__ == "HostSyncError" else "raised"), error
