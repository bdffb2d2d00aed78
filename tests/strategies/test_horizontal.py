"""Horizontal proposals: members, forms and joins."""

from __future__ import annotations

import pytest

from tvm_fusion.compat import relax
from tvm_fusion.config import FusionConfig
from tvm_fusion.graph.relax import from_relax
from tvm_fusion.strategies import Horizontal
from tvm_fusion.strategies.decompose import decompose
from tvm_fusion.testing.modules import ModuleBuilder, parallel_convs
from tvm_fusion.testing.transformer_blocks import dense_norm_heads


def proposed(module, **options):
    graph = from_relax(module).graph
    return list(Horizontal().propose(graph, FusionConfig(**options)))


def largest(module, **options):
    return max(proposed(module, **options), key=lambda p: len(p.operators))


@pytest.mark.parametrize(
    ("options", "form", "join"),
    [
        ({}, "collapsed", "add"),
        ({"relu": True}, "merged", "add"),
        ({"relu": True, "join": "maximum"}, "merged", "maximum"),
        ({"relu": True, "join": "concat"}, "merged", "concat"),
        ({"relu": True, "join": None}, "merged", "apart"),
        ({"relu": True, "join": None, "separate": True}, "partitioned", "apart"),
        ({"relu": True, "join": "concat", "separate": True}, "partitioned", "concat"),
        ({"relu": True, "separate": True}, "joined", "add"),
    ],
)
def test_forms(options, form, join):
    p = largest(parallel_convs(4, channels=8, spatial=6, **options))
    assert (p.option("form"), p.option("join"), len(p.members)) == (form, join, 4)


def test_output_channels_may_differ():
    p = largest(parallel_convs(3, channels=8, outputs=[4, 8, 12], spatial=6, join=None))
    assert p.option("form") == "merged" and len(p.members) == 3


@pytest.mark.parametrize(("members", "sizes"), [(7, {6}), (8, {6, 2}), (13, {6})])
def test_a_long_sum_is_split(members, sizes):
    found = proposed(parallel_convs(members, channels=4, spatial=6, relu=True))
    assert {len(p.members) for p in found if len(p.members) <= 6} >= sizes
    whole = [p for p in found if len(p.members) == members]
    assert whole, "the whole set is proposed too, so that a guard can say why not"


def test_branches_of_equal_type_and_other_kernel_are_one_proposal():
    b = ModuleBuilder()
    x = b.input("x", (1, 8, 6, 6))
    parts = [b.relu(f"r{k}", b.conv(f"c{k}", x, 8, k)) for k in (1, 3)]
    p = largest(b.finish(b.op("cat", relax.op.concat(parts, axis=1))))
    assert p.option("form") == "partitioned" and p.option("join") == "concat"


def test_pointwise_branches():
    b = ModuleBuilder()
    branches = []
    for i in range(3):
        scaled = b.op(
            f"mul{i}", relax.op.multiply(b.input(f"x{i}", (1, 8, 6, 6)), b.const(1, 8, 1, 1))
        )
        branches.append(b.relu(f"relu{i}", b.bias(f"bias{i}", scaled)))
    p = largest(b.finish(*branches))
    assert p.option("form") == "partitioned" and p.anchors == () and len(p.members) == 3


def test_what_follows_the_join_belongs_to_it():
    b = ModuleBuilder()
    x = b.input("x", (1, 8, 6, 6))
    total = b.add("sum", b.relu("r0", b.conv("c0", x, 8)), b.relu("r1", b.conv("c1", x, 8)))
    assert "last" in largest(b.finish(b.relu("last", total))).operators


def test_a_chain_has_no_members():
    b = ModuleBuilder()
    y = b.conv("conv2", b.relu("relu", b.conv("conv1", b.input("x", (1, 8, 6, 6)), 8)), 8)
    assert proposed(b.finish(y)) == []


def test_decomposition_of_a_body():
    graph = from_relax(parallel_convs(3, channels=4, spatial=6, relu=True)).graph
    shape = decompose(graph, [o.name for o in graph.operators])
    assert [b.head for b in shape.branches] == ["conv0", "conv1", "conv2"]
    assert shape.join.kind == "add" and shape.tail == ()


def test_more_than_the_limit_returned_apart():
    """The whole set is proposed for the guard's reason, then pieces that fit, then smaller ones."""
    found = proposed(parallel_convs(8, channels=4, spatial=6, relu=True, join=None))
    chains = [p for p in found if len(p.operators) == 2 * len(p.members)]
    assert [len(p.members) for p in chains] == [8, 6, 2, 3, 3]


def test_a_last_one_stays_alone():
    found = proposed(parallel_convs(7, channels=4, spatial=6, join=None))
    assert [len(p.members) for p in found] == [7, 6, 3, 3]


def test_the_heads_alone_are_a_part_to_compare_with():
    found = proposed(parallel_convs(3, channels=8, spatial=6, relu=True))
    (bare,) = [p for p in found if p.operators == ("conv0", "conv1", "conv2")]
    assert (bare.option("form"), bare.option("join")) == ("merged", "apart")
    without = proposed(parallel_convs(3, channels=8, spatial=6, join=None))
    assert [p.operators for p in without] == [("conv0", "conv1", "conv2")]


