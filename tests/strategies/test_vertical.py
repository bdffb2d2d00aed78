"""Vertical proposals: exact sets on small graphs, and none where there is nothing to fuse."""

from __future__ import annotations

import pytest

from tvm_fusion.compat import relax
from tvm_fusion.config import FusionConfig
from tvm_fusion.strategies import Vertical
from tvm_fusion.testing.blocks import inverted_residual
from tvm_fusion.testing.modules import ModuleBuilder
from tvm_fusion.testing.plans import graph_of
from tvm_fusion.testing.synthetic_blocks import elementwise_chain, relaxation_chain
from tvm_fusion.testing.transformer_blocks import dense_norm, matmul_pair


def proposals(module, **options):
    return list(Vertical().propose(graph_of(module), FusionConfig(**options)))


def proposed(module, **options):
    return {p.operators for p in proposals(module, **options)}


def with_form(module, form, **options):
    return [p for p in proposals(module, **options) if p.option("form") == form]


def test_every_depth_around_a_convolution():
    b = ModuleBuilder()
    y = b.relu("relu", b.bias("bias", b.conv("conv", b.input("x", (1, 8, 6, 6)), 8)))
    sets = proposed(b.finish(y))
    assert ("conv", "bias") in sets and ("conv", "bias", "relu") in sets
    assert ("conv", "bias", "relu") not in proposed(b.finish(y), max_depth=2)


def test_a_residual_add_is_an_epilogue_of_its_later_branch():
    b = ModuleBuilder()
    x = b.input("x", (1, 8, 6, 6))
    first = b.relu("relu1", b.conv("conv1", x, 8))
    y = b.relu("relu2", b.add("add", b.conv("conv2", first, 8), first))
    sets = proposed(b.finish(y))
    assert ("conv2", "add", "relu2") in sets
    # relu1 → add leaves the group through conv2 and comes back.
    assert not any({"relu1", "add"} <= set(s) and "conv2" not in s for s in sets)


def test_a_value_read_twice_inside_the_group():
    b = ModuleBuilder()
    conv = b.conv("conv", b.input("x", (1, 8, 6, 6)), 8)
    y = b.op("mul", relax.op.multiply(conv, b.op("sig", relax.op.sigmoid(conv))))
    sets = proposed(b.finish(y))
    assert ("conv", "sig", "mul") in sets
    assert ("conv", "sig") not in sets  # two results: conv is still needed


def test_a_prologue_that_no_earlier_anchor_holds():
    b = ModuleBuilder()
    pooled = b.op(
        "pool", relax.op.nn.max_pool2d(b.input("x", (1, 8, 6, 6)), pool_size=2, strides=2)
    )
    cat = b.op("cat", relax.op.concat([pooled, pooled], axis=1))
    y = b.conv("conv", b.relu("relu", cat), 8)
    assert ("relu", "conv") in proposed(b.finish(y))


def test_an_epilogue_is_not_taken_as_the_next_prologue():
    b = ModuleBuilder()
    y = b.conv("conv2", b.relu("relu", b.conv("conv1", b.input("x", (1, 8, 6, 6)), 8)), 8)
    sets = proposed(b.finish(y))
    assert ("conv1", "relu") in sets and ("relu", "conv2") not in sets


def test_a_broadcast_ends_a_chain():
    """One proposal crosses the broadcast, whole, so that a guard can name the factor; no part of it does."""
    names = [f"{step}{i}" for i in range(2) for step in ("half", "sub", "exp")]
    sets = proposed(relaxation_chain(depth=2))
    assert tuple(names) in sets
    assert [s for s in sets if "sum" in s] == [(*names, "sum")]


def test_nothing_to_fuse():
    b = ModuleBuilder()
    pooled = relax.op.nn.max_pool2d(b.input("x", (1, 8, 6, 6)), pool_size=2, strides=2)
    assert proposed(b.finish(b.conv("conv", b.op("pool", pooled), 8))) == set()


def test_a_long_chain_is_tiled():
    b = ModuleBuilder()
    value = b.input("x", (4, 4))
    for i in range(40):
        value = b.relu(f"r{i}", value)
    longest = [s for s in proposed(b.finish(value), max_depth=16) if len(s) == 16]
    assert ("r0", *(f"r{i}" for i in range(1, 16))) in longest


