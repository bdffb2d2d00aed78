"""Plans of small graphs: groups, counts, refusals, JSON."""

from __future__ import annotations

import json

import pytest

from tvm_fusion.compat import relax
from tvm_fusion.config import FusionConfig
from tvm_fusion.devices import device_for
from tvm_fusion.errors import PlanError
from tvm_fusion.graph.relax import from_relax
from tvm_fusion.planner import Plan, TargetInfo
from tvm_fusion.planner.assemble import make_plan, proposals_of
from tvm_fusion.targets import parse_target
from tvm_fusion.testing.modules import ModuleBuilder, parallel_convs, random_module

DEVICE = device_for(parse_target("cuda:sm_90"))


def planned(module, **options):
    graph = from_relax(module).graph
    return make_plan(graph, DEVICE, TargetInfo("cuda", "sm_90"), FusionConfig(**options))


def test_the_four_convolutions():
    """The mission's first row: 7 launches and 34 MiB become 1 launch and 4 MiB plus the weights."""
    plan = planned(parallel_convs(4, dtype="float16"))
    weights = 4 * 64 * 64 * 9 * 2
    assert (plan.totals.launches_before, plan.totals.launches_after) == (7, 1)
    assert plan.totals.bytes_before == 34 * 2**20 + weights
    assert plan.totals.bytes_after == 4 * 2**20 + weights
    (group,) = plan.groups
    assert group.options == {"form": "collapsed", "join": "add"}
    assert group.flops_after * 4 < group.flops_before + 4 * 2**20


def test_the_four_convolutions_with_relu():
    plan = planned(parallel_convs(4, relu=True))
    assert (plan.totals.launches_before, plan.totals.launches_after) == (11, 1)
    assert plan.groups[0].options["form"] == "merged"


@pytest.mark.parametrize(
    ("members", "launches", "sizes"), [(6, 1, [6]), (7, 2, [6, 1]), (8, 2, [6, 2])]
)
def test_more_branches_than_the_limit(members, launches, sizes):
    plan = planned(parallel_convs(members, relu=True))
    assert plan.totals.launches_after == launches
    assert [g.members for g in plan.groups] == sizes
    told = {r.reason for r in plan.rejected}
    assert told == (set() if members <= 6 else {"group_too_large"})


def test_twenty_summed_convolutions_collapse_whatever_the_limit():
    plan = planned(parallel_convs(20, channels=8, spatial=14))
    assert plan.totals.launches_after == 1 and plan.groups[0].members == 20


def test_towers_of_other_shape_are_refused_and_stay_vertical():
    b = ModuleBuilder()
    x, y = b.input("x", (1, 8, 16, 16)), b.input("y", (1, 8, 8, 8))
    plan = planned(b.finish(b.relu("r0", b.conv("c0", x, 8)), b.relu("r1", b.conv("c1", y, 8))))
    assert [g.strategy for g in plan.groups] == ["vertical", "vertical"]
    assert [(r.reason, r.nodes) for r in plan.rejected] == [("shape_mismatch", ("c0", "c1"))]


def test_a_bottleneck_is_all_vertical():
    b = ModuleBuilder()
    x = b.input("x", (1, 64, 14, 14))
    y = b.relu("r1", b.bias("b1", b.conv("c1", x, 16, 1)))
    y = b.relu("r2", b.bias("b2", b.conv("c2", y, 16, 3)))
    y = b.bias("b3", b.conv("c3", y, 64, 1))
    plan = planned(b.finish(b.relu("r3", b.add("add", y, x))))
    assert [g.nodes for g in plan.groups] == [
        ("c1", "b1", "r1"),
        ("c2", "b2", "r2"),
        ("c3", "b3", "add", "r3"),
    ]
    assert {r.reason for r in plan.rejected} == {"no_template"}


def test_strategies_can_be_left_out():
    module = parallel_convs(4, relu=True, spatial=16)
    assert {g.strategy for g in planned(module, strategies="vertical").groups} == {"vertical"}


def test_a_denied_node_stays_alone():
    plan = planned(parallel_convs(4, relu=True, spatial=16), deny=("conv2",))
    assert plan.group_of("conv2") is None
    assert any(u.node == "conv2" for u in plan.ungrouped)
    assert "denied" in {r.reason for r in plan.rejected}


