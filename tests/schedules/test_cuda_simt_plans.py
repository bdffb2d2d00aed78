"""What the planner takes a float32 group for is what the template finds: the same problem, the same predicted time."""

from __future__ import annotations

import pytest
from tvm_fusion.schedules import schedule
from tvm_fusion.schedules.cuda.simt import template

from tvm_fusion.compat import relax
from tvm_fusion.devices import DEVICES
from tvm_fusion.graph.relax import from_relax
from tvm_fusion.guards.fma_products import multiplies_by_fma
from tvm_fusion.guards.footprint import footprint
from tvm_fusion.strategies.base import Proposal
from tvm_fusion.strategies.decompose import decompose
from tvm_fusion.targets import parse_target
from tvm_fusion.testing.blocks import depthwise_pointwise
from tvm_fusion.testing.modules import ModuleBuilder, as_group, parallel_convs
from tvm_fusion.testing.transformer_blocks import dense_gelu, head_projections
from tvm_fusion.transform.lower_groups import lower_groups

op = relax.op
TARGET, DEVICE = parse_target("cuda:sm_90"), DEVICES["sm_90"]


def image(size=14, channels=16, layout="NCHW", kernel=3, stride=1, before=False):
    """Convolution and ReLU, or exponential and convolution."""
    b = ModuleBuilder("float32", layout)
    shape = (2, channels, size, size) if layout == "NCHW" else (2, size, size, channels)
    x = b.input("x", shape)
    if before:
        return b.finish(b.conv("conv", b.op("exp", op.exp(x)), 24, kernel))
    return b.finish(b.relu("relu", b.conv("conv", x, 24, kernel, stride=stride)))


def unequal():
    """3x3 + 1x1."""
    b = ModuleBuilder()
    x = b.input("x", (1, 16, 14, 14))
    return b.finish(b.add("add", b.conv("wide", x, 24, 3), b.conv("narrow", x, 24, 1)))


def scores(turned: bool):
    """Products of batches."""
    b = ModuleBuilder()
    x = b.input("x", (3, 40, 32))
    y = b.input("y", (3, 48, 32) if turned else (3, 32, 48))
    if turned:
        y = b.op("turned", op.permute_dims(y, [0, 2, 1]))
    return b.finish(b.op("product", op.matmul(x, y)))


MERGED = {"form": "merged"}
CASES = {
    "3x3": (image(), "vertical", {}),
    "1x1": (image(16, kernel=1), "vertical", {}),
    "1x1 of odd maps": (image(7, kernel=1), "vertical", {}),
    "stride 2": (image(stride=2), "vertical", {}),
    "channels last": (image(layout="NHWC"), "vertical", {}),
    "prologue": (image(before=True), "vertical", {}),
    "prologue, channels last": (image(layout="NHWC", before=True), "vertical", {}),
    "sum of three": (
        parallel_convs(3, channels=16, spatial=20, relu=True),
        "horizontal",
        {**MERGED, "join": "add"},
    ),
    "three apart": (
        parallel_convs(3, channels=16, spatial=20, relu=True, join=None),
        "horizontal",
        {**MERGED, "join": "apart"},
    ),
    "one of three": (
        parallel_convs(3, channels=16, spatial=20),
        "horizontal",
        {"form": "collapsed", "join": "add"},
    ),
    "two inputs": (
        parallel_convs(2, channels=16, spatial=20, separate=True),
        "horizontal",
        {"form": "joined", "join": "add"},
    ),
    "unequal": (unequal(), "cross", {"form": "joined", "join": "add"}),
    "depthwise": (depthwise_pointwise(size=28), "vertical", {"form": "back_to_back"}),
    "product": (dense_gelu(rows=64, width=96, outputs=128), "vertical", {}),
    "heads": (
        head_projections(tokens=64, width=64, heads=2),
        "horizontal",
        {**MERGED, "join": "apart"},
    ),
    "batched": (scores(False), "vertical", {}),
}


def group_of(module, strategy, options):
    """The whole module as a proposal, with its graph."""
    graph = from_relax(module).graph
    names = graph.sort(o.name for o in graph.operators)
    shape = decompose(graph, names, options)
    members = tuple(branch.operators for branch in shape.branches)
    options = tuple(sorted(options.items()))
    return Proposal(strategy, names, shape.anchors, members, 1, (), options), graph


@pytest.mark.parametrize("name", CASES)
def test_the_planner_predicts_what_the_template_makes(name, monkeypatch):
    module, strategy, options = CASES[name]
    proposal, graph = group_of(module, strategy, options)
    needs = footprint(graph, proposal, DEVICE)
    taken = []

    def best_choices(problem, device, count=1, **options):
        taken.append((problem, found(problem, device, **options)[0]))
        return found(problem, device, **options)

    found = template.best_fma_choices
    monkeypatch.setattr(template, "best_fma_choices", best_choices)
    lowered, kernels = lower_groups(as_group(module, strategy, **options))
    _, used = schedule(lowered[kernels[f"fused_{strategy}_0"]], TARGET)
    assert used == "multiply_add"
    ((problem, chosen),) = taken
    assert needs.microseconds == pytest.approx(chosen.microseconds)
    assert needs.blocks == chosen.tile.blocks(problem)
    assert needs.shared_bytes == chosen.tile.shared_bytes(problem)
    assert needs.dynamic_shared and needs.threads == chosen.tile.threads


@pytest.mark.parametrize(
    ("module", "arch"),
    [
        (image(), "sm_75"),
        (parallel_convs(1, dtype="float16", spatial=14), "sm_90"),
        (dense_gelu(rows=2, width=96, outputs=128), "sm_90"),
        (image(channels=1), "sm_90"),
    ],
    ids=["no asynchronous copies", "half precision", "two rows", "short sums"],
)
def test_others_are_estimated_as_before(module, arch):
    proposal, graph = group_of(module, "vertical", {})
    dense = [graph.by_name[name] for name in proposal.anchors]
    assert not multiplies_by_fma(graph, dense, DEVICES[arch])
    assert footprint(graph, proposal, DEVICES[arch]).microseconds == 0
