"""What a user reads: the whole text of every kind of report, and the tree of errors.

The texts are written out in full. Whoever changes one must read it here once more, as somebody who has never heard of
streamshim and whose server has just died while starting.
"""

from __future__ import annotations

import inspect
import pickle
import re
import warnings

import pytest

from streamshim import capture, errors, gate
from streamshim.callsite import Site
from streamshim.errors import RescuedLaunchWarning, StreamShimError, StreamShimWarning, WrongStreamError
from streamshim.findings import LaunchReport
from streamshim.gate import Launch, resolve
from streamshim.runtime import CaptureState
from streamshim.settings import Mode

CURRENT, OTHER, OF_ANOTHER = 0x7F0010, 0x7F0020, 0x7F0030


def user_code(given, launch, argument=""):
    return resolve(given, 1, launch, argument)  # the user's line


LINE = user_code.__code__.co_firstlineno + 1

BOUND = Launch("CuTe kernel 'scan' (TVM-FFI)")
FIXED = Launch(
    "CuTe kernel 'scan' (plain)",
    can_bind=False,
    note="it was compiled before streamshim.install(), without a stream",
    remedy=("Call streamshim.install() before the kernel is compiled.",),
)

RESCUE = f"""\
A launch was moved onto the capturing stream; as written it would be missing from the CUDA graph.

  launch           CuTe kernel 'scan' (TVM-FFI), argument 'stream'
  called at        tests/unit/test_errors.py:{LINE} in user_code
                       return resolve(given, 1, launch, argument)  # the user's line
  stream given     0x7f0020 (not capturing)
  stream expected  0x7f0010, torch's current stream of cuda:1
  capturing        capture 7 on stream 0x7f0010 of cuda:1, begun at serve.py:12 in capture_model, thread MainThread
  streamshim mode  bind

The given stream is outside the capture: as written the kernel would run once, now. The first result would be
right and every replay wrong, without any error.
What to do:
  * Take the stream at each call instead of keeping it, or pass None and let streamshim fill it in: a handle
    that was cached before the capture (by a warm-up, say) is the usual cause.
  * If this launch is meant to stay outside the graph, say so: with streamshim.allow('launch', reason='...')."""

ESCAPE_EXPLICIT = f"""\
Launch refused: it would be missing from the CUDA graph that is being captured.

  launch           CuTe kernel 'scan' (TVM-FFI), argument 'params.stream'
  called at        tests/unit/test_errors.py:{LINE} in user_code
                       return resolve(given, 1, launch, argument)  # the user's line
  stream given     0x7f0020 (not capturing)
  stream expected  0x7f0010, torch's current stream of cuda:1
  capturing        capture 7 on stream 0x7f0010 of cuda:1, begun at serve.py:12 in capture_model, thread MainThread
  streamshim mode  strict

The given stream is not part of the capture, so the kernel would run once, now. The first result would be
right and every replay wrong, without any error.
What to do:
  * Take the stream at each call instead of keeping it, or pass None and let streamshim fill it in: a handle
    that was cached before the capture (by a warm-up, say) is the usual cause.
  * If this launch is meant to stay outside the graph, say so: with streamshim.allow('launch', reason='...')."""

ESCAPE_DEFAULT = f"""\
Launch refused: it would be missing from the CUDA graph that is being captured.

  launch           CuTe kernel 'scan' (TVM-FFI)
  called at        tests/unit/test_errors.py:{LINE} in user_code
                       return resolve(given, 1, launch, argument)  # the user's line
  stream given     the NULL stream (0)
  stream expected  0x7f0010, torch's current stream of cuda:1
  capturing        capture 7 on stream 0x7f0010 of cuda:1, begun at serve.py:12 in capture_model, thread MainThread
  streamshim mode  check

The given stream is not part of the capture, so the kernel would run once, now. The first result would be
right and every replay wrong, without any error.
What to do:
  * Pass torch's current stream (torch.cuda.current_stream().cuda_stream) at each call, or run with streamshim
    in bind mode, which fills it in.
  * If this launch is meant to stay outside the graph, say so: with streamshim.allow('launch', reason='...')."""

