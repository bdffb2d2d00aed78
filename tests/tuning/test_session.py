"""Tuning of a model with a compiler and a clock that are not there."""

from __future__ import annotations

import dataclasses
import json
import random
import zlib

import pytest

from tvm_fusion.compat import relax
from tvm_fusion.config import FusionConfig
from tvm_fusion.errors import TuningError
from tvm_fusion.planner.assemble import proposals_of
from tvm_fusion.targets import parse_target, with_variant
from tvm_fusion.testing.modules import ModuleBuilder
from tvm_fusion.testing.synthetic_blocks import concatenated_sums, cross_pair
from tvm_fusion.testing.tuning_fakes import FakeBuilder, FakeReferences, FakeRunner, ok, spills
from tvm_fusion.transform.fuse import apply_plan, plan_module
from tvm_fusion.tuning.describe import describe
from tvm_fusion.tuning.measure import RunResult
from tvm_fusion.tuning.session import Session
from tvm_fusion.tuning.trials import TrialSet
from tvm_fusion.tuning.tune import device_of, plan_from_records, tune_model
from tvm_fusion.tuning.tuner import BATCH, Budget, Tuner
from tvm_fusion.tuning.untuned import plan_from_shipped
from tvm_fusion.tuning.work_dir import WorkDir, record_arch

TARGET = parse_target("llvm")


def chain(blocks=2):
    """Convolution → scale → shift → ReLU, some times."""
    b = ModuleBuilder()
    y = b.input("x", (1, 8, 8, 8))
    for i in range(blocks):
        y = b.conv(f"conv{i}", y, 8)
        y = b.op(f"scale{i}", relax.op.multiply(y, b.const(1, 8, 1, 1)))
        y = b.relu(f"relu{i}", b.bias(f"shift{i}", y))
    return b.finish(y)


class Rig:
    """A session whose candidates take what a function of operators, template and decision says."""

    def __init__(
        self, folder, module, time, *, trials=64, stop=None, fails=None, config=None, after=None
    ):
        self.records = WorkDir(folder).open(record_arch(TARGET.attrs), "float32")
        self.runner = FakeRunner(lambda kernel, *rest: time(self.operators(kernel), *rest), stop)
        builder = FakeBuilder(
            lambda request: fails(self.operators(request.source.kernel), request) if fails else None
        )
        self.tuner = Tuner(
            with_variant(TARGET), builder, FakeReferences(), self.runner, self.records,
            device_of(TARGET, None),
        )  # fmt: skip
        self.session = Session(
            module, TARGET, config or FusionConfig(), self.tuner, Budget(trials), "chain",
            runs=[describe(after.session, "finished")] if after else (),
        )  # fmt: skip
        self.run = self.session.run
        #: What was measured again to settle between the fastest; `runner.ran` is what was searched.
        self.finals, settle = [], self.tuner.settle

        def settled(*arguments):
            before = len(self.runner.ran)
            settle(*arguments)
            self.finals += self.runner.ran[before:]
            del self.runner.ran[before:]

        self.tuner.settle = settled

    def operators(self, kernel):
        """What a kernel computes."""
        return self.tuner.kernels[kernel].operators

    @property
    def total(self):
        """Measured microseconds of the kernels that the plan of the moment calls."""
        return sum(n * self.tuner.best(k).microseconds for k, n in self.session.calls)


def by_depth(**times):
    """Times by the number of operators, and a little by decision."""

    def time(operators, template, decision):
        chance = zlib.crc32(repr((template, sorted(decision.items()))).encode()) / 2**32
        return times[f"n{len(operators)}"] * (1 + 0.3 * chance)

    return time


def depths(plan):
    """Operators of each group."""
    return [len(group.nodes) for group in plan.groups]


def only_four_spill(operators, request):
    """A compiler to which four operators are too many."""
    return spills(request) if len(operators) == 4 else None


