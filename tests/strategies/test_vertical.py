"""Vertical proposals: exact sets on small graphs, and none where there is nothing to fuse."""

from __future__ import annotations

from tvm_fusion.compat import relax
from tvm_fusion.config import FusionConfig
from tvm_fusion.graph.relax import from_relax
from tvm_fusion.strategies import Vertical
from tvm_fusion.testing.modules import ModuleBuilder


def proposed(module, **options):
    graph = from_relax(module).graph
    return {p.operators for p in Vertical().propose(graph, FusionConfig(**options))}


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
    b = ModuleBuilder()
    x, big = b.input("x", (64, 1)), b.input("big", (64, 64))
    y = b.op("add", relax.op.add(big, b.op("exp", relax.op.exp(b.op("neg", relax.op.negative(x))))))
    sets = proposed(b.finish(y))
    assert ("neg", "exp") in sets
    assert not any({"exp", "add"} <= set(s) for s in sets)


def test_nothing_to_fuse():
    b = ModuleBuilder()
    y = b.conv("conv2", b.conv("conv1", b.input("x", (1, 8, 6, 6)), 8), 8)
    assert proposed(b.finish(y)) == set()


def test_a_long_chain_is_tiled():
    b = ModuleBuilder()
    value = b.input("x", (4, 4))
    for i in range(40):
        value = b.relu(f"r{i}", value)
    longest = [s for s in proposed(b.finish(value), max_depth=16) if len(s) == 16]
    assert ("r0", *(f"r{i}" for i in range(1, 16))) in longest
