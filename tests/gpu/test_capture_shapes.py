"""Shapes of captures on a GPU: forks (B08), first calls (B06), foreign captures, and how a lost one is explained."""

import gc

import cute_kernels
import pytest
import torch
from cutlass.cute.runtime import make_fake_stream
from sync_rows import MODES, N, outcome

import streamshim
from streamshim import capture


def in_a_capture(call, **kwargs):
    # torch.cuda.graph does not put the current stream back when a capture fails at its end.
    with torch.cuda.stream(torch.cuda.current_stream()):
        with torch.cuda.graph(torch.cuda.CUDAGraph(), stream=torch.cuda.Stream(), **kwargs):
            torch.zeros(N, device="cuda")
            call()


def captures_again():
    """Whether the process can capture, and what it captures is right."""
    x, graph = torch.zeros(N, device="cuda"), torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=torch.cuda.Stream()):
        x.add_(1)
    x.fill_(41)
    graph.replay()
    torch.cuda.synchronize()
    return x.tolist() == [42.0] * N


def nodes_of(call):
    """How many nodes the graph of a call has, without streamshim's launches or with them."""
    from cuda.bindings import runtime

    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.stream(torch.cuda.current_stream()):
        with torch.cuda.graph(graph, stream=torch.cuda.Stream()):
            call()
    error, _, count = runtime.cudaGraphGetNodes(graph.raw_cuda_graph())
    assert int(error) == 0
    return count


def by_event(first, then):
    then.wait_event(first.record_event())


def by_wait_stream(first, then):
    then.wait_stream(first)


@pytest.mark.parametrize("order", [by_event, by_wait_stream])
def test_b08_forks_with_foreign_kernels_are_legal_and_have_the_nodes_of_their_twin(shim, order):
    kernel = cute_kernels.compile_fake(cute_kernels.no_stream)
    side, nested = torch.cuda.Stream(), torch.cuda.Stream(priority=-1)
    x, y, z, out = (torch.zeros(100, device="cuda") for _ in range(4))
    kernel(x, y)
    torch.cuda.synchronize()

    def forked(add_one):
        main = torch.cuda.current_stream()
        order(main, side)
        with torch.cuda.stream(side):
            add_one(x, y)
            order(side, nested)
            with torch.cuda.stream(nested):
                add_one(y, z)
            order(nested, side)
        order(side, main)
        add_one(z, out)

    gc.collect()
    assert nodes_of(lambda: forked(kernel)) == nodes_of(lambda: forked(lambda a, b: torch.add(a, 1.0, out=b)))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.Stream()):
        forked(kernel)
    for value in (20.0, 30.0):
        x.fill_(value)
        out.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        assert out.tolist() == [value + 3] * 100


def test_b08_a_fork_that_is_not_joined_is_named_with_its_line(shim):
    side = torch.cuda.Stream()

    def forked():
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            torch.zeros(N, device="cuda")

    with pytest.raises(streamshim.CaptureInvalidatedError, match="904") as lost:
        in_a_capture(forked)
    assert hex(side.cuda_stream) in str(lost.value)
    assert "test_capture_shapes.py" in str(lost.value)
    assert captures_again()


def test_an_external_event_is_no_fork(shim):
    x, graph = torch.zeros(N, device="cuda"), torch.cuda.CUDAGraph()
    event, outside = torch.cuda.Event(external=True), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=torch.cuda.Stream()):
        x.add_(1)
        event.record()
        x.mul_(2)
    x.fill_(20)
    torch.cuda.synchronize()
    graph.replay()
    with torch.cuda.stream(outside):
        event.wait()
    torch.cuda.synchronize()
    assert x.tolist() == [42.0] * N


