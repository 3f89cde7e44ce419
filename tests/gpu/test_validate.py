"""Validated kernels in CUDA graphs: every replay is compared, and nothing waits."""

import ctypes
import random
import threading

import pytest
import torch
from harness import fresh_stream

import streamshim
from streamshim.validation import calls, report, stats
from streamshim.validation.compare import Tolerance, compare, defaults

N = 1000


@pytest.fixture(autouse=True)
def _nothing_validated(monkeypatch):
    monkeypatch.delenv("STREAMSHIM_VALIDATE", raising=False)
    monkeypatch.delenv("STREAMSHIM_REPORT_DIR", raising=False)
    calls.functions.clear()
    report._told.clear()
    stats.forget()
    yield
    torch.cuda.synchronize()
    calls.functions.clear()
    stats.forget()


def kernel(x, fault):
    return x * 2 + fault


def reference(x, fault):
    return x + x


def inputs(n=N, dtype=torch.float32, device="cuda"):
    return torch.zeros(n, dtype=dtype, device=device), torch.zeros(n, dtype=dtype, device=device)


def captured(call, stream=None, **kwargs):
    """A graph of a call, and its output."""
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream or fresh_stream(), **kwargs):
        out = call()
    torch.cuda.synchronize()
    return graph, out


def row(output="output"):
    (found,) = [row for row in streamshim.validation_report().rows if row.captured and row.output == output]
    return found


@pytest.mark.parametrize("installed", [True, False])
@pytest.mark.parametrize("error_mode", ["global", "thread_local", "relaxed"])
def test_1000_replays_with_faults_in_chosen_ones_are_counted_exactly(installed, error_mode):
    if installed:
        streamshim.install("strict")
    verify = streamshim.validate(kernel, reference, name="verify")
    x, fault = inputs()
    verify(x, fault)
    graph, out = captured(lambda: verify(x, fault), capture_error_mode=error_mode)
    chosen = sorted(random.Random(3).sample(range(1, 1001), 25))
    for number in range(1, 1001):
        x.fill_(float(number))
        fault.zero_()
        if number in chosen:
            fault[number % N :].fill_(0.5)
        out.fill_(float("nan"))
        graph.replay()
        if number in (1, 500, 1000):
            assert out[0].item() == 2 * number + fault[0].item()
    found = row()
    assert (found.captured, found.replays, found.checked, found.mismatches) == (1, 1000, 1000, 25)
    assert found.bad_elements == sum(N - number % N for number in chosen)
    assert found.max_abs == 0.5
    (place,) = found.bad
    assert (place.count, place.first, place.index) == (25, chosen[0], (chosen[0] % N,))


def test_the_graph_has_no_host_node_and_no_sync_is_refused():
    streamshim.install("strict")
    verify = streamshim.validate(kernel, reference, sample=2, keep=1)
    x, fault = inputs()
    verify(x, fault)
    graph, _ = captured(lambda: verify(x, fault))
    kinds = {node.kind for node in streamshim.audit(graph).nodes}
    assert kinds <= {"kernel", "copy", "set"}, kinds
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        verify(x, fault)  # nor does an eager call wait, once there are counters
    finally:
        torch.cuda.set_sync_debug_mode(before)


def test_the_first_call_is_inside_the_capture_of_an_installed_shim():
    """`capture.before_begin` has made the counters; nothing was called before."""
    streamshim.install()
    verify = streamshim.validate(kernel, reference)
    x, fault = inputs()
    graph, _ = captured(lambda: verify(x, fault))
    fault[3] = 1
    for _ in range(3):
        graph.replay()
    assert (row().replays, row().mismatches, row().bad[0].index) == (3, 3, (3,))


def test_the_first_call_inside_a_capture_without_the_shim_is_an_error_and_the_capture_stays_valid():
    verify = streamshim.validate(kernel, reference)
    x, fault = inputs()

    def call():
        with pytest.raises(streamshim.ValidationError, match="There are no counters on cuda:0"):
            verify(x, fault)
        return x + 1

    graph, out = captured(call)
    x.fill_(4)
    graph.replay()
    assert out[0].item() == 5


def test_outputs_that_differ_are_an_error_inside_a_capture_too_and_it_stays_valid():
    verify = streamshim.validate(lambda x: x.half(), lambda x: x + 1)
    x, _ = inputs()

    def call():
        with pytest.raises(streamshim.ValidationError, match="output differs in dtype"):
            verify(x)
        return x + 1

    graph, out = captured(call)
    graph.replay()
    assert out[0].item() == 1


@pytest.mark.parametrize("installed", [True, False])
def test_a_report_inside_a_capture_is_an_error_and_it_stays_valid(installed):
    if installed:
        streamshim.install()
    verify = streamshim.validate(kernel, reference)
    x, fault = inputs()
    verify(x, fault)

    def call():
        out = verify(x, fault)
        with pytest.raises(streamshim.ValidationError, match=r"streamshim.validation_report\(\) was called"):
            streamshim.validation_report()
        return out

    graph, _ = captured(call)
    graph.replay()
    assert row().replays == 1


