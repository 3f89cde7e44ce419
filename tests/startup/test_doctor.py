"""`streamshim doctor` and `status` in an environment with the built wheel: what works, and what would not."""

from __future__ import annotations

import json
import os

import environments
import pytest

NOT_THERE = ("cutlass", "tvm_ffi", "cuda")


@pytest.fixture(scope="module")
def engines(tmp_path_factory):
    """A folder with the metadata of vLLM and SGLang, as if they were installed."""
    folder = tmp_path_factory.mktemp("engines")
    for name, version in (("vllm", "0.22.0"), ("sglang", "0.6.0")):
        info = folder / f"{name}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    return folder


@pytest.fixture(scope="module")
def light(tmp_path_factory):
    """A folder that stands for an environment with a torch that is imported in no time, and nothing else."""
    folder = tmp_path_factory.mktemp("light")
    missing = {f"{name}/__init__.py": f"raise ModuleNotFoundError('no', name='{name}')\n" for name in NOT_THERE}
    for name, text in {**environments.FAKE_TORCH, **missing}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


@pytest.fixture
def doctor(installed, tmp_path, light):
    """``doctor(status=0, VARIABLE=...)`` is the checks by name; ``path`` are folders for PYTHONPATH."""

    def examine(environment=installed, status=0, path=(), libraries=light, **variables):
        places = [str(place) for place in (*path, libraries) if place is not None]
        variables["PYTHONPATH"] = os.pathsep.join(places)
        done = environment.run("-m", "streamshim", "doctor", "--json", cwd=tmp_path, status=status, **variables)
        found = json.loads(done.stdout)
        assert found["ok"] is (status == 0)
        return {check["name"]: check for check in found["checks"]}

    return examine


def test_all_is_well(doctor):
    """With the libraries that are really here."""
    checks = doctor(STREAMSHIM="bind", libraries=None)
    assert checks["settings"]["text"] == "mode bind (STREAMSHIM); STREAMSHIM=bind"
    assert checks["start-up file"]["state"] == "ok"
    assert "every Python process of this environment starts streamshim" in checks["start-up file"]["text"]
    assert checks["vllm plugin"]["state"] == "skipped"
    assert checks["binder ctypes"]["text"].startswith("python 3")
    assert "fail" not in [check["state"] for check in checks.values()]


def test_the_text(installed, tmp_path, light):
    done = installed.run("-m", "streamshim", "doctor", cwd=tmp_path, PYTHONPATH=str(light))
    assert done.stdout.startswith("streamshim ")
    assert "start-up file: in place" in done.stdout
    assert "\x1b" not in done.stdout


@pytest.mark.parametrize(
    ("variables", "text"),
    [
        ({"STREAMSHIM": "loud"}, "STREAMSHIM is 'loud'; allowed values"),
        ({"STREAMSHIM": "1", "STREAMSHIM_DISABLE": "1"}, "STREAMSHIM_DISABLE=1"),
        ({"STREAMSHIM": "check", "STREAMSHIM_STRICT": "1"}, "ask for different modes"),
        ({"STREAMSHIM": "1", "STREAMSHIM_CTYPES": "nonsense"}, "STREAMSHIM_CTYPES"),
        ({"STREAMSHIM_VALIDATE": "1"}, "STREAMSHIM_VALIDATE is '1'"),
        ({"STREAMSHIM_REPORT_SECONDS": "soon"}, "STREAMSHIM_REPORT_SECONDS is 'soon'"),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, dict) else "",
)
def test_settings_that_would_not_work(doctor, variables, text):
    check = doctor(status=1, **variables)["settings"]
    assert check["state"] == "fail"
    assert text in check["text"] + check["hint"]


def test_a_start_up_file_that_is_switched_off_is_not_missing(doctor):
    check = doctor(STREAMSHIM="0")["start-up file"]
    assert (check["state"], check["text"]) == ("ok", "in place, and switched off by STREAMSHIM=0")


