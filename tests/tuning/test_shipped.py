"""Records that come with the package."""

from __future__ import annotations

import dataclasses
import json
from importlib import resources
from pathlib import Path

import pytest
from tvm_fusion.schedules.registry import spaces

from tvm_fusion.api import plan_with_records
from tvm_fusion.config import FusionConfig
from tvm_fusion.frontend.canonical import canonicalize
from tvm_fusion.targets import parse_target, with_products, with_variant
from tvm_fusion.testing.modules import ModuleBuilder, parallel_convs
from tvm_fusion.testing.trials import trial
from tvm_fusion.tuning import lookup, shipped
from tvm_fusion.tuning.lookup import lookup_in, policy_of, tuned_records
from tvm_fusion.tuning.session import Session
from tvm_fusion.tuning.shipped import export_trials, shipped_trials
from tvm_fusion.tuning.trials import TrialSet
from tvm_fusion.tuning.tuner import Budget, Device, Tuner
from tvm_fusion.tuning.work_dir import WorkDir

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.fixture(autouse=True)
def fresh():
    shipped_trials.cache_clear()
    yield
    shipped_trials.cache_clear()


def test_what_is_exported_can_be_shipped(tmp_path: Path, monkeypatch) -> None:
    work = WorkDir(tmp_path / "work")
    place = work.place("sm_90", "float16", "0.27.0")
    place.create()
    place.records().add(
        trial("a", 1, 3.0), trial("a", 2, 9.0, samples_us=(1.0, 2.0, 9.0)), trial("b", 3, None),
        trial("c", 4, 5.0),
    )  # fmt: skip
    # The same kernel, faster, for another version of TVM.
    other = work.place("sm_90", "float16", "0.28.0")
    other.create()
    other.records().add(trial("a", 8, 0.5))
    # In TF32, which exact products must not get.
    tf32 = work.place("sm_90", "float32+tf32", "0.27.0")
    tf32.create()
    tf32.records().add(trial("a", 9, 0.1), trial("z", 9, 0.1))
    text = export_trials(work.places())
    assert [json.loads(line)["kernel"] for line in text.splitlines()] == ["a", "c", "a"]
    assert text == export_trials(work.places()[::-1])

    monkeypatch.setattr(shipped.resources, "files", lambda _: tmp_path)
    (tmp_path / "records").mkdir()
    (tmp_path / "records" / "sm_90.jsonl").write_text(text)
    found = shipped_trials("sm_90", "0.27.0")
    assert found.kernels() == ["a", "c"]
    assert found.best("a") == trial("a", 2, samples_us=(2.0,))
    assert shipped_trials("sm_90", "0.28.0").best("a").microseconds == 0.5
    assert not len(shipped_trials("sm_90", "0.29.0"))
    assert not len(shipped_trials("sm_80", "0.27.0"))
    module = canonicalize(parallel_convs(2, channels=4, spatial=5))
    exact = parse_target("cuda:sm_90")
    assert len(tuned_records(module, exact)) == 1
    assert not tuned_records(module, with_products(exact, "tf32"))
    assert policy_of(module, exact) == "float32"
    assert policy_of(module, with_products(exact, "tf32")) == "float32+tf32"
    narrow = canonicalize(parallel_convs(2, channels=4, spatial=5, dtype="float16", layout="NHWC"))
    assert policy_of(narrow, with_products(exact, "tf32")) == "float16"


def test_what_is_fastest_on_another_device_is_not_compiled(tmp_path: Path, monkeypatch) -> None:
    records = WorkDir(tmp_path).open("sm_90", "float16")
    records.add(
        trial("a", 1, 3.0, device="here"), trial("a", 2, 1.0, device="elsewhere"),
        trial("b", 3, 1.0, device="elsewhere"), trial("b", 4, 2.0, device="elsewhere"),
    )  # fmt: skip
    monkeypatch.setattr(lookup, "kernel_digest", lambda func: func)
    shipped_ones = TrialSet([trial("b", 5, 9.0, device="elsewhere")])
    here = lookup_in([records, shipped_ones], Device("here"))
    best = records.best("a", "here")
    assert here("a", None) == (best.template, best.decision)
    assert here("b", None)[1] == shipped_ones.best("b").decision
    for device in ("elsewhere", "a build machine"):
        find = lookup_in([records], Device(device))
        assert find("a", None)[1] == trial("a", 2, 1.0).decision


def test_records_of_another_arch_in_a_file_are_ignored(tmp_path: Path, monkeypatch) -> None:
    work = WorkDir(tmp_path / "work")
    place = work.place("sm_80", "float16", "0.27.0")
    place.create()
    place.records().add(trial(arch="sm_80"))
    monkeypatch.setattr(shipped.resources, "files", lambda _: tmp_path)
    (tmp_path / "records").mkdir()
    (tmp_path / "records" / "sm_90.jsonl").write_text(export_trials(work.places()))
    assert not len(shipped_trials("sm_90", "0.27.0"))


@pytest.mark.nvcc
@pytest.mark.parametrize(("pair", "groups"), [(9.0, 0), (1.5, 1)])
def test_times_that_come_with_the_package_decide_the_depth(pair, groups):
    """Two ReLUs of 1 µs each on record, and both in one kernel."""
    b = ModuleBuilder()
    module = canonicalize(b.finish(b.relu("c", b.relu("a", b.input("x", (64, 256))))))
    target = parse_target("cuda:sm_90")
    exact = with_variant(target)
    tuner = Tuner(exact, None, None, None, TrialSet(), Device("a GPU"))
    Session(module, target, FusionConfig(), tuner, Budget(0)).recall()
    found = []
    for kernel in tuner.kernels.values():
        space = spaces(kernel.func, exact)[0]
        decision = tuple(entry for point in space.points for entry in point.options[0])
        us = pair if len(kernel.operators) == 2 else 1.0
        fields = {"template": space.template, "samples_us": (us,)}
        found.append(dataclasses.replace(trial(kernel.digest, **fields), decision=decision))
    assert len(plan_with_records(module, target, [], tuned=False).groups) == 1
    plan = plan_with_records(module, target, [TrialSet(found)], tuned=False)
    assert len(plan.groups) == groups
    assert [g.measured_us_after for g in plan.groups] == [pair] * groups


def test_nothing_to_export(tmp_path: Path) -> None:
    work = WorkDir(tmp_path)
    work.open("sm_90", "float16").add(trial(us=None))
    assert export_trials(work.places()) == ""
    assert export_trials([]) == ""


def test_every_shipped_file_is_legal_and_packed() -> None:
    files = sorted((resources.files("tvm_fusion.tuning") / "records").glob("*.jsonl"))
    for file in files:
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        for version in {line["tvm"] for line in lines}:
            trials = list(shipped_trials(file.stem, version))
            assert len(trials) == sum(line["tvm"] == version for line in lines)
            assert {(t.arch, t.verdict) for t in trials} == {(file.stem, "ok")}
    assert '"tvm_fusion.tuning": ["records/*.jsonl"]' in (ROOT / "setup.py").read_text()
    assert "tvm_fusion/tuning/records *.jsonl" in (ROOT / "MANIFEST.in").read_text()
