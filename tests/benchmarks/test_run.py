"""The run: workers that lie, die and hang; going on with an earlier file; the real thing on a CPU."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest
import results as results_file
import run
import runner
from processes import Lane, Worker, WorkerError
from runner import EMPTY_KEY, Options, Runner

KEYS = [("cbr1", "float16"), ("fcln4", "float16")]

#: Behaves as its first argument says.
FAKE = """
import json, os, sys, time
kind, name, log = sys.argv[1:4]
def send(value): print(json.dumps(value), flush=True)
if kind == "absent":
    send({"error": "ImportError: no such framework", "fatal": True}); sys.exit()
send({"ok": {name: "1.0"}})
print("a library says hello", flush=True)
for line in sys.stdin:
    request = json.loads(line)
    with open(log, "a") as file: file.write(f"{name} {request['do']} {request.get('row')}\\n")
    row, verb = request.get("row"), request["do"]
    if verb == "ceilings": send({"ok": {"copy": 1e12, "float16": 1e14}}); continue
    if (kind, row, verb) == ("dies", "cbr1", "measure"): os.kill(os.getpid(), 9)
    if (kind, row, verb) == ("dies-in-prepare", "cbr1", "prepare"): os._exit(3)
    if (kind, row, verb) == ("hangs", "cbr1", "prepare"): time.sleep(600)
    if (kind, row, verb) == ("fails", "cbr1", "prepare"):
        send({"error": "ValueError: no", "fatal": False}); continue
    if (kind, row, verb) == ("cuda", "cbr1", "measure"):
        send({"error": "RuntimeError: CUDA error", "fatal": True}); sys.exit()
    error = {"l2": 0.5 if kind == "wrong" and row == "cbr1" else 1e-6, "max": 1e-6}
    if kind == "nan" and row == "cbr1": error = {"l2": None, "max": None}
    answers = {"prepare": {"error": error}, "measure": {"warm": 8.0, "cold": 12.0, "call": 20.0}, "release": {}}
    send({"ok": answers[verb]})
"""


class FakeLane(Lane):
    """A lane whose worker is the script above."""

    def __init__(self, kind: str, name: str, folder: Path) -> None:
        super().__init__(name, 0, {"work": str(folder)}, {}, limit=20.0)
        self.kind, self.folder = kind, folder

    def command(self) -> list[str]:
        return [
            sys.executable,
            "-c",
            textwrap.dedent(FAKE),
            self.kind,
            self.contender,
            str(self.folder / "log"),
        ]


def run_fakes(
    folder: Path, kinds: dict[str, str], keys: list[tuple[str, str]] = KEYS, **options: Any
) -> tuple[dict[str, Any], bool]:
    """Run with fake workers; return the results file's contents and whether all rows are in it."""
    folder.mkdir(exist_ok=True)
    out = folder / "results.json"
    results = results_file.read_results(out, "GPU", "abc") or results_file.new_results(
        "GPU", "abc", {}
    )
    names = [n for n in kinds if n != "reference"]
    defaults = {"rounds": 2, "prepare_limit": 5.0, "measure_limit": 5.0}
    settings = Options(out, names, **{**defaults, **options})
    one = Runner(settings, results, lambda name, i: FakeLane(kinds.get(name, ""), name, folder))
    complete = one.run(keys)
    return (json.loads(out.read_text()) if out.exists() else results), complete


def log_of(folder: Path) -> list[str]:
    """What the fake workers were asked."""
    return (folder / "log").read_text().splitlines() if (folder / "log").exists() else []


def test_a_good_run(tmp_path: Path) -> None:
    results, complete = run_fakes(tmp_path, {"eager": "", "unfused": "", "ours": ""})
    assert complete
    assert [r["name"] for r in results["rows"]] == ["fcln4", "cbr1"]
    for row in results["rows"]:
        assert (row["ours_us"], row["unfused_us"], row["peers"]) == (8.0, 8.0, {"eager": 8.0})
        assert (row["cold_ours_us"], row["call_ours_us"], row["missing"]) == (12.0, 20.0, {})
    assert results["empty_kernel_us"] == {"eager": 8.0, "unfused": 8.0, "ours": 8.0}
    assert results["versions"] == {n: "1.0" for n in ("reference", "eager", "unfused", "ours")}
    assert results["ceilings"]["copy"] == 1e12
    measured = [x for x in log_of(tmp_path) if "measure cbr1" in x]
    assert measured[:2] != measured[2:4], "contenders take turns, and the first one changes"


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("dies", "died of signal 9"),
        ("dies-in-prepare", "ended with exit code 3"),
        ("hangs", "took more than 5 s"),
        ("fails", "ValueError: no"),
        ("cuda", "RuntimeError: CUDA error"),
        ("wrong", "over tolerance"),
        ("nan", "over tolerance"),
    ],
)
def test_trouble_costs_one_time_only(tmp_path: Path, kind: str, reason: str) -> None:
    results, complete = run_fakes(tmp_path, {"eager": kind, "unfused": "", "ours": ""})
    assert complete
    rows = {r["name"]: r for r in results["rows"]}
    assert rows["cbr1"]["peers"] == {} and reason in rows["cbr1"]["missing"]["eager"]
    assert rows["cbr1"]["ours_us"] == 8.0
    assert rows["fcln4"]["peers"] == {"eager": 8.0} and rows["fcln4"]["missing"] == {}
    if kind in ("wrong", "nan"):
        assert "eager" in rows["cbr1"]["errors"], "the error is kept"
        assert "eager measure cbr1" not in log_of(tmp_path), "and no time is taken"


