"""`streamshim explain`: every capture error is recognised in all its wordings, and the first cause is pointed at."""

from __future__ import annotations

import json
import textwrap

import pytest
from click.testing import CliRunner

from streamshim.callsite import Site
from streamshim.cli import main
from streamshim.cli.explain import find
from streamshim.cli.wordings import WORDINGS
from streamshim.findings import LaunchReport, LostCaptureReport, SyncReport
from streamshim.gate import _HEADLINE, Verdict
from streamshim.guards.codes import CODES

#: As SGLang 0.5.11 prints it: three chained errors, of which only the first names the culprit.
SGLANG_LOG = """\
[2026-11-29 10:00:00 TP0] Capture cuda graph begin. This can take up to several minutes.
[2026-11-29 10:00:03 TP0] Scheduler hit an exception: Traceback (most recent call last):
  File "/env/lib/python3.12/site-packages/sglang/srt/model_executor/cuda_graph_runner.py", line 900, in run_once
    logits_output_or_pp_proxy_tensors = forward(
  File "/home/me/gate.py", line 47, in compare
    if not torch.allclose(out, expected).item():
  File "/env/lib/python3.12/site-packages/torch/_tensor.py", line 30, in wrapped
    return f(*args, **kwargs)
torch.AcceleratorError: CUDA error: operation not permitted when stream is capturing
Search for `cudaErrorStreamCaptureUnsupported' in https://docs.nvidia.com/ for more information.

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "/env/lib/python3.12/site-packages/torch/cuda/graphs.py", line 126, in capture_end
    super().capture_end()
torch.AcceleratorError: CUDA error: operation failed due to a previous error during capture

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "/env/lib/python3.12/site-packages/sglang/srt/model_executor/cuda_graph_runner.py", line 716, in __init__
    raise Exception(
Exception: Capture cuda graph failed: CUDA error: operation failed due to a previous error during capture
Possible solutions:
1. set --mem-fraction-static to a smaller value (e.g., 0.8 or 0.7)
"""


def keys(text: str) -> list[str]:
    return [finding.wording.key for finding in find(text.splitlines())]


def explain(text: str, *options: str) -> tuple[int, str]:
    done = CliRunner().invoke(main, ["explain", *options], input=text)
    return done.exit_code, done.output


def test_each_finding_in_order_with_its_lines_and_the_users_own_line():
    findings = find(SGLANG_LOG.splitlines())
    assert [f.wording.key for f in findings] == ["cuda-900", "cuda-901", "sglang-capture"]
    assert [f.lines for f in findings] == [[9, 10], [17, 24], [24]]
    assert findings[0].raised_at == "/home/me/gate.py:47 in compare"
    assert findings[1].raised_at == ""  # only torch's own frames


def test_the_text_begins_with_the_first_cause():
    status, text = explain(SGLANG_LOG)
    assert status == 0
    assert text.startswith("Begin with line 9: CUDA error 900, cudaErrorStreamCaptureUnsupported.\n")
    assert "\x1b" not in text  # no colours outside a terminal
    for word in ("/home/me/gate.py:47 in compare", "lines 9, 10", "usual cause", "what to do"):
        assert word in text


def test_a_consequence_alone_is_still_explained():
    _, text = explain("RuntimeError: operation failed due to a previous error during capture\n")
    assert text.startswith("The first cause is not among what is known: line 1 only follows from another error.")
    assert "Look for the first error" in text


def test_json():
    status, text = explain(SGLANG_LOG, "--json")
    found = json.loads(text)
    assert status == 0
    assert [(f["key"], f["lines"], f["is_consequence"]) for f in found] == [
        ("cuda-900", [9, 10], False),
        ("cuda-901", [17, 24], True),
        ("sglang-capture", [24], True),
    ]


def test_a_file_and_what_is_no_file(tmp_path):
    (tmp_path / "log").write_bytes(b"\xff\xfe noise\n" + SGLANG_LOG.encode())
    assert CliRunner().invoke(main, ["explain", str(tmp_path / "log")]).exit_code == 0
    assert CliRunner().invoke(main, ["explain", str(tmp_path / "none")]).exit_code == 2


@pytest.mark.parametrize("text", ["", "all is well\n", "HTTP error 901\nline 905, in f\nstep 900 of 1000\n"])
def test_nothing_to_explain_is_told_with_status_one(text):
    status, said = explain(text)
    assert status == 1
    assert said.startswith("Nothing in this log")