OTHER_CAPTURE = f"""\
Launch refused: its stream belongs to another capture than torch's current stream.

  launch           CuTe kernel 'scan' (TVM-FFI), argument 'stream'
  called at        tests/unit/test_errors.py:{LINE} in user_code
                       return resolve(given, 1, launch, argument)  # the user's line
  stream given     0x7f0030, part of capture 9 (begun before install(), or below Python)
  stream expected  0x7f0010, torch's current stream of cuda:1
  capturing        capture 7 on stream 0x7f0010 of cuda:1, begun at serve.py:12 in capture_model, thread MainThread
  streamshim mode  bind

The kernel would become part of that other graph and be missing from this one.
What to do:
  * Pass the stream of this capture, or pass None and let streamshim fill it in: two captures share no stream.
  * If this launch is meant to stay outside the graph, say so: with streamshim.allow('launch', reason='...')."""

UNBOUND = f"""\
Launch refused: it takes no stream, so the CUDA graph being captured would miss it.

  launch           CuTe kernel 'scan' (plain)
                       it was compiled before streamshim.install(), without a stream
  called at        tests/unit/test_errors.py:{LINE} in user_code
                       return resolve(given, 1, launch, argument)  # the user's line
  stream given     none; the NULL stream (0) is built in
  stream expected  0x7f0010, torch's current stream of cuda:1
  capturing        capture 7 on stream 0x7f0010 of cuda:1, begun at serve.py:12 in capture_model, thread MainThread
  streamshim mode  bind

The kernel always goes to the NULL stream, so it would run once, now. The first result would be right and
every replay wrong, without any error.
What to do:
  * Call streamshim.install() before the kernel is compiled.
  * If this launch is meant to stay outside the graph, say so: with streamshim.allow('launch', reason='...')."""

# name: mode, given handle, launch, argument, text
REPORTS = {
    "escape, explicit": (Mode.STRICT, OTHER, BOUND, "params.stream", ESCAPE_EXPLICIT),
    "escape, default": (Mode.CHECK, 0, BOUND, "", ESCAPE_DEFAULT),
    "escape, legacy": (
        Mode.CHECK, 1, BOUND, "", ESCAPE_DEFAULT.replace("the NULL stream (0)", "the legacy default stream (1)")
    ),
    "escape, per-thread": (
        Mode.CHECK, 2, BOUND, "", ESCAPE_DEFAULT.replace("the NULL stream (0)", "the per-thread default stream (2)")
    ),
    "other capture": (Mode.BIND, OF_ANOTHER, BOUND, "stream", OTHER_CAPTURE),
    "unbound": (Mode.BIND, 0, FIXED, "", UNBOUND),
}  # fmt: skip


@pytest.fixture
def capturing(cuda, at_root):
    """Capture 7 of torch on the current stream, and capture 9 of somebody else."""
    cuda.current = CURRENT
    cuda.captures = {CURRENT: CaptureState(7), OF_ANOTHER: CaptureState(9)}
    site = Site("serve.py", 12, "capture_model")
    capture._windows[7] = capture.Window(7, CURRENT, 1, site, "MainThread", "global")


@pytest.mark.parametrize(("mode", "given", "launch", "argument", "text"), REPORTS.values(), ids=REPORTS)
def test_the_text_of_a_refusal(capturing, mode, given, launch, argument, text):
    gate.set_mode(mode)
    with pytest.raises(WrongStreamError) as error:
        user_code(given, launch, argument)
    assert str(error.value) == text
    assert str(error.value.report) == text


def test_the_text_of_a_rescue(capturing):
    gate.set_mode(Mode.BIND)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert user_code(OTHER, BOUND, "stream") == CURRENT
    assert str(caught[0].message) == RESCUE


def test_the_report_has_its_parts_as_attributes(capturing):
    gate.set_mode(Mode.STRICT)
    with pytest.raises(WrongStreamError) as error:
        user_code(OTHER, BOUND, "stream")
    report = error.value.report
    assert isinstance(report, LaunchReport)
    assert (report.site.file, report.site.line) == ("tests/unit/test_errors.py", LINE)
    assert report.launch == "CuTe kernel 'scan' (TVM-FFI), argument 'stream'"
    assert report.given == "0x7f0020 (not capturing)"
    assert report.expected == "0x7f0010, torch's current stream of cuda:1"
    assert report.capture.startswith("capture 7 on stream 0x7f0010 of cuda:1, begun at serve.py:12")
    assert report.mode == "strict"
    assert len(report.remedy) == 2


