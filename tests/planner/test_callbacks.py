"""What the compiler and the clock say takes the place of the estimates, and the choice is made again."""

from __future__ import annotations

import dataclasses

import pytest

from tvm_fusion.guards import Resources, Verdict
from tvm_fusion.planner.assemble import proposals_of
from tvm_fusion.planner.candidates import Timing
from tvm_fusion.strategies.base import depth_of
from tvm_fusion.testing.modules import ModuleBuilder, parallel_convs
from tvm_fusion.testing.plans import DEVICE, graph_of, planned, solved
from tvm_fusion.testing.synthetic_blocks import cross_pair, elementwise_chain, mixed_convs
from tvm_fusion.testing.transformer_blocks import dense_norm_heads
from tvm_fusion.transform.annotate import group_attrs

GOOD = Resources(40, 0, 4096, 256, "fake")
SPILL = Resources(255, 48, 4096, 256, "fake")
LOW = Resources(255, 0, 4096, 96, "fake")  # 2 blocks of 3 warps: 9 % of a multiprocessor

#: Without asynchronous copies, kernels of products need many warps.
SYNCHRONOUS = dataclasses.replace(DEVICE, arch="sm_75")


class Compiler:
    """Answers by a rule and notes what it was asked."""

    def __init__(self, rule):
        self.rule, self.rounds = rule, []

    def __call__(self, proposals):
        self.rounds.append(list(proposals))
        return [self.rule(p) for p in proposals]

    @property
    def asked(self):
        return [p for found in self.rounds for p in found]


def chain():
    b = ModuleBuilder()
    y = b.relu("relu", b.bias("bias", b.conv("conv", b.input("x", (1, 8, 14, 14)), 8)))
    return b.finish(y)


def test_what_the_compiler_says_is_in_the_plan():
    (group,) = planned(chain(), compiler=Compiler(lambda p: GOOD)).groups
    assert (group.registers, group.spill_bytes, group.shared_bytes) == (40, 0, 4096)
    assert group.template == "fake" and group.evidence == "predicted"
    assert group.estimated_registers > 0
    (group,) = planned(chain()).groups
    assert (group.registers, group.spill_bytes, group.shared_bytes) == (None, None, None)


def test_only_chosen_kernels_are_built_and_each_once():
    compiler = Compiler(lambda p: GOOD)
    plan = planned(mixed_convs([16] * 8), compiler=compiler)
    assert [p.operators for p in compiler.asked] == [g.nodes for g in plan.groups]
    assert len(compiler.rounds) == 1


def test_a_compiler_without_an_answer_changes_nothing():
    assert planned(chain(), compiler=Compiler(lambda p: None)) == planned(chain())


def test_a_spill_is_tried_again_through_shared_memory():
    compiler = Compiler(lambda p: GOOD if p.option("stage") else SPILL)
    (group,) = planned(chain(), compiler=compiler).groups
    assert group.nodes == ("conv", "bias", "relu")
    assert group.options == {"stage": "shared"} and group.spill_bytes == 0
    assert [p.option("stage") for p in compiler.asked] == ["", "shared"]


def test_a_group_that_still_spills_is_cut():
    compiler = Compiler(lambda p: SPILL if len(p.operators) > 2 else GOOD)
    plan = planned(chain(), compiler=compiler)
    assert [len(g.nodes) for g in plan.groups] == [2]
    (refusal,) = plan.rejected  # of the edge that was cut
    assert len(refusal.nodes) == 2 and refusal.reason == "spill"
    assert refusal.numbers == {"spill_bytes": 48, "registers": 255}
    first = [(len(p.operators), p.option("stage")) for p in compiler.asked[:2]]
    assert first == [(3, ""), (3, "shared")]


def test_a_pointwise_chain_has_nothing_to_stage():
    compiler = Compiler(lambda p: SPILL)
    assert planned(elementwise_chain(6), compiler=compiler).groups == ()
    assert not any(p.option("stage") for p in compiler.asked)


