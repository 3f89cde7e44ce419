"""What comes out of a process: reports in a folder, bad calls in a file, and the two commands that read them."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch
from click.testing import CliRunner

import streamshim
from streamshim.cli import main
from streamshim.validation import calls, environment, report, stats


@pytest.fixture(autouse=True)
def nothing_validated(monkeypatch):
    monkeypatch.delenv("STREAMSHIM_VALIDATE", raising=False)
    monkeypatch.delenv("STREAMSHIM_REPORT_DIR", raising=False)
    calls.functions.clear()
    report._told.clear()
    stats.forget()
    yield
    calls.functions.clear()
    stats.forget()


def kernel(x, scale, out, *, mode="exact"):
    out.copy_(x * scale + (x == 3))
    return {"sum": out.sum(dim=-1)}


def reference(x, scale, out, *, mode="exact"):
    out.copy_(x * scale)
    return {"sum": out.sum(dim=-1)}


def run_bad_calls(keep=2):
    verify = streamshim.validate(kernel, reference, inplace="out", keep=keep, name="verify")
    for value in range(6):
        verify(torch.full((2, 3), float(value % 4)), 2.0, torch.zeros(2, 3), mode="exact")
    return verify


def invoke(*arguments):
    return CliRunner().invoke(main, list(arguments))


def test_a_report_is_json_also_with_infinite_errors():
    streamshim.validate(lambda x: x / 0, lambda x: x)(torch.ones(2))
    text = json.dumps(streamshim.validation_report().to_dict(), allow_nan=False)
    (function,) = json.loads(text)["functions"]
    assert function["rows"][0]["max_abs"] == "inf"
    assert float(function["rows"][0]["max_abs"]) == float("inf")


def test_a_report_of_nothing():
    assert "Nothing is validated in this process" in str(streamshim.validation_report())
    streamshim.validate(kernel, reference, name="verify")
    assert str(streamshim.validation_report()) == "verify: the kernel's result is used; no call was compared yet"


PROGRAM = """
import sys, torch, streamshim
verify = streamshim.validate(lambda x: x + (x == 3), lambda x: x + 0, name="verify")
for value in range(int(sys.argv[1])):
    verify(torch.full((2,), float(value)))
