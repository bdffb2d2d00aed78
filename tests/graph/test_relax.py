"""Relax functions as graphs: names, patterns, counts."""

from __future__ import annotations

import pytest

from tvm_fusion.compat import relax, tvm
from tvm_fusion.errors import InvalidModelError
from tvm_fusion.graph.relax import from_relax
from tvm_fusion.testing.modules import ModuleBuilder


def test_golden_graph():
    b = ModuleBuilder()
    x = b.input("x", (1, 8, 6, 6))
    y = b.relu("act", b.bias("conv", b.conv("conv", x, 4)))
    graph = from_relax(b.finish(y)).graph
    assert str(graph) == (
        "conv: conv2d(x, const0) -> float32[1,4,6,6]\n"
        "conv#2: add(conv, const1) -> float32[1,4,6,6]\n"
        "act: relu(conv#2) -> float32[1,4,6,6]"
    )
    assert graph.inputs == ("x",) and graph.outputs == ("act",)


def test_flops_and_bytes_of_a_convolution():
    b = ModuleBuilder(dtype="float16")
    x = b.input("x", (1, 64, 128, 128))
    conv = from_relax(b.finish(b.conv("conv", x, 64))).graph.by_name["conv"]
    assert conv.flops == 2 * 128 * 128 * 64 * 64 * 9
    assert conv.bytes_read == 2 * 2**20 + 64 * 64 * 9 * 2
    assert conv.bytes_written == 2 * 2**20


def test_flops_of_a_depthwise_convolution_in_both_layouts():
    for layout, shape in (("NCHW", (1, 32, 10, 10)), ("NHWC", (1, 10, 10, 32))):
        b = ModuleBuilder(layout=layout)
        x = b.input("x", shape)
        conv = from_relax(b.finish(b.conv("dw", x, 32, groups=32))).graph.by_name["dw"]
        assert conv.flops == 2 * 10 * 10 * 32 * 9


def test_the_intensity_of_a_depthwise_and_pointwise_pair():
    """MobileNet's 112x112x32→64, anchors' FLOPs over every operator's traffic: 4.3 FLOP/B unfused, 24 fused."""
    b = ModuleBuilder(dtype="float16")
    x = b.input("x", (1, 32, 112, 112))
    y = b.op("relu1", relax.op.clip(b.bias("bn1", b.conv("dw", x, 32, groups=32)), 0, 6))
    z = b.op("relu2", relax.op.clip(b.bias("bn2", b.conv("pw", y, 64, 1)), 0, 6))
    graph = from_relax(b.finish(z)).graph
    flops = sum(graph.by_name[n].flops for n in ("dw", "pw"))
    moved = sum(o.bytes_read + o.bytes_written for o in graph.operators)
    assert flops / moved == pytest.approx(4.3, abs=0.05)
    assert flops / sum(graph.traffic(graph.by_name)) == pytest.approx(24, abs=0.5)


def test_views_cost_nothing_and_tuples_are_no_operators():
    b = ModuleBuilder()
    x = b.input("x", (1, 8, 6, 6))
    parts = b.op("split", relax.op.split(x, 2, axis=1))
    first = b.op("split", relax.TupleGetItem(parts, 0))
    flat = b.op("flat", relax.op.reshape(first, (4, 36)))
    found = from_relax(b.finish(flat))
    assert [o.name for o in found.graph.operators] == ["split", "flat"]
    assert len(found.bindings["split"]) == 2
    assert not found.graph.by_name["flat"].does_work


def test_a_scalar_operand_is_an_attribute():
    b = ModuleBuilder()
    x = b.input("x", (2, 2))
    y = b.op("add", relax.op.add(x, relax.const(2.0, "float32")))
    add = from_relax(b.finish(y)).graph.by_name["add"]
    assert add.inputs == ("x",) and add.attrs["arg1"] == 2.0


def test_a_symbolic_extent_is_none():
    b = ModuleBuilder()
    x = b.input("x", (tvm.tirx.Var("n", "int64"), 4))
    graph = from_relax(b.finish(b.relu("r", x))).graph
    assert graph.tensors["r"].shape == (None, 4)


def test_a_module_without_main_is_refused():
    with pytest.raises(InvalidModelError, match="no Relax function 'main'"):
        from_relax(tvm.IRModule())


@pytest.mark.parametrize(("rows", "read"), [(1000, 12), (2, 2)])
def test_a_table_is_read_where_it_is_looked_up(rows, read):
    """Twelve rows of a vocabulary, not the vocabulary; of two rows no more than there are."""
    b = ModuleBuilder()
    ids = b.op("ids", relax.op.astype(b.input("x", (3, 4)), "int32"))
    found = b.op("take", relax.op.take(b.const(rows, 64), ids, axis=0))
    graph = from_relax(b.finish(found)).graph
    take = graph.by_name["take"]
    assert take.bytes_read == (read * 64 + 12) * 4
    assert graph.traffic(("take",)) == (take.bytes_read, 12 * 64 * 4)
    assert graph.traffic(("ids", "take")) == (take.bytes_read, 12 * 64 * 4)


def test_a_table_that_is_multiplied_too_is_read_whole():
    b = ModuleBuilder()
    table = b.const(50, 8)
    ids = b.op("ids", relax.op.astype(b.input("x", (3,)), "int32"))
    found = b.op("take", relax.op.take(table, ids, axis=0))
    other = b.op("sum", relax.op.matmul(b.input("y", (4, 50)), table))
    graph = from_relax(b.finish(found, other)).graph
    assert graph.traffic(("sum",))[0] == (4 * 50 + 50 * 8) * 4
    assert not graph.read_bytes
