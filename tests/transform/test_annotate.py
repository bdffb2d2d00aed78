"""Annotation: Before/After, strip, idempotence, composition in a Sequential."""

from __future__ import annotations

import pytest

import tvm_fusion as tf
from tvm_fusion.compat import relax, structural_equal, tvm
from tvm_fusion.config import FusionConfig
from tvm_fusion.errors import PlanError, TargetError
from tvm_fusion.graph.relax import from_relax
from tvm_fusion.strategies.base import Proposal
from tvm_fusion.testing.blocks import residual_block
from tvm_fusion.testing.modules import ModuleBuilder, parallel_convs, random_module
from tvm_fusion.testing.named_blocks import named_block
from tvm_fusion.testing.synthetic_blocks import cross_pair, mixed_convs
from tvm_fusion.testing.transformer_blocks import dense_norm_heads, matmul_pair
from tvm_fusion.transform import (
    CompoundFusion,
    CrossFusion,
    Fuse,
    HorizontalFusion,
    StripFusion,
    VerticalFusion,
)
from tvm_fusion.transform.annotate import annotate, parts_from

TARGET = "cuda:sm_90"


def groups(mod):
    return {gv.name_hint: f for gv, f in mod.functions.items() if gv.name_hint != "main"}


def bottleneck():
    b = ModuleBuilder()
    x = b.input("x", (1, 16, 8, 8))
    y = b.relu("r1", b.bias("b1", b.conv("c1", x, 16, 1)))
    y = b.bias("b3", b.conv("c3", y, 16, 3))  # no kernel holds a 1x1 and then a 3x3 convolution
    return b.finish(b.relu("r3", b.add("add", y, x)))


def test_vertical_before_and_after():
    before = bottleneck()
    after = VerticalFusion(target=TARGET)(before)
    found = groups(after)
    assert sorted(found) == ["fused_vertical_0", "fused_vertical_1"]
    attrs = found["fused_vertical_1"].attrs
    assert attrs["Primitive"] and attrs["tvm_fusion.strategy"] == "vertical"
    assert (attrs["tvm_fusion.depth"], attrs["tvm_fusion.members"]) == (4, 1)
    calls = [b.value.op.name_hint for b in after["main"].body.blocks[0].bindings]
    assert calls == ["fused_vertical_0", "fused_vertical_1"]
    names = [b.var.name for b in found["fused_vertical_1"].body.blocks[0].bindings]
    assert names == ["c3", "b3", "add", "r3"]


def test_the_input_module_is_untouched():
    before = bottleneck()
    text = before.script()
    VerticalFusion(target=TARGET)(before)
    assert before.script() == text


def test_no_fire():
    b = ModuleBuilder()
    before = b.finish(b.conv("c2", b.conv("c1", b.input("x", (1, 8, 6, 6)), 8), 8))
    for make in (VerticalFusion, HorizontalFusion, CrossFusion, CompoundFusion, Fuse):
        assert structural_equal(make(target=TARGET)(before), before)
    assert structural_equal(HorizontalFusion(target=TARGET)(bottleneck()), bottleneck())
    assert structural_equal(CompoundFusion(target=TARGET)(bottleneck()), bottleneck())
    chain = b.finish(b.relu("r", b.bias("b", b.conv("c", b.input("y", (1, 8, 6, 6)), 8))))
    assert structural_equal(CrossFusion(target=TARGET)(chain), chain)


@pytest.mark.parametrize(
    "module",
    [bottleneck(), *(parallel_convs(n, channels=4, spatial=6, relu=True) for n in (3, 8)),
     *map(named_block, ("fire", "cross_1_2", "csp", "squeeze_excite_dense", "dense_norm_heads", "inception")),
     *(random_module(s, 20) for s in range(8))],
)  # fmt: skip
@pytest.mark.parametrize(
    "make", [VerticalFusion, HorizontalFusion, CrossFusion, CompoundFusion, Fuse]
)
def test_strip_gives_the_original_and_twice_is_once(module, make):
    fused = make(target=TARGET)(module)
    tvm.ir.assert_structural_equal(StripFusion()(fused), module)
    tvm.ir.assert_structural_equal(make(target=TARGET)(fused), fused)