@pytest.mark.parametrize("operators", [6, 40])
def test_where_everything_spills_nothing_is_fused(operators):
    """Also where more groups spill than the planner asks about: none is chosen unseen."""
    plan = planned(elementwise_chain(operators), compiler=Compiler(lambda p: SPILL))
    assert plan.groups == () and {u.reason for u in plan.ungrouped} == {"spill"}
    assert plan.totals.launches_after == plan.totals.launches_before


def test_a_long_chain_is_cut_to_what_fits():
    compiler = Compiler(lambda p: SPILL if len(p.operators) > 8 else GOOD)
    plan = planned(elementwise_chain(40), compiler=compiler)
    assert plan.totals.launches_after <= 10


def test_no_group_of_a_plan_was_left_unasked():
    compiler = Compiler(lambda p: SPILL if len(p.operators) > 25 else GOOD)
    plan = planned(elementwise_chain(60), compiler=compiler)
    asked = {p.operators for p in compiler.asked}
    assert all(g.nodes in asked and g.spill_bytes == 0 for g in plan.groups)


def test_low_occupancy_drops_the_heaviest_member():
    compiler = Compiler(lambda p: LOW if len(p.members) > 3 else GOOD)
    plan = planned(mixed_convs([16, 64, 32, 8]), SYNCHRONOUS, compiler=compiler)
    wide = [g for g in plan.groups if g.members > 1]
    assert [g.nodes for g in wide] == [("conv0", "relu0", "conv2", "relu2", "conv3", "relu3")]
    assert [g.nodes for g in plan.groups if g.members == 1] == [("conv1", "relu1")]
    (refusal,) = [r for r in plan.rejected if len(r.nodes) == 4]
    assert refusal.reason == "occupancy" and refusal.numbers["source"] == "compiled"


def test_what_is_left_of_a_group_is_a_whole_proposal():
    """Depth, parts and anchors are those of the members that stayed; it can be annotated."""
    module = mixed_convs([16, 64, 32, 8])
    compiler = Compiler(lambda p: LOW if len(p.members) > 3 else GOOD)
    graph = graph_of(module)
    for proposal in proposals_of(planned(module, SYNCHRONOUS, compiler=compiler), graph):
        inside = set(proposal.operators)
        assert all(set(operators) <= inside for _, operators in proposal.parts)
        assert set(proposal.anchors) <= inside
        assert proposal.depth == depth_of(graph, proposal.operators)
        assert group_attrs(proposal)["Primitive"]


def test_two_members_are_not_made_one():
    compiler = Compiler(lambda p: LOW if len(p.members) > 1 else GOOD)
    plan = planned(mixed_convs([16, 16]), SYNCHRONOUS, compiler=compiler)
    assert [g.nodes for g in plan.groups] == [("conv0", "relu0"), ("conv1", "relu1")]


def test_a_kernel_that_cannot_be_built():
    message = "the group became 2 kernels instead of one"
    compiler = Compiler(lambda p: GOOD if len(p.members) == 1 else Resources(error=message))
    plan = planned(dense_norm_heads(heads=2), compiler=compiler)
    assert all(g.members == 1 for g in plan.groups)
    (refusal,) = [r for r in plan.rejected if r.nodes == ("fc0", "fc1")]
    assert (refusal.outcome, refusal.reason) == ("unsupported", "no_template")
    assert refusal.detail == message


def square(proposals):
    """A kernel of n operators takes n² µs: never faster than its operators, unless it is one."""
    return [Timing(float(len(p.operators) ** 2)) for p in proposals]


def test_measured_times_are_in_the_plan():
    def measure(proposals):
        return [Timing(7.0 if len(p.operators) > 1 else 5.0) for p in proposals]

    (group,) = planned(chain(), measure=measure).groups
    assert (group.measured_us_before, group.measured_us_after) == (15.0, 7.0)
    assert group.evidence == "measured"
    assert group.predicted_us_after != 7.0


@pytest.mark.parametrize(
    "module", [chain(), elementwise_chain(40), mixed_convs([16] * 6), parallel_convs(4, spatial=14)]
)
def test_unfused_wins_where_everything_is_slower(module):
    plan = planned(module, measure=square)
    assert plan.groups == ()
    assert plan.totals.launches_after == plan.totals.launches_before
    assert "slower_measured" in {r.reason for r in plan.rejected}