def test_products_of_one_input():
    b = ModuleBuilder()
    x = b.input("x", (16, 32))
    p = largest(b.finish(*(b.dense(n, x, width) for n, width in (("q", 8), ("k", 8), ("v", 16)))))
    assert p.option("form") == "merged" and [m[0] for m in p.members] == ["q", "k", "v"]


def test_grouped_convolutions_are_not_merged():
    b = ModuleBuilder()
    x = b.input("x", (1, 8, 6, 6))
    p = largest(b.finish(b.conv("a", x, 8, groups=8), b.conv("b", x, 8, groups=8)))
    assert p.option("form") == "partitioned"


def test_a_sum_with_a_bias_in_each_branch_is_still_linear():
    b = ModuleBuilder()
    x = b.input("x", (1, 8, 6, 6))
    y = b.add("sum", *(b.bias(f"b{i}", b.conv(f"c{i}", x, 8)) for i in range(2)))
    assert largest(b.finish(b.relu("relu", y))).option("form") == "collapsed"
    b = ModuleBuilder()
    x, other = b.input("x", (1, 8, 6, 6)), b.input("other", (1, 8, 6, 6))
    y = b.add("sum", *(b.add(f"a{i}", b.conv(f"c{i}", x, 8), other) for i in range(2)))
    assert largest(b.finish(y)).option("form") != "collapsed"


def test_readers_of_one_tensor():
    """They load it once; those that meet again belong to a vertical chain."""
    b = ModuleBuilder()
    y = b.op("root", relax.op.nn.softmax(b.input("x", (64, 64)), axis=0))
    results = [b.relu("relu", y), b.op("tanh", relax.op.tanh(y)), b.op("exp", relax.op.exp(y))]
    p = largest(b.finish(*results))
    assert p.operators == ("relu", "tanh", "exp")
    assert (p.option("form"), p.option("join")) == ("elementwise", "apart")
    b = ModuleBuilder()
    y = b.op("root", relax.op.nn.softmax(b.input("x", (64, 64)), axis=0))
    met = b.add("sum", b.relu("relu", y), b.op("tanh", relax.op.tanh(y)))
    assert proposed(b.finish(met)) == []


def test_operators_that_read_each_other_are_no_readers():
    b = ModuleBuilder()
    y = b.op("root", relax.op.nn.softmax(b.input("x", (64, 64)), axis=0))
    relu = b.relu("relu", y)
    module = b.finish(relu, b.op("product", relax.op.multiply(y, relu)))
    assert proposed(module) == []


def with_rows(module, **options):
    """Merged proposals whose members hold a row operator."""
    graph = from_relax(module).graph
    return [
        p
        for p in Horizontal().propose(graph, FusionConfig(**options))
        if p.option("form") == "merged"
        and any(graph.by_name[name].pattern in ("row", "reduction") for name in p.operators)
    ]


def test_products_of_one_input_with_norms():
    found = with_rows(dense_norm_heads(heads=4, rows=16, width=32, outputs=32, relu=True))
    p = max(found, key=lambda p: len(p.members))
    assert p.option("join") == "apart"
    assert p.members == tuple((f"fc{i}", f"fc{i}_bias", f"norm{i}", f"relu{i}") for i in range(4))
    assert p.anchors == tuple(f"{n}{i}" for i in range(4) for n in ("fc", "norm"))


def test_products_with_norms_are_at_most_max_members():
    found = with_rows(dense_norm_heads(heads=8, rows=16, width=32, outputs=32))
    assert max(len(p.members) for p in found) == 6


def row_operator(row):
    return {
        "softmax": lambda v: relax.op.nn.softmax(v, axis=-1),
        "other": lambda v: relax.op.nn.softmax(v, axis=0),
        "relu": relax.op.nn.relu,
    }[row]


@pytest.mark.parametrize(
    "members",
    [
        [(8, "norm"), (8, "softmax")],  # other operators
        [(8, "softmax"), (12, "softmax")],  # other widths
        [(8, "other"), (8, "other")],  # over rows
        [(8, "relu"), (8, "relu")],  # no row operator
    ],
)
def test_rows_that_cannot_be_stacked(members):
    b = ModuleBuilder()
    x = b.input("x", (6, 16))
    parts = []
    for number, (width, row) in enumerate(members):
        value = b.dense(f"fc{number}", x, width)
        if row == "norm":
            parts.append(b.layer_norm(f"norm{number}", value))
        else:
            parts.append(b.op(f"{row}{number}", row_operator(row)(value)))
    assert with_rows(b.finish(*parts)) == []
    assert with_rows(dense_norm_heads(heads=2, rows=6, width=16, outputs=8, separate=True)) == []


@pytest.mark.parametrize(
    ("inputs", "constant", "form"), [(1, True, "merged"), (2, True, "joined"), (1, False, "joined")]
)
def test_a_gated_linear_unit(inputs, constant, form):
    """Products of one input lie side by side in a thread, though only the gate has an activation."""
    b = ModuleBuilder("float16")
    x = [b.input(f"x{i}", (64, 32)) for i in range(inputs)]
    weights = [b.const(32, 48) if constant else b.input(f"w{i}", (32, 48)) for i in range(2)]
    gate = b.op("act", relax.op.nn.silu(b.op("gate", relax.op.matmul(x[0], weights[0]))))
    up = b.op("up", relax.op.matmul(x[-1], weights[1]))
    p = largest(b.finish(b.op("out", relax.op.multiply(gate, up))))
    assert (p.option("form"), p.option("join"), len(p.members)) == (form, "multiply", 2)