def test_captures_with_one_pool_many_shapes_and_many_calls_are_told_apart():
    verify = streamshim.validate(kernel, reference)
    pool, graphs = torch.cuda.graph_pool_handle(), []
    verify(*inputs(3))
    for size in (64, 32, 16, 8):
        x, fault = inputs(size)

        def layers(x=x, fault=fault):
            for layer in range(4):
                x = verify(x, fault[layer : layer + 1])
            return x

        graph, out = captured(layers, pool=pool)
        graphs.append((graph, x, fault, out))
    for turn in range(30):
        for number, (graph, x, fault, out) in enumerate(graphs):
            x.fill_(1.0)
            fault.zero_()
            if (turn + number) % 10 == 0:
                fault[2] = 1.0
            out.fill_(float("nan"))
            graph.replay()
            assert out[0].item() == (16 if (turn + number) % 10 else 18)
    rows = [found for found in streamshim.validation_report().rows if found.captured]
    assert [(r.tensor, r.captured, r.replays, r.mismatches) for r in rows] == [
        (f"float32[{size}] on cuda:0", 4, 120, 3) for size in (64, 32, 16, 8)
    ]
    assert all(" captured call 3 " in place.where for r in rows for place in r.bad)


def test_replays_on_several_streams_at_once_lose_no_count():
    verify = streamshim.validate(kernel, reference)
    graphs, streams = [], [fresh_stream() for _ in range(4)]
    verify(*inputs())

    def call(x, fault):
        return verify(x, fault)

    for number in range(4):
        x, fault = inputs()
        fault.fill_(float(number == 2))
        graphs.append((captured(lambda x=x, fault=fault: call(x, fault))[0], x, fault))
    torch.cuda.synchronize()
    for _ in range(500):
        for stream, (graph, *_) in zip(streams, graphs, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
                call(*graphs[0][1:])
    torch.cuda.synchronize()
    found = row()
    assert (found.calls, found.replays, found.checked, found.mismatches) == (2000, 2000, 4000, 500)


def test_threads_that_capture_and_replay_lose_no_count():
    verify = streamshim.validate(kernel, reference)
    verify(*inputs())
    lock, failed = threading.Lock(), []

    def work(number):
        try:
            x, fault = inputs()
            fault.fill_(float(number == 1))
            stream = fresh_stream()
            with lock:
                graph, _ = captured(lambda: verify(x, fault), stream=stream, capture_error_mode="thread_local")
            with torch.cuda.stream(stream):
                for _ in range(200):
                    graph.replay()
                    verify(x, fault)
            stream.synchronize()
        except BaseException as error:  # noqa: BLE001, it is raised below
            failed.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []
    rows = streamshim.validation_report().rows
    assert sum(r.replays for r in rows) == 800
    assert sum(r.calls for r in rows) == 801
    assert sum(r.mismatches for r in rows) == 400


def test_a_sample_of_the_replays_is_chosen_on_the_device():
    verify = streamshim.validate(kernel, reference, sample=10)
    x, fault = inputs()
    verify(x, fault)
    graph, _ = captured(lambda: verify(x, fault))
    for number in range(1, 101):
        fault.fill_(float(number in (2, 11, 50, 91)))  # 1, 11, 21, ... are compared
        graph.replay()
    found = row()
    assert (found.replays, found.checked, found.mismatches, found.bad[0].first) == (100, 10, 2, 11)


@pytest.mark.parametrize("use", ["kernel", "reference"])
def test_a_ctypes_kernel_that_writes_to_its_argument(shim, use):
    driver = ctypes.CDLL("libcuda.so.1")
    fill = driver.cuMemsetD32Async
    fill.argtypes = [ctypes.c_void_p, ctypes.c_uint, ctypes.c_size_t, ctypes.c_void_p]
    streamshim.bind(driver, {"cuMemsetD32Async": -1})
    try:
        wanted = torch.full((), 7, dtype=torch.int32, device="cuda")
        verify = streamshim.validate(
            lambda out: (fill(out.data_ptr(), 7, out.numel(), None), None)[1],
            lambda out: (out.copy_(wanted.expand_as(out)), None)[1],
            inplace="out",
            use=use,
        )
        out = torch.zeros(N, dtype=torch.int32, device="cuda")
        verify(out)
        graph, _ = captured(lambda: verify(out))
        for number in range(20):
            wanted.fill_(8 if number == 12 else 7)
            out.fill_(-1)
            graph.replay()
            torch.cuda.synchronize()
            assert out[0].item() == (8 if number == 12 and use == "reference" else 7)
        found = row("out")
        assert (found.replays, found.mismatches, found.bad_elements, found.bad[0].first) == (20, 1, N, 13)
    finally:
        streamshim.unbind(driver)


def test_a_reference_that_syncs_is_named(shim):
    verify = streamshim.validate(lambda x: x * 2, lambda x: x * (2 if x.sum().item() >= 0 else 3), name="verify")
    x, _ = inputs()
    verify(x)

    def call():
        with pytest.raises(streamshim.HostSyncError, match="in the reference of the validated function 'verify'"):
            verify(x)
        return x + 1

    graph, _ = captured(call)
    graph.replay()


def test_the_first_bad_replays_are_kept(tmp_path):
    verify = streamshim.validate(kernel, reference, keep=2)
    x, fault = inputs(4, torch.bfloat16)
    verify(x, fault)
    graph, _ = captured(lambda: verify(x, fault))
    for number in range(1, 10):
        x.fill_(float(number))
        fault.fill_(float(number % 3 == 0))
        graph.replay()
    (samples,) = verify.samples.values()
    assert [kept[0].tolist() for kept in samples.read()] == [[3.0] * 4, [6.0] * 4]
    assert verify.save_samples(tmp_path / "bad.pt") == 2


def test_make_graphed_callables_with_gradients():
    verify = streamshim.validate(lambda x, w: x * w, lambda x, w: w * x)

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.w = torch.nn.Parameter(torch.full((N,), 3.0, device="cuda"))

        def forward(self, x):
            return verify(x, self.w)

    model = Model()
    call = torch.cuda.make_graphed_callables(model, (torch.ones(N, device="cuda", requires_grad=True),))
    for _ in range(5):
        x = torch.full((N,), 2.0, device="cuda", requires_grad=True)
        call(x).sum().backward()
        assert x.grad[0].item() == 3.0
    found = row()
    assert (found.replays, found.mismatches) == (5, 0)


@pytest.mark.parametrize("installed", [True, False])
def test_reduce_overhead(installed):
    if installed:
        streamshim.install("strict")
    torch._dynamo.reset()
    verify = streamshim.validate(kernel, reference, name="verify")
    call = torch.compile(lambda x, fault: verify(x.relu(), fault) + 1, mode="reduce-overhead", fullgraph=True)
    wrong = {4, 20, 33}
    with torch.no_grad():
        for number in range(1, 41):
            torch.compiler.cudagraph_mark_step_begin()
            x = torch.full((N,), float(number), device="cuda")
            fault = torch.full((N,), float(number in wrong), device="cuda")
            assert call(x, fault)[0].item() == 2 * number + 1 + (number in wrong)
    torch._dynamo.reset()
    (found,) = streamshim.validation_report().rows
    assert found.captured >= 1
    assert found.replays >= 30
    assert found.calls + found.replays == found.checked == 40
    assert found.mismatches == len(wrong)


DTYPES = [
    *(
        torch.float32,
        torch.float64,
        torch.float16,
        torch.bfloat16,
        torch.complex64,
        torch.bool,
        torch.uint8,
        torch.int8,
    ),
    *(torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32, torch.uint64, torch.float8_e4m3fn),
    torch.float8_e5m2,
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_type_is_compared_inside_a_capture(dtype):
    right = torch.tensor([0, 1, 0, 1], device="cuda").to(dtype)
    wrong = torch.tensor([0, 1, 1, 1], device="cuda").to(dtype)
    x, y = right.clone(), right.clone()
    verify = streamshim.validate(lambda x, y: x.clone(), lambda x, y: y.clone(), keep=1)
    verify(x, y)
    graph, _ = captured(lambda: verify(x, y))
    for value in (right, wrong, right):
        x.copy_(value)
        graph.replay()
    found = row()
    assert (found.replays, found.mismatches, found.max_abs) == (3, 1, 1.0)
    assert (found.bad[0].first, found.bad[0].index) == (2, (2,))
    (samples,) = verify.samples.values()
    assert torch.equal(samples.read()[0][0].view(torch.uint8), wrong.cpu().view(torch.uint8))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16], ids=str)
