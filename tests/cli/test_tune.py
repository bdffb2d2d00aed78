"""``tvm-fusion tune``: once with real kernels, else with a compiler and a clock that are not there."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import os
import shlex
import signal
import subprocess
import sys
import time
import zlib
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from rich.console import Console

from tvm_fusion.cli import live, main
from tvm_fusion.planner import Plan
from tvm_fusion.testing.tuning_fakes import FakeBuilder, FakeRunner, fake_workbench
from tvm_fusion.tuning import tune as tune_module
from tvm_fusion.tuning.allocation import TRIALS
from tvm_fusion.tuning.tuner import BATCH, Device
from tvm_fusion.tuning.whole import WholeTimes
from tvm_fusion.tuning.work_dir import WorkDir


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    """A file with relu(x · w + b)."""
    rng = np.random.default_rng(0)
    weight = numpy_helper.from_array(rng.standard_normal((32, 64), dtype="float32"), "w")
    bias = numpy_helper.from_array(rng.standard_normal((64,), dtype="float32"), "b")
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["p"], "product"),
        helper.make_node("Add", ["p", "b"], ["s"], "bias"),
        helper.make_node("Relu", ["s"], ["y"], "relu"),
    ]
    value = helper.make_tensor_value_info
    graph = helper.make_graph(
        nodes, "tiny", [value("x", TensorProto.FLOAT, ["N", 32])],
        [value("y", TensorProto.FLOAT, ["N", 64])], [weight, bias],
    )  # fmt: skip
    file = tmp_path_factory.mktemp("model") / "tiny.onnx"
    opsets = [helper.make_opsetid("", 17)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=8), file)
    return str(file)


SHAPE = ["--shape", "x=16,32"]


def time_of(kernel, template, decision):
    """10 µs a kernel, however much it does, and some noise."""
    return 10 + zlib.crc32(repr((kernel, sorted(decision.items()))).encode()) / 2**32


@pytest.fixture
def faked(monkeypatch):
    """Tuning with stand-ins; returns the runner."""
    runner = FakeRunner(time_of)
    monkeypatch.setattr(tune_module, "_workbench", fake_workbench(FakeBuilder(), runner))
    monkeypatch.setattr(tune_module, "device_of", lambda *_: Device("a device", "1.0"))
    whole = WholeTimes(20.0, 60.0, None)
    monkeypatch.setattr(tune_module, "time_whole", lambda *_, **__: whole)
    return runner


def lines_of(folder: Path) -> list[str]:
    """The trials on record."""
    return next(folder.glob("*/trials.jsonl")).read_text().splitlines()


def trials_of(work):
    """Digests of the trials in their order; those of the last round a second time."""
    return [json.loads(line)["trial"] for line in lines_of(work)]


def error_line(arguments: list[str], capsys) -> str:
    """Run a command that must fail with exit code 2 and one line."""
    assert main(arguments) == 2
    captured = capsys.readouterr()
    (line,) = captured.err.splitlines()
    assert captured.out == "" and line.startswith("tvm-fusion: ")
    return line


@pytest.fixture(scope="module")
def tuned(model, tmp_path_factory):
    """The model tuned for real: its folder, and what was written to stdout and stderr."""
    folder = tmp_path_factory.mktemp("tuned")
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(
            ["tune", model, *SHAPE, "--work-dir", str(folder / "work"), "--trials", "9",
             "-o", str(folder / "plan.json"), "--html", str(folder / "tuning.html")]
        )  # fmt: skip
    assert code == 0, err.getvalue()
    return folder, out.getvalue(), err.getvalue()


def test_a_model_is_tuned(tuned, model) -> None:
    folder, out, err = tuned
    plan = Plan.from_json((folder / "plan.json").read_text())
    assert plan.model == "tiny" and plan.totals.measured_us_after > 0
    count = len(set(trials_of(folder / "work")))
    assert f"tiny: tuned: {count} trials of 9, {len(plan.groups)} group" in out
    assert "3 kernel launches unfused" in out and "whole model, µs: tuned" in out
    assert "Fusion depth against latency" in (folder / "tuning.html").read_text()
    # Not a terminal: a plain log, the last line with all trials.
    assert "\x1b" not in err
    first, *_, last = err.splitlines()
    assert (
        f"of 9 trials, {len(WorkDir(folder / 'work').places()[0].records().kernels())} kernels"
        in first
    )
    assert f" {count} of 9 trials" in last and "plan of the moment" in last


def test_what_was_tuned_compiles_and_runs(tuned, model, tmp_path, capsys) -> None:
    folder, out, _ = tuned
    (command,) = [line for line in out.splitlines() if line.startswith("compile it: ")]
    words = command.removeprefix("compile it: tvm-fusion ").split()
    library = str(tmp_path / "tiny.so")
    assert words[-2:] == ["-o", "tiny.so"] and "--plan" in words
    assert main([*words[:-1], library]) == 0
    assert main(["run", library]) == 0
    assert main(["compile", model, *SHAPE, "--work-dir", str(folder / "work"), "-o", library]) == 0
    assert capsys.readouterr().err == ""


def test_bench_times_what_was_tuned(tuned, model, capsys) -> None:
    assert main(["bench", model, *SHAPE, "--work-dir", str(tuned[0] / "work")]) == 0
    assert "ratio" in capsys.readouterr().out


def test_bench_without_groups_shows_no_ratio(model, tmp_path, capsys) -> None:
    plan = tmp_path / "plan.json"
    assert main(["plan", model, *SHAPE, "--deny", "*", "-o", str(plan)]) == 0
    assert main(["bench", model, *SHAPE, "--plan", str(plan)]) == 0
    out = capsys.readouterr().out
    assert "ratio" not in out and "no groups: fused and unfused are the same code" in out


def test_bench_of_what_tvm_compiles_is_against_our_kernels(model, tmp_path, capsys) -> None:
    plan = tmp_path / "plan.json"
    assert main(["plan", model, *SHAPE, "--deny", "*", "-o", str(plan)]) == 0
    whole = Plan.from_json(plan.read_text())
    plan.write_text(dataclasses.replace(whole, pipeline="tvm").to_json())
    assert main(["bench", model, *SHAPE, "--plan", str(plan)]) == 0
    out = capsys.readouterr().out
    assert "ratio" in out and "(TVM's default pipeline)" in out and "(3 kernels)" in out


def test_a_page_later(tuned, tmp_path, capsys) -> None:
    page = tmp_path / "later.html"
    assert main(["db", "report", str(tuned[0] / "work"), "-o", str(page)]) == 0
    assert page.read_text() == (tuned[0] / "tuning.html").read_text()
    capsys.readouterr()
    line = error_line(
        ["db", "report", str(tuned[0] / "work"), "--model", "x", "-o", str(page)], capsys
    )
    assert "no run of a model 'x' is on record there" in line


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_ends_with_the_best_so_far(number, model, tmp_path) -> None:
    """A child that is interrupted while it measures: exit code 130, a plan, nothing is lost, nobody lives on."""
    work, plan = tmp_path / "work", tmp_path / "plan.json"
    arguments = ["--work-dir", str(work), "--trials", "2000", "-o", str(plan)]
    with _started(["tune", model, *SHAPE, *arguments]) as child:
        deadline = time.monotonic() + 300
        while not any(f.stat().st_size for f in work.glob("*/trials.jsonl")):
            assert child.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        workers = _children(child.pid)
        if number == signal.SIGTERM:
            for worker in workers:  # as a service manager does
                os.kill(worker, number)
        child.send_signal(number)
        out, err = child.communicate(timeout=300)
    assert child.returncode == 130, err
    assert "Traceback" not in err and "Ctrl-C again stops at once" in err
    assert "stopped, the best so far" in out and "go on: the same command again" in out
    assert Plan.from_json(plan.read_text()).operators == 3
    lines = lines_of(work)
    assert f"{len(lines)} trials of 2000" in out
    assert {json.loads(line)["verdict"] for line in lines} == {"ok"}
    assert workers
    _wait_until_gone(workers)


def test_kill_and_go_on(model, tmp_path, capsys) -> None:
    """kill -9: no process is left, the next run measures what is missing, and nothing twice."""
    arguments = ["tune", model, *SHAPE, "--work-dir", str(tmp_path)]
    with _started([*arguments, "--trials", "2000"]) as child:
        deadline = time.monotonic() + 300
        while sum(f.stat().st_size for f in tmp_path.glob("*/trials.jsonl")) < 4000:
            assert child.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        workers = _children(child.pid)
        child.kill()
        child.communicate()
    _wait_until_gone(workers)
    before = lines_of(tmp_path)
    whole = before if before[-1].endswith("}") else before[:-1]
    budget = len(whole) + 4
    assert main([*arguments, "--trials", str(budget)]) == 0
    after = lines_of(tmp_path)
    assert after[: len(whole)] == whole
    tried = trials_of(tmp_path)
    count = len(set(tried))
    assert count <= budget + BATCH
    # Nothing twice; only in the last round what seems fastest is measured again.
    assert len(set(tried[:count])) == count
    assert f"tuned: {count} trials of {budget}" in capsys.readouterr().out


def _handles(pid: int, number: int) -> bool:
    """Whether a process has a handler for a signal: before Python has come that far, it ends it without a word."""
    status = Path(f"/proc/{pid}/status").read_text()
    return bool(int(status.split("SigCgt:")[1].split()[0], 16) >> (number - 1) & 1)


def test_termination_before_there_is_a_plan(model, tmp_path) -> None:
    """While TVM is imported or the model read: a line, exit code 130, and no folder."""
    with _started(["tune", model, *SHAPE, "--work-dir", str(tmp_path / "work")]) as child:
        while child.poll() is None and not _handles(child.pid, signal.SIGTERM):
            time.sleep(0.05)
        time.sleep(1)
        child.send_signal(signal.SIGTERM)
        out, err = child.communicate(timeout=300)
    if "Ctrl-C again" not in err:  # else a fast machine
        assert (child.returncode, out) == (130, "") and err.endswith("tvm-fusion: interrupted\n")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupt_inside_an_exec_of_text(number, tmp_path) -> None:
    """As of any dataclass that is being imported: the exit code stays 130, whatever Python notes of the exception."""
    (tmp_path / "sitecustomize.py").write_text(
        "import os, sys\n\n"
        "class Finder:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'tvm_fusion.cli.app':\n"
        f"            exec('os.kill(os.getpid(), {int(number)})\\nfor _ in range(100): pass')\n\n"
        "sys.meta_path.insert(0, Finder())\n"
    )
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    with _started(["--version"], env={**os.environ, "PYTHONPATH": path}) as child:
        out, err = child.communicate(timeout=300)
    assert (child.returncode, out, err) == (130, "", "tvm-fusion: interrupted\n")


def test_who_calls_the_program_keeps_his_handler_of_termination(capsys) -> None:
    def own(*_):
        """Of a server that calls `main`."""

    before = signal.signal(signal.SIGTERM, own)
    try:
        assert main(["--version"]) == 0 and signal.getsignal(signal.SIGTERM) is own
        display = live.TuningDisplay(Console(file=io.StringIO()))
        with display.shown():
            os.kill(os.getpid(), signal.SIGTERM)
            assert signal.getsignal(signal.SIGTERM) is own
    finally:
        signal.signal(signal.SIGTERM, before)
    capsys.readouterr()


@contextlib.contextmanager
def _started(arguments, env=None):
    """The program in a process of its own, which does not outlive the test."""
    child = subprocess.Popen(
        [sys.executable, "-m", "tvm_fusion.cli", *arguments], text=True, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, preexec_fn=_default_interrupt, env=env,
    )  # fmt: skip
    try:
        yield child
    finally:
        child.kill()
        child.wait()


def _children(pid: int) -> list[int]:
    """Processes that a process started, by what the kernel says of every thread."""
    tasks = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for task in tasks for child in task.read_text().split()]


def _wait_until_gone(processes: list[int]) -> None:
    """Wait for processes to end; what has ended is there until whoever has it for a child has seen it."""
    deadline = time.monotonic() + 300
    while any(Path(f"/proc/{process}").exists() for process in processes):
        assert time.monotonic() < deadline, "they live on"
        time.sleep(0.05)


def _default_interrupt() -> None:
    """A test runner that is a background job passes its ignoring of SIGINT on."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.mark.parametrize("option", ["-o", "--html"])