def test_a_measured_refusal_has_both_times():
    plan = planned(chain(), measure=square)
    assert {r.reason for r in plan.rejected} == {"slower_measured"}
    by_nodes = {r.nodes: r.numbers for r in plan.rejected}
    # the largest group that covers each edge: three operators take 9 µs against 1 + 1 + 1
    numbers = {"measured_us_before": 3.0, "measured_us_after": 9.0, "noise_us": 0.0}
    assert by_nodes == {("conv", "bias"): numbers, ("bias", "relu"): numbers}


def test_depth_follows_the_measured_time():
    """A chain of which two operators are faster together and three are not."""

    def measure(proposals):
        return [Timing({1: 10.0, 2: 12.0, 3: 31.0}[len(p.operators)]) for p in proposals]

    plan = planned(chain(), measure=measure)
    assert [len(g.nodes) for g in plan.groups] == [2]
    assert plan.groups[0].measured_us_after == 12.0


def test_a_group_that_is_better_measured_than_predicted_is_kept():
    def measure(proposals):
        return [Timing(1.0 if len(p.members) > 1 else 50.0) for p in proposals]

    (group,) = planned(mixed_convs([16] * 4), measure=measure).groups
    assert group.members == 4 and group.measured_us_after == 1.0


@pytest.mark.parametrize(("noise", "groups"), [(0.5, 1), (1.5, 0)])
def test_a_saving_within_the_noise_is_none(noise, groups):
    """Three operators take 11.1 µs one by one, 10 together, and two together are slow."""

    def measure(proposals):
        times = {1: Timing(3.7), 2: Timing(99.0), 3: Timing(10.0, noise)}
        return [times[len(p.operators)] for p in proposals]

    plan = planned(chain(), measure=measure)
    assert len(plan.groups) == groups
    noises = {r.numbers["noise_us"] for r in plan.rejected}
    assert (1.5 in noises) == (not groups)


@pytest.mark.parametrize(("noise", "depth"), [(0.0, 3), (0.5, 2)])
def test_a_group_stays_only_if_it_beats_its_parts_by_more_than_the_noise(noise, depth):
    """Three operators take 9.5 µs together; two together and one alone take 9.8."""

    def recall(proposals):
        times = {1: Timing(6.0, noise), 2: Timing(3.8, noise), 3: Timing(9.5, noise)}
        return [times[len(p.operators)] for p in proposals]

    plan = planned(chain(), recall=recall)
    assert [len(g.nodes) for g in plan.groups] == [depth]
    told = [r for r in plan.rejected if r.reason == "slower_measured"]
    if depth == 3:
        assert not told
        return
    (numbers,) = {
        tuple(sorted(r.numbers.items())) for r in told if "measured_us_parts" in r.numbers
    }
    assert dict(numbers)["measured_us_after"] == 9.5
    assert dict(numbers)["measured_us_parts"] == 9.8


def test_a_clock_overrules_what_was_predicted():
    """Four convolutions that each fill the chip: the model would not make one kernel of them, the clock does."""
    module = mixed_convs([256] * 4, channels=256, size=112)
    assert all(g.members == 1 for g in planned(module, "cuda:sm_75").groups)

    def recall(proposals):
        return [Timing(1.0 if len(p.operators) > 2 else 10.0) for p in proposals]

    (group,) = planned(module, "cuda:sm_75", recall=recall).groups
    assert group.members == 4 and group.evidence == "measured"


