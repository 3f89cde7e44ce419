"""cuda-python: every row of the rule, for each form of launch, by the stream that arrives at the library's function."""

from __future__ import annotations

import threading
import warnings

import pytest

pytest.importorskip("cuda.bindings", reason="cuda-bindings is not installed")
pytest.importorskip("cuda.core", reason="cuda-core is not installed")

from cuda.bindings.driver import CUstream
from cuda.core import Stream
from cuda_recorders import FORMS, Form, Protocol, forms, void_p

import streamshim
from streamshim import RescuedLaunchWarning, WrongStreamError, gate, ledger, runtime
from streamshim.runtime.simulated import Simulator

BINDERS = ["cuda_bindings", "cuda_core"]
MODES = ("bind", "strict", "check")
PASS, BIND, RESCUE, REFUSE = "pass", "bind", "rescue", "refuse"
RULE = {
    # given                  not capturing             capturing
    #                        bind  strict check        bind    strict  check
    "current": ((PASS, PASS, PASS), (PASS, PASS, PASS)),
    "NULL": ((BIND, BIND, PASS), (BIND, BIND, REFUSE)),
    "legacy": ((BIND, BIND, PASS), (BIND, BIND, REFUSE)),
    "per-thread": ((BIND, BIND, PASS), (BIND, BIND, REFUSE)),
    "side": ((PASS, PASS, PASS), (RESCUE, REFUSE, REFUSE)),
    "fork": (None, (PASS, PASS, PASS)),
    "another capture": (None, (REFUSE, REFUSE, REFUSE)),
}
EAGER = [(g, *case) for g, (eager, _) in RULE.items() if eager for case in zip(MODES, eager, strict=True)]
CAPTURING = [(g, *case) for g, (_, capturing) in RULE.items() for case in zip(MODES, capturing, strict=True)]


@pytest.fixture
def sim():
    simulated = Simulator(2)
    runtime.use(simulated)
    gate.connect(simulated)
    return simulated


@pytest.fixture(params=FORMS)
def form(request, monkeypatch) -> Form:
    return forms(monkeypatch)[request.param]()


@pytest.fixture(params=[f for f in FORMS if f != "cuLaunchKernelEx"])
def plain_form(request, monkeypatch) -> Form:
    """The forms whose stream is an argument."""
    return forms(monkeypatch)[request.param]()


def given_handle(given, current, other):
    return {"current": current, "NULL": 0, "legacy": 1, "per-thread": 2}.get(given, other)


def as_stream(form: Form, handle: int) -> object:
    """A handle as what this function takes as it is."""
    if form.recorder.name == "launch":
        return Stream.from_handle(handle) if handle <= 2 else Protocol(handle)
    return CUstream(handle)


def check(form: Form, stream: object, verdict: str, given: int, current: int) -> None:
    if verdict == REFUSE:
        with pytest.raises(WrongStreamError) as caught:
            form(stream)
        assert form.recorder.calls == []
        assert form.recorder.name in caught.value.report.launch
        assert caught.value.report.site.file.endswith("cuda_recorders.py")
        return
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        assert form(stream) is form.recorder.result
    assert [w.category for w in seen] == [RescuedLaunchWarning] * (verdict == RESCUE)
    assert form.handle == (given if verdict == PASS else current)
    assert len(form.recorder.calls) == 1


@pytest.mark.parametrize(("given", "mode", "verdict"), EAGER)
def test_eager(sim, form, given, mode, verdict):
    current, other = sim.new_stream(), sim.new_stream()
    handle = given_handle(given, current.cuda_stream, other.cuda_stream)
    streamshim.install(mode, only=BINDERS)
    with sim.stream(current):
        check(form, as_stream(form, handle), verdict, handle, current.cuda_stream)


@pytest.mark.parametrize(("given", "mode", "verdict"), CAPTURING)
def test_capturing(sim, form, given, mode, verdict):
    other, elsewhere = sim.new_stream(), sim.graph()
    streamshim.install(mode, only=BINDERS)
    graph = sim.graph()
    with sim.capture(graph, error_mode="relaxed"):
        current = sim.current_stream()
        handle = given_handle(given, current.cuda_stream, other.cuda_stream)
        if given == "fork":
            other.wait_stream(current)
        if given == "another capture":
            with sim.stream(other):
                elsewhere.capture_begin(capture_error_mode="relaxed")
        check(form, as_stream(form, handle), verdict, handle, current.cuda_stream)
        if given == "fork":
            current.wait_stream(other)
        if given == "another capture":
            with sim.stream(other):
                elsewhere.capture_end()


def test_what_is_right_already_is_passed_on_untouched(sim, form):
    current = sim.new_stream()
    streamshim.install("bind", only=BINDERS)
    with sim.stream(current):
        arguments = form.arguments(as_stream(form, current.cuda_stream))
        form.recorder(*arguments)
    assert all(got is passed for got, passed in zip(form.recorder.last, arguments, strict=True))


def test_all_other_arguments_are_passed_on_as_they_are(sim, form):
    streamshim.install("bind", only=BINDERS)
    with sim.stream(sim.new_stream()):
        arguments = form.arguments(as_stream(form, 1))
        form.recorder(*arguments)
    for place, (got, passed) in enumerate(zip(form.recorder.last, arguments, strict=True)):
        assert (got is passed) is (place != form.place)