@pytest.mark.parametrize("name", ["trials.jsonl", "models/tiny.json", "new.json"])
def test_records_are_not_replaced(option, name, model, tmp_path, faked, capsys) -> None:
    arguments = ["tune", model, *SHAPE, "--work-dir", str(tmp_path), "--trials", "8"]
    assert main([*arguments, "-o", str(tmp_path / "plan.json")]) == 0  # beside them is fine
    capsys.readouterr()
    (folder,) = (path for path in tmp_path.iterdir() if path.is_dir())
    before = {file: file.read_bytes() for file in folder.rglob("*") if file.is_file()}
    assert "is among the records" in error_line([*arguments, option, str(folder / name)], capsys)
    link = tmp_path / "link"
    link.symlink_to(folder / name)
    assert "is among the records" in error_line([*arguments, option, str(link)], capsys)
    for command in ("plan", "compile"):
        line = error_line([command, model, *SHAPE, "-o", str(folder / name)], capsys)
        assert "is among the records" in line
    assert before == {file: file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def test_a_difference_within_the_noise_is_explained(
    model, tmp_path, faked, monkeypatch, capsys
) -> None:
    arguments = ["tune", model, *SHAPE, "--work-dir", str(tmp_path), "--trials", "8"]
    assert main(arguments) == 0
    assert "noise" not in capsys.readouterr().out
    near = WholeTimes(62.0, 60.0, None, noise=0.03)
    monkeypatch.setattr(tune_module, "time_whole", lambda *_, **__: near)
    assert main(arguments) == 0
    assert "slower by less than the noise (±6 %)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("whole", "told"),
    [
        (
            WholeTimes(251.0, 300.0, None, untuned_us=226.0),
            ["tuned 251.0, untuned 226.0, unfused 300.0, TVM's default not usable (time −10 % against tuned, ",
             "is the untuned one"],
        ),
        (
            WholeTimes(200.0, 300.0, 400.0, untuned_us=226.0),
            ["tuned 200.0, untuned 226.0, unfused 300.0", "(time −12 % against untuned, −33 % against unfused, −50 %"],
        ),
        (
            WholeTimes(227.0, 300.0, None, untuned_us=226.0, untuned_noise=0.02),
            ["slower than untuned by less than the noise (±4 %)"],
        ),
        (WholeTimes(200.0, 300.0, None, untuned_us=200.0), ["(time −33 % against unfused)"]),
    ],
)  # fmt: skip
def test_the_untuned_model_is_told_of(model, tmp_path, faked, monkeypatch, capsys, whole, told):
    monkeypatch.setattr(tune_module, "time_whole", lambda *_, **__: whole)
    arguments = ["tune", model, *SHAPE, "--work-dir", str(tmp_path), "--trials", "8"]
    assert main(arguments) == 0
    out = capsys.readouterr().out
    assert all(text in out for text in told), out
    assert ("is the untuned one" in out) is (whole.fastest == "untuned")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is full")
