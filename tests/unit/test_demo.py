"""The demo, as a user runs it: on the simulator, and with the real CuTe compiler where it is installed."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import streamshim
from streamshim import capture, cli, gate, ledger, runtime
from streamshim.demo import ir, model, story
from streamshim.demo.on_simulator import SimulatedMachine
from streamshim.patching import Patch
from streamshim.runtime.simulated import Graph
from streamshim.settings import Mode

Capsys = pytest.CaptureFixture[str]

RIGHT = [11, 57, 56, 37, 57, 51, 12, 49, 40, 36, 53, 3, 59, 59]
SITE = r".*streamshim/demo/\w+\.py:\d+ in "


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> Any:
    for name in ("STREAMSHIM_MODE", "STREAMSHIM_STRICT", "STREAMSHIM_DISABLE"):
        monkeypatch.delenv(name, raising=False)
    streamshim.uninstall()
    yield
    streamshim.uninstall()


@pytest.fixture
def without_dsl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ir, "version_of", lambda package: None)


@pytest.fixture
def blind(monkeypatch: pytest.MonkeyPatch) -> None:
    """A shim that lets every launch go where the caller sent it."""
    monkeypatch.setattr(gate, "resolve", lambda given, device, launch, argument="": given)


def main(arguments: list[str]) -> int:
    """The exit status of a command."""
    status: int = cli.main(arguments, standalone_mode=False)
    return status


def demo(capsys: Capsys, *options: str) -> tuple[int, str]:
    status = main(["demo", "--simulator", *options])
    printed = capsys.readouterr()
    assert printed.err == ""
    return status, printed.out


def demo_json(capsys: Capsys) -> tuple[int, dict[str, Any]]:
    status, out = demo(capsys, "--json")
    result = json.loads(out)
    assert result["ok"] is (status == 0)
    assert bool(result["problems"]) is (status != 0)
    return status, result


def python(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    root = Path(streamshim.__file__).parents[1]
    return subprocess.run(
        [sys.executable, "-m", "streamshim", *arguments],
        cwd=root,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.usefixtures("without_dsl")
class TestStory:
    def test_json_has_everything(self, capsys: Capsys) -> None:
        status, result = demo_json(capsys)
        assert status == 0
        assert list(result) == ["backend", "why_simulator", "versions", "acts", "ir", "ok", "problems"]
        assert result["backend"] == "simulator"
        assert result["why_simulator"] == "--simulator was given"
        packages = ["nvidia-cutlass-dsl", "apache-tvm-ffi"]
        assert list(result["versions"]) == ["streamshim", "python", "torch", *packages]
        assert result["versions"]["streamshim"] == streamshim.__version__
        assert [act["name"] for act in result["acts"]] == ["graphs_off", "graphs_on", "graphs_on_with_shim", "strict"]
        for act in result["acts"]:
            assert act["ok"] is True
            assert act["wrong"] == len(act["wrong_at"])
            assert len(act["tokens"]) == model.TOKENS

    def test_without_the_shim_every_token_but_the_first_is_wrong(self, capsys: Capsys) -> None:
        off, bare, *_ = demo_json(capsys)[1]["acts"]
        assert off["tokens"] == RIGHT
        assert bare["tokens"] == RIGHT[:1] + [model.PADDING] * (model.TOKENS - 1)
        assert bare["wrong_at"] == list(range(1, model.TOKENS))
        assert (bare["ran_while_capturing"], bare["ran_in_replay"]) == (True, False)

    def test_with_the_shim_all_are_right(self, capsys: Capsys) -> None:
        shimmed = demo_json(capsys)[1]["acts"][2]
        assert (shimmed["tokens"], shimmed["wrong"], shimmed["refusal"]) == (RIGHT, 0, None)
        assert (shimmed["ran_while_capturing"], shimmed["ran_in_replay"]) == (False, True)

    def test_strict_refuses_with_the_whole_message_and_the_capture_lives(self, capsys: Capsys) -> None:
        strict = demo_json(capsys)[1]["acts"][3]
        assert (strict["tokens"], strict["wrong"]) == (RIGHT, 0)
        assert (strict["ran_while_capturing"], strict["ran_in_replay"]) == (False, True)
        refusal = strict["refusal"]
        assert re.fullmatch(SITE + r"\w+", refusal["called_at"])
        assert re.fullmatch(r"0x\w+ \(not capturing\)", refusal["given"])
        assert re.match(r"0x\w+, torch's current stream of cuda:0", refusal["expected"])
        assert refusal["given"].split()[0] != refusal["expected"].split(",")[0]
        for part in ("called_at", "given", "expected"):
            assert refusal[part] in refusal["text"]
        assert re.search(r"capture \d+ on stream 0x\w+ of cuda:0, begun at " + SITE, refusal["text"])
        assert "What to do:" in refusal["text"]

    def test_nothing_is_logged(self, capsys: Capsys, caplog: pytest.LogCaptureFixture) -> None:
        demo(capsys)
        assert not caplog.records

    def test_text_marks_wrong_tokens_and_says_that_it_is_a_simulator(self, capsys: Capsys) -> None:
        status, out = demo(capsys)
        assert status == 0
        assert "SIMULATOR, because --simulator was given" in out
        rows = [line.strip() for line in out.splitlines() if re.match(r"    ?11 ", line)]
        assert [row.count("[") for row in rows] == [0, model.TOKENS - 1, 0, 0]
        assert "13 of 14 tokens wrong" in out
        assert "Launch refused" in out
        assert "No look into a real CuTe kernel: nvidia-cutlass-dsl is not installed" in out
        assert out.splitlines()[-1].startswith("Result: OK")

    def test_weights_are_the_same_every_time(self) -> None:
        assert model.weights() == model.weights()


@pytest.mark.usefixtures("without_dsl")
class TestVerdict:
    @pytest.mark.usefixtures("blind")
    def test_a_shim_that_does_not_bind_is_a_failure(self, capsys: Capsys) -> None:
        status, result = demo_json(capsys)
        assert status == 1
        assert [act["ok"] for act in result["acts"]] == [True, True, False, False]
        assert result["acts"][2]["wrong"] == model.TOKENS - 1
        assert result["acts"][3]["refusal"] is None

    @pytest.mark.usefixtures("blind")
    def test_the_text_of_a_failure_names_what_is_wrong(self, capsys: Capsys) -> None:
        status, out = demo(capsys)
        assert status == 1
        assert "NOT refused" in out
        assert "Result: NOT as it should be." in out
        assert "act 3: wrong tokens although streamshim is installed" in out

    def test_right_without_the_shim_is_a_failure(self, capsys: Capsys, monkeypatch: pytest.MonkeyPatch) -> None:
        kernel = SimulatedMachine.kernel

        def following(self: SimulatedMachine) -> Any:
            launch = kernel(self)
            return lambda *buffers: launch(*buffers, self.current_stream())

        monkeypatch.setattr(SimulatedMachine, "kernel", following)
        status, result = demo_json(capsys)
        assert status == 1
        assert [act["ok"] for act in result["acts"]] == [True, False, True, True]

    def test_a_launch_that_is_not_refused_is_a_failure(self, capsys: Capsys, monkeypatch: pytest.MonkeyPatch) -> None:
        # Right tokens are not enough: bind mode would rescue the launch.
        shim = SimulatedMachine.shim
        monkeypatch.setattr(SimulatedMachine, "shim", lambda self, mode: shim(self, "bind"))
        with pytest.warns(streamshim.RescuedLaunchWarning):
            status = main(["demo", "--simulator", "--json"])
        strict = json.loads(capsys.readouterr().out)["acts"][3]
        assert status == 1
        assert (strict["wrong"], strict["ok"], strict["refusal"]) == (0, False, None)

    def test_a_second_refusal_is_not_swallowed(self) -> None:
        machine = SimulatedMachine()
        calls = []

        def refusing(*args: Any) -> None:
            calls.append(args)
            raise streamshim.WrongStreamError(_report())

        with pytest.raises(streamshim.WrongStreamError):
            story.KeepingLayer(machine, refusing)()
        assert len(calls) == 2


def _report() -> Any:
    from streamshim.callsite import UNKNOWN
    from streamshim.findings import LaunchReport

    return LaunchReport("Refused.", "kernel", UNKNOWN, "a", "b", "c", "strict", "why", ())


@pytest.mark.usefixtures("without_dsl")
class TestProcess:
    def test_it_is_left_as_it_was_found(self, capsys: Capsys) -> None:
        methods = (Graph.capture_begin, Graph.capture_end)
        holder, environment = runtime._holder._runtime, dict(os.environ)
        assert demo(capsys)[0] == 0
        assert (Graph.capture_begin, Graph.capture_end) == methods
        assert runtime._holder._runtime is holder
        assert dict(os.environ) == environment
        assert gate.mode() is Mode.OFF
        assert not capture.enabled
        assert not capture.open_windows()
        assert ledger.counts() == {}
        assert not streamshim.status().installed

    def test_also_after_an_error(self, monkeypatch: pytest.MonkeyPatch) -> None:
        methods, holder = (Graph.capture_begin, Graph.capture_end), runtime._holder._runtime

        def capture_with_shim_fails(self: SimulatedMachine, step: Any) -> Any:
            if gate.mode() is Mode.OFF:
                return step
            raise RuntimeError("broken while streamshim is installed")

        monkeypatch.setattr(SimulatedMachine, "capture", capture_with_shim_fails)
        with pytest.raises(RuntimeError, match="broken while"):
            main(["demo", "--simulator"])
        assert (Graph.capture_begin, Graph.capture_end) == methods
        assert runtime._holder._runtime is holder
        assert gate.mode() is Mode.OFF
        assert not streamshim.status().installed

    def test_an_installation_is_set_aside_and_put_back(self, capsys: Capsys) -> None:
        streamshim.install("check", skip=["cute"])
        assert demo(capsys)[0] == 0
        settings = streamshim.install().settings
        assert (settings.mode, settings.only, settings.skip) == (Mode.CHECK, None, frozenset({"cute"}))

    def test_the_strict_variable_does_not_matter(self, capsys: Capsys, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("STREAMSHIM_STRICT", "1")
        assert demo(capsys)[0] == 0

    @pytest.mark.parametrize(
        ("variable", "value", "said"),
        [("STREAMSHIM_DISABLE", "1", "STREAMSHIM_DISABLE=1 is set"), ("STREAMSHIM_MODE", "loud", "'loud'; allowed")],
    )
    def test_an_environment_that_keeps_it_from_working(
        self, capsys: Capsys, monkeypatch: pytest.MonkeyPatch, variable: str, value: str, said: str
    ) -> None:
        monkeypatch.setenv(variable, value)
        assert main(["demo", "--simulator", "--json"]) == 2
        printed = capsys.readouterr()
        assert printed.out == ""
        assert said in printed.err
        assert variable in printed.err


class TestRealKernel:
    def test_its_stream_before_and_after(self, capsys: Capsys) -> None:
        pytest.importorskip("tvm_ffi", reason="apache-tvm-ffi is not installed")
        environment, patched = dict(os.environ), Patch.apply
        status, result = demo_json(capsys)
        lines = result["ir"]
        if lines["skipped"]:
            pytest.skip(lines["skipped"])
        assert status == 0
        before, after = "\n".join(lines["before"]), "\n".join(lines["after"])
        stream = re.search(r"(%\w+) = cuda\.cast (%\w+) : i64 -> !cuda\.stream", before)
        assert stream
        assert f"{stream[2]} = arith.constant 0 : i64" in before
        assert f"stream = {stream[1]})" in before
        assert "streamshim" not in before
        assert "llvm.call @streamshim_stream" in after
        assert "llvm.call @TVMFFIEnvGetStream" in after
        assert "arith.constant 0" not in after
        assert dict(os.environ) == environment
        assert Patch.apply is patched
        assert not streamshim.status().binders[0].patched

    def test_a_compiler_that_fails_does_not_spoil_the_story(
        self, capsys: Capsys, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(ir, "version_of", lambda package: "9.9")
        monkeypatch.setattr(ir, "_has_hooks", lambda: 1 / 0)
        status, result = demo_json(capsys)
        assert status == 0
        assert "nvidia-cutlass-dsl 9.9 cannot compile here: " in result["ir"]["skipped"]

    def test_a_module_of_another_shape(self) -> None:
        assert ir._stream_lines("module {\n}\n") == []

    def test_a_kernel_that_does_not_follow_is_a_failure(self, capsys: Capsys, monkeypatch: pytest.MonkeyPatch) -> None:
        still_null = ir.Comparison("dsl", ["a"], ["a"], problem="the CuTe kernel does not ask for torch's stream")
        monkeypatch.setattr(ir, "compare", lambda: still_null)
        status, result = demo_json(capsys)
        assert status == 1
        assert result["problems"] == [still_null.problem]


@pytest.mark.gpu
def test_on_the_gpu(capsys: Capsys) -> None:
    status = main(["demo", "--json"])
    result = json.loads(capsys.readouterr().out)
    assert (result["backend"], result["problems"], status) == ("cuda", [], 0)
    off, bare, shimmed, strict = result["acts"]
    assert off["tokens"] == shimmed["tokens"] == strict["tokens"] == RIGHT
    assert bare["wrong_at"] == list(range(1, model.TOKENS))
    assert re.fullmatch(SITE + "__call__", strict["refusal"]["called_at"])


class TestCommandLine:
    def test_alone_it_prints_the_help(self) -> None:
        done = python()
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout.startswith("Usage: python -m streamshim")
        assert "demo" in done.stdout

    def test_an_unknown_command(self) -> None:
        done = python("dmeo")
        assert (done.returncode, done.stdout) == (2, "")
        assert "No such command 'dmeo'" in done.stderr

    def test_an_unknown_option(self) -> None:
        done = python("demo", "--cuda")
        assert (done.returncode, done.stdout) == (2, "")
        assert "--cuda" in done.stderr

    def test_version(self) -> None:
        assert python("--version").stdout == f"streamshim {streamshim.__version__}\n"

    def test_the_whole_thing_in_a_process_of_its_own(self) -> None:
        done = python("demo", "--json", "--simulator", STREAMSHIM_STRICT="0")
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["ok"] is True
