"""Captures and other threads on a GPU: background work that waits (B07), and autograd's threads (B09)."""

import contextlib
import functools
import threading
import traceback

import pytest
import torch
from sync_rows import N

import streamshim


@functools.cache
def streams(count=6):
    """Streams that nobody shares: torch hands out the same 32 in turn, so they are made once and compared."""
    made = [torch.cuda.Stream() for _ in range(count)]
    assert len({stream.cuda_stream for stream in made}) == count
    return made


def _functions(error):
    """The names of the functions that an error has come through."""
    return [frame.name for frame in traceback.extract_tb(error.__traceback__)]


class Background:
    """Three threads that do what a data loader's pinning thread and its like do, each on a stream of its own."""

    def __init__(self):
        self.errors, self.rounds, self._stop = [], 0, threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(stream,), name="pinner") for stream in streams()[:3]]

    def _run(self, stream):
        event = torch.cuda.Event()
        with torch.cuda.stream(stream):
            while not self._stop.is_set():
                try:
                    torch.ones(4, device="cuda").sum().item()
                    torch.ones(4).pin_memory()
                    torch.ones(4).pin_memory().to("cuda", non_blocking=True)
                    event.record()
                    event.query()
                    event.synchronize()
                    stream.synchronize()
                except Exception as error:  # noqa: BLE001, whatever it is, the test looks at it
                    self.errors.append(error)
                self.rounds += 1

    def __enter__(self):
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *exc):
        self._stop.set()
        for thread in self._threads:
            thread.join()


def captures(error_mode, count=50):
    """How many of the captures are valid and replay right, and the errors of the others. Does without
    torch.cuda.graph, which waits for the device before it begins."""
    valid, lost, stream = 0, [], streams()[3]
    for i in range(count):
        with torch.cuda.stream(stream):
            x, out = torch.full((N,), float(i), device="cuda"), torch.full((N,), float("nan"), device="cuda")
            graph = torch.cuda.CUDAGraph()
            try:
                graph.capture_begin(capture_error_mode=error_mode)
                try:
                    torch.add(x, 1.0, out=out)
                finally:
                    graph.capture_end()
            except RuntimeError as error:
                lost.append(error)
                # torch can fail after CUDA has begun to capture; that is still to be ended then.
                with contextlib.suppress(RuntimeError):
                    graph.capture_end()
                continue
            x.fill_(float(i + 1))
            graph.replay()
            valid += out.tolist() == [i + 2.0] * N
    return valid, lost


@pytest.mark.parametrize("error_mode", ["thread_local", "relaxed"])
@pytest.mark.parametrize("mode", ["bind", "strict"])
def test_b07_other_threads_wait_legally_and_fifty_of_fifty_captures_are_valid(mode, error_mode):
    with streamshim.install(mode), Background() as background:
        assert captures(error_mode) == (50, [])
    assert background.errors == []
    assert background.rounds > 0


def test_b07_in_a_global_capture_thread_and_call_are_named(shim):
    with Background() as background:
        valid, lost = captures("global")
    # A call that was made just before a capture began may reach CUDA inside it; then the capture is lost.
    assert valid + len(lost) == 50
    for error in lost:
        assert isinstance(error, streamshim.CaptureInvalidatedError) or "capture_begin" in _functions(error)
    refused = [error for error in background.errors if isinstance(error, streamshim.HostSyncError)]
    assert refused, "the race was not run into"
    for error in refused:
        assert error.report.thread == "pinner"
        assert error.report.site.file.endswith("test_capture_threads.py")
        assert "captures in mode 'global'" in str(error).replace("\n", " ")
        assert "thread_local" in str(error)


def test_a_call_of_another_thread_that_broke_the_capture_is_named(shim):
    event, failed = torch.cuda.Event(), []
    event.record()
    torch.cuda.synchronize()

    def poll():
        try:
            with streamshim.allow("sync", reason="to see what happens"):
                event.query()
        except RuntimeError as error:
            failed.append(error)

    def capture_meanwhile():
        with torch.cuda.stream(torch.cuda.current_stream()):
            with torch.cuda.graph(torch.cuda.CUDAGraph(), stream=streams()[4]):
                torch.ones(N, device="cuda")
                thread = threading.Thread(target=poll, name="poller")
                thread.start()
                thread.join()

    with pytest.raises(streamshim.CaptureInvalidatedError) as lost:
        capture_meanwhile()
    assert len(failed) == 1
    assert "Event.query() in thread poller, at" in str(lost.value)
    assert "which CUDA refused because of this capture" in " ".join(str(lost.value).split())
    torch.cuda.synchronize()


class Doubled(torch.autograd.Function):
    """A function whose backward launches a kernel that knows nothing of torch."""

    kernel = None

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        out = torch.empty_like(grad)
        Doubled.kernel(grad.contiguous(), out)  # grad + 1, on a stream that it does not name
        return out


@pytest.fixture
def backward_kernel(shim, monkeypatch):
    import cute_kernels

    monkeypatch.setattr(Doubled, "kernel", staticmethod(cute_kernels.compile_fake(cute_kernels.no_stream)))
    x = torch.ones(100, device="cuda")
    Doubled.kernel(x, torch.empty_like(x))
    torch.cuda.synchronize()


def captured_backward(x):
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(torch.cuda.current_stream()):
        with torch.cuda.graph(graph, stream=streams()[4]):
            Doubled.apply(x).sum().backward()
    for value in (5.0, 6.0):
        x.grad.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        assert x.grad.tolist() == [2.0] * 100
        x.data.fill_(value)


def test_b09_a_foreign_backward_kernel_is_in_the_graph(backward_kernel):
    captured_backward(torch.ones(100, device="cuda", requires_grad=True))


def test_b09_with_a_warm_up_on_a_side_stream(backward_kernel):
    x, side = torch.ones(100, device="cuda", requires_grad=True), streams()[5]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        Doubled.apply(x).sum().backward()
    torch.cuda.current_stream().wait_stream(side)
    x.grad = None
    captured_backward(x)


def test_b09_make_graphed_callables(backward_kernel):
    class Scaled(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(100, device="cuda"))

        def forward(self, x):
            return Doubled.apply(x * self.weight)

    module = Scaled()
    graphed = torch.cuda.make_graphed_callables(module, (torch.ones(100, device="cuda", requires_grad=True),))
    for value in (3.0, 5.0):
        module.weight.grad = None
        x = torch.full((100,), value, device="cuda", requires_grad=True)
        y = graphed(x)
        y.sum().backward()
        torch.cuda.synchronize()
        assert y.tolist() == [2 * value] * 100
        # The gradient of y is 1; the kernel makes it 2; the weight's is that times x.
        assert (x.grad.tolist(), module.weight.grad.tolist()) == ([2.0] * 100, [2 * value] * 100)


@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream")
def test_b09_a_node_that_remembers_the_default_stream_is_explained(backward_kernel):
    x = torch.ones(100, device="cuda", requires_grad=True)
    kept = Doubled.apply(x).sum()
    kept.backward()
    x.grad = None
    with pytest.raises(streamshim.CaptureInvalidatedError) as lost:
        captured_backward(x)
    text = " ".join(str(lost.value).split())
    assert "test_capture_threads.py" in text
    assert "a node of the autograd graph belongs to the default stream" in text
    assert "Warm up on a side stream" in text
    assert "capture 0" not in text
    # After that the process captures again.
    del kept
    captured_backward(torch.ones(100, device="cuda", requires_grad=True))