def test_an_output_on_a_full_disk_is_named(model, tmp_path, faked, capsys) -> None:
    arguments = ["tune", model, *SHAPE, "--work-dir", str(tmp_path), "--trials", "8"]
    for option in ("-o", "--html"):
        assert main([*arguments, option, "/dev/full"]) == 2
        assert capsys.readouterr().err.splitlines()[-1] == (
            "tvm-fusion: No space left on device: /dev/full; make room, or name a place on another disk"
        )


def test_a_second_run_goes_on(model, tmp_path, faked, capsys) -> None:
    arguments = ["tune", model, *SHAPE, "--work-dir", str(tmp_path)]
    assert main([*arguments, "--trials", "8"]) == 0
    first, ran = lines_of(tmp_path), list(faked.ran)
    assert len(set(trials_of(tmp_path))) == 8 == len(set(ran))
    assert main([*arguments, "--trials", "8"]) == 0
    assert lines_of(tmp_path) == first and faked.ran == ran
    assert main([*arguments, "--trials", "12"]) == 0
    assert lines_of(tmp_path)[: len(first)] == first
    assert len(set(trials_of(tmp_path))) == 12 == len(set(faked.ran))
    out = capsys.readouterr().out
    assert "tuned: 12 trials of 12" in out and "TVM's default not usable" in out


