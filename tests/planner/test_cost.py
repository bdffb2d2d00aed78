"""Bytes, FLOPs and launches against counts by hand, and what predicted times must obey.

Every number is written out. The project's sources count anchors and feature maps alone; the product
counts every kernel and tensor (docs/plan-schema.md). Where the sources name a figure, both are
checked.
"""

from __future__ import annotations

import dataclasses

import pytest

from tvm_fusion.compat import relax
from tvm_fusion.devices import CPU, DEVICES
from tvm_fusion.planner import cost as cost_module
from tvm_fusion.planner.cost import fused_cost, operator_cost, unfused_cost
from tvm_fusion.strategies.base import Proposal
from tvm_fusion.testing.blocks import (
    depthwise_pointwise,
    repvgg_block,
    resnet_bottleneck,
    segmentation_head,
)
from tvm_fusion.testing.modules import ModuleBuilder, parallel_convs
from tvm_fusion.testing.plans import DEVICE, graph_of, planned
from tvm_fusion.testing.synthetic_blocks import cross_pair, mixed_convs
from tvm_fusion.testing.transformer_blocks import matmul_pair

MIB = 2**20


def anchors_and_maps(graph, groups=()):
    """Bytes as the sources count them: anchors, or groups of them, without weights."""

    def moved(names):
        data = [t for t in graph.external_inputs(names) if not graph.tensors[t].is_constant]
        return sum(graph.tensors[t].nbytes for t in (*data, *graph.external_outputs(names)))

    anchors = [(o.name,) for o in graph.operators if o.pattern == "anchor"]
    return sum(map(moved, groups or anchors))


def totals(plan):
    t = plan.totals
    launches = (t.launches_before, t.launches_after)
    return launches, (t.bytes_before, t.bytes_after), (t.flops_before, t.flops_after)


# The figures that the project set out from (benchmarks/figures.py), row by row.


def test_four_convolutions_summed():
    """4 launches and 16 MB → 1 and 4 MB; as the product counts 7 launches and 34 MiB → 1 and 4 MiB."""
    graph = graph_of(parallel_convs(4, dtype="float16"))
    plan = planned(graph)
    launches, (before, after), (flops, executed) = totals(plan)
    # one map: 128 · 128 · 64 · 2 B = 2 MiB; each convolution reads one and writes one
    assert anchors_and_maps(graph) == 16 * MIB
    assert anchors_and_maps(graph, [g.nodes for g in plan.groups]) == 4 * MIB
    assert sum(o.pattern == "anchor" for o in graph.operators) == 4 and launches == (7, 1)
    # 4 · (2 + 2) of the convolutions, 3 · (2 + 2 + 2) of the additions; 64 · 64 · 9 weights each
    weights = 4 * 64 * 64 * 9 * 2
    assert (before, after) == (34 * MIB + weights, 4 * MIB + weights)
    # 2 · 128² · 64 · (64 · 9) each, and 128² · 64 for each addition; afterwards one convolution
    conv = 2 * 128 * 128 * 64 * 64 * 9
    assert (flops, executed) == (4 * conv + 3 * 128 * 128 * 64, conv)


def test_passes_over_the_map_of_three_convolutions():
    """6 → 2; with the additions 12 → 2."""
    graph = graph_of(parallel_convs(3, dtype="float16"))
    plan = planned(graph)
    _, (before, after), _ = totals(plan)
    one, weights = 2 * MIB, 3 * 64 * 64 * 9 * 2
    assert anchors_and_maps(graph) == 6 * one
    assert anchors_and_maps(graph, [g.nodes for g in plan.groups]) == 2 * one
    assert (before - weights, after - weights) == (12 * one, 2 * one)