def test_horizontal_absorbs_whole_vertical_groups():
    module = parallel_convs(3, channels=8, spatial=8, relu=True)
    passes = tvm.transform.Sequential(
        [VerticalFusion(target=TARGET), HorizontalFusion(target=TARGET)]
    )
    fused = passes(module)
    assert [f.attrs["tvm_fusion.strategy"] for f in groups(fused).values()] == ["horizontal"]
    tvm.ir.assert_structural_equal(StripFusion()(fused), module)
    (group,) = groups(fused).values()
    parts = [str(part).partition(":") for part in group.attrs["tvm_fusion.parts"]]
    assert {strategy for strategy, _, _ in parts} == {"vertical"}
    positions = [int(i) for _, _, text in parts for i in text.split(",")]
    assert len(positions) == len(set(positions)) and set(positions) <= set(range(8))


def test_a_plan_of_an_annotated_module_names_what_it_absorbs():
    module = mixed_convs([8, 8, 8], channels=8, size=8)
    (group,) = tf.plan(VerticalFusion(target=TARGET)(module), TARGET).groups
    assert group.strategy == "compound" and group.members == 3
    chains = [p.nodes for p in group.parts if p.strategy == "vertical"]
    assert chains == [(f"conv{i}", f"relu{i}") for i in range(3)]
    assert all(p.predicted_us > 0 for p in group.parts)


def test_vertical_leaves_horizontal_groups_whole():
    module = parallel_convs(3, channels=8, spatial=8, relu=True)
    fused = HorizontalFusion(target=TARGET)(module)
    tvm.ir.assert_structural_equal(VerticalFusion(target=TARGET)(fused), fused)


def test_equal_blocks_hash_equal():
    b = ModuleBuilder()
    value = b.input("x", (1, 8, 6, 6))
    for i in range(2):
        value = b.relu(f"r{i}", b.bias(f"b{i}", b.conv(f"c{i}", value, 8)))
    found = groups(VerticalFusion(target=TARGET)(b.finish(value)))
    first, second = found.values()
    assert tf.compat.structural_hash(first) == tf.compat.structural_hash(second)


def test_the_target_in_scope_is_used():
    module = bottleneck()
    with tvm.target.Target("llvm"):
        assert groups(VerticalFusion()(module))
    with pytest.raises(TargetError):
        VerticalFusion()(module)


def test_a_plan_is_carried_out():
    module = parallel_convs(3, channels=8, spatial=8, relu=True)
    plan = tf.plan(module, TARGET, FusionConfig(strategies="vertical"))
    assert sorted(groups(Fuse(plan)(module))) == sorted(g.id for g in plan.groups)


def test_the_annotated_module_runs_in_tvms_own_pipeline(module=None):
    module = parallel_convs(2, channels=4, spatial=6, relu=True)
    fused = Fuse(target="llvm")(module)
    lowered = tvm.transform.Sequential([relax.transform.LegalizeOps(), relax.transform.FuseTIR()])(
        fused
    )
    assert [type(f).__name__ for f in groups(lowered).values()] == ["PrimFunc"]


@pytest.mark.parametrize(
    ("make", "module", "strategy", "members", "options"),
    [
        (CrossFusion, cross_pair(ratio=2), "cross", 2, {"form": "joined", "join": "add"}),
        (
            CrossFusion, residual_block(size=8), "cross", 1,
            {"form": "joined", "join": "add", "shortcut": "identity"},
        ),
        (
            CompoundFusion, mixed_convs([8, 16], size=8), "compound", 2,
            {"form": "merged", "join": "apart"},
        ),
        (
            CompoundFusion, dense_norm_heads(rows=16, width=32, outputs=32), "compound", 4,
            {"form": "partitioned", "join": "apart"},
        ),
        (HorizontalFusion, mixed_convs([8, 16], size=8, relu=False), "horizontal", 2,
         {"form": "merged", "join": "apart"}),
        (VerticalFusion, matmul_pair(rows=16, width=32, inner=8, outputs=32), "vertical", 1,
         {"form": "back_to_back"}),
    ],
)  # fmt: skip
def test_attributes_of_each_strategy(make, module, strategy, members, options):
    fused = make(target=TARGET)(module)
    (name, group), *_ = groups(fused).items()
    assert name == f"fused_{strategy}_0"
    attrs = group.attrs
    assert attrs["Primitive"] and attrs["tvm_fusion.strategy"] == strategy
    assert attrs["tvm_fusion.members"] == members
    assert dict(attrs["tvm_fusion.options"]) == options
    assert bool(attrs["tvm_fusion.parts"]) == (strategy == "compound")
    tvm.ir.assert_structural_equal(StripFusion()(fused), module)


