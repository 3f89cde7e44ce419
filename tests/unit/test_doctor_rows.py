"""What `streamshim doctor` makes of what was found on a GPU and in a strange environment, without having either."""

from __future__ import annotations

import json
import subprocess
from typing import Any

import pytest

from streamshim.cli import doctor, survey
from streamshim.cli.doctor import Check

FOUND: dict[str, Any] = {"gpus": ["NVIDIA H200", "NVIDIA H200"], "cuda": "13.0", "no_gpu": ""}


def test_self_tests_that_passed_and_failed():
    checks = doctor._of_gpu({**FOUND, "tests": {"one": "", "two": "it is not in the graph"}}, gpu=True)
    assert checks == [
        Check("GPU", "ok", "NVIDIA H200, NVIDIA H200; torch is built for CUDA 13.0"),
        Check("self-test", "ok", "one"),
        Check("self-test", "fail", "two: it is not in the graph"),
    ]


def test_self_tests_that_were_not_wanted():
    assert doctor._of_gpu({**FOUND, "tests": {}}, gpu=False)[1] == Check("self-tests", "skipped", "--no-gpu was given")


def test_a_self_test_that_raises_has_failed():
    def broken() -> str:
        raise RuntimeError("no")

    assert survey._verdict(broken) == "RuntimeError: no"


def test_an_import_that_hangs(monkeypatch):
    def hangs(*args: Any, **kwargs: Any) -> Any:
        raise subprocess.TimeoutExpired("python", kwargs["timeout"])

    monkeypatch.setattr(subprocess, "run", hangs)
    found = doctor._survey({}, gpu=True)
    assert found == Check("libraries", "fail", "importing and trying them took more than 300 s")


def test_a_binder_that_is_off_counts_in_strict_mode_only():
    binder = {
        "name": "cute",
        "state": "off",
        "reason": "no such attribute",
        "versions": {"nvidia-cutlass-dsl": "9.0", "apache-tvm-ffi": None},
        "tested": {"nvidia-cutlass-dsl": ">=4.4,<4.9", "apache-tvm-ffi": ">=0.1.9,<0.2"},
    }
    found = {"imports_failed": {}, "status": {"binders": [binder], "guards_off": ""}}
    for strict, state in ((False, "warn"), (True, "fail")):
        off, version = doctor._of_binders(found, strict)
        assert (off.state, off.text) == (state, "off: no such attribute (nvidia-cutlass-dsl 9.0)")
        assert (version.state, version.text) == ("warn", "9.0, which is outside the tested range >=4.4,<4.9")


@pytest.mark.parametrize(("bad", "status"), [(False, 0), (True, 1)])
def test_the_exit_status_and_the_last_line(monkeypatch, capsys, bad, status):
    checks = [Check("one", "ok", "fine"), Check("two", "fail" if bad else "skipped", "it", "do this")]
    monkeypatch.setattr(doctor, "look", lambda environ, gpu: checks)
    assert doctor.examine(as_json=False, gpu=True) == status
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == ("1 failed, 0 warnings" if bad else "Everything that was looked at is fine")
    assert doctor.examine(as_json=True, gpu=True) == status
    assert json.loads(capsys.readouterr().out)["ok"] is not bad