def test_without_a_reference_nothing_is_recorded(tmp_path: Path) -> None:
    results, complete = run_fakes(tmp_path, {"reference": "absent", "ours": ""})
    assert not complete and results["rows"] == []
    results, complete = run_fakes(tmp_path, {"reference": "fails", "ours": ""})
    assert not complete and [r["name"] for r in results["rows"]] == ["fcln4"], "cbr1 is left"


def test_retry_measures_again_what_is_missing(tmp_path: Path) -> None:
    run_fakes(tmp_path, {"eager": "fails", "ours": ""})
    results, _ = run_fakes(tmp_path, {"eager": "", "ours": ""})
    assert "eager" in results["rows"][1]["missing"], "not unless asked"
    (tmp_path / "log").unlink()
    results, _ = run_fakes(tmp_path, {"eager": "", "ours": ""}, retry=True)
    assert results["rows"][1]["missing"] == {}
    assert not [x for x in log_of(tmp_path) if "fcln4" in x]


def test_a_framework_that_is_absent_is_missing_everywhere(tmp_path: Path) -> None:
    results, complete = run_fakes(tmp_path, {"jax": "absent", "ours": ""})
    assert complete
    for row in results["rows"]:
        assert row["missing"] == {"jax": "ImportError: no such framework"}
        assert row["ours_us"] == 8.0


def test_a_run_goes_on_where_it_stopped(tmp_path: Path) -> None:
    kinds = {"eager": "", "ours": ""}
    run_fakes(tmp_path, kinds, KEYS[:1])
    (tmp_path / "log").unlink()
    results, complete = run_fakes(tmp_path, kinds)
    assert complete and len(results["rows"]) == 2
    assert not [x for x in log_of(tmp_path) if "cbr1" in x or "empty" in x]
    (tmp_path / "log").unlink()
    assert run_fakes(tmp_path, kinds)[1]
    assert log_of(tmp_path) == []


def test_another_contender_measures_its_rows_again(tmp_path: Path) -> None:
    run_fakes(tmp_path, {"ours": ""}, KEYS[:1])
    results, _ = run_fakes(tmp_path, {"eager": "", "ours": ""}, KEYS[:1])
    (row,) = results["rows"]
    assert row["peers"] == {"eager": 8.0} and row["ours_us"] == 8.0


def test_no_batch_is_begun_after_the_budget(tmp_path: Path) -> None:
    results, complete = run_fakes(tmp_path, {"ours": ""}, batch=1, budget=0.0)
    assert not complete
    assert [r["name"] for r in results["rows"]] == ["cbr1"]
    results, complete = run_fakes(tmp_path, {"ours": ""}, batch=1)
    assert complete and len(results["rows"]) == 2


def test_what_takes_too_long_to_compile_does_not_hold_up_the_batch(tmp_path: Path) -> None:
    limits = {"prepare_limit": 60.0, "batch_limit": 5.0}
    results, complete = run_fakes(tmp_path, {"eager": "hangs", "ours": ""}, **limits)
    assert complete
    rows = {r["name"]: r for r in results["rows"]}
    # What was left of the batch's time when it began, not all that one row may take.
    found = re.fullmatch(r"took more than (\d+) s", rows["cbr1"]["missing"]["eager"])
    assert found and int(found[1]) <= 5
    assert rows["fcln4"]["missing"]["eager"] == "no time was left to compile it"
    assert rows["cbr1"]["ours_us"] == rows["fcln4"]["ours_us"] == 8.0


def test_a_slow_contender_has_two_rounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "SLOW", -1.0)
    run_fakes(tmp_path, {"ours": ""}, KEYS[:1], rounds=4)
    assert log_of(tmp_path).count("ours measure cbr1") == 2
    monkeypatch.setattr(runner, "SLOW", 60.0)
    run_fakes(tmp_path / "quick", {"ours": ""}, KEYS[:1], rounds=4)
    assert log_of(tmp_path / "quick").count("ours measure cbr1") == 4


