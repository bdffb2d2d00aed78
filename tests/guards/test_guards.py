"""Each guard: one case where it refuses, one where it must not."""

from __future__ import annotations

import dataclasses

import pytest

from tvm_fusion.compat import relax, tvm
from tvm_fusion.config import FusionConfig
from tvm_fusion.graph.relax import from_relax
from tvm_fusion.guards import ACCEPTED, GUARDS, Verdict, judge
from tvm_fusion.guards.base import REASONS
from tvm_fusion.strategies.base import Proposal
from tvm_fusion.testing.modules import ModuleBuilder, parallel_convs
from tvm_fusion.testing.plans import DEVICE


def chain():
    b = ModuleBuilder()
    y = b.relu("relu", b.bias("bias", b.conv("conv", b.input("x", (1, 8, 6, 6)), 8)))
    return from_relax(b.finish(y)).graph


CHAIN = Proposal("vertical", ("conv", "bias", "relu"), ("conv",), (("conv", "bias", "relu"),), 3)


def pair(module, heads=("a", "b"), **fields):
    graph = from_relax(module).graph
    names = graph.sort(heads)
    fields.setdefault("options", (("form", "partitioned"),))
    return Proposal("horizontal", names, names, tuple((n,) for n in heads), 1, **fields), graph


def two_convs(second=None, shape=(1, 8, 6, 6), **options):
    b = ModuleBuilder()
    x = b.input("x", (1, 8, 6, 6))
    y = x if second is None else b.input("y", second)
    return b.finish(b.conv("a", x, 8), b.conv("b", y, 8, **options))


def verdict(proposal, graph, **options):
    return judge(proposal, graph, FusionConfig(**options), DEVICE)


def reason(proposal, graph, **options):
    return verdict(proposal, graph, **options).reason


def test_a_plain_chain_is_accepted():
    assert judge(CHAIN, chain(), FusionConfig()) is ACCEPTED


@pytest.mark.parametrize("pattern", ["relu", "bias", "con*", "conv2d"])
def test_denied(pattern):
    """By operator type and by node name, with wildcards."""
    found = verdict(CHAIN, chain(), deny=(pattern,))
    assert (found.outcome, found.reason) == ("unsupported", "denied")
    assert found.numbers == {"pattern": pattern}
    assert reason(CHAIN, chain(), deny=("softmax", "conv3d")) == ""


def test_a_denied_source_name_is_found_behind_another_name():
    graph = chain()
    renamed = dataclasses.replace(graph.operators[2], source_names=("/layer1/Relu_3",))
    graph = dataclasses.replace(graph, operators=(*graph.operators[:2], renamed))
    assert reason(CHAIN, graph, deny=("/layer1/*",)) == "denied"
    assert reason(CHAIN, graph, deny=("/layer2/*",)) == ""


def test_dependence():
    b = ModuleBuilder()
    first = b.conv("a", b.input("x", (1, 8, 6, 6)), 8)
    proposal, graph = pair(b.finish(b.conv("b", first, 8)))
    found = verdict(proposal, graph)
    assert (found.outcome, found.reason) == ("illegal", "dependence")
    assert found.numbers == {"earlier": "a", "later": "b"}
    assert reason(*pair(two_convs())) == ""


def test_dependence_through_an_operator_outside():
    b = ModuleBuilder()
    first = b.op("between", relax.op.tanh(b.conv("a", b.input("x", (1, 8, 6, 6)), 8)))
    assert reason(*pair(b.finish(b.conv("b", first, 8)))) == "dependence"


def test_dependence_of_an_epilogue():
    """The second member's last operator adds the first member's result."""
    b = ModuleBuilder()
    x = b.input("x", (1, 8, 6, 6))
    left = b.conv("a", x, 8)
    graph = from_relax(b.finish(b.add("sum", b.conv("b", x, 8), left), left)).graph
    members = (("a",), ("b", "sum"))
    options = (("form", "partitioned"),)
    proposal = Proposal("horizontal", ("a", "b", "sum"), ("a", "b"), members, 2, (), options)
    assert reason(proposal, graph) == "dependence"


def test_not_convex():
    b = ModuleBuilder()
    a = b.relu("a", b.input("x", (4, 4)))
    y = b.add("c", a, b.op("sum", relax.op.sum(a, axis=[0], keepdims=True)))
    graph = from_relax(b.finish(y)).graph
    found = verdict(Proposal("vertical", ("a", "c"), (), (("a", "c"),), 2), graph)
    assert (found.outcome, found.reason) == ("illegal", "not_convex")
    whole = Proposal("vertical", ("a", "sum", "c"), ("sum",), (("a", "sum", "c"),), 3)
    assert reason(whole, graph) != "not_convex"


