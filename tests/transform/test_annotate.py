"""Annotation: Before/After, strip, idempotence, composition in a Sequential."""

from __future__ import annotations

import pytest

import tvm_fusion as tf
from tvm_fusion.compat import relax, structural_equal, tvm
from tvm_fusion.config import FusionConfig
from tvm_fusion.errors import TargetError
from tvm_fusion.testing.modules import ModuleBuilder, parallel_convs, random_module
from tvm_fusion.transform import Fuse, HorizontalFusion, StripFusion, VerticalFusion

TARGET = "cuda:sm_90"


def groups(mod):
    return {gv.name_hint: f for gv, f in mod.functions.items() if gv.name_hint != "main"}


def bottleneck():
    b = ModuleBuilder()
    x = b.input("x", (1, 16, 8, 8))
    y = b.relu("r1", b.bias("b1", b.conv("c1", x, 16, 1)))
    y = b.bias("b3", b.conv("c3", y, 16, 1))
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
    assert structural_equal(VerticalFusion(target=TARGET)(before), before)
    assert structural_equal(HorizontalFusion(target=TARGET)(bottleneck()), bottleneck())


@pytest.mark.parametrize(
    "module",
    [bottleneck(), *(parallel_convs(n, channels=4, spatial=6, relu=True) for n in (3, 8)),
     *(random_module(s, 20) for s in range(8))],
)  # fmt: skip
@pytest.mark.parametrize("make", [VerticalFusion, HorizontalFusion, Fuse])
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
    plan = tf.plan(VerticalFusion(target=TARGET)(module), TARGET)
    assert sorted(plan.groups[0].parts) == [
        "fused_vertical_0",
        "fused_vertical_1",
        "fused_vertical_2",
    ]


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
