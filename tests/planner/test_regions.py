"""Parts of a model that several kernels of different strategies serve."""

from __future__ import annotations

import itertools
import random

import pytest

from tvm_fusion.planner.plan import Group, Region
from tvm_fusion.planner.regions import immediate_dominators, regions_of
from tvm_fusion.testing.blocks import conv_bias_relu, csp_block, resnet_bottleneck
from tvm_fusion.testing.modules import ModuleBuilder, random_module
from tvm_fusion.testing.named_blocks import named_block
from tvm_fusion.testing.plans import graph_of, planned
from tvm_fusion.testing.synthetic_blocks import elementwise_chain
from tvm_fusion.testing.transformer_blocks import bert_block


def group(name, strategy, *nodes):
    return Group(name, strategy, nodes, nodes, 1, 1, 0, (nodes,), {})


def regions(graph, *groups):
    return [(r.kind, r.groups, r.nodes) for r in regions_of(graph, groups)]


def slow_dominators(graph):
    """An operator dominates another where, without it, no path from an input reaches the other."""
    found = []
    for target in graph.operators:
        dominating = []
        for cut in graph.operators[: graph.index[target.name]]:
            reached, todo = set(), [target]
            from_input = False
            while todo:
                operator = todo.pop()
                if operator.name in reached or operator.name == cut.name:
                    continue
                reached.add(operator.name)
                data = [t for t in operator.inputs if not graph.tensors[t].is_constant]
                from_input |= not data or any(t not in graph.producer for t in data)
                todo += graph.predecessors(operator)
            if not from_input:
                dominating.append(graph.index[cut.name])
        found.append(max(dominating, default=-1))
    return found


@pytest.mark.parametrize("seed", range(20))
def test_dominators_of_random_graphs(seed):
    graph = graph_of(random_module(seed, operators=18))
    assert immediate_dominators(graph) == slow_dominators(graph)


def test_a_residual_block_is_one_region():
    graph = graph_of(resnet_bottleneck(channels=64, width=16, size=8))
    first = [o.name for o in graph.operators[:3]]
    last = [o.name for o in graph.operators[6:]]
    inside = tuple(o.name for o in graph.operators[:-1])  # the ReLU follows the join
    groups = group("a", "vertical", *first), group("b", "cross", *last)
    assert regions(graph, *groups) == [("parallel", ("a", "b"), inside)]


def test_groups_of_one_strategy_are_no_compound():
    graph = graph_of(resnet_bottleneck(channels=64, width=16, size=8))
    first = [o.name for o in graph.operators[:3]]
    last = [o.name for o in graph.operators[6:]]
    groups = group("a", "vertical", *first), group("b", "vertical", *last)
    assert regions(graph, *groups) == []
    assert regions(graph) == []


def test_a_chain_has_no_region():
    assert planned(elementwise_chain(20)).regions == ()


def test_one_compound_kernel_is_a_serial_region():
    graph = graph_of(elementwise_chain(4))
    assert regions(graph, group("a", "compound", "op0", "op1")) == [
        ("serial", ("a",), ("op0", "op1"))
    ]
    (region,) = regions_of(graph, [group("a", "compound", "op0", "op1")])
    assert region == Region("serial", ("a",), "op0 … op1", ("op0", "op1"))


def residual_blocks(count):
    b = ModuleBuilder()
    y = b.relu("entry", b.input("x", (1, 8, 8, 8)))
    for i in range(count):
        inner = conv_bias_relu(b, f"first{i}", y, 8)
        y = b.relu(f"out{i}", b.add(f"sum{i}", b.conv(f"second{i}", inner, 8), y))
    return graph_of(b.finish(y))


def test_blocks_one_after_another_are_regions_of_their_own():
    graph = residual_blocks(2)
    groups = []
    for i in range(2):
        first = [f"first{i}_{s}" for s in ("conv", "bias", "relu")]
        groups.append(group(f"a{i}", "vertical", *first))
        groups.append(group(f"b{i}", "cross", f"second{i}", f"sum{i}", f"out{i}"))
    found = regions(graph, *groups)
    assert [(kind, names) for kind, names, _ in found] == [
        ("parallel", ("a0", "b0")),
        ("parallel", ("a1", "b1")),
    ]
    assert found[1][2] == ("first1_conv", "first1_bias", "first1_relu", "second1", "sum1")


def test_the_outermost_split_and_join_is_told():
    """A shortcut around two residual blocks: one region, not three."""
    b = ModuleBuilder()
    x = b.relu("entry", b.input("x", (1, 8, 8, 8)))
    y = x
    for i in range(2):
        y = b.add(f"sum{i}", b.conv(f"conv{i}", y, 8), y)
    graph = graph_of(b.finish(b.add("outer", y, x)))
    groups = group("a", "cross", "conv0", "sum0"), group("b", "vertical", "conv1", "sum1", "outer")
    ((kind, names, nodes),) = regions(graph, *groups)
    assert (kind, names) == ("parallel", ("a", "b"))
    assert nodes == ("conv0", "sum0", "conv1", "sum1", "outer")


def test_the_split_is_not_part_of_the_region():
    graph = graph_of(csp_block(size=8))
    groups = group("a", "vertical", "c1_conv", "c1_bias"), group("b", "cross", "c2_conv", "cat")
    ((_, _, nodes),) = regions(graph, *groups)
    assert "halves" not in nodes and "mix_conv" not in nodes
    assert (nodes[0], nodes[-1]) == ("c1_conv", "cat")


def test_a_transformer_block_is_one_region_with_its_projections():
    """Attention and feed-forward together; the merged projections are a serial region besides."""
    plan = planned(bert_block(sequence=32, hidden=96, heads=4))
    (whole,) = [r for r in plan.regions if r.kind == "parallel"]
    assert {"query", "softmax", "ffn1", "ffn2"} <= set(whole.nodes)
    assert len(whole.groups) == len(set(whole.groups)) >= 3
    serial = [r for r in plan.regions if r.kind == "serial"]
    assert [r.groups for r in serial] == [(g.id,) for g in plan.groups if g.strategy == "compound"]


@pytest.mark.parametrize(
    "name", ["bottleneck_projection", "inception", "squeeze_excite", "shuffle"]
)
def test_regions_of_the_named_blocks(name):
    plan = planned(named_block(name))
    by_id = {g.id: g for g in plan.groups}
    for region in plan.regions:
        served = [by_id[i] for i in region.groups]
        assert all(set(g.nodes) & set(region.nodes) for g in served)
        if region.kind == "parallel":
            assert len({g.strategy for g in served}) > 1
    parallel = [set(r.nodes) for r in plan.regions if r.kind == "parallel"]
    assert not any(a < b for a, b in itertools.permutations(parallel, 2))


@pytest.mark.parametrize("seed", range(15))
def test_regions_of_random_graphs(seed):
    """In topological order, none inside another, each with a join that all of it leads to."""
    graph = graph_of(random_module(seed, operators=30))
    rnd = random.Random(seed)
    groups = [
        group(f"g{i}", rnd.choice(["vertical", "cross"]), o.name)
        for i, o in enumerate(graph.operators)
    ]
    found = [r for r in regions_of(graph, groups) if r.kind == "parallel"]
    starts = [graph.index[r.nodes[0]] for r in found]
    assert starts == sorted(starts)
    for region in found:
        assert region.nodes == graph.sort(region.nodes)
        assert all(graph.depends(region.nodes[-1], n) for n in region.nodes[:-1])
        assert graph.is_convex(region.nodes)
    for left, right in itertools.permutations(found, 2):
        assert not set(left.nodes) <= set(right.nodes)