@pytest.mark.parametrize(
    ("times", "fails", "found"),
    [
        ({"n1": 10, "n2": 8, "n3": 30, "n4": 1}, only_four_spill, [2, 2, 2, 2]),
        ({"n1": 10, "n2": 19, "n3": 9, "n4": 1}, only_four_spill, [3, 3]),
        ({"n1": 10, "n2": 8, "n3": 30, "n4": 12}, None, [4, 4]),
        ({"n1": 10, "n2": 30, "n3": 50, "n4": 70}, only_four_spill, []),
    ],
    ids=["two", "three", "four", "none"],
)
def test_the_depth_follows_the_clock(tmp_path, times, fails, found):
    rig = Rig(tmp_path, chain(), by_depth(**times), fails=fails)
    plan = rig.run()
    assert depths(plan) == found
    assert all(group.evidence == "measured" for group in plan.groups)
    assert rig.tuner.trials <= 64 + BATCH
    if fails and found:
        edges = {r.nodes: r for r in plan.rejected}
        spilled = [r for r in edges.values() if r.reason == "spill"]
        assert spilled and "8 bytes are spilled" in spilled[0].detail


def test_unfused_wins_where_every_group_is_slower(tmp_path):
    plan = Rig(tmp_path, chain(), by_depth(n1=10, n2=25, n3=40, n4=60)).run()
    assert not plan.groups
    inside = [r for r in plan.rejected if r.nodes[0][-1] == r.nodes[1][-1]]
    assert len(inside) == 6 and {r.reason for r in inside} == {"slower_measured"}
    for refusal in inside:
        numbers = refusal.numbers
        assert 40 <= numbers["measured_us_before"] <= 52 and numbers["measured_us_after"] >= 60


def test_the_same_table_gives_the_same_plan(tmp_path):
    time = by_depth(n1=10, n2=12, n3=13, n4=20)
    first, second = (Rig(tmp_path / name, chain(), time) for name in "ab")
    assert first.run() == second.run()
    assert first.runner.ran == second.runner.ran


def test_equal_blocks_are_tuned_once(tmp_path):
    rig = Rig(tmp_path, chain(3), by_depth(n1=10, n2=12, n3=13, n4=20))
    rig.run()
    assert len(rig.runner.ran) == len(set(rig.runner.ran)) == rig.tuner.trials
    assert 0 < len(rig.finals) and set(rig.finals) <= set(rig.runner.ran)
    assert sum(kernel.operators == ("conv2d",) for kernel in rig.tuner.kernels.values()) == 1


def test_killed_and_run_again(tmp_path):
    time = by_depth(n1=10, n2=12, n3=13, n4=20)
    killed = Rig(tmp_path, chain(), time, stop=30)
    with pytest.raises(KeyboardInterrupt):
        killed.run()
    recorded = len(WorkDir(tmp_path).open("x86_64", "float32"))
    assert 0 < recorded <= 30
    # Whatever was measured is usable at once.
    resumed = Rig(tmp_path, chain(), time)
    resumed.session.recall()
    at_the_kill = resumed.total
    assert not resumed.runner.ran
    again = Rig(tmp_path, chain(), time)
    known = {
        json.dumps([t.kernel, t.template, dict(t.decision)]) for t in again.records
    }  # what the fake runner calls them
    plan = again.run()
    assert len(known) == recorded and not known & set(again.runner.ran)
    assert len(again.runner.ran) == again.tuner.trials - recorded
    assert 64 <= again.tuner.trials <= 64 + BATCH
    assert again.total <= at_the_kill
    # Once the budget is spent, running it again measures nothing and changes nothing.
    third = Rig(tmp_path, chain(), time)
    assert third.run() == plan and not third.runner.ran and not third.finals


@pytest.mark.parametrize(("seed", "trials"), [(3, 24), (11, 40), (16, 64)])
def test_a_noisy_clock_measures_nothing_twice(tmp_path, seed, trials):
    """Groups of about the same speed, and a clock of which no two answers are alike: the same command is at its end."""
    rng = random.Random(seed)

    def time(operators, *rest):
        chance = zlib.crc32(repr((seed, operators, rest)).encode()) / 2**32
        middle = (10 + seed) * len(operators) * (0.9 + 0.2 * chance)
        return RunResult("ok", tuple(middle * (1 + abs(rng.gauss(0, 0.05))) for _ in range(5)))

    first = Rig(tmp_path, cross_pair(size=14), time, trials=trials)
    plan = first.run()
    assert describe(first.session, "finished").asked  # or there is nothing to forget
    again = Rig(tmp_path, cross_pair(size=14), time, trials=trials, after=first)
    assert again.run() == plan
    assert not again.runner.ran and not again.finals and again.tuner.trials == first.tuner.trials


