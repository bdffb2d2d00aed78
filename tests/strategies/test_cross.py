"""Cross proposals: branches and their join, shortcuts, gates, balance."""

from __future__ import annotations

import pytest

from tvm_fusion.compat import relax
from tvm_fusion.config import FusionConfig
from tvm_fusion.strategies import Cross
from tvm_fusion.testing.blocks import (
    csp_block,
    fire,
    inception_module,
    repvgg_block,
    residual_block,
    resnet_bottleneck,
    segmentation_head,
    shuffle_unit,
    squeeze_excite,
)
from tvm_fusion.testing.modules import ModuleBuilder, parallel_convs
from tvm_fusion.testing.plans import graph_of
from tvm_fusion.testing.synthetic_blocks import conv3d_branches, cross_pair


def proposed(module, **options):
    return list(Cross().propose(graph_of(module), FusionConfig(**options)))


def largest(module, **options):
    return max(proposed(module, **options), key=lambda p: len(p.operators))


@pytest.mark.parametrize("join", ["add", "multiply", "maximum", "minimum"])
def test_two_branches_and_their_join(join):
    p = largest(cross_pair(join=join, ratio=2))
    assert p.options == (("form", "joined"), ("join", join))
    assert p.anchors == ("heavy_conv", "light_conv")
    assert p.members == (
        ("heavy_conv", "heavy_bias", "heavy_relu"),
        ("light_conv", "light_bias", "light_relu"),
    )
    assert p.operators == (*p.members[0], *p.members[1], "join")
    assert (p.depth, p.parts) == (4, ())


def test_a_projection_shortcut_with_what_follows_the_sum():
    module = resnet_bottleneck(channels=64, width=16, size=8, projection=True, stride=2)
    p = largest(module)
    assert p.members == (("expand_conv", "expand_bias"), ("project_conv", "project_bias"))
    assert p.operators[-2:] == ("shortcut", "out") and p.option("shortcut") == ""
    assert {len(p.operators) for p in proposed(module)} == {5, 6}  # with and without the ReLU


def test_an_identity_shortcut_is_an_operand():
    p = largest(resnet_bottleneck(channels=64, width=16, size=8))
    assert p.operators == ("expand_conv", "expand_bias", "shortcut", "out")
    assert p.members == (("expand_conv", "expand_bias"),)
    assert p.options == (("form", "joined"), ("join", "add"), ("shortcut", "identity"))


def test_an_operand_that_no_branch_starts_from_is_no_shortcut():
    b = ModuleBuilder()
    y = b.bias("bias", b.conv("conv", b.input("x", (1, 8, 6, 6)), 8))
    assert proposed(b.finish(b.add("sum", y, b.input("other", (1, 8, 6, 6))))) == []


def test_a_constant_is_no_branch():
    b = ModuleBuilder()
    x = b.input("x", (1, 8, 6, 6))
    y = b.op("sum", relax.op.add(b.conv("conv", x, 8), b.const(1, 8, 6, 6)))
    assert proposed(b.finish(y)) == []


def test_a_branch_that_is_read_elsewhere_is_an_operand():
    """Its result must be written anyway; the other branch can still be joined with it."""
    b = ModuleBuilder()
    x = b.input("x", (1, 8, 6, 6))
    first = b.relu("first_relu", b.conv("first", x, 8))
    second = b.conv("second", first, 8)
    p = largest(b.finish(b.add("sum", second, first)))
    assert p.members == (("second",),) and p.option("shortcut") == "identity"


def test_a_result_of_the_model_is_an_operand_too():
    b = ModuleBuilder()
    x = b.input("x", (1, 8, 6, 6))
    left, right = b.conv("left", x, 8), b.conv("right", x, 8)
    assert proposed(b.finish(b.add("sum", left, right), left)) == []


def test_the_same_value_twice_is_no_join():
    b = ModuleBuilder()
    y = b.conv("conv", b.input("x", (1, 8, 6, 6)), 8)
    assert proposed(b.finish(b.add("sum", y, y))) == []


def test_a_tree_of_joins():
    b = ModuleBuilder()
    inputs = [b.input(f"x{i}", (1, 4 + i, 6, 6)) for i in range(3)]
    first, second, third = (b.conv(f"c{i}", x, 8) for i, x in enumerate(inputs))
    y = b.op("max", relax.op.maximum(b.add("sum", first, second), third))
    p = largest(b.finish(b.relu("relu", y)))
    assert p.anchors == ("c0", "c1", "c2") and p.option("join") == "mixed"
    assert set(p.operators) == {"c0", "c1", "c2", "sum", "max", "relu"}


def test_prologues_of_branches():
    """A pointwise operator that only one anchor reads, and that no earlier kernel can hold."""
    b = ModuleBuilder()
    left, right = b.input("x", (1, 8, 6, 6)), b.input("y", (1, 8, 6, 6))
    y = b.add("sum", b.conv("a", b.relu("ra", left), 8), b.conv("c", b.relu("rc", right), 8))
    p = largest(b.finish(y))
    assert p.members == (("ra", "a"), ("rc", "c")) and p.anchors == ("a", "c")
    assert ("a", "c", "sum") in {p.operators for p in proposed(b.finish(y))}


