"""The pytest plugin of the built wheel: what it installs, says and lets through, also with xdist and -W error."""

from __future__ import annotations

import pytest

SIMULATED = """
import pytest
from streamshim import gate, runtime
from streamshim.runtime.simulated import Simulator

@pytest.fixture
def launch():
    '''Launches on a stream that was cached before the capture.'''
    sim = Simulator()
    before = runtime.use(sim)
    gate.connect(sim)
    def launch():
        cached, capturing, graph = sim.new_stream(), sim.new_stream(), sim.graph()
        with sim.stream(capturing):
            graph.capture_begin()
            try:
                return gate.resolve(cached.cuda_stream, 0, gate.Launch("kernel 'gate'"), "stream") == cached.cuda_stream
            finally:
                graph.capture_end()
    yield launch
    runtime.use(before)
    gate.connect(before)
"""
TESTS = """
import pytest, streamshim

def test_rescued(launch):
    assert not launch()

def test_twice(launch):
    assert not launch()
    assert not launch()

def test_nothing():
    pass

@pytest.mark.streamshim(allow="launch", reason="a test")
def test_allowed(launch):
    assert launch()

@pytest.mark.streamshim(mode="check")
def test_refused(launch):
    with pytest.raises(streamshim.WrongStreamError):
        launch()
"""
MODE = """
import streamshim
def test_mode():
    assert streamshim.status().mode == MODE
"""


@pytest.fixture
def run_pytest(installed, write):
    """``run_pytest({file: text}, *options, status=0, VARIABLE=...)`` returns what pytest printed."""

    def run(files, *options, status=0, **variables):
        folder = write(files)
        arguments = ["-m", "pytest", "-p", "no:cacheprovider", "-c", "pytest.ini", *options]
        (folder / "pytest.ini").touch()
        done = installed.run(*arguments, cwd=folder, status=status, **variables)
        return done.stdout + done.stderr

    return run


def test_without_a_mode_it_does_nothing_and_imports_nothing(run_pytest):
    test = (
        "import sys\n"
        "def test_nothing():\n"
        "    names = [n for n in sys.modules if n.startswith('streamshim')]\n"
        "    assert set(names) == {'streamshim', 'streamshim._version', 'streamshim.boot', 'streamshim.plugins',\n"
        "        'streamshim.plugins.pytest_plugin'}\n"
        "    assert not {'torch', 'wrapt'} & sys.modules.keys()\n"
    )
    assert ": mode " not in run_pytest({"test_it.py": test})


@pytest.mark.parametrize(
    ("options", "ini", "variables", "mode", "source"),
    [
        (["--streamshim=strict"], "", {}, "strict", "--streamshim"),
        (["--streamshim", "bind"], "check", {"STREAMSHIM": "strict"}, "bind", "--streamshim"),
        ([], "check", {"STREAMSHIM": "1"}, "check", "ini setting"),
        ([], "", {"STREAMSHIM": "1"}, "bind", "environment"),
        ([], "", {"STREAMSHIM_MODE": "check"}, "check", "environment"),
        ([], "", {"STREAMSHIM_STRICT": "1"}, "strict", "environment"),
        (["--streamshim=off"], "", {"STREAMSHIM": "1"}, "off", "--streamshim"),
        ([], "", {"STREAMSHIM": "0", "STREAMSHIM_MODE": "check"}, "off", ""),
        ([], "", {}, "off", ""),
    ],
)
def test_the_mode_and_the_header(run_pytest, options, ini, variables, mode, source):
    files = {"test_it.py": MODE.replace("MODE", repr(mode)), "pytest.ini": f"[pytest]\nstreamshim = {ini}\n"}
    said = run_pytest(files, *options, **variables)
    header = f": mode {mode} ({source}); bound: " + ("nothing yet" if mode == "off" else "ctypes")
    assert (header in said) is bool(source)


@pytest.mark.parametrize("early", ["conftest.py", "test_it.py"])
def test_it_is_installed_before_anything_is_imported(run_pytest, early):
    look = "import sys\nassert sys.modules['streamshim.gate'].active\n"
    files = {early: look, "test_it.py": (look if early == "test_it.py" else "") + "def test_nothing(): pass\n"}
    run_pytest(files, "--streamshim=bind")


@pytest.mark.parametrize(
    ("options", "ini", "variables", "text"),
    [
        (["--streamshim=loud"], "", {}, "invalid choice: 'loud'"),
        ([], "loud", {}, "streamshim = loud in the ini file; allowed values: bind, strict, check, off"),
        ([], "", {"STREAMSHIM_MODE": "loud"}, "streamshim: STREAMSHIM_MODE is 'loud'"),
    ],
)
def test_a_wrong_mode(run_pytest, options, ini, variables, text):
    files = {"test_it.py": "def test_nothing(): pass\n", "pytest.ini": f"[pytest]\nstreamshim = {ini}\n"}
    assert text in run_pytest(files, *options, status=4, **variables)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ("mode='loud'", "has mode='loud'; allowed values: 'bind', 'strict', 'check', 'off'"),
        ("allow='launches', reason='x'", "has allow='launches'; allowed values: 'launch', 'sync'"),
        ("allow='sync'", "has allow without a reason"),
        ("'strict'", "takes mode, allow and reason by name, not 'strict'"),
        ("modus='bind'", "takes mode, allow and reason by name, not 'modus'"),
        ("allow=5, reason='x'", "has allow=5; allowed values: 'launch', 'sync', or a list of them"),
        ("allow=[['sync']], reason='x'", "has allow=[['sync']]; allowed values: 'launch', 'sync', or a list of them"),
        ("allow='sync', reason=5", "has allow without a reason"),
    ],
)
def test_a_wrong_marker(run_pytest, arguments, text):
    test = f"import pytest\n@pytest.mark.streamshim({arguments})\ndef test_it(): pass\n"
    files = {"test_it.py": test, "test_other.py": "def test_other(): raise AssertionError('ran')\n"}
    said = run_pytest(files, status=2)
    assert f"test_it.py::test_it: the marker streamshim {text}" in said
    assert "ran" not in said


