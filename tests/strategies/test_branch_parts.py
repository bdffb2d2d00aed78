"""Parts of parallel branches without their anchors: what is proposed, and what is not."""

from __future__ import annotations

import pytest

from tvm_fusion.compat import relax
from tvm_fusion.config import FusionConfig
from tvm_fusion.strategies import Horizontal
from tvm_fusion.strategies.branch_parts import alike_sets
from tvm_fusion.testing.modules import ModuleBuilder, parallel_convs
from tvm_fusion.testing.plans import graph_of
from tvm_fusion.testing.transformer_blocks import dense_norm_heads

op = relax.op


def proposed(module, **options):
    """Horizontal proposals that hold no anchor with weights."""
    graph = graph_of(module)
    found = Horizontal().propose(graph, FusionConfig(**options))
    return [p for p in found if all(graph.by_name[n].pattern != "anchor" for n in p.operators)]


def members(module, **options):
    return {p.members for p in proposed(module, **options)}


def test_norms_after_products():
    found = proposed(dense_norm_heads(heads=4, rows=16, width=32, outputs=32))
    p = max(found, key=lambda p: len(p.operators))
    assert p.members == tuple((f"norm{i}",) for i in range(4)) and p.anchors == p.operators
    assert p.options == (("form", "partitioned"), ("join", "apart"))
    # the biases are the merged product's
    assert not any("fc0_bias" in p.operators for p in found)


def test_with_what_follows_and_without():
    found = members(dense_norm_heads(heads=2, rows=16, width=32, outputs=32, relu=True))
    assert found == {(("norm0", "relu0"), ("norm1", "relu1")), (("norm0",), ("norm1",))}


def residual_norms(count=2, shapes=None):
    """Products with a bias, an operand of each branch's own, and a norm."""
    b = ModuleBuilder()
    x = b.input("x", (16, 32))
    results = []
    for i in range(count):
        width = (shapes or [32] * count)[i]
        y = b.add(f"sum{i}", b.dense(f"fc{i}", x, width), b.input(f"r{i}", (16, width)))
        results.append(b.layer_norm(f"norm{i}", y))
    return b.finish(*results)


def test_what_merged_products_cannot_hold_goes_with_the_rows():
    found = members(residual_norms())
    assert (("sum0", "norm0"), ("sum1", "norm1")) in found
    # or with nothing, so that a product of its own may hold it
    assert (("norm0",), ("norm1",)) in found
    merged = [
        p for p in Horizontal().propose(graph_of(residual_norms()), FusionConfig())
        if p.option("form") == "merged"
    ]  # fmt: skip
    assert (("fc0", "fc0_bias"), ("fc1", "fc1_bias")) in {p.members for p in merged}


def test_elementwise_chains_after_anchors_that_merge():
    b = ModuleBuilder()
    x = b.input("x", (1, 8, 6, 6))
    parts = []
    for i in range(3):
        y = b.bias(f"bias{i}", b.conv(f"conv{i}", x, 8))
        y = b.add(f"sum{i}", y, b.input(f"r{i}", (1, 8, 6, 6)))
        parts.append(b.relu(f"relu{i}", y))
    found = proposed(b.finish(*parts))
    (p,) = [p for p in found if len(p.members) == 3]
    assert p.members == tuple((f"sum{i}", f"relu{i}") for i in range(3))
    assert p.anchors == () and p.option("form") == "partitioned"


def test_pools_before_anchors():
    b = ModuleBuilder()
    parts = []
    for i in range(2):
        y = op.nn.max_pool2d(b.input(f"x{i}", (1, 8, 8, 8)), pool_size=(2, 2), strides=(2, 2))
        parts.append(b.conv(f"conv{i}", b.op(f"pool{i}", y), 8))
    assert (("pool0",), ("pool1",)) in members(b.finish(*parts))


def test_a_concatenation_of_norms():
    b = ModuleBuilder()
    x = b.input("x", (16, 32))
    parts = [b.layer_norm(f"norm{i}", b.dense(f"fc{i}", x, 32)) for i in range(2)]
    found = proposed(b.finish(b.concat("cat", parts, axis=-1)))
    (p,) = [p for p in found if "norm0" in p.operators]
    assert p.operators[-1] == "cat" and p.option("join") == "concat"


def test_at_most_max_members():
    found = proposed(dense_norm_heads(heads=8, rows=16, width=32, outputs=32), max_members=4)
    assert sorted(len(p.members) for p in found) == [2, 2, 2, 2, 4, 4]


@pytest.mark.parametrize(
    "build",
    [
        lambda: parallel_convs(4, channels=8, spatial=6, relu=True),  # chains in the convolution
        lambda: parallel_convs(4, channels=8, spatial=6, join=None),  # nothing after them
        lambda: dense_norm_heads(heads=1, rows=16, width=32, outputs=32, relu=True),  # one branch
    ],
)
def test_nothing_is_left_over(build):
    assert proposed(build()) == []


def test_rows_of_other_lengths_are_not_alike():
    assert list(alike_sets(graph_of(residual_norms(shapes=[32, 48])))) == []
    assert list(alike_sets(graph_of(residual_norms(shapes=[32, 32])))) != []


def test_norms_one_after_the_other_are_not_alike():
    b = ModuleBuilder()
    y = b.layer_norm("norm0", b.dense("fc0", b.input("x", (16, 32)), 32))
    graph = graph_of(b.finish(b.layer_norm("norm1", b.dense("fc1", y, 32))))
    assert list(alike_sets(graph)) == []


def test_other_operators_are_not_alike():
    b = ModuleBuilder()
    x = b.input("x", (16, 32))
    parts = [
        b.layer_norm("norm", b.dense("fc0", x, 32)),
        b.op("softmax", op.nn.softmax(b.dense("fc1", x, 32), axis=-1)),
        b.op("columns", op.nn.softmax(b.dense("fc2", x, 32), axis=0)),
    ]
    assert list(alike_sets(graph_of(b.finish(*parts)))) == []


def test_proposals_stay_few():
    """As many as rows, times how they may be cut and divided, whatever their number."""
    counts = []
    for heads in (12, 24, 48):
        module = dense_norm_heads(heads=heads, rows=8, width=8, outputs=8, relu=True)
        counts.append(len(proposed(module)))
    assert counts == [12, 24, 48]