def test_four_dense_layers_with_norms():
    """4 launches of each → 1 of each: 8 → 2."""
    b = ModuleBuilder()
    x = b.input("x", (128, 256))
    heads = [b.layer_norm(f"norm{i}", b.dense(f"fc{i}", x, 256, bias=False)) for i in range(4)]
    launches, moved, flops = totals(planned(b.finish(*heads)))
    assert launches == (8, 2)
    # x, and each result: 128 · 256 · 4 B = 131,072; a weight 262,144; scale and shift 2 · 1,024.
    # before, each head: 131,072 + 262,144 + 131,072, then 131,072 + 2,048 + 131,072
    assert moved[0] == 4 * (524_288 + 264_192)
    # after: x once; 4 weights; 4 products written and read; 4 · 2,048 of the norms; 4 results
    assert moved[1] == 131_072 + 4 * 262_144 + 8 * 131_072 + 4 * 2_048 + 4 * 131_072
    # 2 · 128 · 256 · 256 = 16,777,216 a product, 8 · 128 · 256 = 262,144 a norm
    assert flops == (4 * 17_039_360, 4 * 17_039_360)


def test_projections_of_eight_heads():
    """24 launches → 1."""
    b = ModuleBuilder("float16")
    x = b.input("x", (128, 512))
    names = [f"{kind}{i}" for kind in "qkv" for i in range(8)]
    launches, moved, flops = totals(
        planned(b.finish(*(b.dense(n, x, 64, bias=False) for n in names)))
    )
    assert launches == (24, 1)
    # x: 128 · 512 · 2 B = 131,072; a weight 512 · 64 · 2 = 65,536; a result 128 · 64 · 2 = 16,384
    assert moved == (24 * (131_072 + 65_536 + 16_384), 131_072 + 24 * (65_536 + 16_384))
    assert moved[1] == 2 * MIB
    assert flops == (24 * 2 * 128 * 512 * 64,) * 2


@pytest.mark.parametrize(("kept", "before"), [(False, 16), (True, 24)])
def test_convolution_norm_relu_on_a_map_of_4_mib(kept, before):
    """16 → 8 MB with the norm folded into the weights, 24 → 8 with what is left of it kept."""
    b = ModuleBuilder()
    y = b.conv("conv", b.input("x", (1, 64, 128, 128)), 64)  # 64 · 128² · 4 B = 4 MiB
    y = b.relu("relu", b.bias("bias", y) if kept else y)
    launches, moved, _ = totals(planned(b.finish(y)))
    weights = 64 * 64 * 9 * 4 + (64 * 4 if kept else 0)
    assert launches == (3 if kept else 2, 1)
    assert moved == (before * MIB + weights, 8 * MIB + weights)


@pytest.mark.parametrize(
    ("dtype", "layout", "nbytes", "before", "after"),
    [("float16", "NHWC", 2, 4.3, 24.3), ("float32", "NCHW", 4, 2.1, 12.1)],
)
def test_depthwise_and_pointwise(dtype, layout, nbytes, before, after):
    """Alone the depthwise one has 2 to 3 FLOP/B and the pair 15 and more; all operators 4.3 → 24."""
    graph = graph_of(depthwise_pointwise(dtype=dtype, layout=layout))
    plan = planned(graph)
    launches, moved, flops = totals(plan)
    assert launches == (6, 1)
    # maps of 112² · 32 = 401,408 and 112² · 64 = 802,816 values; weights 32 · 9 and 64 · 32, biases
    values = 288 + 32 + 2_048 + 64
    assert moved == (
        # reads and writes of: depthwise, bias, ReLU; pointwise; bias, ReLU
        (6 * 401_408 + 401_408 + 802_816 + 4 * 802_816 + values) * nbytes,
        (401_408 + 802_816 + values) * nbytes,
    )
    # 2 · 401,408 · 9 and 2 · 802,816 · 32; then two operations on each value of both maps
    anchors = 7_225_344 + 51_380_224
    assert flops == (anchors + 2 * 401_408 + 2 * 802_816,) * 2
    assert [round(anchors / m, 1) for m in moved] == [before, after]
    # the sources' counting: the depthwise convolution alone, then the pair fused
    alone = 7_225_344 / anchors_and_maps(graph, [("depthwise_conv",)])
    fused = anchors / anchors_and_maps(graph, [g.nodes for g in plan.groups])
    assert alone == 9 / nbytes and fused == pytest.approx(24.3 if nbytes == 2 else 12.2, abs=0.1)