def test_an_epilogue_of_an_earlier_anchor_is_no_prologue():
    p = largest(residual_block(convs=2, relu=True, size=8))
    assert p.members == (("c1_conv", "c1_bias"),)


@pytest.mark.parametrize("dense", [False, True])
def test_a_gate_that_multiplies_a_map(dense):
    """Squeeze and excite: the pool stays a kernel of its own; the view is part of the branch."""
    p = largest(squeeze_excite(dense=dense, size=8, residual=True))
    anchor = "fc2" if dense else "fc2_conv"
    views = ("gate_image",) if dense else ()
    assert p.anchors == (anchor,) and p.members == ((anchor, "fc2_bias", "gate", *views),)
    assert p.operators == (*p.members[0], "scale", "shortcut", "out")
    assert p.options == (("form", "joined"), ("join", "multiply"), ("shortcut", "identity"))


def test_a_gate_that_does_not_come_from_the_map_is_none():
    b = ModuleBuilder()
    x, other = b.input("x", (1, 8, 6, 6)), b.input("other", (1, 8, 1, 1))
    y = b.op("scale", relax.op.multiply(x, b.conv("gate", other, 8, 1)))
    assert proposed(b.finish(y)) == []


def test_a_concatenation_of_branches():
    p = largest(fire(size=8))
    assert p.options == (("form", "partitioned"), ("join", "concat"))
    assert p.anchors == ("one_conv", "three_conv") and p.operators[-1] == "cat"
    p = largest(inception_module(size=8))
    assert p.anchors == ("one_conv", "three_conv", "five_conv", "pooled_conv")


def test_a_concatenation_with_shortcuts():
    """Two of the three operands are slices from outside; one of them is added inside the branch."""
    found = proposed(csp_block(size=8))
    (p,) = [p for p in found if p.option("join") == "concat"]
    assert p.members == (("c2_conv", "c2_bias", "c2_relu", "shortcut"),)
    assert p.options == (("form", "partitioned"), ("join", "concat"), ("shortcut", "identity"))


def test_a_concatenation_of_tensors_from_outside_is_none():
    b = ModuleBuilder()
    x, y = b.input("x", (1, 8, 6, 6)), b.input("y", (1, 8, 6, 6))
    assert proposed(b.finish(b.concat("cat", [x, y]))) == []


def test_a_pooled_branch_of_a_concatenation_is_no_shortcut():
    assert proposed(shuffle_unit(stride=2, size=8)) == []


def test_three_dimensional_branches():
    p = largest(conv3d_branches(kernels=(3, 1)))
    assert p.anchors == ("large0", "large1") and p.option("form") == "joined"


@pytest.mark.parametrize(
    ("balance", "expected"),
    [
        ("refuse", {"form": "joined"}),
        ("warps", {"form": "joined", "balance": "warps"}),
        ("pad", {"form": "collapsed", "balance": "pad"}),
    ],
)
def test_balance_of_a_linear_pair(balance, expected):
    """RepVGG: 3x3 and 1x1 of one input, biases only: the padded weights can be added."""
    p = largest(repvgg_block(size=8), balance=balance)
    options = dict(p.options)
    assert {k: v for k, v in options.items() if k in ("form", "balance")} == expected


def test_padded_branches_that_are_not_linear_are_merged():
    p = largest(segmentation_head(size=8), balance="pad")
    assert p.options == (("balance", "pad"), ("form", "merged"), ("join", "add"))


def test_balance_is_for_unequal_branches_alone():
    for balance in ("pad", "warps"):
        assert largest(cross_pair(ratio=3), balance=balance).option("balance") == ""
        p = largest(cross_pair(ratio=3), balance=balance, max_work_ratio=2.0)
        # two inputs: no convolution computes both
        assert p.option("balance") == ("warps" if balance == "warps" else "")


def test_equal_siblings_are_left_to_horizontal_fusion():
    """One convolution of one input shares more than branches that meet in registers do."""
    assert proposed(parallel_convs(3, channels=8, spatial=6, relu=True)) == []
    other_inputs = parallel_convs(3, channels=8, spatial=6, relu=True, separate=True)
    assert largest(other_inputs).option("form") == "joined"


@pytest.mark.parametrize(
    "module", [csp_block(size=8), inception_module(size=8), repvgg_block(size=8)]
)
def test_proposals_are_well_formed(module):
    graph = graph_of(module)
    found = proposed(module, balance="pad")
    assert found == proposed(module, balance="pad")
    for p in found:
        members = [n for m in p.members for n in m]
        assert len(members) == len(set(members)) and set(members) < set(p.operators)
        assert p.operators == graph.sort(p.operators) and graph.is_convex(p.operators)
        assert len(graph.external_outputs(p.operators)) == 1
        assert all(a in m for a, m in zip(p.anchors, p.members, strict=True))


def test_a_chain_has_nothing_to_join():
    b = ModuleBuilder()
    y = b.relu("relu", b.bias("bias", b.conv("conv", b.input("x", (1, 8, 6, 6)), 8)))
    assert proposed(b.finish(y)) == []
