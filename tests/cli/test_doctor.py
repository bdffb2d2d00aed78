"""``tvm-fusion doctor``: it says what is there, what is missing, and for what."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tvm_fusion import errors
from tvm_fusion.cli import doctor, main
from tvm_fusion.cli.doctor import JOBS, Check, examine, guarded, missing


def report(capsys) -> tuple[int, dict]:
    code = main(["doctor", "--format", "json"])
    return code, json.loads(capsys.readouterr().out)


def state(found: dict, name: str) -> dict:
    (check,) = [check for check in found["checks"] if check["name"] == name]
    return check


@pytest.fixture
def quick(monkeypatch) -> None:
    """Without the trial run, which has its test above."""
    monkeypatch.setattr(doctor, "_trial_run", lambda: Check("trial run", "ok"))


def test_this_machine(capsys) -> None:
    """The tests run here, so the least is there; the trial run did run."""
    assert main(["doctor"]) == 0
    text = capsys.readouterr().out
    assert "yes  plan and explain, for any target" in text
    assert "yes  compile and tune for this CPU" in text
    assert "two operators in 1 kernel, right" in text
    assert f"{sys.version_info[0]}.{sys.version_info[1]}." in text
    assert "apache-tvm 0." in text and "apache-tvm-ffi 0." in text


def test_every_job_asks_for_checks_that_exist(quick) -> None:
    names = {check.name for check in examine()}
    for job, needs in JOBS:
        assert {name for need in needs for name in need.split("|")} <= names, job


def test_missing() -> None:
    checks = {c.name: c for c in (Check("a", "ok"), Check("b", "missing"), Check("c", "wrong"))}
    assert missing(checks, ["a"]) == []
    assert missing(checks, ["a", "b", "c"]) == ["b", "c"]
    assert missing(checks, ["b|a"]) == []
    assert missing(checks, ["b|c"]) == ["b or c"]


def test_another_ffi_is_wrong(capsys, monkeypatch, quick) -> None:
    """A version that crashes in tuning is noticed, and is the exit code."""
    real = doctor.version_of
    other = {"apache-tvm-ffi": "0.1.15.post2"}
    monkeypatch.setattr(doctor, "version_of", lambda name: other.get(name) or real(name))
    code, found = report(capsys)
    assert code == 2
    check = state(found, "packages")
    assert check["state"] == "wrong" and "apache-tvm-ffi 0.1.15.post2, needs 0.1." in check["found"]
    assert "pip install" in check["repair"]
    assert all("packages" in job["missing"] for job in found["jobs"])


def test_without_programs_and_extras(capsys, monkeypatch, quick, tmp_path) -> None:
    """Each names what to install, and what it is needed for."""
    real = doctor.version_of
    monkeypatch.setattr(doctor, "version_of", lambda n: None if n.startswith("onnx") else real(n))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.delenv("CC", raising=False)
    code, found = report(capsys)
    assert code == 2  # nothing can be linked
    assert state(found, "C++ compiler")["repair"].startswith("install g++")
    assert state(found, "extra onnx")["repair"] == "pip install 'tvm_fusion[onnx]'"
    assert "onnxruntime" in state(found, "extra onnx")["found"]
    lacking = {job["job"]: job["missing"] for job in found["jobs"]}
    assert lacking["plan and explain, for any target"] == []
    assert lacking["read ONNX files"] == ["extra onnx"]
    assert "C++ compiler" in lacking["compile and tune for this CPU"]
    assert lacking["verify, run and bench on this CPU"] == []


def test_a_compiler_that_is_named_and_not_there(capsys, monkeypatch, quick) -> None:
    monkeypatch.setenv("CXX", "/no/such/compiler")
    _, found = report(capsys)
    assert "/no/such/compiler (CXX or CC) is not there" in state(found, "C++ compiler")["found"]


def test_a_folder_that_cannot_be_written(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(doctor.tempfile, "gettempdir", lambda: str(tmp_path / "none"))
    check = doctor._temporary_files()
    assert check.state == "wrong" and "TMPDIR" in check.repair


@pytest.mark.parametrize(
    "error",
    [ImportError("no tvm"), OSError("cannot map\nmore"), errors.CompilerError("g++ failed")],
)
def test_what_breaks_is_said(error) -> None:
    def broken() -> Check:
        raise error

    check = guarded("trial run", broken)
    assert check.state == "wrong" and check.found == str(error).splitlines()[0] and check.repair


def test_it_works_without_tvm() -> None:
    """Where TVM does not import there is a report, not a traceback."""
    code = (
        "import sys; sys.modules['tvm'] = None; sys.modules['tvm_ffi'] = None; "
        "from tvm_fusion.cli import main; sys.exit(main(['doctor']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    assert "wrong    native core" in done.stdout and "no   plan and explain" in done.stdout