def test_a_wrong_marker_under_xdist(run_pytest):
    pytest.importorskip("xdist")
    test = "import pytest\npytestmark = pytest.mark.streamshim(mode='loud')\ndef test_it(): pass\n"
    said = run_pytest({"test_it.py": test}, "-n", "1", status=1)
    assert "test_it.py::test_it: the marker streamshim has mode='loud'; allowed values: " in said


def test_none_in_a_marker_is_as_if_it_were_not_there(run_pytest):
    test = "import pytest\n@pytest.mark.streamshim(mode=None, allow=None, reason='')\ndef test_it(): pass\n"
    assert "1 passed" in run_pytest({"test_it.py": test})


@pytest.mark.parametrize(
    "options",
    [[], ["-n", "2"], ["-p", "no:warnings"], ["-p", "no:xdist"], ["-W", "ignore"]],
    ids=lambda options: " ".join(options) or "plain",
)
def test_findings_by_test(run_pytest, options):
    said = run_pytest({"conftest.py": SIMULATED, "test_it.py": TESTS}, "--streamshim=bind", *options)
    assert "5 passed" in said
    section = said[said.index("= streamshim =") :].splitlines()
    tests = [line for line in section if line.startswith("test_it.py")]
    assert sorted(tests) == [f"test_it.py::test_{n}" for n in ("allowed", "refused", "rescued", "twice")]
    found = sorted(line.strip() for line in section if line.startswith("  "))
    assert [text.partition(":")[0] for text in found] == ["allowed launch", "refused launch", *["rescued launch"] * 2]
    assert all("kernel 'gate', at " in text for text in found)
    assert [text.endswith("(2 times)") for text in found] == [False, False, False, True]


def test_no_findings_of_an_installation_that_is_not_the_plugins(run_pytest):
    test = "import streamshim\ndef test_it(launch):\n    with streamshim.install('bind'): launch()\n"
    assert "= streamshim =" not in run_pytest({"conftest.py": SIMULATED, "test_it.py": test})


def test_a_test_with_many_findings_lists_some(run_pytest):
    test = (
        "from streamshim import ledger\n"
        "from streamshim.callsite import Site\n"
        "def test_it():\n"
        "    for n in range(30):\n"
        "        ledger.add(ledger.Event('rescued launch', 'kernel', Site('m.py', n, 'f'), 0, 0, 1))\n"
    )
    said = run_pytest({"test_it.py": test}, "--streamshim=bind")
    assert said.count("rescued launch: kernel, at m.py") == 10
    assert "and 20 others" in said


def test_warnings_that_are_errors_are_raised_at_the_launch(run_pytest):
    said = run_pytest({"conftest.py": SIMULATED, "test_it.py": TESTS}, "--streamshim=bind", "-W", "error", status=1)
    assert "2 failed, 3 passed" in said
    assert "RescuedLaunchWarning: A launch was moved onto the capturing stream" in said
    assert "rescued launch: kernel 'gate'" in said


def test_pytest_does_not_warn_of_what_the_start_up_file_has_imported(run_pytest):
    said = run_pytest({"test_it.py": "def test_nothing(): pass\n"}, "-W", "error", STREAMSHIM="strict")
    assert "1 passed" in said
    assert "warning" not in said


def test_the_modes_of_tests_come_and_go(run_pytest):
    test = (
        "import pytest, streamshim\n"
        "mode = lambda: streamshim.status().mode\n"
        "def test_before(): assert mode() == 'bind'\n"
        "@pytest.fixture\n"
        "def at_setup(): return mode()\n"
        "@pytest.mark.streamshim(mode='strict')\n"
        "class TestStrict:\n"
        "    def test_strict(self, at_setup): assert (mode(), at_setup) == ('strict', 'strict')\n"
        "    @pytest.mark.streamshim(mode='off')\n"
        "    def test_off(self): assert mode() == 'off'\n"
        "def test_after(): assert mode() == 'bind'\n"
    )
    assert "4 passed" in run_pytest({"test_it.py": test}, "--streamshim=bind")
    alone = test.replace("'bind'", "'off'")
    assert "4 passed" in run_pytest({"test_it.py": alone})


def test_the_fixture_is_there_and_skips_without_a_gpu(run_pytest):
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("there is a GPU; tests/gpu/test_workers.py uses the fixture")
    test = "def test_it(streamshim_graph): raise AssertionError\n"
    assert "needs a CUDA device" in run_pytest({"test_it.py": test}, "-rs")