def test_an_opaque_operator_is_named():
    b = ModuleBuilder()
    cum = b.op("cum", relax.op.cumsum(b.relu("r", b.input("x", (4, 4))), axis=1))
    plan = planned(b.finish(cum))
    assert ("cum", "cumsum", "unsupported_op") in {(u.node, u.op, u.reason) for u in plan.ungrouped}


def test_recompute_names_the_factor():
    b = ModuleBuilder()
    x, big = b.input("x", (4096, 1)), b.input("big", (4096, 4096))
    y = b.op("add", relax.op.add(big, b.op("exp", relax.op.exp(b.op("neg", relax.op.negative(x))))))
    (refusal,) = planned(b.finish(y)).rejected
    assert refusal.reason == "recompute" and refusal.numbers["factor"] == 4096


@pytest.mark.parametrize("seed", range(30))
def test_plans_of_random_graphs(seed):
    """Groups are disjoint and jointly acyclic, nothing gets lost, and the same graph gives the same plan."""
    module = random_module(seed, operators=25)
    graph = from_relax(module).graph
    plan = planned(module)
    nodes = [n for g in plan.groups for n in g.nodes]
    assert len(nodes) == len(set(nodes))
    assert graph.is_jointly_acyclic([g.nodes for g in plan.groups])
    alone = {u.node for u in plan.ungrouped}
    assert set(nodes) | alone == {o.name for o in graph.operators if o.does_work}
    assert plan.totals.launches_after == len(plan.groups) + len(alone)
    assert plan.totals.predicted_us_after <= plan.totals.predicted_us_before
    assert plan == planned(module)
    # every edge between working operators is inside a group or explained
    explained = {r.nodes for r in plan.rejected}
    for operator in graph.operators:
        for before in graph.predecessors(operator):
            group = plan.group_of(operator.name)
            inside = group is not None and before.name in group.nodes
            assert inside or (before.name, operator.name) in explained


def test_json_round_trip():
    plan = planned(parallel_convs(8, relu=True, spatial=16))
    assert Plan.from_json(plan.to_json()) == plan
    assert json.loads(plan.to_json())["schema"] == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d.update(schema=7), "reads schema 1"),
        (lambda d: d.pop("target"), "'target' is missing"),
        (lambda d: d.pop("groups"), "'groups' is missing"),
        (lambda d: d.update(dtype="zz"), "unknown dtype"),
        (lambda d: d["groups"].append(d["groups"][0]), "two groups of the id"),
        (lambda d: d["groups"][0].update(id="main"), "cannot be the id"),
        (lambda d: d["groups"][0].update(strategy="diagonal"), "unknown strategy"),
        (lambda d: d["groups"][0].update(options={"form": "zz"}), "unknown options"),
        (lambda d: d["groups"][0].update(options={"bogus": "1"}), "unknown options"),
        (lambda d: d["groups"][0].update(id=5), "is 5, not a str"),
        (lambda d: d["groups"][0].update(options=None), "not an object"),
        (lambda d: d["groups"][0].update(options=[]), "not an object"),
        (lambda d: d["groups"][0].update(branches=[["zz"]]), "not of its nodes"),
        (lambda d: d["groups"][0].update(branches=[]), "not of its nodes"),
        (lambda d: d["groups"][0].update(depth=True), "is True, not a int"),
        (lambda d: d["groups"][0].update(nodes=["conv0"]), "of its nodes|other nodes"),
        (lambda d: d.update(groups=3), "not a list"),
        (lambda d: d["groups"][0].pop("nodes"), "incomplete"),
        (lambda d: d["groups"][0].update(colour="red"), "unknown field 'colour'"),
    ],
)
def test_broken_plans_are_refused(change, message):
    data = json.loads(planned(parallel_convs(2, relu=True, spatial=16)).to_json())
    change(data)
    with pytest.raises(PlanError, match=message):
        Plan.from_json(json.dumps(data))
    with pytest.raises(PlanError, match="not JSON"):
        Plan.from_json("{")


def test_a_plan_of_another_model_is_refused():
    plan = planned(parallel_convs(4, relu=True, spatial=16))
    other = from_relax(random_module(1)).graph
    with pytest.raises(PlanError, match="which the model lacks"):
        proposals_of(plan, other)