"""


def test_each_process_writes_a_report_and_they_are_merged(tmp_path, monkeypatch):
    monkeypatch.setenv("STREAMSHIM_REPORT_DIR", str(tmp_path / "reports"))
    for rank, number in (("0", "2"), ("1", "5")):
        monkeypatch.setenv("RANK", rank)
        subprocess.run([sys.executable, "-c", PROGRAM, number], check=True)
    assert len(list((tmp_path / "reports").glob("validation-*.json"))) == 2
    result = invoke("report", str(tmp_path / "reports"), "--json")
    found = json.loads(result.stdout)
    (row,) = found["rows"]
    assert (row["function"], row["processes"], row["checked"], row["mismatches"]) == ("verify", 2, 7, 1)
    (place,) = row["bad"]
    assert (place["process"], place["where"], place["first"], place["index"]) == ("rank 1", "eager calls", 4, [0])
    assert result.exit_code == 1
    table = invoke("report", str(tmp_path / "reports"))
    assert "2 processes" in table.stdout
    assert "verify" in table.stdout
    assert "rank 1" in table.stdout


def test_eager_calls_write_it_too_for_processes_that_are_killed(tmp_path, monkeypatch):
    monkeypatch.setenv("STREAMSHIM_REPORT_DIR", str(tmp_path))
    monkeypatch.setenv("STREAMSHIM_REPORT_SECONDS", "0")
    program = PROGRAM + "\nimport os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    subprocess.run([sys.executable, "-c", program, "5"], check=False)
    found = json.loads(invoke("report", str(tmp_path), "--json").stdout)
    # Written before the last call is counted.
    assert [(row["checked"], row["mismatches"]) for row in found["rows"]] == [(4, 1)]


def test_a_bad_number_of_seconds(monkeypatch):
    monkeypatch.setenv("STREAMSHIM_REPORT_SECONDS", "soon")
    with pytest.raises(ValueError, match="STREAMSHIM_REPORT_SECONDS is 'soon'; allowed: a number of seconds"):
        environment.report_seconds()


def test_a_forked_child_counts_from_zero():
    verify = streamshim.validate(lambda x: x + 1, lambda x: x + 1, name="verify")
    verify(torch.ones(2))
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        before = len(streamshim.validation_report().rows)
        verify(torch.ones(2))
        (row,) = streamshim.validation_report().rows
        os.write(writer, f"{before} {row.calls} {row.checked}".encode())
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(reader, 100) == b"0 1 1"
    assert streamshim.validation_report().rows[0].calls == 1


def test_a_folder_without_reports_and_a_file_that_is_none(tmp_path):
    result = invoke("report", str(tmp_path))
    assert result.exit_code == 1
    assert "There are no reports (validation-*.json) in" in result.output
    (tmp_path / "validation-a-1.json").write_text("[]")
    assert "is no validation report" in invoke("report", str(tmp_path)).output


def test_a_folder_that_cannot_be_written_is_named(monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("STREAMSHIM_REPORT_DIR", str(tmp_path / "file"))
    streamshim.validate(torch.exp, torch.exp)(torch.ones(2))
    with pytest.raises(streamshim.ValidationError, match=r"STREAMSHIM_REPORT_DIR is '.*/file', where no report can be"):
        streamshim.validation_report()


def test_an_eager_call_goes_on_where_no_report_can_be_written(monkeypatch, tmp_path, caplog):
    (tmp_path / "file").touch()
    monkeypatch.setenv("STREAMSHIM_REPORT_DIR", str(tmp_path / "file"))
    monkeypatch.setenv("STREAMSHIM_REPORT_SECONDS", "0")
    monkeypatch.setattr("streamshim.validation.report._next_checkpoint", 0.0)
    verify = streamshim.validate(torch.exp, torch.exp)
    for _ in range(3):
        assert verify(torch.zeros(2)).tolist() == [1.0, 1.0]
    (record,) = caplog.records
    assert "STREAMSHIM_REPORT_DIR is" in record.getMessage()


def test_on_mismatch_raise_is_told_at_exit_too():
    program = PROGRAM.replace('name="verify"', 'name="verify", on_mismatch="raise"')
    done = subprocess.run([sys.executable, "-c", program, "5"], check=True, capture_output=True, text=True)
    assert "streamshim: A validated kernel does not agree with its reference: 'verify'" in done.stderr


def test_a_folder_that_cannot_be_written_is_one_line_at_exit(tmp_path):
    (tmp_path / "file").touch()
    environ = {**os.environ, "STREAMSHIM_REPORT_DIR": str(tmp_path / "file")}
    done = subprocess.run([sys.executable, "-c", PROGRAM, "5"], check=True, capture_output=True, text=True, env=environ)
    assert "streamshim: STREAMSHIM_REPORT_DIR is" in done.stderr
    assert "Traceback" not in done.stderr


def test_bad_calls_are_saved_and_made_again(tmp_path):
    verify = run_bad_calls()
    path = str(tmp_path / "bad.pt")
    assert verify.save_samples(path) == 1
    saved = torch.load(path, weights_only=True)
    assert saved["kernel"] == f"{__name__}:kernel"
    first = saved["calls"][0]
    assert [tensor.tolist() for tensor in first["tensors"]] == [[[3.0] * 3] * 2, [[0.0] * 3] * 2]
    result = invoke("replay", path, "--device", "cpu")
    assert result.exit_code == 1
    assert "verify: 1 bad call in" in result.output
    assert "call 1, output['sum']: the saved kernel and the saved reference" in result.output
    assert f"--kernel {__name__}:kernel --reference {__name__}:reference" in " ".join(result.output.split())
    still = invoke("replay", path, "--device", "cpu", "--kernel", f"{__name__}:kernel")
    assert still.exit_code == 1
    assert "call 1, out: the kernel now and the saved reference" in still.output
    repaired = invoke("replay", path, "--device", "cpu", "--kernel", f"{__name__}:reference")
    assert repaired.exit_code == 0
    assert "all of 6 elements" in repaired.output


def test_replay_says_what_is_wrong(tmp_path):
    path = tmp_path / "bad.pt"
    path.write_text("nothing")
    refused = invoke("replay", str(path)).output
    assert "is no file of save_samples()" in refused
    assert "weights_only" not in refused  # torch's advice would have the file run its code
    torch.save({"a": 1}, path)
    assert "not by save_samples()" in invoke("replay", str(path)).output
    run_bad_calls().save_samples(path)
    assert "'kernel' is not of the form MODULE:NAME" in invoke("replay", str(path), "--kernel", "kernel").output
    assert "cannot be imported" in invoke("replay", str(path), "--kernel", "no_such_module:f").output
    assert "'os:sep' is a str, which cannot be called" in invoke("replay", str(path), "--kernel", "os:sep").output
    assert "'abacus' cannot be used" in invoke("replay", str(path), "--device", "abacus").output


def test_replay_names_no_function_that_cannot_be_imported(tmp_path):
    verify = streamshim.validate(lambda x: x + 1, lambda x: x, keep=1)
    path = str(tmp_path / "bad.pt")
    verify.save_samples(path)
    assert "To call them again" not in invoke("replay", path).output  # there are none
    verify(torch.ones(2))
    verify.save_samples(path)
    assert "--kernel MODULE:NAME --reference MODULE:NAME" in " ".join(invoke("replay", path).output.split())


def test_samples_of_a_function_that_keeps_none(tmp_path):
    with pytest.raises(streamshim.ValidationError, match="verify: nothing is kept; ask for it"):
        streamshim.validate(torch.exp, torch.exp, name="verify").save_samples(tmp_path / "bad.pt")
    assert not list(tmp_path.iterdir())


def test_an_argument_that_cannot_be_saved_is_named(tmp_path):
    verify = streamshim.validate(lambda x, config: x + 1, lambda x, config: x, keep=1)
    verify(torch.ones(2), object)
    path = tmp_path / "bad.pt"
    assert verify.save_samples(path) == 1
    result = invoke("replay", str(path), "--kernel", f"{__name__}:reference")
    assert "An argument of type builtins.type could not be saved" in result.output