@pytest.mark.parametrize("code", CODES, ids=lambda code: str(code.number))
def test_every_code_in_the_words_of_runtime_driver_torch_and_bindings(code):
    prefix = "" if code.name == "CapturedEvent" else "StreamCapture"
    driver = {
        900: "STREAM_CAPTURE_UNSUPPORTED",
        901: "STREAM_CAPTURE_INVALIDATED",
        902: "STREAM_CAPTURE_MERGE",
        903: "STREAM_CAPTURE_UNMATCHED",
        904: "STREAM_CAPTURE_UNJOINED",
        905: "STREAM_CAPTURE_ISOLATION",
        906: "STREAM_CAPTURE_IMPLICIT",
        907: "CAPTURED_EVENT",
        908: "STREAM_CAPTURE_WRONG_THREAD",
    }[code.number]
    for said in (
        f"torch.AcceleratorError: CUDA error: {code.text}",
        f"Search for `cudaError{prefix}{code.name}' in https://docs.nvidia.com/",
        f"<cudaError_t.cudaError{prefix}{code.name}: {code.number}>",
        f"CUDA_ERROR_{driver}: {code.text}",
        f"<CUresult.CUDA_ERROR_{driver}: {code.number}>",
        f"CUDA kernel launch failed, error code: {code.number}",
        f"CUDA Error: {code.number}, somewhere",
        f"cuda call returned error code={code.number}(something)",
    ):
        assert keys(said) == [f"cuda-{code.number}"], said


SITE = Site("model.py", 7, "decode")


@pytest.mark.parametrize("verdict", _HEADLINE)
def test_streamshims_own_launch_reports(verdict):
    report = LaunchReport(_HEADLINE[verdict], "kernel", SITE, "0", "0x10", "capture 1", "bind", "why", ("do this",))
    assert keys(str(report)) == ["rescued" if verdict is Verdict.RESCUE else "wrong-stream"]


def test_streamshims_other_reports():
    for thread in ("", "loader"):
        assert keys(str(SyncReport(".item()", SITE, thread, "capture 1", "bind", "why", ()))) == ["host-sync"]
    lost = LostCaptureReport(901, "too late", (), SITE, False, "capture 1", ())
    assert keys(str(lost)) == ["lost", "cuda-901"]


@pytest.mark.parametrize(
    ("line", "key"),
    [
        ("WARNING streamshim: binder cute is off: no such attribute", "binder"),
        ("streamshim: the vLLM plugin could not start it, so this process (pid 7) ends: ValueError: x", "not-active"),
        ("UserWarning: The CUDA Graph is empty. This usually means that the graph was", "torch-empty"),
        ("RuntimeError: called a synchronizing CUDA operation", "torch-sync"),
        ("RuntimeError: Cannot copy between CPU and CUDA tensors during CUDA graph capture unless the", "torch-copy"),
        ("RuntimeError: CUDA graphs must be captured on a non-default stream. (However", "torch-default-stream"),
        ("RuntimeError: Offset increment outside graph capture encountered unexpectedly.", "torch-rng"),
        ("Cannot call CUDAGeneratorImpl::current_seed during CUDA graph capture", "torch-seed"),
        ("RuntimeError: CUDA graph capturing detected at an inappropriate time.", "vllm-late-capture"),
        ("AssertionError: Input addresses for cudagraphs are different during replay.", "vllm-addresses"),
        ("RuntimeError: Engine core initialization failed. See root cause above.", "vllm-core"),
        ("streamshim: guard of torch waits is off: torch.cuda.Event.query is a property", "guard"),
        ("streamshim.errors.BinderError: Calls that captures are guarded by could not be patched, so", "guard"),
        ("streamshim.errors.NoCudaError: torch 2.13 was built without CUDA", "no-cuda"),
        ("streamshim.errors.CompiledInCaptureError: ...", "compiled-in-capture"),
    ],
)
def test_the_wordings_of_others(line, key):
    assert keys(line) == [key]


def test_every_wording_says_all_it_has_to():
    assert len({wording.key for wording in WORDINGS}) == len(WORDINGS)
    for wording in WORDINGS:
        for text in (wording.title, wording.meaning, wording.cause, *wording.remedy):
            assert text == textwrap.dedent(text).strip() != "", wording.key
        assert wording.remedy, wording.key


def test_a_long_log_is_read_in_one_pass():
    """Engines log for days, and some put a whole configuration on one line. A second here is a day there."""
    busy = "INFO [gpu_model_runner.py:123] Capturing CUDA graphs (PIECEWISE): code 42, status 17, error count 0"
    one_line = "cuda error code " * 100_000
    assert keys("\n".join([*[busy] * 20_000, one_line, "CUDA error: 900"])) == ["cuda-900"]
