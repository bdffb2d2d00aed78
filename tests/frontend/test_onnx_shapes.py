"""Sizes that a graph computes from its inputs' sizes become constants."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

from tvm_fusion.errors import InvalidModelError
from tvm_fusion.frontend import onnx as frontend


def two_rounds(shape):
    """A reshape to a computed size, and another one by the size of its result: inference needs two rounds."""
    nodes = [
        helper.make_node("Shape", ["x"], ["s"]),
        helper.make_node("Slice", ["s", "two", "four"], ["hw"]),
        helper.make_node("ReduceProd", ["hw"], ["n"], keepdims=1),
        helper.make_node("Concat", ["one", "minus", "n"], ["flat"], axis=0),
        helper.make_node("Reshape", ["x", "flat"], ["y"]),
        helper.make_node("Relu", ["y"], ["r"]),
        helper.make_node("Shape", ["r"], ["t"]),
        helper.make_node("Gather", ["t", "two"], ["length"]),
        helper.make_node("Concat", ["length", "minus"], ["last"], axis=0),
        helper.make_node("Reshape", ["r", "last"], ["z"]),
    ]
    numbers = {"one": [1], "two": [2], "four": [4], "minus": [-1]}
    graph = helper.make_graph(
        nodes,
        "sizes",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info("z", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(np.array(v), k) for k, v in numbers.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def test_sizes_are_folded_round_by_round(operators, run_module, monkeypatch):
    def absent(model):
        raise AssertionError("the simplifier is not needed")

    monkeypatch.setattr(frontend, "_simplify", absent)
    mod = frontend.load(two_rounds([1, 3, "h", "w"]), shape={"x": (1, 3, 4, 5)})
    assert [op for _, op in operators(mod)] == ["reshape", "nn.relu", "reshape"]
    x = np.random.default_rng(0).standard_normal((1, 3, 4, 5)).astype("float32")
    np.testing.assert_array_equal(run_module(mod, x)[0], np.maximum(x.reshape(20, 3), 0))


def test_question_marks_are_different_sizes():
    """Exporters of Paddle's write "?" for whatever they do not know."""
    mod = frontend.load(two_rounds([1, 3, "?", "?"]), shape={"x": (1, 3, 4, 5)})
    assert [int(n) for n in mod["main"].ret_ty.shape.values] == [20, 3]
    with pytest.raises(ValueError, match="dimension 'n' is given both 4 and 5"):
        frontend.load(two_rounds([1, 3, "n", "n"]), shape={"x": (1, 3, 4, 5)})


def test_contradictions_are_found():
    proto = two_rounds([1, 3, "h", "w"])
    proto.graph.initializer.append(numpy_helper.from_array(np.ones((7, 7), "float32"), "odd"))
    proto.graph.node.append(helper.make_node("Add", ["z", "odd"], ["sum"]))
    proto.graph.output[0].name = "sum"
    with pytest.raises(InvalidModelError, match="not valid ONNX"):
        frontend.load(proto, shape={"x": (1, 3, 4, 5)})
