"""The rule, from one literal table, and `resolve`, which must be the same rule with as few questions as possible."""

from __future__ import annotations

import inspect
import threading
import warnings

import pytest

from streamshim import gate, ledger
from streamshim.allowance import allow
from streamshim.errors import RescuedLaunchWarning, WrongStreamError
from streamshim.gate import Launch, Verdict, decide, resolve
from streamshim.runtime import NOT_CAPTURING, CaptureState
from streamshim.runtime.simulated import Simulator
from streamshim.settings import Mode

CURRENT, OTHER = 0x7000, 0x8000
NO = NOT_CAPTURING
THIS, ANOTHER = CaptureState(7), CaptureState(9)
BROKEN = CaptureState(7, valid=False)

P, B, R = Verdict.PASS, Verdict.BIND, Verdict.RESCUE
ESCAPE, MISPLACED, UNBOUND = Verdict.REFUSE_ESCAPE, Verdict.REFUSE_OTHER_CAPTURE, Verdict.REFUSE_UNBOUND

# (given handle, its capture, current handle, its capture, can bind): verdict in bind, strict, check; off always passes.
TABLE = [
    # default-class, not capturing
    ((0, NO, CURRENT, NO, True), (B, B, P)),
    ((1, NO, CURRENT, NO, True), (B, B, P)),
    ((2, NO, CURRENT, NO, True), (B, B, P)),
    # default-class, and the current stream is another default-class one
    ((1, NO, 0, NO, True), (B, B, P)),
    ((2, NO, 0, NO, True), (B, B, P)),
    ((0, NO, 2, NO, True), (B, B, P)),
    # default-class, capturing
    ((0, NO, CURRENT, THIS, True), (B, B, ESCAPE)),
    ((1, NO, CURRENT, THIS, True), (B, B, ESCAPE)),
    ((2, NO, CURRENT, THIS, True), (B, B, ESCAPE)),
    ((0, NO, CURRENT, BROKEN, True), (B, B, ESCAPE)),
    # equals current
    ((0, NO, 0, NO, True), (P, P, P)),
    ((2, NO, 2, NO, True), (P, P, P)),
    ((CURRENT, NO, CURRENT, NO, True), (P, P, P)),
    ((CURRENT, THIS, CURRENT, THIS, True), (P, P, P)),
    # explicit, current not capturing
    ((OTHER, NO, CURRENT, NO, True), (P, P, P)),
    ((OTHER, NO, 0, NO, True), (P, P, P)),
    ((OTHER, ANOTHER, CURRENT, NO, True), (P, P, P)),
    ((3, NO, CURRENT, NO, True), (P, P, P)),
    # explicit, the same capture: a fork
    ((OTHER, THIS, CURRENT, THIS, True), (P, P, P)),
    ((OTHER, BROKEN, CURRENT, BROKEN, True), (P, P, P)),
    # explicit, not capturing
    ((OTHER, NO, CURRENT, THIS, True), (R, ESCAPE, ESCAPE)),
    ((3, NO, CURRENT, THIS, True), (R, ESCAPE, ESCAPE)),
    # explicit, another capture
    ((OTHER, ANOTHER, CURRENT, THIS, True), (MISPLACED, MISPLACED, MISPLACED)),
    # cannot be bound
    ((0, NO, CURRENT, NO, False), (P, P, P)),
    ((0, NO, 0, NO, False), (P, P, P)),
    ((0, NO, CURRENT, THIS, False), (UNBOUND, UNBOUND, UNBOUND)),
]
MODES = (Mode.BIND, Mode.STRICT, Mode.CHECK)
CASES = [
    pytest.param(mode, *facts, verdict, id=f"{mode}-{i}-{verdict.name}")
    for i, (facts, verdicts) in enumerate(TABLE)
    for mode, verdict in (*zip(MODES, verdicts, strict=True), (Mode.OFF, P))
]
EVERY_CASE = pytest.mark.parametrize(
    ("mode", "given", "given_capture", "current", "capture", "can_bind", "verdict"), CASES
)

HEADLINES = {
    ESCAPE: "Launch refused: it would be missing from the CUDA graph that is being captured.",
    MISPLACED: "Launch refused: its stream belongs to another capture than torch's current stream.",
    UNBOUND: "Launch refused: it takes no stream, so the CUDA graph being captured would miss it.",
}


def put(cuda, mode, given, given_capture, current, capture):
    gate.set_mode(mode)
    cuda.current = current
    cuda.captures = {given: given_capture, current: capture}


@EVERY_CASE
def test_decide(mode, given, given_capture, current, capture, can_bind, verdict):
    assert decide(mode, given, current, capture, given_capture, can_bind) is verdict