@pytest.mark.parametrize("error_mode", MODES)
def test_b06_autotuning_is_refused_and_works_when_warmed_up(shim, error_mode):
    triton_kernels = pytest.importorskip("triton_kernels", reason="triton is not installed")
    tuned, x, out = triton_kernels.tuned(), torch.full((N,), 41.0, device="cuda"), torch.zeros(N, device="cuda")
    what, error = outcome(lambda _: tuned[(1,)](x, out, N), error_mode)
    assert what == "refused"
    assert "Run it once before the capture" in str(error)
    assert "sync_rows.py" in str(error) or "test_capture_shapes.py" in str(error)
    tuned[(1,)](x, out, N)
    torch.cuda.synchronize()
    out.fill_(float("nan"))
    assert outcome(lambda _: tuned[(1,)](x, out, N), error_mode) == ("fine", None)
    assert captures_again()


LOSSES = {
    "an allowed sync": lambda: streamshim.allow("sync", reason="to see what happens")(torch.cuda.synchronize)(),
    "a sync below Python": lambda: _cupy_device().synchronize(),
    "an exception and a sync": lambda: _fail_and_sync(),
    "work from before": lambda: torch.cuda.current_stream().wait_event(_eager_event()),
}


def _cupy_device():
    return pytest.importorskip("cupy", reason="cupy is not installed").cuda.Device()


def _eager_event():
    event = torch.cuda.Event()
    event.record(torch.cuda.default_stream())
    return event


def _fail_and_sync():
    try:
        with streamshim.allow("sync", reason="to see what happens"):
            torch.ones((), device="cuda").item()
    except RuntimeError:
        raise ValueError("the validation failed") from None


@pytest.mark.parametrize("loss", LOSSES)
def test_after_a_lost_capture_the_process_captures_again(shim, loss):
    if loss == "a sync below Python":
        _cupy_device()
    with pytest.raises(streamshim.CaptureInvalidatedError) as lost:
        in_a_capture(LOSSES[loss])
    assert isinstance(lost.value.__cause__, RuntimeError)
    assert "test_capture_shapes.py" in str(lost.value)
    assert capture.open_windows() == []
    torch.cuda.synchronize()
    assert captures_again()


def test_after_a_lost_capture_random_numbers_are_drawn_again(shim):
    """torch's generator takes the capture to be going on; and a graph from before still follows the seed."""
    drawn, graph = torch.zeros(64, device="cuda"), torch.cuda.CUDAGraph()
    with torch.cuda.stream(torch.cuda.current_stream()):
        with torch.cuda.graph(graph, stream=torch.cuda.Stream()):
            drawn.uniform_()

    def replayed(seed):
        torch.cuda.manual_seed(seed)
        drawn.fill_(-1.0)
        graph.replay()
        return drawn.tolist()

    before = replayed(3)
    with pytest.raises(streamshim.CaptureInvalidatedError):
        in_a_capture(LOSSES["work from before"])
    torch.cuda.manual_seed(3)
    assert len(set(torch.rand(64, device="cuda").tolist())) > 32
    assert replayed(3) == before
    assert replayed(4) != before


def test_an_allowed_sync_is_let_through_and_named_as_the_cause(shim):
    """Allowing is not making legal: CUDA loses the capture, and the error says where."""
    one = torch.ones((), device="cuda")
    with pytest.raises(streamshim.CaptureInvalidatedError) as lost:
        in_a_capture(streamshim.allow("sync", reason="to see what happens")(lambda: one.item()))
    assert lost.value.report.site.file.endswith("test_capture_shapes.py")
    assert ".item() on a CUDA tensor" in str(lost.value)


def cuda_python():
    from cuda.bindings import runtime

    mode = runtime.cudaStreamCaptureMode.cudaStreamCaptureModeThreadLocal
    return (
        lambda stream: runtime.cudaStreamBeginCapture(stream, mode)[0],
        lambda stream: runtime.cudaStreamEndCapture(stream)[:2],
    )


def libcuda():
    import ctypes

    lib = ctypes.CDLL("libcuda.so.1")

    def end(stream):
        graph = ctypes.c_void_p()
        return lib.cuStreamEndCapture(ctypes.c_void_p(stream), ctypes.byref(graph)), graph.value

    return lambda stream: lib.cuStreamBeginCapture_v2(ctypes.c_void_p(stream), 1), end