@pytest.mark.parametrize("make", [lambda h: h, void_p, Protocol, CUstream], ids=["int", "c_void_p", "protocol", "CU"])
@pytest.mark.parametrize("which", ["NULL", "current", "side"])
def test_whatever_can_be_a_stream_is_taken(sim, plain_form, make, which):
    current, side = sim.new_stream(), sim.new_stream()
    handle = {"NULL": 0, "current": current.cuda_stream, "side": side.cuda_stream}[which]
    streamshim.install("bind", only=BINDERS)
    with sim.stream(current):
        plain_form(make(handle))
    assert plain_form.handle == (handle or current.cuda_stream)
    arrived = plain_form.recorder.last[plain_form.place]
    if plain_form.recorder.name == "launch":
        assert hasattr(arrived, "__cuda_stream__")
    else:
        assert type(arrived) in (int, CUstream)


def test_none_is_the_default_stream(sim, plain_form):
    current = sim.new_stream()
    streamshim.install("bind", only=BINDERS)
    with sim.stream(current):
        plain_form(None)
    assert plain_form.handle == current.cuda_stream


@pytest.mark.parametrize("value", ["a string", -1, True, 1 << 64, [], 1.5], ids=repr)
def test_what_is_no_stream_is_refused_by_name(sim, plain_form, value):
    streamshim.install("bind", only=BINDERS)
    with pytest.raises(TypeError, match=rf"^cuda\..*{plain_form.recorder.name}, argument '(hS|s)tream'"):
        plain_form(value)
    assert plain_form.recorder.calls == []


def test_check_mode_converts_nothing(sim, plain_form):
    current = sim.new_stream()
    streamshim.install("check", only=BINDERS)
    value = void_p(current.cuda_stream)
    with sim.stream(current):
        plain_form(value)
    assert plain_form.recorder.last[plain_form.place] is value


def test_bound_objects_are_made_once(sim, plain_form):
    streamshim.install("bind", only=BINDERS)
    with sim.stream(sim.new_stream()):
        plain_form(as_stream(plain_form, 1))
        first = plain_form.recorder.last[plain_form.place]
        plain_form(as_stream(plain_form, 2))
    assert plain_form.recorder.last[plain_form.place] is first


def test_the_device_is_the_current_one(sim, form):
    zero, one = sim.new_stream(0), sim.new_stream(1)
    streamshim.install("bind", only=BINDERS)
    sim._thread.current.update({0: zero, 1: one})
    for device, stream in ((0, zero), (1, one)):
        with sim.device(device):
            form(as_stream(form, 1))
        assert form.handle == stream.cuda_stream


def test_threads_with_different_current_streams(sim, form):
    streamshim.install("bind", only=BINDERS)
    barrier = threading.Barrier(2, timeout=20)
    current: list[int] = []

    def work():
        with sim.stream(sim.new_stream()) as stream:
            current.append(stream.cuda_stream)
            barrier.wait()
            for _ in range(200):
                form(as_stream(form, 1))

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    arrived = [form.handle_in(args) for args, _ in form.recorder.calls]
    assert len(arrived) == 400
    assert sorted(set(arrived)) == sorted(current)
    assert [arrived.count(handle) for handle in current] == [200, 200]


def test_an_exception_inside_goes_through_and_leaves_nothing_behind(sim, form):
    current = sim.new_stream()
    streamshim.install("bind", only=BINDERS)
    form.recorder.error = RuntimeError("from inside")
    with sim.stream(current):
        with pytest.raises(RuntimeError, match="from inside"):
            form(as_stream(form, 1))
        form.recorder.error = None
        form(as_stream(form, 1))
        assert sim.current_stream() is current
    assert form.handle == current.cuda_stream


def test_uninstalled_and_installed_again(sim, form):
    current = sim.new_stream()
    for _ in range(3):
        streamshim.install("bind", only=BINDERS)
        with sim.stream(current):
            form(as_stream(form, 1))
            assert form.handle == current.cuda_stream
            streamshim.uninstall()
            assert getattr(form.recorder.module, form.recorder.name) is form.recorder.function
            form(as_stream(form, 1))
        assert form.handle == 1


def test_wrapped_by_somebody_above_and_below(sim, form, monkeypatch):
    """The recorder is the one below."""
    current = sim.new_stream()
    streamshim.install("bind", only=BINDERS)
    module, name = form.recorder.module, form.recorder.name
    ours, above = getattr(module, name), []

    def theirs(*args, **kwargs):
        above.append(args)
        return ours(*args, **kwargs)

    monkeypatch.setattr(module, name, theirs)
    with sim.stream(current):
        form(as_stream(form, 1))
        assert form.handle == current.cuda_stream
        streamshim.uninstall()
        assert getattr(module, name) is theirs
        form(as_stream(form, 1))
    assert form.handle == 1
    assert len(above) == len(form.recorder.calls) == 2


def test_allowed_launches_go_where_the_caller_sent_them(sim, form):
    stale, current = sim.new_stream(), sim.new_stream()
    streamshim.install("strict", only=BINDERS)
    with sim.capture(sim.graph(), current):
        with streamshim.allow("launch", reason="a test"):
            form(as_stream(form, stale.cuda_stream))
    assert form.handle == stale.cuda_stream
    assert ledger.counts() == {"allowed launch": 1}
