"""Branches, join and tail of groups of every kind."""

from __future__ import annotations

import pytest

from tvm_fusion.compat import relax
from tvm_fusion.graph.relax import from_relax
from tvm_fusion.strategies.decompose import decompose, member_results
from tvm_fusion.testing.modules import ModuleBuilder, random_module

op = relax.op
SHAPE = (1, 6, 8, 8)


def parts(module, **options):
    graph = from_relax(module).graph
    return decompose(graph, [o.name for o in graph.operators], options)


def members(shape):
    return [b.operators for b in shape.branches]


def projection(b, *, prologue=False):
    x, y = b.input("x", SHAPE), b.input("y", SHAPE)
    left = b.relu("l1", b.conv("l0", b.relu("p", x) if prologue else x, 6))
    return b.add("j", left, b.bias("r1", b.conv("r0", y, 6, 1)))


def test_branches_join_and_tail():
    b = ModuleBuilder()
    shape = parts(b.finish(b.relu("t", projection(b))), form="joined")
    assert members(shape) == [("l0", "l1"), ("r0", "r1")]
    assert (shape.join.kind, shape.join.operators, shape.tail) == ("add", ("j",), ("t",))
    assert [branch.result for branch in shape.branches] == ["l1", "r1"]
    assert shape.anchors == ("l0", "r0")


def test_a_prologue_belongs_to_its_branch():
    b = ModuleBuilder()
    shape = parts(b.finish(projection(b, prologue=True)), form="joined")
    assert members(shape) == [("p", "l0", "l1"), ("r0", "r1")]
    assert [branch.head for branch in shape.branches] == ["l0", "r0"]


def test_anchors_that_depend_on_each_other_are_one_branch():
    b = ModuleBuilder()
    x = b.input("x", SHAPE)
    sides = [
        b.conv(f"{n}1", b.relu(f"{n}r", b.conv(f"{n}0", x, 6, 3, groups=6)), 6, 1) for n in "ab"
    ]
    shape = parts(b.finish(b.add("j", *sides)), form="joined")
    assert members(shape) == [("a0", "ar", "a1"), ("b0", "br", "b1")]
    assert shape.anchors == ("a0", "a1", "b0", "b1")


def test_row_operators_are_anchors_of_their_branch():
    b = ModuleBuilder()
    rows = [b.layer_norm(f"n{i}", b.dense(f"f{i}", b.input(f"x{i}", (4, 8)), 8)) for i in range(2)]
    shape = parts(b.finish(b.add("j", *rows)), form="joined")
    assert members(shape) == [(f"f{i}", f"f{i}_bias", f"n{i}") for i in range(2)]


def test_a_tree_of_joins_with_an_operator_between():
    b = ModuleBuilder()
    x = b.input("x", SHAPE)
    convs = [b.conv(f"c{i}", x, 6) for i in range(3)]
    inner = b.relu("between", b.op("m", op.multiply(convs[0], convs[1])))
    shape = parts(b.finish(b.add("j", inner, convs[2])), form="joined")
    assert shape.join.kind == "mixed" and shape.join.operators == ("m", "between", "j")
    assert members(shape) == [("c0",), ("c1",), ("c2",)]


def test_the_shortcut_is_a_branch_of_the_join_only_where_it_is_asked_for():
    b = ModuleBuilder()
    x = b.input("x", SHAPE)
    module = b.finish(b.relu("t", b.add("j", b.bias("b", b.conv("c", x, 6)), x)))
    shape = parts(module, form="joined", shortcut="identity")
    assert members(shape) == [("c", "b")] and shape.tail == ("t",)
    assert [branch.result for branch in shape.join.branches] == ["b", "x"]
    plain = parts(module)
    assert members(plain) == [("c", "b", "j", "t")] and plain.join is None


def test_a_gate_and_the_map_that_it_scales():
    b = ModuleBuilder()
    s, x = b.input("s", (1, 3)), b.input("x", SHAPE)
    view = b.op("v", op.reshape(b.op("g", op.sigmoid(b.dense("fc", s, 6))), (1, 6, 1, 1)))
    shape = parts(b.finish(b.op("j", op.multiply(view, x))), form="joined", shortcut="identity")
    assert members(shape) == [("fc", "fc_bias", "g", "v")]
    assert shape.join.kind == "multiply" and shape.join.branches[-1].result == "x"


@pytest.mark.parametrize("form", ["back_to_back", "anchor_row"])
def test_two_anchors_on_one_path(form):
    b = ModuleBuilder()
    value = b.dense("f1", b.input("x", (4, 8)), 8)
    value = b.layer_norm("n", value) if form == "anchor_row" else b.dense("f2", value, 8)
    shape = parts(b.finish(value), form=form)
    (branch,) = shape.branches
    assert branch.head == "f1" and len(branch.operators) == len(shape.anchors) + (
        1 if form == "anchor_row" else 2
    )
    assert shape.join is None and shape.tail == ()


def concatenated(b, *, tail=True):
    x, y = b.input("x", SHAPE), b.input("y", SHAPE)
    total = b.concat("cat", [y, b.relu("r", b.conv("c", x, 6)), x])
    return b.finish(b.relu("t", b.bias("s", total)) if tail else total)


def test_operands_from_outside_are_branches_of_the_concatenation():
    shape = parts(concatenated(ModuleBuilder()), form="partitioned", join="concat")
    assert members(shape) == [("c", "r")]
    assert [branch.result for branch in shape.join.branches] == ["y", "r", "x"]
    assert shape.tail == ("s", "t")


def test_slices_connect_no_members():
    b = ModuleBuilder()
    first, second = b.split("sp", b.input("x", SHAPE), 2)
    value = b.relu("r", b.conv("c", second, 3))
    module = b.finish(b.concat("cat", [first, value, second]))
    shape = parts(module, form="partitioned", join="concat")
    assert members(shape) == [("sp",), ("c", "r")]
    graph = from_relax(module).graph
    names = [o.name for o in graph.operators]
    assert member_results(graph, names, {"join": "concat"}) == ("cat", [["sp.0"], ["r"], ["sp.1"]])


def test_members_that_share_work_are_one():
    b = ModuleBuilder()
    first = b.conv("c0", b.input("x", SHAPE), 6)
    module = b.finish(b.concat("cat", [first, b.conv("c1", first, 6)]))
    assert members(parts(module, form="partitioned", join="concat")) == [("c0", "c1")]


def test_members_returned_apart():
    b = ModuleBuilder()
    x = b.input("x", SHAPE)
    pooled = b.op("p", op.nn.max_pool2d(x, 3))
    module = b.finish(b.relu("r", b.conv("c", x, 6)), pooled, b.op("g", op.sigmoid(x)))
    shape = parts(module, form="partitioned", join="apart")
    assert sorted(members(shape)) == [("c", "r"), ("g",), ("p",)]
    assert shape.join is None and shape.tail == ()


@pytest.mark.parametrize("form", ["joined", "partitioned"])
@pytest.mark.parametrize("seed", range(20))
def test_every_operator_has_one_place(seed, form):
    module = random_module(seed, 16)
    shape = parts(module, form=form, join="concat" if seed % 2 else "apart")
    placed = [name for names in members(shape) for name in names] + list(shape.tail)
    placed += shape.join.operators if shape.join else ()
    assert sorted(placed) == sorted(o.name for o in from_relax(module).graph.operators)
