"""Plans of small graphs: groups, counts, refusals, JSON."""

from __future__ import annotations

import dataclasses
import itertools
import json

import pytest

from tvm_fusion.compat import relax
from tvm_fusion.config import BALANCES, PRESETS, STRATEGIES
from tvm_fusion.errors import PlanError
from tvm_fusion.guards.base import OUTCOMES, REASONS
from tvm_fusion.planner import Plan
from tvm_fusion.planner.assemble import proposals_of
from tvm_fusion.testing.blocks import resnet_bottleneck
from tvm_fusion.testing.modules import ModuleBuilder, parallel_convs, random_module
from tvm_fusion.testing.named_blocks import NAMED_BLOCKS, named_block
from tvm_fusion.testing.plans import graph_of, planned, solved
from tvm_fusion.testing.transformer_blocks import dense_norm_heads


def test_the_four_convolutions():
    """Four convolutions, summed: 7 launches and 34 MiB become 1 launch and 4 MiB plus the weights."""
    plan = planned(parallel_convs(4, dtype="float16"))
    weights = 4 * 64 * 64 * 9 * 2
    assert (plan.totals.launches_before, plan.totals.launches_after) == (7, 1)
    assert plan.totals.bytes_before == 34 * 2**20 + weights
    assert plan.totals.bytes_after == 4 * 2**20 + weights
    (group,) = plan.groups
    assert (group.strategy, group.options) == ("horizontal", {"form": "collapsed", "join": "add"})
    assert group.flops_after * 4 < group.flops_before + 4 * 2**20


def test_branches_of_chains_are_compound():
    """Vertical in each branch, then horizontal over the branches; the parts say so."""
    (group,) = planned(parallel_convs(4, relu=True, channels=16, spatial=14, join=None)).groups
    assert group.strategy == "compound" and group.options["form"] == "merged"
    assert [(p.strategy, p.nodes) for p in group.parts] == [
        *(("vertical", (f"conv{i}", f"relu{i}")) for i in range(4)),
        ("horizontal", ("conv0", "conv1", "conv2", "conv3")),
    ]
    assert all(0 < p.predicted_us < group.predicted_us_before for p in group.parts)
    (group,) = planned(parallel_convs(4, channels=16, spatial=14, join=None)).groups
    assert group.strategy == "horizontal" and group.parts == ()


@pytest.mark.parametrize(
    ("members", "launches", "sizes"), [(6, 1, [6]), (7, 2, [6, 1]), (8, 2, [6, 2])]
)
def test_more_branches_than_the_limit(members, launches, sizes):
    plan = planned(parallel_convs(members, relu=True, channels=16, spatial=14, join=None))
    assert plan.totals.launches_after == launches
    assert [g.members for g in plan.groups] == sizes
    told = {r.reason for r in plan.rejected}
    assert told == (set() if members <= 6 else {"group_too_large"})


@pytest.mark.parametrize("members", [7, 8, 12])
def test_a_long_sum_is_in_no_group_larger_than_the_limit(members):
    plan = planned(parallel_convs(members, relu=True, channels=16, spatial=14))
    assert max(g.members for g in plan.groups) == 6
    (told,) = [r for r in plan.rejected if len(r.nodes) == members]
    assert told.reason == "group_too_large"
    assert told.numbers == {"members": members, "max_members": 6}


def test_twenty_summed_convolutions_collapse_whatever_the_limit():
    plan = planned(parallel_convs(20, channels=8, spatial=14))
    assert plan.totals.launches_after == 1 and plan.groups[0].members == 20


@pytest.mark.parametrize("denied", [(), ("*",)])
def test_edges_of_views_are_not_told_of(denied):
    """They have no kernel; what stops two operators with views between them is said of the node (`explain`)."""
    b = ModuleBuilder()
    x = b.conv("conv", b.input("x", (1, 8, 6, 6)), 8)
    view = b.op("view", relax.op.reshape(x, (8, 36)))
    graph = graph_of(b.finish(b.op("row", relax.op.nn.softmax(b.relu("relu", view)))))
    working = {o.name for o in graph.operators if o.does_work}
    assert working == {"conv", "relu", "row"}
    plan = planned(graph, deny=denied)
    told = {r.nodes for r in plan.rejected}
    assert all(working.issuperset(nodes) for nodes in told)
    assert (("relu", "row") in told) is bool(denied)