def test_a_variable_that_nothing_reads(doctor):
    check = doctor(STREAMSHIM_MOD="strict")["settings"]
    assert check["state"] == "warn"
    assert check["hint"].startswith("Nothing reads STREAMSHIM_MOD; there are STREAMSHIM_MODE, ")


def test_a_checkout_has_no_start_up_file(bare, doctor):
    path = [environments.ROOT]
    checks = doctor(bare, path=path)
    assert (checks["start-up file"]["state"], checks["start-up file"]["hint"] != "") == ("warn", True)
    assert doctor(bare, status=1, path=path, STREAMSHIM="1")["start-up file"]["state"] == "fail"


def test_plugins_of_engines(doctor, engines):
    checks = doctor(path=[engines], VLLM_PLUGINS="another", SGLANG_PLUGINS="another, streamshim")
    assert (checks["vllm"]["state"], checks["vllm"]["text"]) == ("ok", "0.22.0")
    assert (checks["vllm plugin"]["state"], checks["vllm plugin"]["text"]) == (
        "warn",
        "left out by VLLM_PLUGINS=another",
    )
    assert checks["sglang"] == {
        "name": "sglang",
        "state": "warn",
        "text": "0.6.0, which is outside the tested range >=0.5.11,<0.6",
        "hint": "",
    }
    assert checks["sglang plugin"]["text"] == "visible, and active in each of its processes"
    off = doctor(path=[engines], STREAMSHIM="0")["vllm plugin"]
    assert off["text"] == "visible, and switched off by STREAMSHIM=0"


def test_plugins_that_the_engines_cannot_see(bare, doctor, engines):
    checks = doctor(bare, path=[environments.ROOT, engines])
    assert checks["vllm plugin"]["state"] == "warn"
    assert "no entry point of the group vllm.general_plugins" in checks["vllm plugin"]["text"]


def test_without_torch_and_with_broken_libraries(doctor, write):
    folder = write(
        {
            "torch/__init__.py": "raise ImportError('libcudart.so.13: cannot open shared object file')\n",
            "cutlass/__init__.py": "raise ModuleNotFoundError('no', name='cutlass')\n",
            "cuda/__init__.py": "",
            "tvm_ffi/__init__.py": "class StreamContext: pass\n",
            "tvm_ffi/stream.py": "class StreamContext: pass\n",
        }
    )
    checks = doctor(path=[folder])
    assert "libcudart.so.13" in checks["torch"]["text"] + str(checks)
    assert checks["GPU"] == {
        "name": "GPU",
        "state": "skipped",
        "text": "torch is not installed; the self-tests were not run",
        "hint": "",
    }
    assert checks["binder tvm_ffi"]["state"] == "warn"
    assert "off: " in checks["binder tvm_ffi"]["text"]
    strict = doctor(status=1, path=[folder], STREAMSHIM="strict")
    assert strict["binder tvm_ffi"]["state"] == "fail"


def test_a_library_that_kills_the_process(doctor, write):
    folder = write({"torch/__init__.py": "import os; os._exit(9)\n"})
    checks = doctor(status=1, path=[folder])
    assert checks["libraries"]["text"].startswith("importing and trying them ended with status 9")


def test_status(installed, tmp_path, light):
    there = {"cwd": tmp_path, "PYTHONPATH": str(light)}
    done = installed.run("-m", "streamshim", "status", "--json", STREAMSHIM_MODE="check", **there)
    found = json.loads(done.stdout)
    assert (found["mode"], found["source"], found["installed"]) == ("check", "STREAMSHIM_MODE", True)
    assert {binder["name"]: binder["state"] for binder in found["binders"]}["ctypes"] == "bound"
    text = installed.run("-m", "streamshim", "status", "--mode", "strict", **there).stdout
    assert ": installed, mode strict (argument)" in text
    wrong = installed.run("-m", "streamshim", "status", status=1, STREAMSHIM_MODE="loud", **there).stderr
    assert "STREAMSHIM_MODE is 'loud'" in wrong