@pytest.mark.parametrize(
    ("us", "known", "joined", "reason"),
    [
        (15.0, True, True, None),
        (190.0, True, False, "slower_measured"),
        (15.0, False, False, "work_ratio"),
    ],
)
def test_a_clock_overrules_the_rule_of_work_ratios(us, known, joined, reason):
    """A 3x3 and a 1x1 convolution of one sum are 1:9; where their joined kernel was measured, that counts."""
    module = cross_pair(kernels=(3, 1), channels=64, outputs=64)

    def recall(proposals):
        times = [
            Timing(us if depth > 2 else 20.0) for depth in (len(p.members) + 1 for p in proposals)
        ]
        whole = [len(p.members) > 1 for p in proposals]
        return [t if known or not w else None for t, w in zip(times, whole, strict=True)]

    plan = planned(module, recall=recall)
    assert any(g.members > 1 for g in plan.groups) is joined
    assert reason is None or reason in {r.reason for r in plan.rejected}


def test_a_guard_is_not_overruled_by_a_clock():
    def recall(proposals):
        return [Timing(1.0 if len(p.operators) > 1 else 10.0) for p in proposals]

    assert all(len(g.nodes) <= 2 for g in planned(chain(), recall=recall, max_operators=2).groups)


def test_what_is_known_to_pay_is_not_refused_by_the_compiler():
    """The compiler judges what would be compiled without tuning; another way to write the kernel was measured."""

    def recall(proposals):
        return [Timing(1.0 if len(p.operators) == 3 else 10.0) for p in proposals]

    (group,) = planned(chain(), compiler=Compiler(lambda p: LOW), recall=recall).groups
    assert len(group.nodes) == 3 and group.registers == LOW.registers
    assert not planned(chain(), SYNCHRONOUS, compiler=Compiler(lambda p: LOW)).groups


def test_what_is_excluded_says_why():
    verdict = Verdict("illegal", "numerics", {"wrong": 3}, "it is wrong")
    key = (("conv", "bias", "relu"), ())
    plan = planned(chain(), excluded={key: verdict})
    assert [len(g.nodes) for g in plan.groups] == [2]
    assert {(r.reason, r.detail) for r in plan.rejected} == {("numerics", "it is wrong")}


def test_all_times_of_a_round_are_asked_for_at_once():
    asked = []

    def measure(proposals):
        asked.append(len(proposals))
        return [Timing(1.0) for _ in proposals]

    planned(mixed_convs([16, 32, 64, 128]), measure=measure)
    assert len(asked) < 6 and max(asked) > 4


def test_what_is_recalled_counts_before_anything_is_chosen():
    """Two operators together are known to be fast: the model alone would take all three."""

    def recall(proposals):
        times = {1: Timing(10.0), 2: Timing(1.0), 3: Timing(29.0)}
        return [times[len(p.operators)] for p in proposals]

    (model,) = planned(chain()).groups
    (known,) = planned(chain(), recall=recall).groups
    assert (len(model.nodes), len(known.nodes)) == (3, 2)
    assert known.measured_us_after == 1.0


def test_an_unknown_time_is_no_refusal():
    def measure(proposals):
        return [None for _ in proposals]

    assert planned(chain(), measure=measure) == planned(chain())


def test_what_the_compiler_refuses_is_not_measured():
    measured = []

    def measure(proposals):
        measured.extend(p for p in proposals if len(p.operators) > 1)
        return [Timing(1.0) for _ in proposals]

    compiler = Compiler(lambda p: SPILL if len(p.operators) > 2 else GOOD)
    planned(chain(), compiler=compiler, measure=measure)
    assert {len(p.operators) for p in measured} == {2}


def test_both_callbacks_are_deterministic():
    def again():
        compiler = Compiler(lambda p: LOW if len(p.members) > 3 else GOOD)
        return planned(
            mixed_convs([16, 64, 32, 8, 16]),
            compiler=compiler,
            measure=lambda ps: [Timing(len(p.operators) ** 0.5) for p in ps],
        )

    assert again() == again()


def test_considered_candidates_keep_what_was_found_out():
    compiler = Compiler(lambda p: SPILL if len(p.operators) > 2 else GOOD)
    solution = solved(chain(), compiler=compiler)
    known = {c.operators: c for c in solution.considered if c.resources is not None}
    assert known[("conv", "bias", "relu")].verdict.reason == "spill"
    assert all(c.verdict.accepted for names, c in known.items() if len(names) == 2)
    assert {len(names) for names in known} == {2, 3}
