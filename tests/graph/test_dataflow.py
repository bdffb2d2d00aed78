"""The IR-neutral graph: order, reachability, traffic."""

from __future__ import annotations

import pytest

from tvm_fusion.errors import InvalidModelError
from tvm_fusion.graph import DataflowGraph, Operator, Tensor


def operator(name, inputs, pattern="elementwise", flops=1):
    return Operator(
        name, "relu", (name,), tuple(inputs), (f"{name}.out",), {}, pattern, flops, 4, 4
    )


def diamond():
    """a feeds b and c, which d joins."""
    operators = (
        operator("a", ["x"]),
        operator("b", ["a.out"]),
        operator("c", ["a.out"]),
        operator("d", ["b.out", "c.out"]),
    )
    names = ["x", *(o.outputs[0] for o in operators)]
    return DataflowGraph(
        operators, {n: Tensor(n, (2, 3), "float32") for n in names}, ("x",), ("d.out",)
    )


def test_bytes_of_a_tensor_follow_its_type():
    assert Tensor("t", (2, 3), "float32").nbytes == 24
    assert Tensor("t", (2, 3), "bfloat16").nbytes == 12
    assert Tensor("t", (2, None), "float16").nbytes == 4


def test_consumers_and_levels():
    graph = diamond()
    assert [c.name for c in graph.consumers["a.out"]] == ["b", "c"]
    assert graph.level == {"a": 1, "b": 2, "c": 2, "d": 3}


def test_convexity():
    graph = diamond()
    assert graph.is_convex(["b", "c", "d"])
    assert not graph.is_convex(["a", "b", "d"])


def test_joint_acyclicity():
    graph = diamond()
    assert not graph.is_jointly_acyclic([["a", "d"], ["b", "c"]])
    assert graph.is_jointly_acyclic([["a"], ["b", "c", "d"]])


def test_traffic_counts_each_tensor_once():
    graph = diamond()
    assert graph.traffic(["b", "c", "d"]) == (24, 24)  # a.out once, d.out once
    assert graph.traffic(["b"]) == (24, 24)


def test_an_operator_before_its_producer_is_refused():
    with pytest.raises(InvalidModelError, match="topological order"):
        DataflowGraph((operator("a", ["missing"]),), {}, (), ())
