"""Pairs of anchors that can share a kernel, and those that cannot."""

from __future__ import annotations

import pytest

from tvm_fusion.config import FusionConfig
from tvm_fusion.devices import device_for
from tvm_fusion.guards.footprint import footprint
from tvm_fusion.guards.template_pairs import TemplatePairs, describe, is_depthwise, is_pointwise
from tvm_fusion.strategies import Horizontal, Vertical
from tvm_fusion.targets import parse_target
from tvm_fusion.testing.modules import ModuleBuilder
from tvm_fusion.testing.plans import DEVICE, graph_of
from tvm_fusion.testing.synthetic_blocks import conv3d_branches
from tvm_fusion.testing.transformer_blocks import dense_norm_heads, matmul_pair

#: Kernel, and other options of ``ModuleBuilder.conv`` on 16 channels.
PLAIN, POINTWISE = {"kernel": 3}, {"kernel": 1}
DEPTHWISE, GROUPED = {"kernel": 3, "groups": 16}, {"kernel": 1, "groups": 4}


def two_convs(first, second):
    b = ModuleBuilder()
    y = b.relu("between", b.conv("first", b.input("x", (1, 16, 14, 14)), 16, **first))
    return b.finish(b.conv("second", y, 16, **second))


def verdict(module):
    graph, config = graph_of(module), FusionConfig()
    found = Vertical().propose(graph, config)
    (pair,) = [p for p in found if p.option("form") == "back_to_back"][:1]
    return TemplatePairs().check(pair, graph, config, DEVICE)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (PLAIN, POINTWISE),
        (POINTWISE, POINTWISE),
        (DEPTHWISE, POINTWISE),
        (GROUPED, POINTWISE),
        ({"kernel": 5, "stride": 2}, POINTWISE),
    ],
)
def test_pairs_with_a_template(first, second):
    assert verdict(two_convs(first, second)).accepted


@pytest.mark.parametrize(
    ("first", "second", "told"),
    [
        (POINTWISE, DEPTHWISE, "1x1 conv2d (first) and 3x3 depthwise conv2d (second)"),
        (PLAIN, PLAIN, "3x3 conv2d (first) and 3x3 conv2d (second)"),
        (POINTWISE, PLAIN, "1x1 conv2d (first) and 3x3 conv2d (second)"),
        (DEPTHWISE, DEPTHWISE, "3x3 depthwise conv2d (first) and 3x3 depthwise conv2d (second)"),
        (DEPTHWISE, GROUPED, "3x3 depthwise conv2d (first) and 1x1 conv2d (second)"),
        (PLAIN, {"kernel": 1, "stride": 2}, "3x3 conv2d (first) and 1x1 conv2d (second)"),
        (PLAIN, {"kernel": 1, "padding": 1}, "3x3 conv2d (first) and 1x1 conv2d (second)"),
    ],
)
def test_pairs_without_one(first, second, told):
    found = verdict(two_convs(first, second))
    assert (found.outcome, found.reason) == ("unsupported", "no_template")
    assert found.numbers == {"ops": ["conv2d", "conv2d"]} and told in found.detail


def test_products():
    assert verdict(matmul_pair()).accepted
    found = verdict(conv3d_branches(kernels=(3,)))
    assert found.reason == "no_template" and "1x1x1 conv3d (small0)" in found.detail


def test_other_forms_are_not_asked():
    graph, config = graph_of(two_convs(PLAIN, PLAIN)), FusionConfig()
    chain = next(p for p in Vertical().propose(graph, config) if not p.option("form"))
    assert TemplatePairs().check(chain, graph, config, DEVICE).accepted


def test_kinds_of_convolutions_in_both_layouts():
    for layout in ("NCHW", "NHWC"):
        b = ModuleBuilder(layout=layout)
        x = b.input("x", (1, 16, 14, 14) if layout == "NCHW" else (1, 14, 14, 16))
        names = {
            "plain": b.conv("plain", x, 8),
            "pointwise": b.conv("pointwise", x, 8, 1),
            "depthwise": b.conv("depthwise", x, 16, groups=16),
        }
        graph = graph_of(b.finish(*names.values()))
        pointwise = {n for n in names if is_pointwise(graph, graph.by_name[n])}
        depthwise = {n for n in names if is_depthwise(graph, graph.by_name[n])}
        assert (pointwise, depthwise) == ({"pointwise"}, {"depthwise"})
        assert describe(graph, graph.by_name["depthwise"]) == "3x3 depthwise conv2d"


def merged_norms(dtype, outputs=256):
    """Four dense layers with layer norms as one proposal."""
    graph = graph_of(
        dense_norm_heads(heads=4, rows=32, width=64, outputs=outputs, relu=True, dtype=dtype)
    )
    found = Horizontal().propose(graph, FusionConfig())
    return max(found, key=lambda p: len(p.operators)), graph


def test_merged_products_with_norms_on_tensor_cores():
    proposal, graph = merged_norms("float16")
    device = device_for(parse_target("cuda:sm_90"))
    assert TemplatePairs().check(proposal, graph, FusionConfig(), device).accepted
    needs = footprint(graph, proposal, device)
    assert needs.microseconds > 0 and needs.dynamic_shared
    assert needs.shared_bytes <= device.shared_memory_per_block_optin


@pytest.mark.parametrize(
    ("dtype", "arch", "outputs"),
    [
        ("float32", "sm_90", 256),
        ("float16", "sm_75", 256),
        ("float16", "sm_80", 4096),  # a row fits into no block, and there are no clusters
    ],
)
def test_merged_products_with_norms_elsewhere(dtype, arch, outputs):
    proposal, graph = merged_norms(dtype, outputs)
    device = device_for(parse_target(f"cuda:{arch}"))
    found = TemplatePairs().check(proposal, graph, FusionConfig(), device)
    assert found.reason == "no_template" and "4 merged products with layer_norm" in found.detail
