"""Merging and pruning of whole work dirs."""

from __future__ import annotations

import collections
import tempfile
import warnings
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tvm_fusion.errors import DatabaseError
from tvm_fusion.testing.trials import trial
from tvm_fusion.tuning.summary import Summary, load_summaries, save_summary
from tvm_fusion.tuning.trials import Trial
from tvm_fusion.tuning.upkeep import Pruned, merge, prune
from tvm_fusion.tuning.work_dir import WorkDir

#: Few values each, so that trials meet.
TRIALS = st.lists(
    st.builds(
        trial,
        kernel=st.sampled_from(["k0", "k1"]),
        rows=st.integers(1, 3),
        us=st.sampled_from([None, 1.0, 2.0, 3.5]),
        arch=st.sampled_from(["sm_80", "sm_90"]),
        device=st.sampled_from(["one", "two"]),
        date=st.sampled_from(["2026-01-01", "2026-01-02"]),
    ),
    max_size=8,
)

ARCHS = ("sm_80", "sm_90")


def work_dir(path: Path, trials: list[Trial]) -> WorkDir:
    """A work dir that holds trials, each by itself so that none is left out."""
    work = WorkDir(path)
    for arch in ARCHS:
        records = work.open(arch, "float16")
        for one in trials:
            if one.arch == arch:
                records.add(one)
    return work


def content(work: WorkDir) -> set[Trial]:
    """All trials of a work dir."""
    return {one for place in work.places() for one in place.records()}


def model(*trials: list[Trial]) -> dict[tuple[object, ...], Trial]:
    """What the trials amount to, said plainly."""
    kept: dict[tuple[object, ...], Trial] = {}
    for one in (one for some in trials for one in some):
        key = (one.kernel, one.template, one.decision, one.arch, one.device)
        old = kept.get(key)
        if old is None or (one.date, one.to_line()) > (old.date, old.to_line()):
            kept[key] = one
    return kept


@settings(max_examples=15)
@given(TRIALS, TRIALS, TRIALS)
def test_merge_is_a_union(first, second, third) -> None:
    with tempfile.TemporaryDirectory() as name:
        path = Path(name)
        works = [work_dir(path / str(i), some) for i, some in enumerate((first, second, third))]
        one, two, all_at_once, twice = (WorkDir(path / f"out{i}") for i in range(4))
        merge(works, one)
        merge(works[::-1], two)
        for work in works:
            merge([work], all_at_once)
        merge([one, *works], twice)
        wanted = model(first, second, third)
        for out in (one, two, all_at_once, twice):
            assert content(out) == set(wanted.values())
            assert merge([out, *works], out) == (0, 0)
        for arch in ARCHS:
            records = one.open(arch, "float16")
            for kernel in ("k0", "k1"):
                times = [
                    t.samples_us[0]
                    for t in wanted.values()
                    if (t.kernel, t.arch, t.verdict) == (kernel, arch, "ok")
                ]
                best = records.best(kernel)
                assert (best.microseconds if best else None) == min(times, default=None)


@settings(max_examples=25)
@given(TRIALS, st.integers(1, 2))
def test_prune_keeps_the_best(trials, keep: int) -> None:
    with tempfile.TemporaryDirectory() as name:
        work = work_dir(Path(name), trials)
        for place in work.places():
            before = place.records()
            prune(place, keep)
            after = place.records()
            assert prune(place, keep) == Pruned(0, 0)
            groups = collections.Counter((t.kernel, t.device) for t in before if t.verdict == "ok")
            found = collections.Counter((t.kernel, t.device) for t in after)
            assert found == {group: min(count, keep) for group, count in groups.items()}
            for kernel in before.kernels():
                assert after.best(kernel) == before.best(kernel)
                for device in ("one", "two"):
                    assert after.best(kernel, device) == before.best(kernel, device)


def test_prune_drops_damage_and_keeps_what_a_later_release_wrote(tmp_path: Path) -> None:
    work = WorkDir(tmp_path)
    work.open("sm_90", "float16").add(trial(rows=1, us=2.0), trial(rows=2, us=1.0), trial(us=None))
    (place,) = work.places()
    file = place.folder / "trials.jsonl"
    newer = '{"schema":2,"decision":[]}\n'
    file.write_text("garbage\n" + newer + file.read_text() + '{"torn')
    dropped = prune(place, keep=1)
    assert dropped == Pruned(trials=2, records=0, damaged=2)
    assert str(dropped) == "2 trials, 2 damaged lines and 0 records of meta-schedule"
    assert file.read_text() == newer + trial(rows=2, us=1.0).to_line() + "\n"


def test_a_running_tuner_goes_on_after_a_prune(tmp_path: Path) -> None:
    work = WorkDir(tmp_path)
    records = work.open("sm_90", "float16")
    records.add(trial(rows=1, us=2.0), trial(rows=2, us=1.0))
    (place,) = work.places()
    prune(place, keep=1)
    records.add(trial(rows=3, us=3.0))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        records.refresh()
        assert [t.decision[0][1] for t in place.records()] == [2, 3]
    # What it knew, it still knows, and does not try again.
    assert len(records) == 3


def test_merge_of_versions_and_archs_keeps_them_apart(tmp_path: Path) -> None:
    first, out = WorkDir(tmp_path / "first"), WorkDir(tmp_path / "out")
    for arch, version in (("sm_80", "0.27.0"), ("sm_90", "0.27.0"), ("sm_90", "0.28.0")):
        place = first.place(arch, "float16", version)
        place.create()
        place.records().add(trial(arch=arch, us=float(version[2:4])))
    assert merge([first], out) == (3, 0)
    assert [p.folder.name for p in out.places()] == [p.folder.name for p in first.places()]
    assert out.place("sm_90", "float16", "0.28.0").records().best("k0").microseconds == 28.0


def test_merge_keeps_the_latest_summary_of_a_model(tmp_path: Path) -> None:
    works = [WorkDir(tmp_path / name) for name in "ab"]
    for number, work in enumerate(works):
        place = work.place("sm_90", "float16", "0.27.0")
        place.create()
        for model in ("both", f"own {number}"):
            values = (model, "cuda sm_90", "float16", "a GPU", "", number, 9, "finished", (4, 2), 1)
            save_summary(place.folder, Summary(*values, date=f"2026-01-0{number + 1}"))
    for order in (works, works[::-1]):
        out = WorkDir(tmp_path / f"out {order[0].path.name}")
        merge(order, out)
        found = {s.model: s.trials for s in load_summaries(out.places()[0].folder)}
        assert found == {"both": 1, "own 0": 0, "own 1": 1}


def test_merge_needs_records(tmp_path: Path) -> None:
    with pytest.raises(DatabaseError, match="holds no records"):
        merge([WorkDir(tmp_path)], WorkDir(tmp_path / "out"))
    assert not (tmp_path / "out").exists()
