"""What is explored: depths, strategies and other groupings, each group once."""

from __future__ import annotations

import dataclasses

import pytest

from tvm_fusion.config import STRATEGIES, FusionConfig
from tvm_fusion.planner.compare import kernel_of
from tvm_fusion.planner.planner import solve
from tvm_fusion.testing.blocks import inception_module, residual_block, resnet_bottleneck
from tvm_fusion.testing.modules import ModuleBuilder, parallel_convs, random_module
from tvm_fusion.testing.plans import DEVICE, graph_of
from tvm_fusion.testing.synthetic_blocks import concatenated_sums, cross_pair, elementwise_chain
from tvm_fusion.testing.transformer_blocks import bert_block
from tvm_fusion.tuning.candidates import DEPTHS, explore, floor_microseconds


def chain():
    """Two convolutions, each with three pointwise operators."""
    b = ModuleBuilder()
    y = b.input("x", (1, 8, 14, 14))
    for i in range(2):
        y = b.relu(f"relu{i}", b.bias(f"bias{i}", b.conv(f"conv{i}", y, 8)))
        y = b.bias(f"shift{i}", y)
    return b.finish(y)


MODULES = {
    "chain": chain,
    "long chain": lambda: elementwise_chain(20),
    "convs": lambda: parallel_convs(4, spatial=14, relu=True),
    "bottleneck": resnet_bottleneck,
    "residual": residual_block,
    "inception": inception_module,
    "bert": bert_block,
    "sums": concatenated_sums,
    **{f"random {seed}": lambda seed=seed: random_module(seed, 16) for seed in range(8)},
}


@pytest.fixture(params=MODULES.values(), ids=MODULES.keys(), scope="module")
def graph(request):
    """The graph of a module."""
    return graph_of(request.param())


def test_every_group_is_explored_once_and_can_be_a_group(graph):
    found = explore(graph, DEVICE, FusionConfig())
    assert found[0].name == "all" and len({v.name for v in found}) == len(found)
    groups = [p for variation in found for p in variation.proposals]
    kernels = [kernel_of(p) for p in groups]
    assert len(set(kernels)) == len(kernels)
    for proposal in groups:
        assert len(proposal.operators) > 1
        assert graph.is_convex(proposal.operators)
        assert proposal.operators == graph.sort(proposal.operators)


def test_the_first_variation_is_the_plan_of_the_model(graph):
    plan = solve(graph, DEVICE, FusionConfig())
    assert list(explore(graph, DEVICE, FusionConfig())[0].proposals) == [
        c.proposal for c in plan.chosen
    ]


def test_what_each_variation_would_take_is_explored(graph):
    config = FusionConfig()
    found = {
        kernel_of(p) for variation in explore(graph, DEVICE, config) for p in variation.proposals
    }
    varied = [dataclasses.replace(config, max_depth=depth) for depth in DEPTHS]
    varied += [dataclasses.replace(config, strategies=(s,)) for s in STRATEGIES if s != "compound"]
    for one in varied:
        assert {kernel_of(c.proposal) for c in solve(graph, DEVICE, one).chosen} <= found


def test_it_is_the_same_each_time(graph):
    assert explore(graph, DEVICE, FusionConfig()) == explore(graph, DEVICE, FusionConfig())


def test_nothing_goes_beyond_the_limits(graph):
    config = FusionConfig(strategies=("vertical",), max_depth=3, max_operators=4)
    for variation in explore(graph, DEVICE, config):
        for proposal in variation.proposals:
            assert proposal.strategy == "vertical" and len(proposal.operators) <= 4
            assert proposal.depth <= 3


def test_depths_of_a_chain():
    found = {
        v.name: {p.depth for p in v.proposals}
        for v in explore(graph_of(elementwise_chain(20)), DEVICE, FusionConfig())
    }
    assert max(found["depth 2"]) == 2 and max(found["depth 4"]) == 4
    assert max(found["all"]) == 20


def test_a_single_operator_has_nothing_to_explore():
    b = ModuleBuilder()
    found = explore(
        graph_of(b.finish(b.relu("relu", b.input("x", (4, 4))))), DEVICE, FusionConfig()
    )
    assert [(v.name, v.proposals) for v in found] == [("all", ())]


def test_no_group_is_taken_to_be_faster_than_its_floor(graph):
    for candidate in solve(graph, DEVICE, FusionConfig()).chosen:
        floor = floor_microseconds(graph, candidate.proposal, DEVICE)
        assert 0 <= floor <= candidate.after.microseconds


@pytest.mark.parametrize(("balance", "there"), [("refuse", True), ("pad", False)])
def test_branches_of_unequal_work_are_explored_joined(balance, there):
    """1:9; what balances them, or that nothing may be joined, is the caller's to say."""
    graph = graph_of(cross_pair(kernels=(3, 1), channels=64, outputs=64))
    config = FusionConfig(balance=balance)
    found = {v.name: v.proposals for v in explore(graph, DEVICE, config)}
    joined = [p for p in found.get("any work ratio", ()) if len(p.members) > 1]
    assert bool(joined) is there
    assert not any(len(p.members) > 1 for p in found["all"]) or not there
    alone = explore(graph, DEVICE, dataclasses.replace(config, strategies=("vertical",)))
    assert "any work ratio" not in {v.name for v in alone}