def test_unsupported_operator():
    b = ModuleBuilder()
    y = b.relu("r", b.op("cum", relax.op.cumsum(b.relu("q", b.input("x", (4, 4))), axis=1)))
    graph = from_relax(b.finish(b.op("s", relax.op.tanh(y)))).graph
    found = verdict(Proposal("vertical", ("cum", "r"), (), (("cum", "r"),), 2), graph)
    assert (found.outcome, found.reason) == ("unsupported", "unsupported_op")
    assert found.numbers == {"op": "cumsum"}
    assert reason(Proposal("vertical", ("r", "s"), (), (("r", "s"),), 2), graph) == ""


def test_dynamic_shape():
    """Legality cannot be proved without the extent; that is no fault of the group."""
    proposal = Proposal("vertical", ("e", "r"), (), (("e", "r"),), 2)

    def graph(extent):
        b = ModuleBuilder()
        return from_relax(
            b.finish(b.relu("r", b.op("e", relax.op.exp(b.input("x", (extent, 4))))))
        ).graph

    found = verdict(proposal, graph(tvm.tirx.Var("n", "int64")))
    assert (found.outcome, found.reason) == ("unprovable", "dynamic_shape")
    assert found.numbers == {"shape": [None, 4]} and "--shape" in found.detail
    assert reason(proposal, graph(8)) == ""


def test_shape_mismatch_of_inputs_and_strides():
    found = verdict(*pair(two_convs(second=(1, 8, 3, 3))))
    assert (found.outcome, found.reason) == ("unsupported", "shape_mismatch")
    assert found.numbers == {"input_shapes": [[1, 8, 6, 6], [1, 8, 3, 3]]}
    assert verdict(*pair(two_convs(stride=2))).numbers == {"strides": [[1, 1], [2, 2]]}
    assert verdict(*pair(two_convs(kernel=5, padding=0))).numbers == {
        "output_extents": [[1, 6, 6], [1, 2, 2]]
    }
    assert reason(*pair(two_convs(kernel=5))) == ""


def test_output_channels_may_differ():
    b = ModuleBuilder()
    x = b.input("x", (1, 8, 6, 6))
    assert reason(*pair(b.finish(b.conv("a", x, 8), b.conv("b", x, 32)))) == ""


def test_dtype_mismatch():
    b = ModuleBuilder()
    x = b.input("x", (1, 8, 6, 6))
    a = b.relu("a", x)
    y = b.op("b", relax.op.astype(x, "float16"))
    found = verdict(*pair(b.finish(a, y)))
    assert (found.outcome, found.reason) == ("unsupported", "dtype_mismatch")
    assert found.numbers == {"dtypes": ["float32", "float16"]}
    b = ModuleBuilder()
    x = b.input("x", (1, 8, 6, 6))
    assert reason(*pair(b.finish(b.relu("a", x), b.op("b", relax.op.tanh(x))))) == ""


def test_layout_mismatch():
    b = ModuleBuilder()
    x = b.input("x", (1, 8, 8, 8))
    a = b.conv("a", x, 8)
    b.layout = "NHWC"
    found = verdict(*pair(b.finish(a, b.conv("b", x, 8))))
    assert (found.outcome, found.reason) == ("unsupported", "layout_mismatch")
    assert found.numbers == {"layouts": ["NCHW", "NHWC"]}
    b = ModuleBuilder(layout="NHWC")
    x = b.input("x", (1, 8, 8, 8))
    assert reason(*pair(b.finish(b.conv("a", x, 8), b.conv("b", x, 8)))) == ""


@pytest.mark.parametrize("guard", ["dtype_mismatch", "layout_mismatch", "shape_mismatch"])
def test_branches_that_meet_in_a_cross_join_need_not_agree(guard):
    b = ModuleBuilder()
    large, small = b.input("x", (1, 4, 13, 13)), b.input("y", (1, 8, 7, 7))
    left, right = b.conv("a", large, 8, stride=2), b.conv("b", small, 8)
    graph = from_relax(b.finish(b.add("sum", left, right))).graph
    options = (("form", "joined"), ("join", "add"))
    proposal = Proposal("cross", ("a", "b", "sum"), ("a", "b"), (("a",), ("b",)), 2, (), options)
    assert reason(proposal, graph) != guard