def test_merging_across_the_branches_of_a_join():
    """Cross fusion saves a kernel, and a map's way to memory and back, beyond vertical fusion."""
    module = cross_pair(ratio=2, size=14)
    alone = planned(module, strategies="vertical").totals
    both = planned(module, strategies="vertical,cross").totals
    assert (alone.launches_after, both.launches_after) == (2, 1)
    assert alone.bytes_after - both.bytes_after == 2 * 4 * 32 * 14 * 14
    assert both.predicted_us_after < alone.predicted_us_after


# Forms whose executed FLOPs or bytes differ from the sum of their operators.


def test_a_joined_cross_group():
    module = resnet_bottleneck(channels=32, width=16, size=8, projection=True, stride=2)
    plan = planned(module, strategies="cross")
    (group,) = plan.groups
    assert group.nodes[-2:] == ("shortcut", "out") and group.members == 2
    # inputs of 16 · 16 and 32 · 64 values; result 64 · 16; weights 64 · 16 and 64 · 32, biases 64
    inputs, result, weights = (256, 2_048), 1_024, (1_024, 64, 2_048, 64)
    pointwise = 2 * 2 * result + 3 * result + 2 * result  # two biases, the sum, the ReLU
    assert group.bytes_before == 4 * (sum(inputs) + 2 * result + pointwise + sum(weights))
    assert group.bytes_after == 4 * (sum(inputs) + result + sum(weights))
    # 2 · 1,024 · 16 and 2 · 1,024 · 32, four pointwise operators
    flops = 32_768 + 65_536 + 4 * 1_024
    assert (group.flops_before, group.flops_after) == (flops, flops)
    assert (group.launches_before, group.launches_after) == (6, 1)


def test_a_padded_pair_that_is_merged():
    """The 1x1 kernel runs as a 3x3 one: its FLOPs count nine times."""
    plan = planned(
        segmentation_head(size=16, channels=16, outputs=8), balance="pad", strategies="cross"
    )
    (group,) = plan.groups
    assert group.options == {"balance": "pad", "form": "merged", "join": "add"}
    # 2 · 256 · 8 · 16 = 65,536 and nine times that; two biases, two ReLUs and a sum of 2,048
    assert group.flops_before == 65_536 + 589_824 + 5 * 2_048
    assert group.flops_after == 2 * 589_824 + 5 * 2_048
    # x: 16 · 256 values, result 8 · 256, weights 8 · 16 · (1 + 9), biases 2 · 8
    assert group.bytes_after == 4 * (4_096 + 2_048 + 1_280 + 16)


def test_a_padded_pair_that_collapses():
    """RepVGG: one 3x3 convolution with the added weights; the identity and the ReLU follow."""
    plan = planned(repvgg_block(size=16, channels=16), balance="pad", strategies="cross")
    (group,) = plan.groups
    assert (group.options["form"], group.options["balance"]) == ("collapsed", "pad")
    # 2 · 4,096 · 16 · 9 = 1,179,648 and a ninth; 2 biases, 2 sums, 1 ReLU of 4,096
    assert group.flops_before == 1_179_648 + 131_072 + 5 * 4_096
    assert group.flops_after == 1_179_648 + 3 * 4_096


def test_two_anchors_back_to_back():
    graph = graph_of(matmul_pair(rows=8192))
    names = tuple(o.name for o in graph.operators)
    proposal = Proposal(
        "vertical", names, ("first", "second"), (names,), 5, (), (("form", "back_to_back"),)
    )
    cost = fused_cost(graph, proposal, DEVICE)
    # [8192, 256] · [256, 64] and [8192, 64] · [64, 256]: 2 · 134,217,728 each; bias and ReLU of
    # 8192 · 64, bias of 8192 · 256. One block of columns holds all 256: nothing is computed twice.
    assert cost.flops == 2 * 268_435_456 + 2 * 524_288 + 2_097_152
    # x and result 2,097,152 values each, weights 16,384 each, biases 64 and 256; no [8192, 64] at all
    assert cost.nbytes == 4 * (2 * 2_097_152 + 2 * 16_384 + 64 + 256)
    assert cost.launches == 1
    before = unfused_cost(graph, names, DEVICE)
    # the inner value is written once and read once, and so are its bias and ReLU
    assert before.nbytes - cost.nbytes == 4 * (6 * 524_288 + 2 * 2_097_152)
    assert (before.launches, before.flops) == (5, cost.flops)