@pytest.mark.parametrize("api", [cuda_python, libcuda])
def test_a_capture_that_torch_did_not_begin_is_recognised(shim, api):
    kernel = cute_kernels.compile_fake(cute_kernels.with_stream, make_fake_stream())
    x, out, stream = torch.ones(100, device="cuda"), torch.zeros(100, device="cuda"), torch.cuda.Stream()
    kernel(x, out, 0)
    torch.cuda.synchronize()
    out.fill_(-1.0)
    begin, end = api()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        assert int(begin(stream.cuda_stream)) == 0
        if api is cuda_python:
            (window,) = capture.open_windows()
            assert (window.stream, window.error_mode) == (stream.cuda_stream, "thread_local")
            with pytest.raises(streamshim.HostSyncError):
                x.sum().item()
        kernel(x, out, 0)
        with pytest.raises(streamshim.HostSyncError, match=r"torch\.cuda\.synchronize"):
            torch.cuda.synchronize()
        with pytest.raises(streamshim.HostSyncError):
            stream.synchronize()
        error, graph = end(stream.cuda_stream)
    assert int(error) == 0
    assert graph
    torch.cuda.synchronize()
    assert out.tolist() == [-1.0] * 100
    assert capture.open_windows() == []


def test_breakable_graphs_end_and_begin_many_captures_in_one_block(shim):
    kernel = cute_kernels.compile_fake(cute_kernels.with_stream, make_fake_stream())
    x, out, stream = torch.zeros(100, device="cuda"), torch.zeros(100, device="cuda"), torch.cuda.Stream()
    kernel(x, out, 0)
    torch.cuda.synchronize()
    graphs, ids, eager = [], set(), []
    with torch.cuda.stream(stream):
        for _ in range(10):
            graph = torch.cuda.CUDAGraph()
            graph.capture_begin(capture_error_mode="thread_local")
            ids.update(window.id for window in capture.open_windows())
            kernel(x, out, 0)
            kernel(out, x, 0)
            with pytest.raises(streamshim.HostSyncError):
                x.sum().item()
            graph.capture_end()
            graphs.append(graph)
            eager.append(x.sum().item())  # between two captures it is legal
    assert len(ids) == 10
    assert eager == [0.0] * 10
    for graph in graphs:
        graph.replay()
    torch.cuda.synchronize()
    assert x.tolist() == [20.0] * 100


FUNCTIONS = {
    "plain": lambda x: torch.relu(x) * 2 + 1,
    "mask": lambda x: torch.where(x > 0, x, torch.zeros_like(x)).to(torch.float64)[1:],
    "graph break at a value": lambda x: x * 2 if x.sum().item() > 0 else x,
    "synchronise": lambda x: (x * 2, torch.cuda.synchronize())[0],
}


def forked_function(x):
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        y = x + 1
    torch.cuda.current_stream().wait_stream(side)
    return y * 2


FUNCTIONS["fork"] = forked_function


def compiled_graphs(function):
    """The graphs that Dynamo makes of a function: the number of operations in each."""
    torch._dynamo.reset()
    seen = []

    def backend(module, inputs):
        seen.append([(node.op, str(node.target)) for node in module.graph.nodes])
        return module.forward

    torch.compile(function, backend=backend)(torch.ones(8, device="cuda"))
    torch._dynamo.reset()
    return seen


@pytest.mark.parametrize("name", FUNCTIONS)
def test_torch_compile_makes_the_same_graphs_with_and_without_the_shim(name):
    without = compiled_graphs(FUNCTIONS[name])
    with streamshim.install("strict"):
        assert compiled_graphs(FUNCTIONS[name]) == without
    assert without


def test_reduce_overhead_is_right_with_forks_and_without_recompiling(shim):
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: torch.relu(x) * 2 + 1, mode="reduce-overhead")
    with torch.no_grad():
        results = []
        for value in (1.0, 2.0, 3.0, 4.0, 5.0):
            torch.compiler.cudagraph_mark_step_begin()
            results.append(compiled(torch.full((64,), value, device="cuda")).tolist()[0])
            if value == 2.0:
                torch.compiler.set_stance("fail_on_recompile")
    torch.compiler.set_stance("default")
    torch._dynamo.reset()
    assert results == [3.0, 5.0, 7.0, 9.0, 11.0]
