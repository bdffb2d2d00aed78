"""Inputs whose decision is known: each a small graph, with what the plan must say of it.

What may be fused is tested for a device on which launches cost so much that all of it is; what pays
is tested for a real one.
"""

from __future__ import annotations

import time

import pytest

import tvm_fusion as tf
from tvm_fusion.compat import relax
from tvm_fusion.config import BALANCES
from tvm_fusion.testing.blocks import (
    csp_block,
    depthwise_pointwise,
    fire,
    inception_module,
    inverted_residual,
    residual_block,
    resnet_bottleneck,
    shuffle_unit,
    squeeze_excite,
)
from tvm_fusion.testing.modules import ModuleBuilder, parallel_convs
from tvm_fusion.testing.plans import EAGER, graph_of, planned, solved
from tvm_fusion.testing.synthetic_blocks import (
    conv3d_branches,
    cross_pair,
    diamonds,
    elementwise_chain,
    mixed_convs,
    relaxation_chain,
    summed_loads,
)
from tvm_fusion.testing.transformer_blocks import bert_block, dense_norm_heads

#: Refusals that follow from predicted times.
BY_COST = {"slower_predicted", "parts_better", "overlaps_better"}
#: Output channels in turn, for any number of members.
CHANNELS = (16, 32, 64, 16, 32, 64, 16, 32)


def eager(module, **options):
    return planned(module, EAGER, **options)


def refused(plan):
    return {r.nodes: r for r in plan.rejected}


def wide(plan):
    return [g for g in plan.groups if g.members > 1]


# A chain that ends in a broadcast.


@pytest.mark.parametrize("depth", [8, 16])
def test_the_cut_falls_just_before_the_broadcast(depth):
    plan = planned(relaxation_chain(depth=depth))
    (group,) = plan.groups
    assert plan.dtype == "float16" and group.strategy == "vertical"
    assert group.nodes[-1] == f"exp{depth - 1}" and len(group.nodes) == 3 * depth
    (refusal,) = plan.rejected
    assert refusal.nodes == (f"exp{depth - 1}", "sum")
    assert (refusal.outcome, refusal.reason) == ("unprofitable", "recompute")
    assert refusal.numbers["factor"] == 4096 and "4096 times" in refusal.detail
    assert [(u.node, u.reason) for u in plan.ungrouped] == [("sum", "recompute")]


def test_a_narrow_broadcast_is_no_reason_to_cut():
    (group,) = planned(relaxation_chain(depth=8, rows=64, width=4)).groups
    assert len(group.nodes) == 25


# Parallel 3x3 convolutions with ReLU on [1, C, 14, 14].


@pytest.mark.parametrize("members", range(2, 9))
def test_parallel_convolutions_of_mixed_channels(members):
    plan = eager(mixed_convs(CHANNELS[:members]))
    sizes = [g.members for g in plan.groups]
    assert sizes == {7: [6, 1], 8: [6, 2]}.get(members, [members])
    for group in wide(plan):
        assert (group.strategy, group.options["form"]) == ("compound", "merged")
    told = refused(plan)
    if members <= 6:
        assert told == {}
    else:
        (refusal,) = told.values()
        assert refusal.reason == "group_too_large" and len(refusal.nodes) == members
        assert refusal.numbers == {"members": members, "max_members": 6}


@pytest.mark.parametrize(
    ("options", "numbers"),
    [({"stride": (1, 2)}, "strides"), ({"size": (14, 28)}, "input_shapes")],
)
def test_unequal_members_are_refused_and_stay_vertical(options, numbers):
    plan = eager(mixed_convs([16, 32], **options))
    assert [(g.strategy, g.nodes) for g in plan.groups] == [
        ("vertical", ("conv0", "relu0")),
        ("vertical", ("conv1", "relu1")),
    ]
    refusal = refused(plan)[("conv0", "conv1")]
    assert (refusal.outcome, refusal.reason) == ("unsupported", "shape_mismatch")
    assert numbers in refusal.numbers


def test_those_that_agree_are_still_fused():
    plan = eager(mixed_convs([16, 16, 32], stride=(1, 2, 1)))
    assert [g.nodes for g in wide(plan)] == [("conv0", "relu0", "conv2", "relu2")]
    assert refused(plan)[("conv0", "conv1", "conv2")].reason == "shape_mismatch"


def test_members_that_each_fill_the_chip_stay_apart():
    """256 to 256 channels at 112²: 12,544 positions, hundreds of blocks each."""
    module = mixed_convs([256] * 4, channels=256, size=112)
    plan = planned(module, "cuda:sm_75")
    assert wide(plan) == []
    (refusal,) = [r for r in plan.rejected if len(r.nodes) == 4]
    assert refusal.reason in BY_COST and refusal.numbers["predicted_us_before"] > 0
    # Where one wider convolution is the same kernel with more blocks, they gain the tails of their grids at most.
    apart = planned(module, strategies="vertical").totals.predicted_us_after
    assert 0.95 * apart < planned(module).totals.predicted_us_after <= apart


