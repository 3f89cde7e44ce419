"""pytest's entry point: streamshim in test runs, a marker, a fixture that checks graphs, and findings by test.

Loading it imports neither torch nor anything else of streamshim; without a mode nothing is installed.
"""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

from .. import boot
from .._version import __version__

if TYPE_CHECKING:
    from ..settings import Mode
    from .graph_check import GraphCheck

MODES = ("bind", "strict", "check", "off")
#: What can be allowed; as `allowance.KINDS`, which is not imported for it.
KINDS = ("launch", "sync")
#: How many different findings of a test are listed.
SHOWN = 10

_MARKER = (
    "streamshim(mode=None, allow=None, reason=''): streamshim's mode for this test (bind, strict, check, off); what is "
    "allowed in it (launch, sync, or both in a list), and the reason why"
)
_mode = pytest.StashKey["Mode"]()
_source = pytest.StashKey[str]()
_findings = pytest.StashKey[dict[str, list[str]]]()
_seen = pytest.StashKey[int]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """``--streamshim`` and the setting ``streamshim``."""
    parser.getgroup("streamshim").addoption(
        "--streamshim",
        choices=MODES,
        help="Install streamshim for the run, in this mode. Wins over the ini setting, and that over the environment "
        "(STREAMSHIM, STREAMSHIM_MODE, STREAMSHIM_STRICT).",
    )
    parser.addini("streamshim", "streamshim's mode for the run: bind, strict, check or off", default="")


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    """Install before anything of the user's is imported."""
    said, source = early_config.known_args_namespace.streamshim, "--streamshim"
    if said is None:
        said, source = early_config.getini("streamshim") or None, "ini setting"
        if said not in (None, *MODES):
            raise pytest.UsageError(f"streamshim = {said} in the ini file; allowed values: {', '.join(MODES)}")
    if said is None:
        if not _environment_asks():
            return
        source = "environment"
    # Also where that is "off", which wins over a start-up file.
    early_config.stash[_mode] = _install(said)
    early_config.stash[_source] = source


def pytest_configure(config: pytest.Config) -> None:
    """The marker's description; and the findings, which only the process that reports has."""
    config.addinivalue_line("markers", _MARKER)
    config.stash[_findings] = {}


def pytest_report_header(config: pytest.Config) -> str | None:
    """One line: the mode, where it came from, and which binders have found their library so far."""
    if _mode not in config.stash:
        return None
    from ..installer import status

    states = {binder.name: binder.state for binder in status().binders}
    bound = ", ".join(name for name, state in states.items() if state == "bound") or "nothing yet"
    off = ", ".join(name for name, state in states.items() if state == "off")
    return f"streamshim {__version__}: mode {config.stash[_mode]} ({config.stash[_source]}); bound: {bound}" + (
        f"; OFF: {off}" if off else ""
    )


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Iterator[None]:
    """Refuse markers that cannot be understood before any test runs, as an error of collection: xdist shows those."""
    report: Any = yield
    items = [node for node in report.result if isinstance(node, pytest.Item)]
    wrong = [f"{item.nodeid}: the marker streamshim {what}" for item in items for what in _wrong_in_markers(item)]
    if wrong:
        report.outcome, report.longrepr, report.result = "failed", "\n".join(wrong), []
    return report  # type: ignore[no-any-return]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """The mode of a test that has one of its own."""
    said = _marked(item, "mode")
    before = item.config.stash.get(_mode, None)
    if said is None or said == str(before or "off"):
        return (yield)
    from ..installer import uninstall

    uninstall()
    try:
        if said != "off":
            _install(said)
        return (yield)
    finally:
        uninstall()
        if before is not None:
            _install(str(before))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Iterator[None]:
    """Count from here on what is noticed."""
    item.stash[_seen] = _noticed()
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """What the marker allows, for the test itself."""
    allowed = _marked(item, "allow")
    with contextlib.ExitStack() as regions:
        if allowed is not None:
            from ..allowance import allow

            for what in [allowed] if isinstance(allowed, str) else allowed:
                regions.enter_context(allow(what, reason=_marked(item, "reason")))
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """Put what was noticed into the report, which xdist carries to the process that prints it."""
    report: Any = yield
    if _mode not in item.config.stash and _marked(item, "mode") is None:
        return report  # type: ignore[no-any-return]  # whoever has installed streamshim here, it was not this plugin
    before, now = item.stash.get(_seen, 0), _noticed()
    # install() begins to count anew.
    new = now - before if now >= before else now
    item.stash[_seen] = now
    if new:
        from .. import ledger

        report.streamshim_findings = [f"{e.kind}: {e.what}, at {e.site}" for e in ledger.events()[-new:]]
    return report  # type: ignore[no-any-return]


