"""Each guard: one case where it refuses, one where it must not."""

from __future__ import annotations

import pytest

from tvm_fusion.compat import relax, tvm
from tvm_fusion.config import FusionConfig
from tvm_fusion.graph.relax import from_relax
from tvm_fusion.guards import ACCEPTED, GUARDS, Verdict, judge
from tvm_fusion.guards.base import REASONS
from tvm_fusion.strategies.base import Proposal
from tvm_fusion.testing.modules import ModuleBuilder, parallel_convs


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


def reason(proposal, graph, **options):
    return judge(proposal, graph, FusionConfig(**options)).reason


def test_a_plain_chain_is_accepted():
    assert judge(CHAIN, chain(), FusionConfig()) is ACCEPTED


@pytest.mark.parametrize("pattern", ["relu", "bias", "con*"])
def test_denied(pattern):
    verdict = judge(CHAIN, chain(), FusionConfig(deny=(pattern,)))
    assert verdict.reason == "denied" and verdict.numbers["pattern"] == pattern
    assert reason(CHAIN, chain(), deny=("softmax",)) == ""


def test_dependence():
    b = ModuleBuilder()
    first = b.conv("a", b.input("x", (1, 8, 6, 6)), 8)
    proposal, graph = pair(b.finish(b.conv("b", first, 8)))
    assert reason(proposal, graph) == "dependence"
    assert reason(*pair(two_convs())) == ""


def test_not_convex():
    b = ModuleBuilder()
    a = b.relu("a", b.input("x", (4, 4)))
    y = b.add("c", a, b.op("sum", relax.op.sum(a, axis=[0], keepdims=True)))
    graph = from_relax(b.finish(y)).graph
    proposal = Proposal("vertical", ("a", "c"), (), (("a", "c"),), 2)
    verdict = judge(proposal, graph, FusionConfig())
    assert (verdict.outcome, verdict.reason) == ("illegal", "not_convex")


def test_unsupported_operator():
    b = ModuleBuilder()
    y = b.relu("r", b.op("cum", relax.op.cumsum(b.input("x", (4, 4)), axis=1)))
    graph = from_relax(b.finish(y)).graph
    assert (
        reason(Proposal("vertical", ("cum", "r"), (), (("cum", "r"),), 2), graph)
        == "unsupported_op"
    )


def test_dynamic_shape():
    b = ModuleBuilder()
    x = b.input("x", (tvm.tirx.Var("n", "int64"), 4))
    graph = from_relax(b.finish(b.relu("r", b.op("e", relax.op.exp(x))))).graph
    assert reason(Proposal("vertical", ("e", "r"), (), (("e", "r"),), 2), graph) == "dynamic_shape"


def test_shape_mismatch_of_inputs_and_strides():
    assert reason(*pair(two_convs(second=(1, 8, 3, 3)))) == "shape_mismatch"
    assert reason(*pair(two_convs(stride=2))) == "shape_mismatch"
    assert reason(*pair(two_convs(kernel=5))) == ""
    assert reason(*pair(two_convs(kernel=5, padding=0))) == "shape_mismatch"


def test_dtype_mismatch():
    b = ModuleBuilder()
    x = b.input("x", (1, 8, 6, 6))
    a = b.relu("a", x)
    y = b.op("b", relax.op.astype(x, "float16"))
    assert reason(*pair(b.finish(a, y))) == "dtype_mismatch"


def test_layout_mismatch():
    b = ModuleBuilder()
    x = b.input("x", (1, 8, 8, 8))
    a = b.conv("a", x, 8)
    b.layout = "NHWC"
    assert reason(*pair(b.finish(a, b.conv("b", x, 8)))) == "layout_mismatch"


def test_divergence():
    b = ModuleBuilder()
    x = b.input("x", (1, 8, 6, 6))
    module = b.finish(b.relu("r", b.conv("a", x, 8)), b.conv("b", x, 8))
    graph = from_relax(module).graph
    members = (("a", "r"), ("b",))
    proposal = Proposal("horizontal", ("a", "r", "b"), ("a", "b"), members, 2)
    assert reason(proposal, graph) == "divergence"


def test_group_too_large():
    graph = from_relax(parallel_convs(7, channels=4, spatial=6, join=None)).graph
    heads = tuple(f"conv{i}" for i in range(7))
    proposal = Proposal("horizontal", heads, heads, tuple((h,) for h in heads), 1)
    verdict = judge(proposal, graph, FusionConfig())
    assert verdict.reason == "group_too_large"
    assert verdict.numbers == {"members": 7, "max_members": 6}
    assert reason(proposal, graph, max_members=7) == ""
    assert reason(CHAIN, chain(), max_depth=2) == "group_too_large"


def test_every_guard_has_a_documented_reason():
    assert {g.reason for g in GUARDS} <= set(REASONS)


def test_a_verdict_needs_a_reason_to_refuse():
    with pytest.raises(ValueError, match="does not go with"):
        Verdict("illegal")
    with pytest.raises(ValueError, match="unknown outcome"):
        Verdict("maybe")