@EVERY_CASE
def test_resolve_agrees_with_decide(cuda, mode, given, given_capture, current, capture, can_bind, verdict):
    put(cuda, mode, given, given_capture, current, capture)
    launch = Launch("kernel", can_bind)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if verdict in HEADLINES:
            with pytest.raises(WrongStreamError) as error:
                resolve(given, 0, launch)
            assert error.value.report.headline == HEADLINES[verdict]
        else:
            assert resolve(given, 0, launch) == (given if verdict is P else current)
    assert [type(w.message) for w in caught] == [RescuedLaunchWarning] * (verdict is R)
    kinds = {R: "rescued launch", **dict.fromkeys(HEADLINES, "refused launch")}
    assert ledger.counts() == ({kinds[verdict]: 1} if verdict in kinds else {})


def test_the_docstring_and_the_test_have_the_same_table():
    """The table in the module's docstring is what people read: it must name each row that the test has."""
    rows = [line for line in inspect.getdoc(gate).splitlines() if line.startswith("    ")][1:]
    words = {
        P: "pass", B: "bind", R: "bind and warn", ESCAPE: "refuse", MISPLACED: "refuse", UNBOUND: "refuse",
    }  # fmt: skip
    written = {tuple(part for part in line.strip().split("  ") if part)[-3:] for line in rows}
    written = {tuple(word.strip() for word in row) for row in written}
    assert written == {tuple(words[v] for v in verdicts) for _, verdicts in TABLE}


def test_a_capture_of_the_per_thread_stream_counts(cuda):
    """It is default-class as a given handle, but it can be captured, and then it is as good as any other."""
    put(cuda, Mode.STRICT, OTHER, NO, 2, THIS)
    assert decide(Mode.STRICT, OTHER, 2, THIS, NO) is ESCAPE
    with pytest.raises(WrongStreamError):
        resolve(OTHER, 0, Launch("kernel"))


@pytest.mark.parametrize(
    ("mode", "given", "current", "can_bind", "asked"),
    [
        # The fast rows: whatever captures, nobody is asked.
        (Mode.BIND, 0, CURRENT, True, []),
        (Mode.BIND, 1, CURRENT, True, []),
        (Mode.BIND, 2, CURRENT, True, []),
        (Mode.BIND, CURRENT, CURRENT, True, []),
        (Mode.BIND, 0, 0, True, []),
        (Mode.STRICT, 0, CURRENT, True, []),
        (Mode.STRICT, CURRENT, CURRENT, True, []),
        (Mode.CHECK, CURRENT, CURRENT, True, []),
        (Mode.OFF, 0, CURRENT, True, []),
        (Mode.OFF, OTHER, CURRENT, True, []),
        (Mode.OFF, 0, CURRENT, False, []),
        # The NULL stream cannot capture, so it is not asked either.
        (Mode.BIND, OTHER, 0, True, []),
        # The others: one question, and a second one only if the current stream captures.
        (Mode.BIND, OTHER, CURRENT, True, [CURRENT]),
        (Mode.CHECK, 0, CURRENT, True, [CURRENT]),
        (Mode.BIND, 0, CURRENT, False, [CURRENT]),
    ],
)
def test_as_few_questions_as_possible(cuda, mode, given, current, can_bind, asked):
    put(cuda, mode, given, NO, current, NO)
    resolve(given, 0, Launch("kernel", can_bind))
    assert cuda.asked == asked


def test_the_given_stream_is_asked_when_the_current_one_captures(cuda):
    put(cuda, Mode.BIND, OTHER, THIS, CURRENT, THIS)
    assert resolve(OTHER, 0, Launch("kernel")) == OTHER
    assert cuda.asked == [CURRENT, OTHER]


def test_a_default_handle_is_never_asked(cuda):
    """Asking for the NULL stream is an error in the driver while a blocking stream captures."""
    put(cuda, Mode.CHECK, 0, NO, CURRENT, THIS)
    with pytest.raises(WrongStreamError):
        resolve(0, 0, Launch("kernel"))
    assert 0 not in cuda.asked


def test_the_device_of_the_launch_is_asked(cuda, monkeypatch):
    devices = []
    monkeypatch.setattr(gate, "current_handle", lambda device: devices.append(device) or CURRENT)
    gate.set_mode(Mode.BIND)
    assert resolve(0, 3, Launch("kernel")) == CURRENT
    assert devices == [3]