def test_a_budget_that_is_too_small_is_exceeded_by_a_batch_at_most(tmp_path):
    rig = Rig(tmp_path, chain(), by_depth(n1=10, n2=12, n3=13, n4=20), trials=2)
    rig.run()
    assert 2 <= rig.tuner.trials <= 2 + BATCH


def test_what_is_on_record_gives_the_same_plan_again(tmp_path):
    rig = Rig(tmp_path, chain(), by_depth(n1=10, n2=8, n3=30, n4=1), fails=only_four_spill)
    plan = rig.run()
    records = WorkDir(tmp_path).open("x86_64", "float32")
    assert plan_from_records(chain(), TARGET, records, name="chain") == plan


def test_records_that_cover_a_model_decide_its_depth(tmp_path):
    rig = Rig(tmp_path, chain(), by_depth(n1=10, n2=8, n3=30, n4=40))
    tuned = rig.run()
    planned = plan_module(chain(), TARGET, FusionConfig(), model="chain")
    shipped = TrialSet(rig.records)
    found = plan_from_shipped(chain(), TARGET, shipped, planned, name="chain")
    assert [g.nodes for g in found.groups] == [g.nodes for g in tuned.groups]
    assert [g.nodes for g in found.groups] != [g.nodes for g in planned.groups]


def test_records_that_cover_half_a_model_decide_nothing(tmp_path):
    rig = Rig(tmp_path, chain(), by_depth(n1=10, n2=8, n3=30, n4=1))
    rig.run()
    planned = plan_module(chain(), TARGET, FusionConfig(), model="chain")
    whole = next(k.digest for k in rig.tuner.kernels.values() if len(k.operators) == 4)
    some = TrialSet(t for t in rig.records if t.kernel != whole)
    assert len(some) < len(rig.records) and max(len(g.nodes) for g in planned.groups) == 4
    for shipped in (some, TrialSet()):
        assert plan_from_shipped(chain(), TARGET, shipped, planned, name="chain") is planned


def test_a_record_of_which_no_template_makes_a_kernel_does_not_count(tmp_path):
    rig = Rig(tmp_path, chain(), by_depth(n1=10, n2=8, n3=9, n4=1))
    assert max(len(g.nodes) for g in rig.run().groups) == 4
    whole = next(k.digest for k in rig.tuner.kernels.values() if len(k.operators) == 4)
    gone = (("tile.of_old", 3),)
    left = TrialSet(
        dataclasses.replace(t, decision=gone) if t.kernel == whole else t for t in rig.records
    )
    planned = plan_module(chain(), TARGET, FusionConfig(), model="chain")
    found = plan_from_shipped(chain(), TARGET, left, planned, name="chain")
    assert all(g.measured_us_after is None for g in found.groups if len(g.nodes) == 4)


def test_require_cached(tmp_path):
    with pytest.raises(TuningError, match="never measured"):
        tune_model(chain(), TARGET, tmp_path, require_cached=True)
    plan = Rig(tmp_path, chain(), by_depth(n1=10, n2=12, n3=13, n4=20)).run()
    found = tune_model(chain(), TARGET, tmp_path, require_cached=True, name="chain")
    assert found.plan == plan and found.trials >= 64 and found.whole is None
    with pytest.raises(TuningError, match="never measured"):
        tune_model(concatenated_sums(size=4), TARGET, tmp_path, require_cached=True)