def test_chains_are_as_deep_as_the_limits_allow():
    sets = proposed(elementwise_chain(200))
    assert max(map(len, sets)) == 64
    tiles = [s for s in sets if len(s) == 64]
    assert len({name for s in tiles for name in s}) == 192  # 3 of 64, and 8 operators are left
    assert max(map(len, proposed(elementwise_chain(200), max_operators=20))) == 20


def test_two_products_back_to_back():
    found = with_form(matmul_pair(), "back_to_back")
    assert [p.operators for p in found] == [
        ("first", "first_bias", "relu", "second"),
        ("first", "first_bias", "relu", "second", "second_bias"),
    ]
    for p in found:
        assert p.anchors == ("first", "second") and p.members == (p.operators,)
    assert [p.depth for p in found] == [4, 5]
    assert with_form(matmul_pair(), "back_to_back", max_depth=3) == []


def test_neighbouring_anchors_of_a_chain_of_three_are_paired():
    pairs = {p.anchors for p in with_form(inverted_residual(), "back_to_back")}
    assert pairs == {("expand_conv", "depthwise_conv"), ("depthwise_conv", "project_conv")}


def test_a_value_that_is_needed_elsewhere_is_not_kept_on_chip():
    b = ModuleBuilder()
    first = b.relu("relu", b.conv("first", b.input("x", (1, 8, 6, 6)), 8))
    module = b.finish(b.conv("second", first, 8, 1), b.op("tanh", relax.op.tanh(first)))
    assert with_form(module, "back_to_back") == []
    b = ModuleBuilder()
    first = b.relu("relu", b.conv("first", b.input("x", (1, 8, 6, 6)), 8))
    assert with_form(b.finish(b.conv("second", first, 8, 1), first), "back_to_back") == []


def test_a_product_of_a_value_with_itself_is_no_pair():
    b = ModuleBuilder()
    first = b.dense("first", b.input("x", (16, 16)), 16, bias=False)
    assert with_form(b.finish(b.op("square", relax.op.matmul(first, first))), "back_to_back") == []


def test_a_product_and_the_norm_of_its_rows():
    found = with_form(dense_norm(), "anchor_row")
    assert [p.operators for p in found] == [
        ("fc0", "fc0_bias", "norm0"),
        ("fc0", "fc0_bias", "norm0", "relu0"),
    ]
    assert all(p.anchors == ("fc0", "norm0") for p in found)


ROWS = {
    "softmax": lambda v: relax.op.nn.softmax(v, axis=-1),
    "log_softmax": lambda v: relax.op.nn.log_softmax(v, axis=1),
    "sum": lambda v: relax.op.sum(v, axis=[-1]),
    "mean": lambda v: relax.op.mean(v, axis=[1], keepdims=True),
    "max": lambda v: relax.op.max(v, axis=[-1]),
}
NOT_ROWS = {
    "softmax over columns": lambda v: relax.op.nn.softmax(v, axis=0),
    "sum over columns": lambda v: relax.op.sum(v, axis=[0]),
    "sum over all": lambda v: relax.op.sum(v),
    "index of the largest": lambda v: relax.op.argmax(v, axis=-1),
}


@pytest.mark.parametrize("name", [*ROWS, *NOT_ROWS])
def test_row_operators_are_those_over_the_last_axis(name):
    b = ModuleBuilder()
    product = b.dense("fc", b.input("x", (32, 64)), 64)
    module = b.finish(b.op("row", {**ROWS, **NOT_ROWS}[name](product)))
    assert bool(with_form(module, "anchor_row")) == (name in ROWS)


def test_a_convolution_is_not_followed_by_a_row_operator():
    b = ModuleBuilder()
    y = b.conv("conv", b.input("x", (1, 8, 6, 6)), 8)
    assert with_form(b.finish(b.op("row", relax.op.nn.softmax(y, axis=-1))), "anchor_row") == []


@pytest.mark.parametrize("module", [matmul_pair(), dense_norm(), inverted_residual()])
def test_proposals_are_the_same_each_time(module):
    assert proposals(module) == proposals(module)