class _Collector:
    """Collects what the reports say; of every worker, in the process that prints."""

    def __init__(self, config: pytest.Config) -> None:
        self._findings = config.stash[_findings]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        found = getattr(report, "streamshim_findings", [])
        if found:
            self._findings.setdefault(report.nodeid, []).extend(found)


def pytest_sessionstart(session: pytest.Session) -> None:
    """Listen to the reports."""
    session.config.pluginmanager.register(_Collector(session.config), "streamshim-collector")


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """The findings of each test, each with the number of times."""
    findings = config.stash[_findings]
    if not findings:
        return
    terminalreporter.section("streamshim")
    for test, found in findings.items():
        terminalreporter.line(test)
        counts = Counter(found)
        for text, times in counts.most_common(SHOWN):
            terminalreporter.line(f"  {text}" + (f" ({times} times)" if times > 1 else ""))
        if len(counts) > SHOWN:
            terminalreporter.line(f"  and {len(counts) - SHOWN} others")


@pytest.fixture
def streamshim_graph() -> Callable[..., GraphCheck]:
    """``streamshim_graph(function, *inputs)`` captures a call and holds its replays against eager calls.

    See `streamshim.plugins.graph_check.check` for the arguments. Skips the test where there is no CUDA device.
    """
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    from .graph_check import check

    return check


def _environment_asks() -> bool:
    """Whether a variable names a mode or asks for one; wrong values do, so that they are told."""
    if (os.environ.get(boot.VARIABLE) or boot.ON[0]).lower() in boot.OFF:
        return False
    return any(os.environ.get(name) for name in (boot.VARIABLE, "STREAMSHIM_MODE", "STREAMSHIM_STRICT"))


def _install(mode: str | None) -> Mode:
    from ..errors import StreamShimError
    from ..installer import install

    try:
        return install(mode).mode
    except (ValueError, StreamShimError) as error:
        raise pytest.UsageError(f"streamshim: {error}") from None


def _wrong_in_markers(item: pytest.Item) -> Iterator[str]:
    for marker in item.iter_markers("streamshim"):
        unknown = sorted(marker.kwargs.keys() - {"mode", "allow", "reason"})
        mode, allowed, reason = (marker.kwargs.get(name) for name in ("mode", "allow", "reason"))
        if marker.args or unknown:
            yield f"takes mode, allow and reason by name, not {', '.join(map(repr, [*marker.args, *unknown]))}"
        elif mode is not None and mode not in MODES:
            yield f"has mode={mode!r}; allowed values: {', '.join(map(repr, MODES))}"
        elif allowed is not None and not _are_kinds(allowed):
            yield f"has allow={allowed!r}; allowed values: {', '.join(map(repr, KINDS))}, or a list of them"
        elif allowed and not (isinstance(reason, str) and reason.strip()):
            yield "has allow without a reason; say in a few words why this is right"


def _are_kinds(allowed: object) -> bool:
    listed = [allowed] if isinstance(allowed, str) else allowed
    return isinstance(listed, (list, tuple, set, frozenset)) and all(kind in KINDS for kind in listed)


def _marked(item: pytest.Item, name: str) -> Any:
    """What the marker says; the closest to the test counts."""
    return next((m.kwargs[name] for m in item.iter_markers("streamshim") if name in m.kwargs), None)


def _noticed() -> int:
    """How much was noticed in this process since `install`; nothing is imported for the answer."""
    import sys

    ledger = sys.modules.get("streamshim.ledger")
    return sum(ledger.counts().values()) if ledger is not None else 0