@pytest.mark.parametrize("join", [None, "add"])
def test_twelve_members_forced_into_one_kernel_are_refused(join):
    """It lost 8 % in the project's sources: on registers or cost, with the numbers.

    Members on inputs of their own are another matter: each has blocks of its own, and 12 of them
    were measured faster in one launch (benchmarks/results/h200-kernels.md).
    """
    module = parallel_convs(12, spatial=14, relu=True, join=join)
    plan = planned(module, max_members=12)
    assert max(g.members for g in plan.groups) < 12
    (refusal,) = [r for r in plan.rejected if len(r.nodes) == 12]
    assert refusal.reason in BY_COST | {"registers", "occupancy", "shared_memory"}
    assert refusal.numbers


def test_without_force_twelve_are_two_groups_of_six():
    plan = eager(parallel_convs(12, spatial=14, relu=True, join=None))
    assert [g.members for g in plan.groups] == [6, 6]
    assert refused(plan)[tuple(f"conv{i}" for i in range(12))].reason == "group_too_large"


# Three-dimensional convolutions: no template merges them.


@pytest.mark.parametrize("kernels", [(3, 3), (3, 1), (1, 3)])
@pytest.mark.parametrize("device", [EAGER, "llvm"], ids=["cuda", "cpu"])
def test_conv3d_branches(kernels, device):
    """1x1x1 then k·k·k in each branch: no crash, and every edge that stays is explained."""
    module = conv3d_branches(kernels=kernels)
    plan = planned(module, device)
    told = refused(plan)
    for i in (0, 1):
        refusal = told[(f"small{i}", f"large{i}")]
        assert refusal.reason == "no_template" and "1x1x1 conv3d" in refusal.detail
        assert plan.group_of(f"large{i}") is plan.group_of(f"relu{i}") is not None
    if kernels[0] == kernels[1]:
        assert plan.group_of("large0").options == {"form": "joined", "join": "add"}
    else:
        # 2 · 512 · 16 · 16 · 27 against the same without the 27
        assert plan.group_of("large0") is not plan.group_of("large1")
        refusal = told[("large0", "large1")]
        assert refusal.reason == "work_ratio" and refusal.numbers["ratio"] > 20


@pytest.mark.parametrize("kernels", [(3, 3), (3, 1)])
def test_conv3d_denied(kernels):
    plan = eager(conv3d_branches(kernels=kernels), deny=["conv3d"])
    assert not any("conv3d" in g.operators for g in plan.groups)
    lone = {u.node for u in plan.ungrouped}
    assert {"small0", "large0", "small1", "large1"} <= lone
    assert refused(plan)[("large0", "relu0")].reason == "denied"
    assert refused(plan)[("large0", "relu0")].numbers == {"pattern": "conv3d"}


def test_one_node_denied():
    plan = eager(conv3d_branches(), deny=["large1"])
    assert plan.group_of("large1") is None
    (denied,) = [r for r in plan.rejected if r.nodes == ("large1", "relu1")]
    assert denied.reason == "denied" and plan.group_of("relu0") is not None
    assert all(r.numbers["pattern"] == "large1" for r in plan.rejected if r.reason == "denied")


# Many operands, long chains: no kernel spills.


def test_twenty_loads_are_planned_as_few_kernels():
    plan = eager(summed_loads())
    assert plan.totals.launches_before == 29 and plan.totals.launches_after <= 8
    sums = {f"sum{i}" for i in range(1, 20)}
    assert any(sums <= set(g.nodes) for g in plan.groups)


@pytest.mark.nvcc
@pytest.mark.parametrize(
    "module",
    [summed_loads(), elementwise_chain(200), relaxation_chain(depth=16, rows=256, width=256)],
    ids=["loads", "chain", "relaxation"],
)
def test_no_kernel_spills(module):
    plan = tf.plan(module, "cuda:sm_90", build=True)
    assert plan.groups
    for group in plan.groups:
        assert group.spill_bytes == 0 and 0 < group.registers <= 255 and group.template
    assert not any(r.reason == "spill" for r in plan.rejected)


def test_a_chain_of_200_operators():
    plan = eager(elementwise_chain(200))
    assert [len(g.nodes) for g in plan.groups] == [64, 64, 64, 8]
    told = {r.reason for r in plan.rejected}
    assert plan.ungrouped == () and told <= {"group_too_large", *BY_COST, "no_template"}


# Thousands of operators.