def test_require_cached(model, tmp_path, faked, capsys) -> None:
    work = tmp_path / "work"
    cached = ["tune", model, *SHAPE, "--work-dir", str(work), "--require-cached"]
    line = error_line(cached, capsys)
    assert f"{work} has no trials of x86_64, float32" in line and "without require_cached" in line
    assert not work.exists()
    assert main(["tune", model, *SHAPE, "--work-dir", str(work), "--trials", "8"]) == 0
    ran, page = len(faked.ran), tmp_path / "page.html"
    assert main([*cached, "-o", str(tmp_path / "plan.html"), "--html", str(page)]) == 0
    assert "8 trials on record" in capsys.readouterr().out and len(faked.ran) == ran
    assert "<svg" in (tmp_path / "plan.html").read_text() and "8 trials of 8" in page.read_text()
    # Another shape has other kernels.
    other = [*cached[:2], "--shape", "x=24,32", *cached[4:]]
    assert "never measured (matmul + add + relu)" in error_line(other, capsys)


def test_a_second_ctrl_c_leaves_the_plan_of_the_moment(model, tmp_path, faked, capsys) -> None:
    faked.stop = 14
    arguments = ["tune", model, *SHAPE, "--work-dir", str(tmp_path), "--trials", "40"]
    assert main([*arguments, "-o", str(tmp_path / "plan.json")]) == 130
    assert "stopped, the best so far" in capsys.readouterr().out
    assert Plan.from_json((tmp_path / "plan.json").read_text()).groups
    # Before there is a plan there is nothing to leave.
    faked.stop = 0
    arguments[arguments.index(str(tmp_path))] = str(tmp_path / "other")
    assert main(arguments) == 130
    captured = capsys.readouterr()
    assert captured.err.splitlines()[-1:] == ["tvm-fusion: interrupted"], captured