def test_cross_fusion_balances():
    module = cross_pair(kernels=(3, 1), size=8)
    assert groups(CrossFusion(target=TARGET)(module)) == {}
    for balance in ("pad", "warps"):
        (group,) = groups(CrossFusion(balance=balance, target=TARGET)(module)).values()
        assert dict(group.attrs["tvm_fusion.options"])["balance"] == balance
    assert groups(CrossFusion(max_work_ratio=9, target=TARGET)(module))


def test_compound_fusion_absorbs_what_stands():
    """Vertical, then horizontal, then compound: each pass keeps or absorbs whole groups."""
    module = mixed_convs([8, 8, 8], channels=8, size=8)
    passes = [VerticalFusion(target=TARGET), CompoundFusion(target=TARGET)]
    fused = tvm.transform.Sequential(passes)(module)
    assert [f.attrs["tvm_fusion.strategy"] for f in groups(fused).values()] == ["compound"]
    tvm.ir.assert_structural_equal(StripFusion()(fused), module)


def test_parallel_compound_annotates_nothing():
    """Kernels that serve one region are what the other passes make."""
    module = bottleneck()
    assert structural_equal(CompoundFusion(mode="parallel", target=TARGET)(module), module)
    with pytest.raises(ValueError, match="unknown mode 'both'; choose from serial, parallel"):
        CompoundFusion(mode="both")


def test_a_group_that_stands_is_kept_though_it_saves_nothing():
    """Someone wanted it: another pass may absorb it, not undo it."""
    module = matmul_pair(rows=4096, width=1024, inner=512, outputs=16384, dtype="float16")
    found = from_relax(module)
    names = tuple(o.name for o in found.graph.operators)
    options = (("form", "back_to_back"),)
    mine = Proposal("vertical", names, ("first", "second"), (names,), 5, (), options)
    annotated = annotate(module, found, {"mine": mine})
    for make in (VerticalFusion, HorizontalFusion, Fuse):
        (group,) = groups(make(target=TARGET)(annotated)).values()
        assert len(group.body.blocks[0].bindings) == 5
    plan = tf.plan(module, TARGET)
    assert all(len(g.nodes) < 5 for g in plan.groups), "unasked it would not be made"


def test_parts_are_positions_so_that_equal_blocks_hash_equal():
    blocks = []
    for prefix in ("first", "second"):
        b = ModuleBuilder()
        x = b.input("x", (1, 8, 8, 8))
        names = [(f"{prefix}{i}", f"{prefix}{i}r") for i in range(2)]
        module = b.finish(*(b.relu(r, b.conv(c, x, 8)) for c, r in names))
        (group,) = groups(CompoundFusion(target=TARGET)(module)).values()
        blocks.append((group, names))
    (left, names), (right, _) = blocks
    assert tf.compat.structural_hash(left) == tf.compat.structural_hash(right)
    order = [n for pair in names for n in pair]
    assert parts_from(left.attrs, order) == (
        ("vertical", names[0]), ("vertical", names[1]), ("horizontal", (names[0][0], names[1][0])),
    )  # fmt: skip


def diamond():
    """Two chains of two operators that cross: a → d and b → c, read by one another's ends."""
    b = ModuleBuilder()
    x = b.input("x", (1, 8))
    first, second = b.relu("first", x), b.op("second", relax.op.tanh(x))
    third = b.add("third", first, second)
    return b.finish(b.add("fourth", b.op("middle", relax.op.exp(third)), first))


def alone(*operators):
    """Some operators as a group."""
    return Proposal("vertical", operators, (), (operators,), 2)


@pytest.mark.parametrize(
    ("made", "names"),
    [
        ({"g": alone("first", "fourth")}, "^g need"),
        ({"g": alone("first", "middle"), "h": alone("second", "third")}, "^(g and h|h and g) need"),
    ],
)
def test_groups_that_close_a_cycle_are_refused(made, names):
    mod = diamond()
    with pytest.raises(PlanError, match=names):
        annotate(mod, from_relax(mod), made)
    fine = {"g": alone("first", "second"), "h": alone("middle", "fourth")}
    assert len(groups(annotate(mod, from_relax(mod), fine))) == 2


def test_a_target_where_a_plan_belongs():
    with pytest.raises(TypeError, match="a target is given as target="):
        tf.transform.Fuse("cuda:sm_90a")