@pytest.mark.parametrize(
    ("verdict", "reason"), [("wrong", "numerics"), ("crashed", "no_template"), ("timeout", "no_template")]
)  # fmt: skip
def test_a_kernel_that_always_fails_is_left_out_and_named(tmp_path, verdict, reason):
    fine = by_depth(n1=10, n2=8, n3=9, n4=1)

    def time(operators, *rest):
        return RunResult(verdict, (), "why") if len(operators) == 4 else ok(fine(operators, *rest))

    rig = Rig(tmp_path, chain(1), time)
    plan = rig.run()
    assert depths(plan) and 4 not in depths(plan)
    named = [r for r in plan.rejected if r.reason == reason]
    assert named and f"{verdict}): why" in named[0].detail
    failed = [t for t in rig.records if t.verdict == verdict]
    assert failed and {t.operators for t in failed} == {("conv2d", "multiply", "add", "relu")}
    assert all(t.message == "why" for t in failed)


def test_a_group_is_not_given_up_because_its_first_kernel_fails(tmp_path):
    """Of four operators, what would be compiled without tuning is wrong; another way is right, and fastest."""
    fine = by_depth(n1=10, n2=8, n3=9, n4=1)
    seen = []

    def time(operators, *rest):
        if len(operators) < 4:
            return ok(fine(operators, *rest))
        seen.append(rest)
        return RunResult("wrong") if rest == seen[0] else ok(fine(operators, *rest))

    assert depths(Rig(tmp_path, chain(1), time).run()) == [4]


def test_parts_are_tuned_too(tmp_path):
    """A convolution alone is slow as it would be compiled without tuning, and fast otherwise: then no group pays."""
    fine = by_depth(n1=10, n2=25, n3=26, n4=27)
    seen = []

    def time(operators, *rest):
        if operators != ("conv2d",):
            return fine(operators, *rest) / (1 if "conv2d" in operators else 10)
        seen.append(rest)
        return 30.0 if rest == seen[0] else 5.0

    rig = Rig(tmp_path, chain(1), time, trials=128)
    plan = rig.run()
    assert all("conv0" not in group.nodes for group in plan.groups)
    assert len(seen) > 1


def test_trials_go_to_the_kernels_that_the_plan_calls(tmp_path):
    rig = Rig(tmp_path, chain(), by_depth(n1=10, n2=20, n3=25, n4=2))
    rig.run()
    counts = {
        len(k.operators): k.trials for k in rig.tuner.kernels.values() if "conv2d" in k.operators
    }
    assert counts[4] == max(counts.values())


def test_the_plan_never_loses_to_what_was_measured(tmp_path):
    """With a random time for every kernel, the plan is at most a clock's noise slower than any that was explored."""
    for seed in range(4):

        def time(operators, *rest, seed=seed):
            return 1 + 9 * zlib.crc32(repr((seed, operators)).encode()) / 2**32

        rig = Rig(tmp_path / str(seed), concatenated_sums(size=8), time, trials=24)
        plan = rig.run()
        inside = {name for group in plan.groups for name in group.nodes}
        assert inside <= {o.name for o in rig.session.graph.operators}
        for variation in [(), *(v.proposals for v in rig.session.variations)]:
            other = time_of(rig, variation)
            assert time_of(rig, proposals_of(plan, rig.session.graph)) <= other * 1.02


def time_of(rig, groups):
    """Measured microseconds of a model with these groups, the rest one by one."""
    inside = {name for group in groups for name in group.operators}
    rest = [p for p in rig.session._singles() if p.operators[0] not in inside]
    kernels = rig.session.times.kernels_of([*groups, *rest])
    return sum(rig.tuner.best(kernel).microseconds for kernel in kernels)


def test_annotated_modules_are_tuned(tmp_path):
    """Groups that a model brings are seen through: the tuner knows their operators."""
    annotated = apply_plan(chain(), plan_module(chain(), TARGET, FusionConfig()))
    assert len(annotated.get_global_vars()) > 1
    rig = Rig(tmp_path, annotated, lambda operators, *rest: 1.0 * len(operators), trials=16)
    plan = rig.run()
    assert {node for group in plan.groups for node in group.nodes} >= {"conv0", "relu0"}
    assert rig.session.covers(plan)