def test_towers_of_other_shape_are_refused_and_stay_vertical():
    b = ModuleBuilder()
    x, y = b.input("x", (1, 8, 16, 16)), b.input("y", (1, 8, 8, 8))
    plan = planned(b.finish(b.relu("r0", b.conv("c0", x, 8)), b.relu("r1", b.conv("c1", y, 8))))
    assert [g.strategy for g in plan.groups] == ["vertical", "vertical"]
    assert [(r.reason, r.nodes) for r in plan.rejected] == [("shape_mismatch", ("c0", "c1"))]


def test_a_bottleneck_without_pairs_of_anchors():
    """Vertical alone, each convolution its own kernel: three chains, the last one with the sum."""
    module = resnet_bottleneck(channels=64, width=16, size=14)
    plan = planned(module, strategies="vertical", max_depth=4, max_recompute=1.0)
    assert [g.nodes for g in plan.groups] == [
        ("reduce_conv", "reduce_bias", "reduce_relu"),
        ("middle_conv", "middle_bias", "middle_relu"),
        ("expand_conv", "expand_bias", "shortcut", "out"),
    ]
    refused = {r.nodes: r.reason for r in plan.rejected}
    assert refused[("reduce_relu", "middle_conv")] == "no_template"
    assert len(refused) == 2


def test_products_with_norms_are_two_launches():
    """One wide product and the norms side by side: together they take less time than whole rows in one kernel."""
    products, norms = planned(dense_norm_heads()).groups
    assert (products.strategy, products.options["form"]) == ("compound", "merged")
    assert (norms.strategy, norms.options["form"]) == ("horizontal", "partitioned")
    assert products.members == norms.members == 4


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


def check_plan(module, plan):
    """Groups are disjoint and jointly acyclic, nothing gets lost, and what stays apart is explained."""
    graph = graph_of(module)
    nodes = [n for g in plan.groups for n in g.nodes]
    assert len(nodes) == len(set(nodes))
    assert graph.is_jointly_acyclic([g.nodes for g in plan.groups])
    alone = {u.node for u in plan.ungrouped}
    working = {o.name for o in graph.operators if o.does_work}
    assert (set(nodes) & working) | alone == working and not alone & set(nodes)
    assert plan.operators == len(working)
    assert plan.totals.launches_before == len(working)
    assert plan.totals.launches_after == len(plan.groups) + len(alone)
    for group in plan.groups:
        inside = [n for branch in group.branches for n in branch]
        assert len(inside) == len(set(inside)) and set(inside) <= set(group.nodes)
        assert group.predicted_us_after < group.predicted_us_before
        assert all(set(part.nodes) <= set(group.nodes) for part in group.parts)
    check_refusals(graph, plan)


def check_refusals(graph, plan):
    for refusal in plan.rejected:
        assert refusal.reason in REASONS and refusal.detail and refusal.outcome in OUTCOMES[1:]
    explained = {r.nodes for r in plan.rejected}
    for operator in graph.operators:
        for before in graph.predecessors(operator):
            group = plan.group_of(operator.name)
            inside = group is not None and before.name in group.nodes
            if operator.does_work and before.does_work and not inside:
                assert (before.name, operator.name) in explained
    assert {u.reason for u in plan.ungrouped} <= set(REASONS)


def check_search(plan, solution):
    """The search is exact, and its saving is the plan's."""
    assert plan.search.exact == plan.search.regions and plan.search.gap_us == 0
    saving = plan.totals.predicted_us_before - plan.totals.predicted_us_after
    assert saving == pytest.approx(sum(c.saving for c in solution.chosen), abs=1e-3)


@pytest.mark.parametrize("seed", range(40))
def test_plans_of_random_graphs(seed):
    module = random_module(seed, operators=15 + seed)
    options = {"balance": BALANCES[seed % 3], "preset": PRESETS[seed % 4]}
    device = ("cuda:sm_90", "cuda:sm_75", "llvm")[seed % 3]
    plan = planned(module, device, **options)
    check_plan(module, plan)
    check_search(plan, solved(module, device, **options))
    assert plan == planned(module, device, **options)
    assert Plan.from_json(plan.to_json()) == plan


