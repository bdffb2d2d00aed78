"""Whole runs in work dirs that are damaged, of another arch, unwritable, or shared; nothing is measured twice."""

from __future__ import annotations

import collections
import json
import shutil
import subprocess
import sys
import warnings
import zlib
from pathlib import Path

import pytest

from tvm_fusion.errors import DatabaseError
from tvm_fusion.frontend.canonical import canonicalize
from tvm_fusion.targets import parse_target
from tvm_fusion.testing.modules import ModuleBuilder
from tvm_fusion.testing.tuning_fakes import FakeBuilder, FakeRunner, fake_workbench
from tvm_fusion.tuning import tune as tune_module
from tvm_fusion.tuning.trials import Trial
from tvm_fusion.tuning.tune import tune_model
from tvm_fusion.tuning.tuner import BATCH, Device
from tvm_fusion.tuning.whole import WholeTimes
from tvm_fusion.tuning.work_dir import WorkDir

LLVM = parse_target("llvm")


def module(blocks=2):
    """Convolutions in turn, each with ReLU."""
    b = ModuleBuilder()
    x = b.input("image", (1, 8, 12, 12))
    for number in range(blocks):
        x = b.relu(f"r{number}", b.conv(f"c{number}", x, 8 + 4 * number))
    return canonicalize(b.finish(x))


def time_of(kernel, template, decision):
    """10 µs a kernel, however much it does, and some noise."""
    return 10 + zlib.crc32(repr((kernel, sorted(decision.items()))).encode()) / 2**32


def fake(patch):
    """Tuning with stand-ins; returns the runner."""
    runner = FakeRunner(time_of)
    patch.setattr(tune_module, "_workbench", fake_workbench(FakeBuilder(), runner))
    patch.setattr(tune_module, "device_of", lambda *_: Device("a device", "1.0"))
    patch.setattr(tune_module, "time_whole", lambda *_, **__: WholeTimes(20.0, 60.0, 40.0))
    return runner


@pytest.fixture
def runner(monkeypatch):
    """What measures, in a process whose tuning is faked."""
    return fake(monkeypatch)


def trials_file(folder: Path, arch: str = "x86_64") -> Path:
    return WorkDir(folder).place(arch, "float32").folder / "trials.jsonl"


def test_trials_of_another_arch_are_measured_anew(tmp_path, runner):
    first = tune_model(module(1), parse_target("cuda:sm_80"), tmp_path, trials=8)
    ran = set(runner.ran)
    other = trials_file(tmp_path, "sm_90")
    other.parent.mkdir()
    shutil.copy(trials_file(tmp_path, "sm_80"), other)
    runner.ran.clear()
    second = tune_model(module(1), parse_target("cuda:sm_90"), tmp_path, trials=8)
    assert first.trials == second.trials == len(set(runner.ran)) and ran
    lines = [json.loads(line) for line in other.read_text().splitlines()]
    archs = [line["arch"] for line in lines]
    assert archs == sorted(archs)  # those of sm_80 as they were, then those of sm_90
    found = collections.Counter(arch for _, arch in {(x["trial"], x["arch"]) for x in lines})
    assert found == {"sm_80": first.trials, "sm_90": second.trials}


def test_a_damaged_line_costs_its_own_trial(tmp_path, runner):
    found = tune_model(module(), LLVM, tmp_path, trials=30)
    file = trials_file(tmp_path)
    lines = file.read_text().splitlines()
    # A trial that is not the first of its kernel: what is missing is proposed again.
    lost = Trial.from_dict(json.loads(lines[-1]))
    file.write_text("\n".join([*lines[:-1], lines[-1][:-9] + "#"]) + "\n")
    runner.ran.clear()
    with pytest.warns(UserWarning, match="line skipped: 1 damaged") as told:
        again = tune_model(module(), LLVM, tmp_path, trials=30)
    assert len(told) == 1 and len(runner.ran) <= 1
    assert again.trials == found.trials and len(again.plan.groups) == len(found.plan.groups)
    for what in runner.ran:
        kernel, template, decision = json.loads(what)
        assert (kernel, template, tuple(decision.items())) not in {
            (t.kernel, t.template, t.decision)
            for t in (Trial.from_dict(json.loads(line)) for line in lines[:-1])
        }
    assert lost.verdict == "ok"


@pytest.mark.parametrize("place", ["file/work", "/proc/none/work"])
def test_a_work_dir_that_cannot_be_made_ends_the_run_before_it_begins(
    place, tmp_path, runner, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("")
    with pytest.raises(DatabaseError, match=r"^cannot make work dir .*; name another one$"):
        tune_model(module(), LLVM, place)
    assert not runner.ran


TUNER = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
import pytest, test_faults
with pytest.MonkeyPatch.context() as patch:
    runner = test_faults.fake(patch)
    found = test_faults.tune_model(
        test_faults.module(int(sys.argv[2])), test_faults.LLVM, sys.argv[1], trials=40, name=sys.argv[2]
    )
print(found.trials, len(runner.ran), len(set(runner.ran)))
"""


def test_two_runs_at_once_lose_nothing(tmp_path, runner):
    """Of two models with kernels in common, in two processes."""
    command = [sys.executable, "-W", "ignore", "-c", TUNER, str(tmp_path)]
    both = [subprocess.Popen([*command, n], stdout=subprocess.PIPE, text=True) for n in "23"]
    told = [list(map(int, run.communicate(timeout=300)[0].split())) for run in both]
    assert [run.returncode for run in both] == [0, 0]
    for trials, ran, distinct in told:
        # Only in the last round what seems fastest is measured again.
        assert 0 < distinct <= trials <= 40 + BATCH and ran >= distinct
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        records = WorkDir(tmp_path).places()[0].records()
    measured = {(t.kernel, t.template, t.decision) for t in records}
    assert max(trials for trials, *_ in told) <= len(measured) <= sum(ran for _, ran, _ in told)
    # Both plans follow from the records, and nothing is tried again.
    for blocks in (2, 3):
        tune_model(module(blocks), LLVM, tmp_path, trials=1, name=str(blocks))
    assert not runner.ran