@pytest.mark.parametrize("given", [OTHER, OF_ANOTHER], ids=["outside", "another capture"])
def test_check_mode_does_not_advise_what_it_refuses(capturing, given):
    """Check mode binds nothing: whoever passes None there, on this advice, is refused once more."""
    gate.set_mode(Mode.CHECK)
    with pytest.raises(WrongStreamError) as error:
        user_code(given, BOUND, "stream")
    assert not re.search(r"pass None|or None", " ".join(error.value.report.remedy))


@pytest.mark.parametrize("launch", [BOUND, FIXED, Launch("a launch of a .so", can_bind=False)], ids=lambda la: la.what)
def test_every_report_says_what_to_do(capturing, launch):
    gate.set_mode(Mode.CHECK)
    with pytest.raises(WrongStreamError) as error:
        user_code(0, launch)
    assert re.search(r"What to do:\n  \* \S", str(error.value))


@pytest.mark.parametrize("name", REPORTS)
def test_no_line_is_too_long_for_a_terminal(name):
    """But for the rows of facts, which hold paths."""
    text = REPORTS[name][-1]
    assert max(len(line) for line in text.splitlines() if not line.startswith("  capturing")) <= 110


def test_a_line_whose_source_cannot_be_read_is_given_without_it():
    report = LaunchReport("H.", "kernel", Site("<string>", 3, "<module>"), "a", "b", "nothing", "bind", "W.", ("R.",))
    assert "  called at        <string>:3 in <module>\n  stream given     a\n" in str(report)


def test_long_words_are_not_broken():
    path = "/a/very/long/path" * 10
    report = LaunchReport(
        "H.", "kernel", Site("f.py", 1, "f"), "a", "b", "nothing", "bind", "W.", (f"See {path} now.",)
    )
    assert path in str(report)


def test_the_docstring_shows_the_tree_of_classes():
    """The tree that people read is the tree that they catch by."""
    shown: dict[str, str] = {}
    parents: dict[int, str] = {}
    tree = re.compile(r"^(?P<indent>(?:[│├└─ ] *)*?)(?P<name>\w+(?:Error|Warning))\b")
    for line in inspect.getdoc(errors).splitlines():
        if not line.startswith("    ") or not (found := tree.match(line[4:])):
            continue
        depth = len(found["indent"])
        parents[depth] = found["name"]
        shallower = [d for d in parents if d < depth]
        shown[found["name"]] = parents[max(shallower)] if shallower else "root"
    classes = {
        name: cls
        for name, cls in vars(errors).items()
        if isinstance(cls, type) and issubclass(cls, (Exception, Warning)) and cls.__module__ == errors.__name__
    }
    real = {
        name: "root" if name in ("StreamShimError", "StreamShimWarning") else cls.__base__.__name__
        for name, cls in classes.items()
    }
    assert shown == real


@pytest.mark.parametrize("name", [n for n in vars(errors) if n.endswith("Error")])
def test_every_error_is_a_streamshim_error(name):
    cls = getattr(errors, name)
    assert issubclass(cls, StreamShimError)
    assert not issubclass(cls, Warning)
    assert cls.__doc__


@pytest.mark.parametrize("name", [n for n in vars(errors) if n.endswith("Warning")])
def test_every_warning_is_a_user_warning(name):
    """So that Python shows it without being told to."""
    cls = getattr(errors, name)
    assert issubclass(cls, (StreamShimWarning, UserWarning))
    assert not issubclass(cls, StreamShimError)
    assert cls.__doc__


def test_an_error_survives_the_way_to_another_process(capturing):
    """Engines send the exceptions of their workers through a pipe."""
    gate.set_mode(Mode.STRICT)
    with pytest.raises(WrongStreamError) as error:
        user_code(OTHER, BOUND, "stream")
    twin = pickle.loads(pickle.dumps(error.value))
    assert type(twin) is WrongStreamError
    assert str(twin) == str(error.value)


def test_a_rescue_can_be_filtered_by_its_class(capturing):
    gate.set_mode(Mode.BIND)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.simplefilter("ignore", RescuedLaunchWarning)
        assert user_code(OTHER, BOUND, "stream") == CURRENT