@pytest.mark.parametrize("name", [n for n in NAMED_BLOCKS if n != "bert_batch8"])
def test_plans_of_the_named_blocks(name):
    """In both widths, each for another device."""
    for dtype, device in (("float32", "cuda:sm_120"), ("float16", "cuda:sm_80")):
        module = named_block(name, dtype)
        plan = planned(module, device)
        check_plan(module, plan)
        assert plan == planned(module, device)


SUBSETS = [s for n in range(1, 5) for s in itertools.combinations(STRATEGIES, n)]


def check_more_is_no_worse(module, **options):
    """Adding a strategy adds candidates; the optimum can only fall."""
    graph = graph_of(module)
    after = {s: planned(graph, strategies=s, **options).totals.predicted_us_after for s in SUBSETS}
    for fewer, more in itertools.permutations(SUBSETS, 2):
        if set(fewer) < set(more):
            assert after[more] <= after[fewer] + 1e-3, f"{fewer} against {more}"


@pytest.mark.parametrize("seed", range(0, 40, 4))
def test_another_strategy_never_costs_time_on_random_graphs(seed):
    check_more_is_no_worse(random_module(seed, operators=25), balance=BALANCES[seed % 3])


@pytest.mark.parametrize("balance", BALANCES)
@pytest.mark.parametrize(
    "name", ["repvgg", "fire", "csp", "bottleneck_projection", "four_convs_relu"]
)
def test_another_strategy_never_costs_time_in_blocks(name, balance):
    check_more_is_no_worse(named_block(name), balance=balance)


@pytest.mark.parametrize("name", ["bottleneck", "dense_norm_heads", "fire", "cross_1_2", "csp"])
def test_a_plan_gives_back_what_was_chosen(name):
    """Through JSON and onto the graph again: the same proposals, anchors and members included."""
    module = named_block(name)
    plan = Plan.from_json(planned(module).to_json())
    assert proposals_of(plan, graph_of(module)) == [c.proposal for c in solved(module).chosen]


def test_the_search_and_the_plan_agree_on_what_is_exact():
    plan = planned(named_block("inception"))
    assert plan.search.regions >= 1 and plan.search.exact == plan.search.regions
    assert (plan.search.bounded, plan.search.gap_us) == (0, 0.0)


def test_a_plan_says_what_float32_products_are_computed_in():
    module = parallel_convs(2, relu=True, layout="NHWC")
    exact, plan = planned(module), planned(module, float32_products="tf32")
    assert (exact.float32_products, exact.precision) == ("float32", "float32")
    assert (plan.float32_products, plan.precision, plan.dtype) == ("tf32", "tf32", "float32")
    assert Plan.from_json(plan.to_json()) == plan
    assert "(tf32)" in str(plan) and "(float32)" in str(exact)
    # Twice the bytes of float16 at half its rate, still much less than on FMA units.
    narrow = planned(parallel_convs(2, relu=True, layout="NHWC", dtype="float16"))
    times = [p.totals.predicted_us_after for p in (narrow, plan, exact)]
    assert times == sorted(times)
    data = json.loads(plan.to_json())
    data["float32_products"] = "tf31"
    with pytest.raises(PlanError, match="unknown float32_products 'tf31'"):
        Plan.from_json(json.dumps(data))
    with pytest.raises(ValueError, match="unknown float32_products 'tf31'; choose from float32"):
        planned(module, float32_products="tf31")


def test_tf32_changes_no_plan_without_float32_products():
    module = parallel_convs(3, relu=True, layout="NHWC", dtype="float16")
    asked = planned(module, float32_products="tf32")
    assert asked.precision == "float16"
    assert dataclasses.replace(asked, float32_products="float32") == planned(module)


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
    other = graph_of(random_module(1))
    with pytest.raises(PlanError, match="which the model lacks"):
        proposals_of(plan, other)


def test_a_strategy_that_was_not_asked_for_is_named():
    """Not a missing template: vertical fusion would join them."""
    module = parallel_convs(1, relu=True, spatial=8)
    for strategies, reasons in (("cross", {"denied"}), ("vertical", set())):
        assert {r.reason for r in planned(module, strategies=strategies).rejected} == reasons
