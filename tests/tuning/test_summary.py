"""What is kept of a run beside its trials, and what people are shown of it, with a clock that is not there."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import random
import zlib

import pytest

from tvm_fusion.config import FusionConfig
from tvm_fusion.errors import DatabaseError, TuningError
from tvm_fusion.frontend.canonical import canonicalize
from tvm_fusion.graph.relax import from_relax
from tvm_fusion.strategies.base import Proposal
from tvm_fusion.targets import parse_target
from tvm_fusion.testing.modules import ModuleBuilder
from tvm_fusion.testing.synthetic_blocks import cross_pair
from tvm_fusion.testing.trials import trial
from tvm_fusion.testing.tuning_fakes import FakeBuilder, FakeRunner, fake_workbench
from tvm_fusion.tuning import tune as tune_module
from tvm_fusion.tuning import tuner as tuner_module
from tvm_fusion.tuning import untuned as untuned_module
from tvm_fusion.tuning.asked import asked_before, graph_digest, notes_of
from tvm_fusion.tuning.lookup import own_device, recorded_device, records_for
from tvm_fusion.tuning.overview import overview
from tvm_fusion.tuning.summary import GroupNote, Summary, load_summaries, save_summary
from tvm_fusion.tuning.tune import plan_from_records, tune_model
from tvm_fusion.tuning.tuner import Device
from tvm_fusion.tuning.untuned import plan_untuned
from tvm_fusion.tuning.whole import WholeTimes
from tvm_fusion.tuning.work_dir import Records, WorkDir

TARGET = parse_target("llvm")

#: What plans say that do not follow the records.
PIPELINE = {"default": "tvm", "untuned": "untuned"}


def module():
    """Two equal convolutions in turn, each with ReLU, then a shape of its own."""
    b = ModuleBuilder()
    x = b.input("image", (1, 8, 12, 12))
    for number in range(2):
        x = b.relu(f"r{number}", b.conv(f"c{number}", x, 8))
    return canonicalize(b.finish(b.relu("last", b.conv("head", x, 4, 1))))


def time_of(kernel, template, decision):
    """10 µs a kernel, however much it does, and some noise."""
    return 10 + zlib.crc32(repr((kernel, sorted(decision.items()))).encode()) / 2**32


@pytest.fixture
def faked(monkeypatch):
    """Tuning with stand-ins; returns the runner. The whole model takes what the test says."""
    runner = FakeRunner(time_of)
    runner.whole = WholeTimes(20.0, 60.0, 40.0)
    monkeypatch.setattr(tune_module, "_workbench", fake_workbench(FakeBuilder(), runner))
    monkeypatch.setattr(tune_module, "device_of", lambda *_: Device("a device", "1.0"))
    monkeypatch.setattr(tune_module, "time_whole", lambda *_, **__: runner.whole)
    return runner


def test_a_run_leaves_a_summary(tmp_path, faked):
    states = []
    found = tune_model(
        module(), TARGET, tmp_path, trials=30, name="net/1",
        report=lambda session: states.append(overview(session, 2.0)),
    )  # fmt: skip
    (place,) = WorkDir(tmp_path).places()
    (summary,) = load_summaries(place.folder)
    assert summary.model == "net/1" and summary.state == "finished"
    assert summary.trials == found.trials <= 30 and summary.device == "a device"
    assert (summary.tuned_us, summary.unfused_us, summary.default_us) == (20.0, 60.0, 40.0)
    kernels = {k.kernel: k for k in summary.kernels}
    assert set(kernels) == set(place.records().kernels())
    assert sum(k.calls for k in summary.kernels) == found.plan.totals.launches_after
    for chain in summary.chains:
        assert chain.rows[0].least == 1 and not chain.rows[0].failed
        assert {k for row in chain.rows for k in row.kernels} <= set(kernels)
        assert sum(row.chosen for row in chain.rows) == 1
        bytes_ = [row.nbytes for row in chain.rows]
        assert bytes_ == sorted(bytes_, reverse=True)
    # What the table shows, from first to last.
    assert states[0].kernels == () and math.isinf(states[0].model_us)
    assert [s.trials for s in states] == sorted(s.trials for s in states)
    last = states[-1]
    assert last.groups == len(found.plan.groups) > 0
    assert math.isclose(last.model_us, sum(k.calls * k.best_us for k in last.kernels if k.calls))
    assert last.model_us < last.unfused_us
    # Against the same operators, each as a kernel of its own.
    best = {k.kernel: k.best_us for k in last.kernels}
    grouped = [k for k in last.kernels if k.strategy]
    assert any(math.isfinite(k.unfused_us) for k in grouped)
    for view in grouped:
        parts = dict(view.parts)
        if math.isfinite(view.unfused_us):
            assert sum(parts.values()) == len(view.operators)
            assert math.isclose(view.unfused_us, sum(n * best[k] for k, n in parts.items()))
    costs = [k.cost_us for k in last.kernels]
    assert costs == sorted(costs, reverse=True)


def test_equal_operators_are_measured_once(tmp_path, faked):
    found = tune_model(module(), TARGET, tmp_path, trials=1)
    assert len(faked.ran) == len(set(faked.ran)) == found.trials


def test_without_groups_tuned_and_unfused_are_one(tmp_path, faked):
    """They are the same code (`time_whole` times it once), and nothing is refused by its time."""
    faked.whole = WholeTimes(40.0, 40.0, 40.0)
    b = ModuleBuilder()
    lone = canonicalize(b.finish(b.conv("c", b.input("image", (1, 8, 12, 12)), 8)))
    found = tune_model(lone, TARGET, tmp_path, trials=20)
    assert not found.plan.groups and found.shipped == "tuned"
    assert found.whole == WholeTimes(40.0, 40.0, 40.0)
    totals = found.plan.totals
    assert totals.measured_us_before == totals.measured_us_after == 40.0
    assert not found.plan.rejected


@pytest.mark.parametrize("minutes", [0, -1, math.nan])
def test_minutes_are_above_0(tmp_path, faked, minutes):
    """Of NaN no comparison is true: a run would not end."""
    with pytest.raises(ValueError, match="minutes must be above 0"):
        tune_model(module(), TARGET, tmp_path / "none", minutes=minutes)
    assert not (tmp_path / "none").exists()


def test_a_run_that_is_told_to_stop_ends_with_the_best_so_far(tmp_path, faked):
    def stop(session):
        session.tuner.stopping = session.tuner.new_trials > 0

    found = tune_model(module(), TARGET, tmp_path, trials=500, report=stop)
    assert found.stopped and found.whole is None and 0 < found.trials < 100
    (place,) = WorkDir(tmp_path).places()
    (summary,) = load_summaries(place.folder)
    assert summary.state == "stopped" and summary.tuned_us is None
    ran = len(faked.ran)
    again = tune_model(module(), TARGET, tmp_path, trials=found.trials)
    assert not again.stopped and len(faked.ran) == ran


def test_of_a_full_disk_the_lost_trials_are_told(tmp_path, faked, monkeypatch):
    """Not the summary, which fails last."""

    def add(records, *trials):
        for one in trials:
            records._keep(one)
        raise DatabaseError("trials are in memory only")

    def save(*_):
        raise DatabaseError("no summary")

    monkeypatch.setattr(Records, "add", add)
    monkeypatch.setattr(tune_module, "save_summary", save)
    monkeypatch.setattr(tuner_module, "save_models", save)
    sessions = []
    tune_model(module(), TARGET, tmp_path, trials=40, report=sessions.append)
    assert sessions[-1].tuner.disk_problem == "trials are in memory only"


def test_a_killed_run_has_a_summary_of_its_last_plan(tmp_path, faked):
    def die(session):
        if session.plan is not None and session.tuner.new_trials > 20:
            raise RuntimeError("killed")

    with pytest.raises(RuntimeError):
        tune_model(module(), TARGET, tmp_path, trials=100, report=die)
    (place,) = WorkDir(tmp_path).places()
    assert [s.state for s in load_summaries(place.folder)] == ["running"]


@pytest.mark.parametrize(
    ("whole", "fastest"),
    [
        (WholeTimes(50.0, 60.0, 40.0), "default"),
        (WholeTimes(50.0, 60.0, 49.0), "tuned"),  # not clearly faster
        (WholeTimes(70.0, 60.0, 59.0), "unfused"),
        (WholeTimes(70.0, 60.0, 50.0), "default"),
        (WholeTimes(50.0, 60.0, None), "tuned"),
        (WholeTimes(61.0, 60.0, None, noise=0.02), "tuned"),  # slower, but within the noise
        (WholeTimes(61.0, 60.0, None, noise=0.002), "unfused"),
        (WholeTimes(50.0, 60.0, 48.0, default_noise=0.05), "tuned"),
        (WholeTimes(50.0, 60.0, 48.0, untuned_us=45.0), "untuned"),
        (WholeTimes(50.0, 60.0, 40.0, untuned_us=45.0), "default"),
        (WholeTimes(50.0, 60.0, 48.9, untuned_us=51.0), "tuned"),
        (WholeTimes(50.0, 60.0, 50.0, untuned_us=49.0, untuned_noise=0.02), "tuned"),
    ],
)
def test_the_fastest_way_is_compiled(tmp_path, faked, whole, fastest):
    faked.whole = whole
    found = tune_model(module(), TARGET, tmp_path, trials=30)
    assert found.shipped == whole.fastest == fastest
    assert found.plan.pipeline == PIPELINE.get(fastest, "tvm_fusion")
    fused = fastest in ("tuned", "untuned")
    assert bool(found.plan.groups) is fused
    assert found.plan.totals.measured_us_after == whole.of(fastest)
    records = WorkDir(tmp_path).open("x86_64", "float32")
    assert plan_from_records(module(), TARGET, records).pipeline == found.plan.pipeline
    assert bool(plan_from_records(module(), TARGET, records).groups) is fused
    # The summary tells of what is compiled, not of the groups that are not.
    (summary,) = load_summaries(WorkDir(tmp_path).places()[0].folder)
    called = [k for k in summary.kernels if k.calls]
    chosen = [row.least for chain in summary.chains for row in chain.rows if row.chosen]
    if fastest == "default":
        assert not called and not chosen
    else:
        assert sum(k.calls for k in called) == summary.launches[1]
        assert any(k.strategy for k in called) is fused
        assert set(chosen) == ({1} if fastest == "unfused" else set(chosen) - {1})


@pytest.mark.parametrize("slower", [True, False])
def test_groups_that_did_not_pay_stay_out_later_too(tmp_path, faked, slower):
    faked.whole = WholeTimes(70.0 if slower else 50.0, 60.0)
    found = tune_model(module(), TARGET, tmp_path, trials=30)
    assert found.shipped == ("unfused" if slower else "tuned")
    assert bool(found.plan.groups) is not slower
    records = WorkDir(tmp_path).open("x86_64", "float32")
    plan = plan_from_records(module(), TARGET, records)
    assert bool(plan.groups) is not slower
    cached = tune_model(module(), TARGET, tmp_path, require_cached=True)
    assert cached.shipped == found.shipped and len(cached.plan.groups) == len(plan.groups)
    # Another model of the same kernels is not concerned.
    b = ModuleBuilder()
    x = b.input("image", (1, 8, 12, 12))
    other = canonicalize(b.finish(b.relu("r", b.conv("c", x, 8))))
    assert plan_from_records(other, TARGET, records).groups


def other_groups(monkeypatch):
    """Without tuning nothing is fused but the last two operators."""
    real = untuned_module.plan_module

    def plan_module(*args, **options):
        plan = real(*args, **options)
        return dataclasses.replace(plan, groups=plan.groups[-1:])

    monkeypatch.setattr(untuned_module, "plan_module", plan_module)


@pytest.mark.parametrize("slower", [True, False])
def test_what_was_tuned_and_did_not_pay_stays_out_later_too(tmp_path, faked, monkeypatch, slower):
    """Neither the plan nor a record of the work dir counts; other models of the same kernels are not concerned."""
    other_groups(monkeypatch)
    faked.whole = WholeTimes(70.0, 90.0, untuned_us=50.0 if slower else 69.0, untuned_noise=0.01)
    found = tune_model(module(), TARGET, tmp_path, trials=30)
    assert found.shipped == ("untuned" if slower else "tuned")
    assert (len(found.plan.groups) == 1) is slower
    (summary,) = load_summaries(WorkDir(tmp_path).places()[0].folder)
    assert summary.shipped == found.shipped and summary.untuned_us == faked.whole.untuned_us
    records = WorkDir(tmp_path).open("x86_64", "float32")
    plan = plan_from_records(module(), TARGET, records)
    cached = tune_model(module(), TARGET, tmp_path, require_cached=True)
    for again in (plan, cached.plan):
        assert again.groups == found.plan.groups and again.pipeline == found.plan.pipeline
        assert again.pipeline == ("untuned" if slower else "tvm_fusion")
    if slower:
        totals = found.plan.totals
        assert (totals.measured_us_before, totals.measured_us_after) == (90.0, 50.0)
        assert plan.totals == totals
        assert plan == dataclasses.replace(
            plan_untuned(module(), TARGET, []), totals=totals, pipeline="untuned"
        )
    assert cached.shipped == found.shipped
    assert bool(records_for(plan, [records])) is not slower
    b = ModuleBuilder()
    x = b.input("image", (1, 8, 12, 12))
    other = canonicalize(b.finish(b.relu("r", b.conv("c", x, 8))))
    assert plan_from_records(other, TARGET, records).pipeline == "tvm_fusion"


@pytest.mark.parametrize("way", ["untuned", "unfused", "default"])
def test_what_was_timed_says_nothing_of_another_configuration(tmp_path, faked, way):
    times = {"untuned_us": 50.0} if way == "untuned" else {}
    faked.whole = WholeTimes(
        70.0, 60.0 if way == "unfused" else 90.0, 40.0 if way == "default" else None, **times
    )
    vertical = FusionConfig(strategies=("vertical",))
    assert tune_model(module(), TARGET, tmp_path, trials=30, config=vertical).shipped == way
    records = WorkDir(tmp_path).open("x86_64", "float32")
    for config, counts in ((vertical, True), (None, False)):
        plan = plan_from_records(module(), TARGET, records, config=config)
        assert (plan.pipeline == PIPELINE.get(way) or not plan.groups) is counts
        found = tune_model(module(), TARGET, tmp_path, require_cached=True, config=config)
        assert found.shipped == (way if counts else "tuned")


@pytest.mark.parametrize("first", ["untuned", "unfused", "default", "tuned"])
def test_of_a_model_with_two_names_the_last_run_decides(tmp_path, faked, monkeypatch, first):
    other_groups(monkeypatch)
    ways = {
        "untuned": WholeTimes(70.0, 90.0, untuned_us=50.0), "unfused": WholeTimes(70.0, 60.0),
        "default": WholeTimes(70.0, 90.0, 40.0), "tuned": WholeTimes(70.0, 90.0),
    }  # fmt: skip
    records = WorkDir(tmp_path).open("x86_64", "float32")
    for names in ("ab", "dc"):  # whichever comes first in the folder
        for name, way in zip(
            names, (first, "tuned" if first != "tuned" else "untuned"), strict=True
        ):
            faked.whole = ways[way]
            found = tune_model(module(), TARGET, tmp_path, trials=30, name=name)
            assert found.shipped == way
            records.refresh()
            assert plan_from_records(module(), TARGET, records).pipeline == found.plan.pipeline
            assert tune_model(module(), TARGET, tmp_path, require_cached=True).shipped == way


def test_times_of_another_device_are_better_than_none(tmp_path, faked):
    tune_model(module(), TARGET, tmp_path, trials=20)
    records = WorkDir(tmp_path).open("x86_64", "float32")
    assert recorded_device(records, Device("elsewhere")).name == "a device"
    assert recorded_device(records, Device("a device", "2")) == Device("a device", "2")
    empty = WorkDir(tmp_path / "none").open("x86_64", "float32")
    assert recorded_device(empty, Device("elsewhere")).name == "elsewhere"


def test_a_former_name_counts_where_the_present_one_has_no_trials(tmp_path):
    records = WorkDir(tmp_path).open("x86_64", "float32")
    of = {"arch": "x86_64"}
    records.add(
        trial(rows=1, device="cpu", **of), *(trial(rows=n, device="B", **of) for n in (1, 2))
    )
    assert own_device(records, Device("A", former="cpu")).name == "cpu"
    assert recorded_device(records, Device("A", former="cpu")).name == "cpu"
    assert recorded_device(records, Device("A", former="mine")).name == "B"
    records.add(trial(rows=3, device="A", **of))
    assert own_device(records, Device("A", former="cpu")).name == "A"


def test_require_cached_makes_no_folder(tmp_path, faked):
    with pytest.raises(
        TuningError, match=r"none has no trials of x86_64, float32 .* on a device: .*tune first"
    ):
        tune_model(module(), TARGET, tmp_path / "none", require_cached=True)
    assert not (tmp_path / "none").exists() and not faked.ran


def test_require_cached_names_the_devices_that_there_are(tmp_path, faked, monkeypatch):
    tuned = tune_model(module(), TARGET, tmp_path, trials=20)
    monkeypatch.setattr(tune_module, "device_of", lambda *_: Device("another"))
    told = f"on another, but {tuned.trials} of a device: the model was never measured there"
    with pytest.raises(TuningError, match=told):
        tune_model(module(), TARGET, tmp_path, require_cached=True)
    # Unless that is what this one was called before.
    monkeypatch.setattr(tune_module, "device_of", lambda *_: Device("another", former="a device"))
    found = tune_model(module(), TARGET, tmp_path, require_cached=True)
    assert found.plan.groups == tuned.plan.groups and found.trials == tuned.trials
    # A model of which this device was never asked is another matter.
    b = ModuleBuilder()
    other = canonicalize(b.finish(b.conv("c", b.input("image", (1, 8, 14, 14)), 8)))
    with pytest.raises(TuningError, match=r"never measured \(conv2d\); tune first"):
        tune_model(other, TARGET, tmp_path, require_cached=True)


def test_a_workbench_that_cannot_be_leaves_no_folder(tmp_path, faked, monkeypatch):
    @contextlib.contextmanager
    def broken(*_):
        raise TuningError("no device")
        yield

    monkeypatch.setattr(tune_module, "_workbench", broken)
    with pytest.raises(TuningError, match="no device"):
        tune_model(module(), TARGET, tmp_path / "none")
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("seed", [0, 7, 9])
def test_what_was_asked_for_is_known_to_the_next_run(tmp_path, faked, monkeypatch, seed):
    """A clock of which no two answers are alike: with the budget spent, the same command repeats nothing."""
    rng, mod = random.Random(seed), canonicalize(cross_pair(size=14))
    tune_model(mod, TARGET, tmp_path / "other", trials=64)
    (other,) = WorkDir(tmp_path / "other").places()
    sizes = {trial.kernel: len(trial.operators) for trial in other.records()}

    def time(kernel, *rest):
        """About the same for a group and for its operators one by one."""
        middle = 9 + 2 * zlib.crc32(repr((seed, kernel, rest)).encode()) / 2**32
        return sizes.get(kernel, 7) * middle * (1 + abs(rng.gauss(0, 0.05)))

    monkeypatch.setattr(faked, "time", time)
    work = tmp_path / "work"
    first = tune_model(mod, TARGET, work, trials=24)
    (place,) = WorkDir(work).places()
    (summary,) = load_summaries(place.folder)
    lines = (place.folder / "trials.jsonl").read_text()
    assert set(Proposal(*dataclasses.astuple(note)) for note in summary.asked)
    again = tune_model(mod, TARGET, work, trials=24)
    assert (place.folder / "trials.jsonl").read_text() == lines
    assert again.plan.groups == first.plan.groups and again.trials == first.trials
    assert plan_from_records(mod, TARGET, place.records()).groups == first.plan.groups


def test_what_was_asked_of_another_graph_is_not_known():
    note = GroupNote("vertical", ("a", "b"), ("a",), (("a", "b"),), 2, (), ())
    graphs = [from_relax(mod).graph for mod in (module(), canonicalize(cross_pair(size=14)))]
    digests = [graph_digest(graph) for graph in graphs]
    fields = ("llvm", "float32", "cpu", "", 3, 9, "stopped", (4, 2), 1)
    runs = [Summary(n, *fields, graph=d, asked=(note,)) for n, d in zip("ab", digests, strict=True)]
    (found,) = asked_before(graphs[0], runs)
    assert notes_of([found], []) == (note,) and not notes_of([found], [found])
    assert asked_before(graphs[1], runs) and not asked_before(graphs[1], runs[:1])


def test_summaries_survive_json_and_damage(tmp_path, recwarn):
    note = GroupNote(
        "cross", ("a", "b"), (), (("a",), ("b",)), 1, (("vertical", ("a",)),), (("form", "x"),)
    )
    values = ("m", "llvm", "float32", "cpu", "", 3, 9, "stopped", (4, 2), 1)
    summary = Summary(*values, graph="0123", asked=(note,))
    assert Summary.from_json(summary.to_json()) == summary
    save_summary(tmp_path, summary)
    assert load_summaries(tmp_path) == [summary] and not recwarn.list
    newer = json.dumps({**json.loads(summary.to_json()), "schema": 2})
    for number, text in enumerate(["", "[]", '{"schema":1}', newer, "{" * 9999]):
        (tmp_path / "models" / f"{number}.json").write_text(text)
    with pytest.warns(UserWarning, match=r"4\.json is damaged or of another release"):
        assert load_summaries(tmp_path) == [summary]


def test_a_summary_that_cannot_be_written_is_one_sentence(tmp_path):
    (tmp_path / "models").write_text("a file")
    summary = Summary("m", "llvm", "float32", "cpu", "", 3, 9, "stopped", (4, 2), 1)
    with pytest.raises(DatabaseError, match="cannot write"):
        save_summary(tmp_path, summary)