def test_floats_are_judged_as_isclose_judges_them(dtype):
    torch.manual_seed(7)
    wide = torch.float32 if dtype.itemsize == 2 else dtype
    for scale in (0.0, 1e-7, 1e-5, 1e-3, 1e-2):
        expected = torch.randn(257, 31, device="cuda", dtype=torch.float64)
        actual = (expected * (1 + scale * torch.randn_like(expected))).to(dtype)
        expected = expected.to(dtype)
        actual[3, 5], expected[7, 9], actual[11, 0] = float("nan"), float("inf"), float("-inf")
        rtol, atol = defaults(dtype)
        bad = ~torch.isclose(actual.to(wide), expected.to(wide), rtol, atol)
        found = compare(actual, expected, Tolerance(rtol, atol))
        assert found.bad.item() == bad.sum().item()
        assert found.index.item() == bad.flatten().nonzero()[0].item()


@pytest.mark.two_gpus
def test_counters_are_on_the_device_of_the_outputs():
    verify = streamshim.validate(kernel, reference)

    def call(x, fault):
        return verify(x, fault)

    for device in ("cuda:1", "cuda:0"):
        with torch.cuda.device(device):
            x, fault = inputs(device=device)
            call(x, fault)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=torch.cuda.Stream(device)):
                call(x, fault)
            for number in range(10):
                fault.fill_(float(number == 4 and device == "cuda:1"))
                graph.replay()
    found = {r.tensor: r for r in streamshim.validation_report().rows}
    for device, mismatches in (("cuda:0", 0), ("cuda:1", 1)):
        one = found[f"float32[{N}] on {device}"]
        assert (one.calls, one.replays, one.mismatches) == (1, 10, mismatches)