@pytest.mark.parametrize(
    ("form", "members", "factor"),
    [("back_to_back", 1, 3.0), ("joined", 2, 5.0), ("joined", 1, 1.0), ("", 1, 1.0)],
)
def test_the_factor_of_a_form(monkeypatch, form, members, factor):
    """A shortcut is an operand: with one branch a joined kernel is that of a vertical group.

    On a chip whose kernels have no time model of their tiles.
    """
    device = DEVICES["sm_75"]
    forms = {"back_to_back": 3.0, "joined": 5.0, "merged": 7.0}
    rates = dataclasses.replace(cost_module.GPU_RATES, forms=forms, latency={})
    monkeypatch.setattr(cost_module, "GPU_RATES", rates)
    graph = graph_of(parallel_convs(2, channels=16, spatial=56))
    names = ("conv0", "conv1", "add1") if members == 2 else ("conv0",)
    branches = tuple((name,) for name in names[:members])
    options = (("form", form),) if form else ()
    proposal = Proposal("cross", names, names[:members], branches, 1, (), options)
    # The same kernel as of a form that the rates do not know.
    plain = dataclasses.replace(rates, forms={})
    found = fused_cost(graph, proposal, device).microseconds - device.launch_overhead * 1e6
    monkeypatch.setattr(cost_module, "GPU_RATES", plain)
    without = fused_cost(graph, proposal, device).microseconds - device.launch_overhead * 1e6
    assert found == pytest.approx(factor * without)


def test_a_compound_group():
    """Two convolutions with ReLU of one input, 16 and 32 channels, in one kernel."""
    (group,) = planned(mixed_convs([16, 32])).groups
    assert group.strategy == "compound" and group.options["form"] == "merged"
    # x: 32 · 196 = 6,272 values; results 3,136 and 6,272; weights 32 · 9 = 288 a channel
    assert group.bytes_after == 4 * (6_272 + 3_136 + 6_272 + 48 * 288)
    # before: x twice, both convolutions' results, read and written by the ReLUs
    assert group.bytes_before == 4 * (2 * 6_272 + 9_408 + 2 * 9_408 + 48 * 288)
    flops = 2 * 9_408 * 288 + 9_408
    assert (group.flops_before, group.flops_after) == (flops, flops)
    assert group.intensity_after == pytest.approx(flops / group.bytes_after, abs=1e-3)


def test_a_merged_convolution_costs_the_same_whether_its_branches_are_concatenated():
    """The concatenation is where the results are written, not work, and no gate of a larger map."""
    graphs = [graph_of(parallel_convs(4, spatial=56, relu=True, join=j)) for j in (None, "concat")]
    costs = []
    for graph in graphs:
        names = tuple(o.name for o in graph.operators)
        members = tuple((f"conv{i}", f"relu{i}") for i in range(4))
        join = "concat" if "concat" in names else "apart"
        options = (("form", "merged"), ("join", join))
        heads = tuple(m[0] for m in members)
        proposal = Proposal("horizontal", names, heads, members, 2, (), options)
        costs.append(fused_cost(graph, proposal, DEVICE))
    apart, joined = costs
    assert (apart.nbytes, apart.flops) == (joined.nbytes, joined.flops)
    assert joined.microseconds == pytest.approx(apart.microseconds, rel=0.05)


