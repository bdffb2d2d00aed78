"""Model families, hot and cold operators: what they shape, and what they must not change."""

from __future__ import annotations

import pytest

from tvm_fusion.config import PRESETS, STRATEGIES
from tvm_fusion.planner.cost import operator_cost
from tvm_fusion.planner.presets import TIE_ORDER, Heat, family_of, heat_of
from tvm_fusion.testing.blocks import inverted_residual, resnet_bottleneck
from tvm_fusion.testing.modules import ModuleBuilder, parallel_convs, random_module
from tvm_fusion.testing.named_blocks import named_block
from tvm_fusion.testing.plans import DEVICE, graph_of, planned
from tvm_fusion.testing.synthetic_blocks import elementwise_chain
from tvm_fusion.testing.transformer_blocks import bert_block, head_projections


@pytest.mark.parametrize(
    ("module", "family"),
    [
        (inverted_residual(), "small-cnn"),
        (resnet_bottleneck(), "small-cnn"),
        (elementwise_chain(4), "small-cnn"),
        # 2 · 128² · 64 · 64 · 9 = 1.2 GFLOP each
        (parallel_convs(2), "small-cnn"),
        (parallel_convs(3), "large-cnn"),
        (bert_block(sequence=16, hidden=64, heads=2), "transformer"),
        (head_projections(heads=2, tokens=16, hidden=64, width=8), "transformer"),
    ],
)
def test_the_family_is_read_from_the_operators(module, family):
    assert family_of(graph_of(module)) == family
    assert planned(module).preset == family


def test_the_larger_share_of_flops_decides():
    b = ModuleBuilder()
    y = b.conv("conv", b.input("x", (1, 8, 8, 8)), 8)  # 2 · 64 · 8 · 72 = 73,728
    wide = b.dense("product", b.input("y", (64, 64)), 64, bias=False)  # 2 · 64³ = 524,288
    assert family_of(graph_of(b.finish(y, wide))) == "transformer"
    b = ModuleBuilder()
    y = b.conv("conv", b.input("x", (1, 8, 32, 32)), 64)  # 9.4 million
    wide = b.dense("product", b.input("y", (64, 64)), 64, bias=False)
    assert family_of(graph_of(b.finish(y, wide))) == "small-cnn"


@pytest.mark.parametrize("preset", PRESETS[1:])
def test_a_preset_can_be_asked_for(preset):
    assert planned(inverted_residual(), preset=preset).preset == preset
    assert sorted(TIE_ORDER[preset]) == sorted(STRATEGIES)


def test_a_transformer_may_merge_more_projections():
    """24 projections are one product where the model is a transformer, four groups of six elsewhere."""
    module = head_projections(heads=8, tokens=128, hidden=64, width=64)
    (group,) = planned(module).groups
    assert group.members == 24 and group.options["form"] == "merged"
    assert [g.members for g in planned(module, preset="large-cnn").groups] == [6] * 4


@pytest.mark.parametrize("name", ["repvgg", "inception", "bottleneck_projection", "fire"])
def test_a_preset_never_overrides_the_optimum(name):
    """On convolutional blocks, where presets only break ties, the time is the same with all of them."""
    module = named_block(name)
    times = {planned(module, preset=p).totals.predicted_us_after for p in PRESETS}
    assert len(times) == 1


@pytest.mark.parametrize("seed", range(10))
def test_presets_on_random_graphs(seed):
    module = random_module(seed, operators=30)
    times = [planned(module, preset=p).totals.predicted_us_after for p in PRESETS[1:3]]
    assert times[0] == times[1]


def test_hot_operators_take_most_of_the_time():
    graph = graph_of(named_block("inception"))
    heat = heat_of(graph, DEVICE)
    time = {o.name: operator_cost(graph, o, DEVICE).microseconds for o in graph.operators}
    total, hot = sum(time.values()), sum(time[n] for n in heat.hot)
    least = min(time[n] for n in heat.hot)
    assert hot >= 0.8 * total > hot - least
    assert all(time[n] <= least for n in time if n not in heat.hot)


def test_ties_prefer_vertical_where_hot_and_horizontal_where_cold():
    heat = Heat(frozenset({"hot"}))
    for preset in TIE_ORDER:
        assert heat.preference(preset, "vertical", ("hot", "cold")) < min(
            heat.preference(preset, s, ("hot", "cold")) for s in STRATEGIES if s != "vertical"
        )
        assert heat.preference(preset, "horizontal", ("cold",)) < min(
            heat.preference(preset, s, ("cold",)) for s in STRATEGIES if s != "horizontal"
        )
    assert heat.preference("large-cnn", "cross", ("hot",)) < heat.preference(
        "large-cnn", "compound", ("hot",)
    )


def test_groups_are_marked_and_ranked_for_tuning():
    plan = planned(named_block("inception"))
    assert sorted(g.priority for g in plan.groups) == list(range(len(plan.groups)))
    ranked = sorted(plan.groups, key=lambda g: g.priority)
    assert [g.hot for g in ranked] == sorted((g.hot for g in ranked), reverse=True)
    for hot in (True, False):
        times = [g.predicted_us_before for g in ranked if g.hot is hot]
        assert times == sorted(times, reverse=True)