def test_having_absorbed_a_cross_group_exempts_nothing():
    """The parts of a proposal are history: members of a horizontal launch must agree all the same."""
    proposal, graph = pair(two_convs(stride=2), parts=(("cross", ("a",)),))
    assert reason(proposal, graph) == "shape_mismatch"


@pytest.mark.parametrize(
    ("form", "elements", "expected"),
    [
        ("partitioned", 16, "divergence"),
        ("partitioned", 31, "divergence"),
        ("partitioned", 32, ""),
        ("elementwise", 16, ""),
    ],
)
def test_divergence(form, elements, expected):
    """Members that run different operators have blocks of their own; fewer elements than a warp idle."""
    b = ModuleBuilder()
    x = b.input("x", (elements,))
    graph = from_relax(b.finish(b.relu("a", x), b.op("b", relax.op.tanh(x)))).graph
    options = (("form", form), ("join", "apart"))
    proposal = Proposal("horizontal", ("a", "b"), (), (("a",), ("b",)), 1, (), options)
    found = verdict(proposal, graph, min_occupancy=0)
    assert found.reason == expected
    if expected:
        assert found.outcome == "unprofitable"
        assert found.numbers["elements"] == [elements] * 2 and found.numbers["warp_size"] == 32


def test_equal_members_do_not_diverge_however_small():
    b = ModuleBuilder()
    x = b.input("x", (4,))
    graph = from_relax(b.finish(b.relu("a", x), b.relu("b", x))).graph
    options = (("form", "partitioned"), ("join", "apart"))
    proposal = Proposal("horizontal", ("a", "b"), (), (("a",), ("b",)), 1, (), options)
    assert reason(proposal, graph, min_occupancy=0) == ""


def test_group_too_large():
    graph = from_relax(parallel_convs(7, channels=4, spatial=6, join=None)).graph
    heads = tuple(f"conv{i}" for i in range(7))
    options = (("form", "merged"), ("join", "apart"))
    proposal = Proposal("horizontal", heads, heads, tuple((h,) for h in heads), 1, (), options)
    found = verdict(proposal, graph, min_occupancy=0)
    assert (found.outcome, found.reason) == ("unprofitable", "group_too_large")
    assert found.numbers == {"members": 7, "max_members": 6}
    assert reason(proposal, graph, max_members=7, min_occupancy=0) == ""
    assert verdict(CHAIN, chain(), max_depth=2).numbers == {"depth": 3, "max_depth": 2}
    assert verdict(CHAIN, chain(), max_operators=2).numbers == {"operators": 3, "max_operators": 2}
    assert reason(CHAIN, chain(), max_depth=3, max_operators=3) == ""


def test_members_of_a_collapsed_sum_do_not_count():
    graph = from_relax(parallel_convs(7, channels=4, spatial=6)).graph
    heads = tuple(f"conv{i}" for i in range(7))
    names = graph.sort((*heads, *(f"add{i}" for i in range(1, 7))))
    for form, expected in (("collapsed", ""), ("merged", "group_too_large")):
        options = (("form", form), ("join", "add"))
        members = tuple((h,) for h in heads)
        proposal = Proposal("horizontal", names, heads, members, 7, (), options)
        assert reason(proposal, graph, min_occupancy=0) == expected


def test_projections_of_a_transformer_may_be_many():
    """Products of one input only widen the merged product: four times as many members."""
    b = ModuleBuilder()
    x = b.input("x", (128, 64))
    heads = tuple(f"head{i}" for i in range(25))
    graph = from_relax(b.finish(*(b.dense(h, x, 64, bias=False) for h in heads))).graph

    def merged(count, **options):
        taken = heads[:count]
        form = (("form", "merged"), ("join", "apart"))
        members = tuple((h,) for h in taken)
        return reason(Proposal("horizontal", taken, taken, members, 1, (), form), graph, **options)

    assert merged(24, preset="transformer") == ""
    assert merged(25, preset="transformer") == "group_too_large"
    assert merged(7, preset="large-cnn") == "group_too_large"


def test_every_guard_has_a_documented_reason():
    assert {g.reason for g in GUARDS} <= set(REASONS)


def test_a_verdict_needs_a_reason_to_refuse():
    with pytest.raises(ValueError, match="does not go with"):
        Verdict("illegal")
    with pytest.raises(ValueError, match="unknown outcome"):
        Verdict("maybe")