def test_a_job_that_ignores_ctrl_c_goes_on_doing_so() -> None:
    display = live.TuningDisplay(Console(file=io.StringIO()))
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with display.shown():
            os.kill(os.getpid(), signal.SIGINT)
        # Tests may run as such a job themselves.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        with display.shown():
            assert signal.getsignal(signal.SIGINT) is not signal.default_int_handler
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_terminal_shows_a_table(model, tmp_path, faked) -> None:
    """The display on a terminal: a table with the kernels, the plan, and the final note."""
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=110, height=40, color_system=None)
    display = live.TuningDisplay(console)
    from tvm_fusion.api import resolve
    from tvm_fusion.frontend import load

    target, module = resolve(load(model, shape={"x": (16, 32)}), "llvm")
    with display.shown():
        tune_module.tune_model(module, target, tmp_path, trials=8, report=display)
    text = screen.getvalue()
    assert "untuned µs" in text and "matmul + add + relu" in text
    assert "8 of 8 trials" in text and "timing the whole model" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "Missing option '--work-dir'"),
        (["--work-dir", "W", "--trials", "0"], "'--trials'"),
        (["--work-dir", "W", "--trials", "many"], "'--trials'"),
        (["--work-dir", "W", "--minutes", "0"], "--minutes must be above 0, not 0"),
        (["--work-dir", "W", "--minutes", "nan"], "--minutes must be above 0, not nan"),
        (["--work-dir", "W", "--runner", "moon"], "'--runner'"),
        (["--work-dir", "W", "--key", "k"], "--key goes with --rpc HOST:PORT"),
        (["--work-dir", "W", "--rpc", "h:1"], "--rpc needs --key"),
        (["--work-dir", "W", "--devices", "0,x"], "'0,x' is not a list of numbers, as 0,1"),
        (["--work-dir", "W", "--devices", "0,0"], "do not go with target llvm"),
        (["--work-dir", "W", "--rpc", "h:1", "--key", "k", "--devices", "0"], "exclude each other"),
        (["--work-dir", "W", "--rpc", "h", "--key", "k"], "'h' is not of the form HOST:PORT"),
        (["--work-dir", "W", "--rpc", "h:x", "--key", "k"], "is not of the form HOST:PORT"),
        (["--work-dir", "W", "--rpc", "h:70000", "--key", "k"], "is not of the form HOST:PORT"),
        (["--work-dir", "W", "--rpc", "h:1", "--key", "k", "--runner", "local"], "exclude each other"),
        (["--work-dir", "W", "--target", "tpu"], "unknown target 'tpu'"),
        (["--work-dir", "W", "-o", "none/plan.json"], "No such folder"),
        (["--work-dir", "W", "-o", "x", "--html", "x"], "name the same file"),
        (["--work-dir", "W", "-o", "W"], "W is the work dir; name another file"),
        (["--work-dir", "W", "--html", "./W"], "W is the work dir; name another file"),
        (["--work-dir", __file__], "is a file; name a folder"),
        (["--work-dir", "W", "--max-depth", "0"], "--max-depth"),
    ],
)  # fmt: skip
def test_wrong_arguments(arguments, message, model, tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert message in error_line(["tune", model, *SHAPE, *arguments], capsys)
    assert not list(tmp_path.iterdir())


def test_a_device_that_is_not_there(model, tmp_path, capsys) -> None:
    work = str(tmp_path / "work")
    line = error_line(["tune", model, *SHAPE, "--work-dir", work, "--target", "cuda:sm_70"], capsys)
    assert "no device for cuda" in line and "--rpc HOST:PORT --key KEY" in line
    line = error_line(
        ["tune", model, *SHAPE, "--work-dir", work, "--rpc", "localhost:1", "--key", "k"], capsys
    )
    assert "no RPC tracker at localhost:1" in line


def test_a_work_dir_without_records_is_an_error(model, tmp_path, capsys) -> None:
    for command in (["compile", "-o", str(tmp_path / "x.so")], ["bench"]):
        work = ["--work-dir", str(tmp_path / "none")]
        line = error_line([command[0], model, *SHAPE, *command[1:], *work], capsys)
        assert "holds no records of" in line and "tvm-fusion tune --work-dir makes them" in line
    assert not (tmp_path / "none").exists()


def onnx_file(folder: Path, operator: str, **attributes) -> str:
    """A model of one operator on a vector."""
    value = helper.make_tensor_value_info
    graph = helper.make_graph(
        [helper.make_node(operator, ["x"], ["y"], **attributes)], "one",
        [value("x", TensorProto.FLOAT, [16])], [value("y", TensorProto.FLOAT, [16])],
    )  # fmt: skip
    file = folder / "one.onnx"
    opsets = [helper.make_opsetid("", 17)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=8), file)
    return str(file)


def test_what_is_said_to_come_next_works_without_a_trial(tmp_path, faked, capsys) -> None:
    """Of a model without kernels, and of a run that had no time to try anything."""
    for operator, more in (("Identity", []), ("Relu", ["--minutes", "1e-9"])):
        model, work = onnx_file(tmp_path, operator), tmp_path / operator
        assert main(["tune", model, "--work-dir", str(work), *more]) == 0
        out = capsys.readouterr().out
        assert "tuned: 0 trials of" in out
        words = shlex.split(out.splitlines()[-1].removeprefix("compile it: tvm-fusion "))
        assert main([*words[:-1], str(tmp_path / "one.so")]) == 0
        assert (tmp_path / "one.so").exists()
        capsys.readouterr()
        # The folder of another type has nothing, still.
        wrong = [*words[:-1], str(tmp_path / "two.so"), "--dtype", "float16"]
        assert "holds no records of" in error_line(wrong, capsys)


def test_the_number_of_trials_in_the_help(capsys) -> None:
    assert main(["tune", "--help"]) == 0
    assert f"[default: {TRIALS}]" in " ".join(capsys.readouterr().out.split())