@pytest.mark.parametrize(("device", "commit"), [("other", "abc"), ("GPU", "def")])
def test_a_file_of_another_run_is_refused(tmp_path: Path, device: str, commit: str) -> None:
    run_fakes(tmp_path, {"ours": ""}, KEYS[:1])
    path = tmp_path / "results.json"
    assert results_file.read_results(path, "GPU", "abc") is not None
    with pytest.raises(ValueError, match="name another file"):
        results_file.read_results(path, device, commit)


def test_a_worker_that_dies_at_every_start_is_given_up(tmp_path: Path) -> None:
    lane = FakeLane("dies-in-prepare", "eager", tmp_path)
    reasons = []
    for _ in range(Lane.MAX_STARTS + 1):
        with pytest.raises(WorkerError) as caught:
            lane.prepare(("cbr1", "float16"), 5.0)
        reasons.append(str(caught.value))
    assert "died" in reasons[-1] and "times" in reasons[-1]
    assert set(reasons[:-1]) == {"ended with exit code 3"}


def test_a_worker_that_takes_too_long_is_killed(tmp_path: Path) -> None:
    worker = Worker([sys.executable, "-c", "import time; time.sleep(600)"], tmp_path / "log")
    start = time.monotonic()
    with pytest.raises(WorkerError, match="took more than"):
        worker.hello(0.5)
    assert time.monotonic() - start < 60
    assert worker._process.poll() is not None


def test_contenders_and_rows_of_the_command_line() -> None:
    parse = run.parser().parse_args
    assert run.chosen_contenders(parse(["--contenders", "ours,eager"]), "cuda") == ["eager", "ours"]
    assert "tvm_tuned" not in run.chosen_contenders(parse([]), "cuda")
    assert "tvm_tuned" in run.chosen_contenders(parse(["--stock-tvm-trials", "8"]), "cuda")
    assert "tensorrt" not in run.chosen_contenders(parse(["--without", "tensorrt"]), "cuda")
    assert "inductor" not in run.chosen_contenders(parse([]), "cpu")
    with pytest.raises(ValueError, match="nobody"):
        run.chosen_contenders(parse(["--contenders", "nobody"]), "cuda")
    keys = run.chosen_keys(parse(["--rows", "cbr1,qkv8", "--dtypes", "float32,float16"]), "cuda")
    assert keys == [
        ("qkv8", "float16"),
        ("cbr1", "float16"),
        ("qkv8", "float32"),
        ("cbr1", "float32"),
    ]
    with pytest.raises(ValueError, match="float64"):
        run.chosen_keys(parse(["--dtypes", "float64"]), "cuda")
    assert EMPTY_KEY not in run.chosen_keys(parse([]), "cuda")


@pytest.mark.torch
def test_the_smoke_run_on_a_cpu(tmp_path: Path) -> None:
    """The whole path: export, import, compile, compare, time, write, print; ours and PyTorch."""
    out = tmp_path / "smoke.json"
    command = [
        sys.executable, run.__file__, "--smoke", "--device", "cpu", "--rows", "fcln4", "--out", out, "--work",
        tmp_path / "work", "--contenders", "eager,expert,unfused,ours", "--commit", "abc",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    results = json.loads(out.read_text())
    (row,) = results["rows"]
    assert (row["name"], row["dtype"], row["missing"]) == ("fcln4", "float32", {})
    assert row["ours_us"] > 0 and row["unfused_us"] > 0 and row["expert_us"] > 0
    assert row["cold_ours_us"] is None, "there is no cold clock on a CPU"
    assert 0 < row["error"] < 5e-5
    about = row["about"]
    assert about["ours"]["launches"] < about["unfused"]["launches"]
    assert (results["device"], results["commit"]) == ("CPU", "abc")
    assert {"torch", "tvm", "tvm_fusion"} <= set(results["versions"])
    assert "says nothing about the targets" in done.stdout
    assert set(results["empty_kernel_us"]) == {"eager", "expert", "unfused", "ours"}


@pytest.mark.gpu
@pytest.mark.torch
def test_the_smoke_run_on_a_gpu(tmp_path: Path) -> None:
    """The same on a GPU: graphs, a cold clock, a floor, and the same error in what is timed."""
    out = tmp_path / "smoke.json"
    command = [
        sys.executable, run.__file__, "--smoke", "--rows", "fcln4", "--out", out, "--work", tmp_path / "work",
        "--contenders", "eager,inductor_freeze,expert,tvm_default,unfused,ours", "--commit", "abc",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    (row,) = json.loads(out.read_text())["rows"]
    assert (row["dtype"], row["missing"]) == ("float16", {})
    for clock in ("ours_us", "unfused_us", "expert_us"):
        assert 0 < row[clock] < row[f"cold_{clock}"], clock
    assert 0 < row["floor_us"] < row["ours_us"]
    assert row["replay"]["ours"] > 0
    assert all(0 < e["l2"] < 2**-8 for e in row["errors"].values())
