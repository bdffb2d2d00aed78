"""Groups as attributes, and back."""

from __future__ import annotations

from tvm_fusion.graph.dataflow import DataflowGraph, Operator, Tensor
from tvm_fusion.strategies.attributes import group_attrs, parts_from, proposal_from
from tvm_fusion.strategies.base import Proposal


def chain(length: int = 3) -> DataflowGraph:
    """Operators ``r0``, ``r1``… one after the other."""
    tensors = {"x": Tensor("x", (4, 4), "float32")}
    operators, read = [], "x"
    for i in range(length):
        name = f"r{i}"
        tensors[name] = Tensor(name, (4, 4), "float32")
        operators.append(
            Operator(name, "relu", (name,), (read,), (name,), {}, "elementwise", 16, 64, 64)
        )
        read = name
    return DataflowGraph(tuple(operators), tensors, ("x",), (read,))


def test_a_group_comes_back() -> None:
    graph = chain()
    parts = (("vertical", ("r0", "r1")), ("vertical", ("r2",)))
    group = Proposal("vertical", ("r0", "r1", "r2"), (), (("r0", "r1", "r2"),), 3, parts)
    attrs = group_attrs(group)
    assert attrs["tvm_fusion.parts"] == ["vertical:0,1", "vertical:2"]
    assert "tvm_fusion.numerics" not in attrs
    assert group_attrs(group, "strict")["tvm_fusion.numerics"] == "strict"
    assert proposal_from(graph, ["r2", "r0", "r1"], attrs) == group


def test_what_another_hand_wrote_is_left_out() -> None:
    """Parts that the group does not have, options that this package does not know, or none at all."""
    assert parts_from({"tvm_fusion.parts": ["vertical:0,7"]}, ("r0", "r1")) == ()
    attrs = {
        "tvm_fusion.strategy": "vertical",
        "tvm_fusion.options": {"form": "round", "join": "add", "other": "x"},
    }
    assert proposal_from(chain(), ["r0", "r1"], attrs).options == (("join", "add"),)
    assert proposal_from(chain(), ["r0"], {"tvm_fusion.strategy": "vertical"}).options == ()
