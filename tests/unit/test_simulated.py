"""The simulator's own facts: what CUDA does about streams and captures, without streamshim."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from streamshim.runtime import NOT_CAPTURING, CaptureState
from streamshim.runtime.simulated import Buffer, Graph, SimulatedCudaError, Simulator, Stream

MODES = ("global", "thread_local", "relaxed")


@pytest.fixture
def sim() -> Simulator:
    return Simulator(devices=2)


def add_one(x: Buffer) -> None:
    x.values[:] = [value + 1.0 for value in x.values]


def launch(sim: Simulator, x: Buffer, stream: Stream | int | None = None, name: str = "add_one") -> None:
    """Launch on a stream, a handle, or the current stream."""
    stream = sim.current_stream() if stream is None else stream
    sim.launch(add_one, x, stream=stream if isinstance(stream, int) else stream.cuda_stream, name=name)


def in_thread(function: Callable[[], Any]) -> Any:
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(function).result(timeout=60)


def code_of(function: Callable[[], Any]) -> int:
    """The code of the error that the function raises; 0 if it raises none."""
    try:
        function()
    except SimulatedCudaError as error:
        return error.code
    return 0


class Open:
    """A capture that is begun and ended by hand, on a stream that stays current."""

    def __init__(self, sim: Simulator, error_mode: str = "global") -> None:
        self._sim = sim
        self.graph, self.stream = sim.graph(), sim.new_stream()
        sim._thread.current[0] = self.stream
        self.graph.capture_begin(capture_error_mode=error_mode)

    @property
    def state(self) -> CaptureState:
        return self._sim.capture_state(self.stream.cuda_stream)

    def end(self) -> int:
        code = code_of(self.graph.capture_end)
        del self._sim._thread.current[0]
        return code


# What breaks a capture from another thread, and from its own


def read_default(sim: Simulator, recorded: Any, side: Stream) -> None:
    sim.read(sim.buffer([1.0]))


def read_side(sim: Simulator, recorded: Any, side: Stream) -> None:
    with sim.stream(side):
        sim.read(sim.buffer([1.0]))


def stream_synchronize(sim: Simulator, recorded: Any, side: Stream) -> None:
    side.synchronize()


def device_synchronize(sim: Simulator, recorded: Any, side: Stream) -> None:
    sim.synchronize()


def malloc(sim: Simulator, recorded: Any, side: Stream) -> None:
    sim.malloc()


def event_query(sim: Simulator, recorded: Any, side: Stream) -> None:
    recorded.query()


def event_synchronize(sim: Simulator, recorded: Any, side: Stream) -> None:
    recorded.synchronize()


def just_launch(sim: Simulator, recorded: Any, side: Stream) -> None:
    for stream in (0, 1, 2, side):
        launch(sim, sim.buffer([1.0]), stream)


CALLS = {
    read_default: (True, False, False),
    read_side: (True, False, False),
    stream_synchronize: (True, False, False),
    device_synchronize: (True, True, True),
    malloc: (True, False, False),
    event_query: (True, False, False),
    event_synchronize: (True, False, False),
    just_launch: (False, False, False),
}
ELSEWHERE = [(call, *case) for call, broken in CALLS.items() for case in zip(MODES, broken, strict=True)]
# The capturing thread itself is also bound by its own "thread_local" capture; its current stream is the capturing one.
OWN = {
    read_default: (True, True, True),
    read_side: (True, True, False),
    stream_synchronize: (True, True, False),
    device_synchronize: (True, True, True),
    malloc: (True, True, False),
    event_query: (True, True, False),
    event_synchronize: (True, True, False),
    just_launch: (False, False, False),
}
BY_ITSELF = [(call, *case) for call, broken in OWN.items() for case in zip(MODES, broken, strict=True)]


@pytest.mark.parametrize(("call", "mode", "breaks"), ELSEWHERE)
def test_another_thread(sim: Simulator, call: Callable[..., None], mode: str, breaks: bool) -> None:
    recorded, side = sim.current_stream().record_event(), sim.new_stream()
    capture = Open(sim, mode)
    begun = capture.state
    assert in_thread(lambda: code_of(lambda: call(sim, recorded, side))) == (900 if breaks else 0)
    assert capture.state == (CaptureState(0, valid=False) if breaks else begun)
    assert capture.end() == (901 if breaks else 0)
    assert_captures(sim)


@pytest.mark.parametrize(("call", "mode", "breaks"), BY_ITSELF)
def test_the_capturing_thread(sim: Simulator, call: Callable[..., None], mode: str, breaks: bool) -> None:
    recorded, side = sim.current_stream().record_event(), sim.new_stream()
    capture = Open(sim, mode)
    assert code_of(lambda: call(sim, recorded, side)) == (900 if breaks else 0)
    assert capture.end() == (901 if breaks else 0)
    assert_captures(sim)


def assert_captures(sim: Simulator) -> None:
    """The simulator is as good as new: it can capture and replay."""
    x, graph = sim.buffer([0.0]), sim.graph()
    with sim.capture(graph):
        launch(sim, x)
    assert sim.read(x) == [0.0]
    graph.replay()
    assert sim.read(x) == [1.0]


@pytest.mark.parametrize("mode", MODES)
def test_a_sync_of_the_capturing_stream_breaks_every_mode(sim: Simulator, mode: str) -> None:
    capture = Open(sim, mode)
    assert code_of(capture.stream.synchronize) == 900
    assert capture.end() == 901


def test_a_device_sync_elsewhere_spares_a_relaxed_capture(sim: Simulator) -> None:
    capture = Open(sim, "relaxed")
    sim.synchronize(1)
    assert capture.state.valid
    assert capture.end() == 0


def test_waiting_for_an_event_that_was_never_recorded_is_no_sync(sim: Simulator) -> None:
    capture = Open(sim)
    sim.event().synchronize()
    sim.current_stream().wait_event(sim.event())
    assert capture.state.valid
    assert capture.end() == 0


def test_the_host_cannot_ask_about_a_captured_event(sim: Simulator) -> None:
    for ask in ("query", "synchronize"):
        capture = Open(sim, "relaxed")
        assert code_of(getattr(capture.stream.record_event(), ask)) == 907
        assert capture.end() == 901


# Captures


def test_ids_and_handles_are_unique_in_the_process() -> None:
    ids, handles = [], []
    for _ in range(2):
        sim = Simulator()
        for _ in range(3):
            capture = Open(sim)
            ids.append(capture.state.id)
            handles.append(capture.stream.cuda_stream)
            assert capture.end() == 0
    assert ids == sorted(set(ids))
    assert ids[0] > 0
    assert len(set(handles)) == 6
    assert min(handles) >= 0x5A000000


def test_state_of_streams_during_a_capture(sim: Simulator) -> None:
    side, apart = sim.new_stream(), sim.new_stream()
    capture = Open(sim)
    for handle in (0, 1, 2, side.cuda_stream):
        assert sim.capture_state(handle) == NOT_CAPTURING
    side.wait_stream(capture.stream)
    assert sim.capture_state(side.cuda_stream) == capture.state == CaptureState(capture.state.id)
    assert in_thread(lambda: sim.capture_state(side.cuda_stream)) == capture.state
    assert sim.capture_state(apart.cuda_stream) == NOT_CAPTURING
    assert capture.end() == 0
    assert sim.capture_state(side.cuda_stream) == capture.state == NOT_CAPTURING


def test_unknown_handles_are_refused(sim: Simulator) -> None:
    assert code_of(lambda: sim.capture_state(0x1234)) == 400
    assert code_of(lambda: launch(sim, sim.buffer([0.0]), 0x1234)) == 400
    assert code_of(lambda: launch(sim, sim.buffer([0.0]), Simulator().new_stream())) == 400


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("handle", [0, 1, 2, "side"])
def test_a_launch_outside_the_capture_is_no_error_and_not_in_the_graph(
    sim: Simulator, mode: str, handle: int | str
) -> None:
    x, y, graph = sim.buffer([0.0]), sim.buffer([0.0]), sim.graph()
    stream = sim.new_stream() if isinstance(handle, str) else handle
    with sim.capture(graph, error_mode=mode):
        launch(sim, y, name="inside")
        launch(sim, x, stream, name="outside")
    assert graph.nodes == ["inside"]
    sim.synchronize()
    assert (x.values, y.values) == ([1.0], [0.0])
    graph.replay()
    graph.replay()
    sim.synchronize()
    assert (x.values, y.values) == ([1.0], [2.0])


def test_the_legacy_stream_cannot_be_captured(sim: Simulator) -> None:
    assert code_of(sim.graph().capture_begin) == 900
    assert_captures(sim)


def test_a_stream_is_in_one_capture_at_most(sim: Simulator) -> None:
    capture, other = Open(sim), sim.graph()
    assert code_of(other.capture_begin) == 401
    assert capture.end() == 0
    assert code_of(capture.graph.capture_begin) == 900
    with sim.stream(capture.stream):
        assert code_of(capture.graph.capture_begin) == 401
        capture.graph.reset()
        capture.graph.capture_begin()
        capture.graph.capture_end()


def test_a_capture_ends_on_its_own_stream(sim: Simulator) -> None:
    capture = Open(sim)
    with sim.stream(sim.new_stream()):
        assert code_of(capture.graph.capture_end) == 903
    assert capture.end() == 901


@pytest.mark.parametrize(("mode", "code"), [("global", 908), ("thread_local", 908), ("relaxed", 0)])
def test_only_a_relaxed_capture_ends_on_another_thread(sim: Simulator, mode: str, code: int) -> None:
    capture = Open(sim, mode)

    def end() -> int:
        with sim.stream(capture.stream):
            return code_of(capture.graph.capture_end)

    assert in_thread(end) == code
    assert capture.end() == (0 if code else 401)


def test_a_wrong_error_mode_names_the_right_ones(sim: Simulator) -> None:
    with sim.stream(sim.new_stream()), pytest.raises(ValueError, match="global, thread_local or relaxed"):
        sim.graph().capture_begin(capture_error_mode="loose")


def test_everything_in_an_invalidated_capture_is_901(sim: Simulator) -> None:
    x, side = sim.buffer([0.0]), sim.new_stream()
    capture = Open(sim)
    event = capture.stream.record_event()
    assert code_of(sim.malloc) == 900
    assert code_of(lambda: launch(sim, x)) == 901
    assert code_of(lambda: x.fill(1.0)) == 901
    assert code_of(capture.stream.record_event) == 901
    assert code_of(lambda: side.wait_event(event)) == 901
    assert capture.end() == 901
    assert code_of(capture.graph.replay) == 1
    assert_captures(sim)


def test_the_error_of_the_end_comes_last_and_hides_the_first(sim: Simulator) -> None:
    def lose() -> None:
        with sim.capture(sim.graph()):
            sim.synchronize()

    with pytest.raises(SimulatedCudaError) as caught:
        lose()
    first = caught.value.__context__
    assert (caught.value.code, caught.value.name) == (901, "cudaErrorStreamCaptureInvalidated")
    assert isinstance(first, SimulatedCudaError)
    assert (first.code, first.name) == (900, "cudaErrorStreamCaptureUnsupported")
    assert "not permitted when stream is capturing" in str(first)
    assert sim.current_handle(0) == 0


def test_two_captures_of_one_process(sim: Simulator) -> None:
    x, y, graphs = sim.buffer([0.0]), sim.buffer([0.0]), [sim.graph(), sim.graph()]
    with sim.capture(graphs[0], error_mode="thread_local"):

        def capture_too() -> None:
            with sim.capture(graphs[1], error_mode="thread_local"):
                launch(sim, y, name="there")

        launch(sim, x, name="here")
        in_thread(capture_too)
    assert [graph.nodes for graph in graphs] == [["here"], ["there"]]


# Forks


def test_forks_and_joins_become_edges(sim: Simulator) -> None:
    x, graph, a, b = sim.buffer([0.0]), sim.graph(), sim.new_stream(), sim.new_stream()
    with sim.capture(graph):
        main = sim.current_stream()
        launch(sim, x, name="root")
        a.wait_stream(main)
        b.wait_event(a.record_event())  # nested
        for stream, name in ((a, "a"), (b, "b"), (main, "main")):
            launch(sim, x, stream, name)
        a.wait_stream(b)
        main.wait_stream(a)
        launch(sim, x, name="last")
    assert graph.nodes == ["root", "a", "b", "main", "last"]
    assert graph.edges == [(0, 1), (0, 2), (0, 3), (1, 4), (2, 4), (3, 4)]
    graph.replay()
    assert sim.read(x) == [5.0]


def test_an_unjoined_fork(sim: Simulator) -> None:
    x, side, inner = sim.buffer([0.0]), sim.new_stream(), sim.new_stream()
    capture = Open(sim)
    side.wait_stream(capture.stream)
    inner.wait_stream(side)
    launch(sim, x, inner)
    capture.stream.wait_stream(side)  # joins side, but not what side forked
    assert capture.state.valid
    assert capture.end() == 904
    for stream in (capture.stream, side, inner):
        assert sim.capture_state(stream.cuda_stream) == NOT_CAPTURING
    assert_captures(sim)


def test_a_fork_on_another_device(sim: Simulator) -> None:
    x, y, graph, far = sim.buffer([0.0]), sim.buffer([0.0], 1), sim.graph(), sim.new_stream(1)
    with sim.capture(graph):
        launch(sim, x, name="near")
        far.wait_stream(sim.current_stream())
        launch(sim, y, far, name="far")
        sim.current_stream().wait_stream(far)
    assert graph.nodes == ["near", "far"]
    capture = Open(sim, "relaxed")
    far.wait_stream(capture.stream)
    assert code_of(lambda: sim.synchronize(1)) == 900
    assert capture.end() == 901


def test_captures_do_not_merge(sim: Simulator) -> None:
    first = Open(sim, "relaxed")
    second = Open(sim, "relaxed")
    assert code_of(lambda: second.stream.wait_stream(first.stream)) == 902
    assert not first.state.valid
    assert not second.state.valid
    assert second.end() == 901
    with sim.stream(first.stream):
        assert code_of(first.graph.capture_end) == 901


def test_a_capture_does_not_wait_for_eager_work(sim: Simulator) -> None:
    capture = Open(sim)
    assert code_of(lambda: capture.stream.wait_stream(sim.new_stream())) == 905
    assert capture.end() == 901


def test_the_legacy_stream_does_not_wait_for_a_capture(sim: Simulator) -> None:
    legacy = sim.current_stream()
    capture = Open(sim)
    assert code_of(lambda: legacy.wait_stream(capture.stream)) == 906
    assert capture.end() == 901


def test_an_event_of_a_capture_that_is_over(sim: Simulator) -> None:
    capture = Open(sim)
    event = capture.stream.record_event()
    assert capture.end() == 0
    assert code_of(lambda: sim.new_stream().wait_event(event)) == 907
    sim.new_stream().record_event(event)
    event.synchronize()
    assert event.query()


# Eager work


def test_work_runs_when_the_host_waits(sim: Simulator) -> None:
    x = sim.buffer([1.0, 2.0])
    launch(sim, x)
    assert x.values == [1.0, 2.0]
    assert sim.read(x) == [2.0, 3.0]


def test_a_delay_lets_other_streams_run_ahead(sim: Simulator) -> None:
    order: list[str] = []
    slow, quick, ordered = sim.new_stream(), sim.new_stream(), sim.new_stream()

    def note(stream: Stream, name: str) -> None:
        sim.launch(lambda: order.append(name), stream=stream.cuda_stream)

    with sim.stream(slow):
        sim.delay()
    note(slow, "slow 1")
    done = slow.record_event()
    note(slow, "slow 2")
    note(quick, "quick 1")
    ordered.wait_event(done)
    note(ordered, "ordered")
    note(quick, "quick 2")
    assert not done.query()
    assert order == ["quick 1", "quick 2"]
    quick.synchronize()
    assert order == ["quick 1", "quick 2"]
    sim.synchronize()
    assert order == ["quick 1", "quick 2", "slow 1", "slow 2", "ordered"]
    assert done.query()


def test_without_a_delay_the_order_is_that_of_submission(sim: Simulator) -> None:
    order: list[int] = []
    streams = [sim.new_stream() for _ in range(3)]
    for i in range(9):
        sim.launch(lambda i=i: order.append(i), stream=streams[(i * 2) % 3].cuda_stream)
    streams[0].synchronize()
    sim.synchronize()
    assert order == list(range(9))


def test_a_stream_that_is_not_awaited_stays_behind(sim: Simulator) -> None:
    x, y, slow, other = sim.buffer([0.0]), sim.buffer([0.0]), sim.new_stream(), sim.new_stream()
    with sim.stream(slow):
        sim.delay()
        launch(sim, x)
    launch(sim, y, other)
    assert sim.read(y) == [1.0]
    assert sim.read(x) == [0.0]  # the current stream does not wait for `slow`
    slow.synchronize()
    assert x.values == [1.0]


@pytest.mark.parametrize(("blocking", "expected"), [(False, [5.0]), (True, [6.0])])
def test_only_blocking_streams_are_in_order_with_the_legacy_stream(
    sim: Simulator, blocking: bool, expected: list[float]
) -> None:
    x = sim.buffer([0.0])
    with sim.stream(sim.new_stream(blocking=blocking)):
        sim.delay()
        x.fill(5.0)
    launch(sim, x, 0)
    sim.synchronize()
    assert x.values == expected


def test_a_blocking_stream_waits_for_the_legacy_stream(sim: Simulator) -> None:
    x = sim.buffer([0.0])
    sim.delay()
    x.fill(5.0)
    launch(sim, x, 2)  # the per-thread default stream is a blocking one
    sim.synchronize()
    assert x.values == [6.0]


def test_legacy_work_breaks_the_capture_of_a_blocking_stream(sim: Simulator) -> None:
    graph, x = sim.graph(), sim.buffer([0.0])
    with sim.stream(sim.new_stream(blocking=True)):
        graph.capture_begin()
        assert code_of(lambda: launch(sim, x, 0)) == 906
        assert code_of(graph.capture_end) == 901


def test_per_thread_default_streams(sim: Simulator) -> None:
    x = sim.buffer([0.0])
    launch(sim, x, 2)
    in_thread(lambda: launch(sim, x, 2))
    sim.synchronize()
    assert x.values == [2.0]


# Graphs


def test_replay_goes_to_the_current_stream(sim: Simulator) -> None:
    x, graph, stream = sim.buffer([0.0]), sim.graph(), sim.new_stream()
    with sim.capture(graph, stream):
        x.fill(5.0)
        launch(sim, x)
    assert graph.nodes == ["fill", "add_one"]
    with sim.stream(stream):
        sim.delay()
        graph.replay()
    assert sim.read(x) == [0.0]
    stream.synchronize()
    assert x.values == [6.0]


def test_a_captured_delay_delays_the_replay(sim: Simulator) -> None:
    x, graph, stream = sim.buffer([0.0]), sim.graph(), sim.new_stream()
    with sim.capture(graph):
        sim.delay()
        launch(sim, x)
    with sim.stream(stream):
        graph.replay()
    x.fill(5.0)
    sim.synchronize()
    assert x.values == [6.0]


def test_a_replay_can_be_captured(sim: Simulator) -> None:
    x, inner, outer = sim.buffer([0.0]), sim.graph(), sim.graph()
    with sim.capture(inner):
        launch(sim, x, name="inner")
    with sim.capture(outer):
        launch(sim, x, name="outer")
        inner.replay()
    assert outer.nodes == ["outer", "inner"]
    outer.replay()
    assert sim.read(x) == [2.0]


def test_an_empty_graph_replays(sim: Simulator) -> None:
    graph = sim.graph()
    with sim.capture(graph):
        pass
    graph.replay()
    assert graph.nodes == []
    assert isinstance(graph, Graph)


# Devices and threads


def test_a_stream_block_switches_stream_and_device_and_puts_both_back(sim: Simulator) -> None:
    near, far = sim.new_stream(), sim.new_stream(1)

    def seen() -> tuple[int, int, int]:
        return sim.current_device(), sim.current_handle(0), sim.current_handle(1)

    with sim.stream(near):
        with sim.stream(far):
            assert seen() == (1, near.cuda_stream, far.cuda_stream)
            with sim.device(0):
                assert seen() == (0, near.cuda_stream, far.cuda_stream)
            assert in_thread(seen) == (0, 0, 0)
        assert seen() == (0, near.cuda_stream, 0)
    assert seen() == (0, 0, 0)


def test_a_block_that_raises_puts_everything_back(sim: Simulator) -> None:
    def fail() -> None:
        with sim.stream(sim.new_stream(1)), sim.device(0):
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert (sim.current_device(), sim.current_handle(0), sim.current_handle(1)) == (0, 0, 0)


def test_default_handles_mean_the_current_device(sim: Simulator) -> None:
    far = sim.buffer([0.0], 1)
    assert code_of(lambda: launch(sim, far, 0)) == 700
    with sim.device(1):
        launch(sim, far, 0)
    assert sim.read(far) == [1.0]


def test_devices_that_do_not_exist(sim: Simulator) -> None:
    assert sim.device_count() == 2
    for ask in (sim.set_device, sim.current_handle, sim.new_stream, sim.synchronize):
        assert code_of(lambda ask=ask: ask(2)) == 101
    assert sim.current_device() == 0


def test_fill_follows_the_buffers_device(sim: Simulator) -> None:
    far, stream = sim.buffer([0.0], 1), sim.new_stream(1)
    with sim.stream(stream), sim.device(0):
        with sim.device(1):
            sim.delay()
        far.fill(3.0)
        assert sim.read(far) == [3.0]


def test_many_threads_share_one_simulator(sim: Simulator) -> None:
    x = sim.buffer([0.0])

    def work() -> None:
        with sim.stream(sim.new_stream()):
            for _ in range(50):
                launch(sim, x)

    with ThreadPoolExecutor(4) as threads:
        for done in [threads.submit(work) for _ in range(8)]:
            done.result(timeout=60)
    sim.synchronize()
    assert x.values == [400.0]