class TestRescue:
    """A launch with a handle from outside the capture is moved, and says so."""

    @pytest.fixture(autouse=True)
    def capturing(self, cuda):
        put(cuda, Mode.BIND, OTHER, NO, CURRENT, THIS)
        self.cuda = cuda

    def launch_at_one_line(self):
        return resolve(OTHER, 0, Launch("kernel"))

    def launch_at_another_line(self):
        return resolve(OTHER, 0, Launch("kernel"))

    def test_warns_once_for_each_line_and_capture(self):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("default")
            for _ in range(3):
                assert self.launch_at_one_line() == CURRENT
            assert len(caught) == 1
            for _ in range(3):
                self.launch_at_another_line()
            assert len(caught) == 2
            self.cuda.captures[CURRENT] = CaptureState(8)
            for _ in range(3):
                self.launch_at_one_line()
            assert len(caught) == 3
        assert ledger.counts() == {"rescued launch": 9}

    def test_the_warning_points_at_the_users_line(self, at_root):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            self.launch_at_one_line()
        line = self.launch_at_one_line.__code__.co_firstlineno + 1
        assert (caught[0].filename, caught[0].lineno) == ("tests/unit/test_gate.py", line)

    def test_a_new_installation_warns_again(self):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("default")
            self.launch_at_one_line()
            gate.set_mode(Mode.BIND)
            self.launch_at_one_line()
        assert len(caught) == 2

    def test_raises_each_time_when_warnings_are_errors(self):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for _ in range(3):
                with pytest.raises(RescuedLaunchWarning, match="was moved onto the capturing stream"):
                    self.launch_at_one_line()

    def test_moves_without_a_word_when_warnings_are_ignored(self):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("ignore")
            assert self.launch_at_one_line() == CURRENT
        assert caught == []


@pytest.mark.parametrize(
    ("mode", "given", "given_capture", "can_bind"),
    [
        (Mode.BIND, OTHER, NO, True),
        (Mode.STRICT, OTHER, NO, True),
        (Mode.STRICT, OTHER, ANOTHER, True),
        (Mode.CHECK, 0, NO, True),
        (Mode.BIND, 0, NO, False),
    ],
)
def test_an_allowed_launch_goes_where_the_caller_sent_it(cuda, mode, given, given_capture, can_bind):
    put(cuda, mode, given, given_capture, CURRENT, THIS)
    with allow("launch", reason="telemetry"):
        assert resolve(given, 0, Launch("kernel", can_bind)) == given
    (event,) = ledger.events()
    assert (event.kind, event.given, event.current, event.capture) == ("allowed launch", given, CURRENT, 7)


def test_what_can_be_bound_is_bound_in_an_allowed_region_too(cuda):
    put(cuda, Mode.BIND, 0, NO, CURRENT, THIS)
    with allow("launch", reason="telemetry"):
        assert resolve(0, 0, Launch("kernel")) == CURRENT
    assert ledger.events() == []


def test_a_refusal_leaves_an_event_with_the_line(cuda, at_root):
    put(cuda, Mode.STRICT, OTHER, NO, CURRENT, THIS)
    with pytest.raises(WrongStreamError):
        resolve(OTHER, 0, Launch("kernel 'k'"))
    (event,) = ledger.events()
    assert (event.kind, event.what, event.site.file) == ("refused launch", "kernel 'k'", "tests/unit/test_gate.py")
    assert (event.given, event.current, event.capture) == (OTHER, CURRENT, 7)


def test_the_mode_is_that_of_the_process_not_of_the_thread(cuda):
    gate.set_mode(Mode.CHECK)
    seen = []
    thread = threading.Thread(target=lambda: seen.append(gate.mode()))
    thread.start()
    thread.join()
    assert seen == [Mode.CHECK]


def test_off_is_the_mode_before_anything_is_installed():
    assert gate.mode() is Mode.OFF


def test_torch_is_looked_for_at_the_first_question_only(run_python):
    """Importing the gate imports no torch; a launch asks for it, since it is there by then."""
    code = """
import sys
from streamshim import gate, runtime
class Fake:
    def current_handle(self, device): return 0x7000
    def current_device(self): return 3
    def capture_state(self, handle): return handle
    def device_count(self): return 4
before = "torch" in sys.modules
runtime.use(Fake())
gate.connect(None)
handle = gate.resolve(0x7000, 0, gate.Launch("kernel"))
print(before, handle == 0x7000, gate.current_handle.__func__ is Fake.current_handle)
gate.connect(None)
print(gate.current_device(), gate.current_device.__func__ is Fake.current_device)
gate.connect(None)
print(gate.capture_state(5), gate.capture_state.__func__ is Fake.capture_state)
"""
    assert run_python(code) == "False True True\n3 True\n5 True\n"


@pytest.mark.parametrize("count", [1, 2])
def test_whether_there_is_one_device_is_known_once_a_runtime_is_connected(count):
    gate.connect(Simulator(count))
    assert gate.one_device is (count == 1)
    gate.connect(None)
    assert gate.one_device is False