def planning_time(operators):
    """Processor seconds of one plan, the graph's own indices included."""
    graph = graph_of(diamonds(operators))
    started = time.process_time()
    plan = planned(graph)
    spent = time.process_time() - started
    assert sum(len(g.nodes) for g in plan.groups) + len(plan.ungrouped) == operators
    assert plan.totals.launches_after <= operators // 25
    assert plan.search.bounded == 0
    return spent


def test_thousands_of_operators_in_diamonds():
    """The goals are 2 s for 5,000 operators and 4 times the time of 2,000; a busy machine may take twice."""
    small, large = min(planning_time(2000) for _ in range(2)), planning_time(5000)
    assert large < 4.0
    assert large < 8 * small


# Branches of unequal work, with each kind of balance.


@pytest.mark.parametrize("balance", BALANCES)
@pytest.mark.parametrize("ratio", [1, 2, 3, 4])
def test_work_ratios(ratio, balance):
    """Two inputs, so that no common convolution exists: above 1:3 only warps can balance them."""
    plan = eager(cross_pair(ratio=ratio), balance=balance)
    if ratio <= 3 or balance == "warps":
        (group,) = plan.groups
        assert group.members == 2 and len(group.nodes) == 7
        # equal branches of one input are siblings, too, and merge into one convolution
        assert group.strategy == ("cross" if ratio > 1 else "compound")
        assert group.options.get("balance") == ("warps" if ratio > 3 else None)
    else:
        assert [g.strategy for g in plan.groups] == ["vertical", "vertical"]
        refusal = refused(plan)[("heavy_conv", "light_conv")]
        assert (refusal.strategy, refusal.reason) == ("cross", "work_ratio")
        assert refusal.numbers["ratio"] == pytest.approx(4, abs=0.02)
        assert ("cannot be padded" in refusal.detail) == (balance == "pad")


@pytest.mark.parametrize("balance", BALANCES)
def test_unequal_kernels_of_one_input(balance):
    plan = eager(cross_pair(kernels=(3, 1)), balance=balance)
    if balance == "refuse":
        assert not any({"heavy_conv", "light_conv"} <= set(g.nodes) for g in plan.groups)
        assert refused(plan)[("heavy_conv", "light_conv")].reason == "work_ratio"
        return
    (group,) = plan.groups
    assert group.strategy == "cross" and group.options["balance"] == balance
    assert group.options["form"] == ("merged" if balance == "pad" else "joined")


@pytest.mark.parametrize("balance", BALANCES)
def test_a_shortcut_without_work_needs_no_balance(balance):
    (group,) = eager(residual_block(size=14), balance=balance).groups
    assert group.strategy == "cross"
    assert group.options == {"form": "joined", "join": "add", "shortcut": "identity"}


# Blocks of well-known networks.


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_split_channels_with_a_shortcut_on_one_half(dtype):
    """The residual reads a slice, which is also a branch of the concatenation."""
    plan = eager(csp_block(dtype=dtype))
    group = plan.group_of("cat")
    assert group.strategy == "cross" and "shortcut" in group.nodes
    assert group.options == {"form": "partitioned", "join": "concat", "shortcut": "identity"}
    assert plan.group_of("halves") is None
    assert plan.totals.launches_after == 4


def test_a_bottleneck():
    plan = eager(resnet_bottleneck())
    last = plan.group_of("out")
    assert plan.totals.launches_before == 10 and plan.totals.launches_after <= 3
    assert plan.ungrouped == () and {"expand_conv", "expand_bias", "shortcut"} <= set(last.nodes)
    # an identity shortcut is an operand of the join; two anchors in one kernel are vertical
    assert last.strategy == ("vertical" if last.options["form"] == "back_to_back" else "cross")
    assert refused(plan)[("reduce_relu", "middle_conv")].reason == "no_template"


def test_a_bottleneck_without_pairs():
    plan = eager(resnet_bottleneck(channels=2048, width=512, size=7))
    last = plan.group_of("out")
    assert last.nodes == ("expand_conv", "expand_bias", "shortcut", "out")
    assert last.options == {"form": "joined", "join": "add", "shortcut": "identity"}
    assert [g.strategy for g in plan.groups] == ["vertical", "vertical", "cross"]
    (region,) = plan.regions
    assert region.kind == "parallel" and region.groups == tuple(g.id for g in plan.groups)


def test_a_strided_bottleneck_joins_its_projection():
    plan = eager(resnet_bottleneck(width=128, stride=2, projection=True))
    assert plan.totals.launches_before == 12 and plan.totals.launches_after <= 4
    assert refused(plan)[("reduce_conv", "project_conv")].reason == "shape_mismatch"
    assert plan.ungrouped == ()