def test_totals_are_the_groups_and_what_is_left():
    plan = planned(
        resnet_bottleneck(channels=64, width=16, size=14), strategies="vertical", max_depth=3
    )
    graph = graph_of(resnet_bottleneck(channels=64, width=16, size=14))
    alone = [operator_cost(graph, graph.by_name[u.node], DEVICE) for u in plan.ungrouped]
    for field, cost in (("bytes", "nbytes"), ("flops", "flops"), ("launches", "launches")):
        rest = sum(getattr(c, cost) for c in alone)
        for when in ("before", "after"):
            inside = sum(getattr(g, f"{field}_{when}") for g in plan.groups)
            assert getattr(plan.totals, f"{field}_{when}") == inside + rest


def test_a_view_costs_nothing():
    b = ModuleBuilder()
    y = b.op("flat", relax.op.reshape(b.relu("relu", b.input("x", (4, 8))), (32,)))
    graph = graph_of(b.finish(y))
    assert operator_cost(graph, graph.by_name["flat"], DEVICE).launches == 0
    assert planned(graph).totals.launches_before == 1


# Predicted times.

ALL_DEVICES = [*DEVICES.values(), CPU]


def pointwise(rows, dtype="float32"):
    b = ModuleBuilder(dtype)
    return graph_of(b.finish(b.relu("only", b.input("x", (rows, 1024)))))


def convolution(size, channels=64, dtype="float32"):
    b = ModuleBuilder(dtype)
    return graph_of(b.finish(b.conv("only", b.input("x", (1, channels, size, size)), channels)))


def time_of(graph, device=DEVICE):
    return operator_cost(graph, graph.by_name["only"], device).microseconds * 1e-6


@pytest.mark.parametrize("device", ALL_DEVICES, ids=lambda d: d.arch)
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_no_kernel_beats_the_chip(device, dtype):
    """Neither the launch, nor the memory, nor the arithmetic."""
    pointwise_graphs = [pointwise(rows, dtype) for rows in (1, 65536)]
    for graph in (*pointwise_graphs, *(convolution(size, dtype=dtype) for size in (7, 112))):
        (operator,) = graph.operators
        moved = operator.bytes_read + operator.bytes_written
        assert time_of(graph, device) >= max(
            device.launch_overhead,
            moved / device.memory_bandwidth,
            operator.flops / device.peak_flops(dtype),
        )


def test_more_work_takes_longer():
    for make, sizes in ((pointwise, (1024, 4096, 65536)), (convolution, (14, 56, 112))):
        times = [time_of(make(size)) for size in sizes]
        assert times == sorted(times) and times[0] < times[-1]


def test_half_the_bytes_take_about_half_the_time():
    wide, narrow = time_of(pointwise(65536)), time_of(pointwise(65536, "float16"))
    assert 0.45 < narrow / wide < 0.6


def test_a_small_convolution_leaves_the_chip_idle():
    """Its FLOPs take longer than those of a large one, its launch apart."""
    small, large = convolution(7), convolution(112)
    rate = [(time_of(g) - DEVICE.launch_overhead) / g.by_name["only"].flops for g in (small, large)]
    assert rate[0] > 2 * rate[1]


def test_a_faster_chip_is_faster():
    for graph in (pointwise(65536), convolution(112)):
        assert time_of(graph, DEVICES["sm_90"]) < time_of(graph, DEVICES["sm_75"])


@pytest.mark.parametrize("arch", ["sm_75", "sm_90", "sm_120"])
def test_fusing_a_chain_saves_its_launches_at_least(arch):
    device = DEVICES[arch]
    b = ModuleBuilder()
    y = b.relu("c", b.op("b", relax.op.tanh(b.relu("a", b.input("x", (64, 64))))))
    graph, names = graph_of(b.finish(y)), ("a", "b", "c")
    fused = fused_cost(graph, Proposal("vertical", names, (), (names,), 3), device)
    before = unfused_cost(graph, names, device)
    saved = before.microseconds - fused.microseconds
    assert saved >= 2 * device.launch_overhead * 1e6
    assert (before.launches, fused.launches) == (3, 1)