def test_squeeze_and_excite():
    """The global pool stays a kernel of its own; the gate and what it multiplies share one."""
    for dense in (False, True):
        assert eager(squeeze_excite(dense=dense, residual=True)).totals.launches_after == 3
        # Left to itself the planner may also put the two dense layers into one kernel.
        config = {"deny": ("fc1*",), "max_depth": 64}
        plan = eager(squeeze_excite(dense=dense, residual=True), **config)
        assert plan.group_of("pool") is None
        group = plan.group_of("scale")
        assert group.strategy == "cross" and group.options["join"] == "multiply"
        assert {"gate", "shortcut", "out"} <= set(group.nodes)


def test_an_inception_module():
    plan = eager(inception_module())
    (merged,) = wide(plan)
    assert merged.strategy == "compound" and merged.options["form"] == "merged"
    heads = {branch[0] for branch in merged.branches}
    assert heads == {"one_conv", "reduce3_conv", "reduce5_conv"}
    assert plan.totals.launches_before == 20 and plan.totals.launches_after <= 6
    for name in ("three", "five", "pooled"):
        assert plan.group_of(f"{name}_conv") is plan.group_of(f"{name}_relu")
    assert {r.kind for r in plan.regions} == {"serial", "parallel"}


def test_a_mobile_block():
    plan = eager(inverted_residual())
    assert plan.totals.launches_before == 9 and plan.totals.launches_after == 2
    (pair,) = [g for g in plan.groups if g.options.get("form") == "back_to_back"]
    assert {"depthwise_conv", "project_conv", "shortcut"} <= set(pair.nodes)
    assert pair.anchors == 2 and pair.strategy == "vertical"


def test_depthwise_and_pointwise_are_one_kernel():
    (group,) = eager(depthwise_pointwise()).groups
    assert group.options == {"form": "back_to_back"} and len(group.nodes) == 6
    assert group.intensity_before < 3 and group.intensity_after > 12


def test_a_fire_module():
    plan = eager(fire())
    assert plan.totals.launches_before == 10 and plan.totals.launches_after == 2
    group = plan.group_of("cat")
    assert group.members == 2 and group.options["join"] == "concat"
    assert group.strategy in ("compound", "cross")
    told = refused(plan)
    # each branch is told of by its own convolution: 1x1 and 1x1 could share a kernel, were it alone
    large, small = (told[("squeeze_relu", n)] for n in ("three_conv", "one_conv"))
    assert large.reason == "no_template" and "3x3 conv2d (three_conv)" in large.detail
    assert small.reason == "overlaps_better" and "needed elsewhere" in small.detail


def test_a_shuffle_unit():
    plan = eager(shuffle_unit())
    assert plan.totals.launches_after == 4
    assert [u.op for u in plan.ungrouped] == ["permute_dims"]
    group = plan.group_of("out")
    assert group.strategy == "cross" and group.options["shortcut"] == "identity"
    strided = eager(shuffle_unit(stride=2))
    assert strided.totals.launches_after <= 6


def test_a_transformer_block():
    """BERT-base sizes: projections merged, products with softmax and norms, the rest explained."""
    plan = eager(bert_block())
    assert plan.preset == "transformer"
    projections = plan.group_of("query")
    assert projections is plan.group_of("key") is plan.group_of("value")
    assert projections.options == {"form": "merged", "join": "apart"} and projections.members == 3
    for product, row in (("scores", "softmax"), ("output", "attention_norm"), ("ffn2", "ffn_norm")):
        group = plan.group_of(row)
        assert group is plan.group_of(product) and group.options == {"form": "anchor_row"}
    assert plan.group_of("ffn1") is plan.group_of("gelu") is not None
    assert plan.totals.launches_before == 25 and plan.totals.launches_after == 10
    assert {u.op for u in plan.ungrouped} == {"permute_dims", "matmul"}
    (parallel,) = [r for r in plan.regions if r.kind == "parallel"]
    assert set(parallel.groups) == {g.id for g in plan.groups}


def test_dense_layers_with_norms():
    (group,) = eager(dense_norm_heads()).groups
    assert (group.strategy, group.members) == ("compound", 4)
    assert group.options == {"form": "partitioned", "join": "apart"}


def test_every_strategy_is_chosen_somewhere():
    modules = (inception_module(), residual_block(size=14), parallel_convs(4), dense_norm_heads())
    chosen = {c.proposal.strategy for m in modules for c in solved(m, EAGER).chosen}
    assert chosen == {"vertical", "horizontal", "cross", "compound"}


def test_padding_does_not_reach_a_concatenated_shortcut():
    """Its channels are copied: there are no weights of its own to merge with the branches'."""
    b = ModuleBuilder()
    x = b.input("x", (1, 8, 14, 14))
    wide, narrow = b.conv("wide", x, 8, 3), b.conv("narrow", x, 8, 1)
    module = b.finish(b.op("cat", relax.op.concat([x, wide, narrow], axis=1)))
    forms = {g.options.get("form") for g in eager(module, balance="pad").groups}
    assert "merged" not in forms
