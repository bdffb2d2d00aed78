"""Loops, tensors without elements, reductions, and what says sizes, axes and counts."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import TensorProto, helper

from tvm_fusion.errors import UnsupportedOperatorError
from tvm_fusion.frontend.onnx import load
from tvm_fusion.testing.onnx_nodes import compare, model, numbers, refused
from tvm_fusion.testing.onnx_suite import checking_here

pytest.importorskip("onnxruntime")
node = helper.make_node


def nothing(*, axis=0):
    """A node that takes no elements of x, and its places."""
    return node("Slice", ["x", "a", "a", "ax"], ["e"]), {"a": np.array([1]), "ax": np.array([axis])}


@pytest.mark.parametrize("axis", [0, 1])
def test_tensors_without_elements_join(axis):
    cut, stored = nothing(axis=axis)
    rest = [node("Relu", ["e"], ["r"]), node("Concat", ["x", "r", "x"], ["y"], axis=axis)]
    x = numbers(3, 4)
    compare(model([cut, *rest], {"x": x}, stored), {"x": x})


def test_products_of_nothing_are_zero():
    cut, stored = nothing(axis=1)
    rest = [node("MatMul", ["e", "w"], ["p"]), node("Add", ["p", "x"], ["y"])]
    x = numbers(3, 4)
    compare(model([cut, *rest], {"x": x}, {**stored, "w": numbers(0, 4)}), {"x": x})


def test_a_slice_of_nothing_is_a_result():
    cut, stored = nothing(axis=1)
    x = numbers(3, 4)
    compare(model([cut], {"x": x}, stored, outputs=("e",)), {"x": x})


def test_reshapes_that_allow_zeros():
    x = numbers(2, 3, 4)
    reshape = node("Reshape", ["x", "s"], ["y"], name="r", allowzero=1)
    compare(model([reshape], {"x": x}, {"s": np.array([6, -1])}), {"x": x})
    refused(
        model([reshape], {"x": x}, {"s": np.array([0, 4, 6])}),
        r"Reshape \(node 'r'\).*\[0, 4, 6\], of 24 elements",
    )
    cut, stored = nothing(axis=0)
    emptied = [cut, node("Reshape", ["e", "s"], ["r"], allowzero=1)]
    emptied.append(node("Concat", ["r", "x"], ["y"], axis=0))
    x = numbers(3, 4)
    compare(model(emptied, {"x": x}, {**stored, "s": np.array([0, 4])}), {"x": x})


def counted(condition, start=None, most=None, rows=False):
    """A Loop that doubles x while ``condition``, of its number and its own condition, holds."""
    inputs = [
        helper.make_tensor_value_info("i", TensorProto.INT64, []),
        helper.make_tensor_value_info("go", TensorProto.BOOL, []),
        helper.make_tensor_value_info("s", TensorProto.FLOAT, [2, 3]),
    ]
    nodes = [*condition, node("Add", ["s", "s"], ["d"]), node("Abs", ["s"], ["row"])]
    outputs = [
        helper.make_tensor_value_info("on", TensorProto.BOOL, []),
        helper.make_tensor_value_info("d", TensorProto.FLOAT, [2, 3]),
        helper.make_tensor_value_info("row", TensorProto.FLOAT, [2, 3]),
    ][: 3 if rows else 2]
    body = helper.make_graph(nodes[: None if rows else -1], "body", inputs, outputs)
    stored = {"two": np.array(2)}
    stored |= {} if start is None else {"c": np.array(start)}
    stored |= {} if most is None else {"n": np.array(most)}
    names = ["y", "rows"][: 2 if rows else 1]
    operands = ["n" if most is not None else "", "c" if start is not None else "", "x"]
    loop = node("Loop", operands, names, name="again", body=body)
    return model(
        [loop, node("Neg", ["y"], ["z"])], {"x": numbers(2, 3)}, stored, outputs=("z", *names[1:])
    )


STAYS = [node("Identity", ["go"], ["on"])]
FIRST_TWO = [node("Less", ["i", "two"], ["on"])]
ONCE = [node("Not", ["go"], ["on"])]
ON_DATA = [node("ReduceMax", ["s"], ["m"], keepdims=0), node("Less", ["m", "m"], ["on"])]


@pytest.mark.parametrize("rows", [False, True])
@pytest.mark.parametrize(
    ("condition", "start", "most"),
    [
        (STAYS, None, 0), (STAYS, True, 0), (STAYS, False, 3), (STAYS, False, None), (STAYS, None, -1),
        (ONCE, None, 5), (ONCE, True, None), (FIRST_TWO, None, 10), (FIRST_TWO, None, None), (FIRST_TWO, True, 2),
        (STAYS, True, 3), (ON_DATA, False, None),
    ],
)  # fmt: skip
def test_loops_that_end(condition, start, most, rows):
    compare(counted(condition, start, most, rows), {"x": numbers(2, 3)})


@pytest.mark.parametrize(("condition", "most"), [(STAYS, None), (ON_DATA, None), (ON_DATA, 3)])
def test_loops_of_unknown_length_are_refused(condition, most):
    refused(counted(condition, None, most), r"Loop \(node 'again'\)")


@pytest.mark.parametrize("keep", [0, 1])
@pytest.mark.parametrize("opset", [11, 13, 18])
@pytest.mark.parametrize("operator", ["ReduceMean", "ReduceL2", "ReduceLogSum", "ReduceSum"])
def test_reductions_of_integers(operator, opset, keep):
    """Axes are an attribute up to opset 17, of ReduceSum up to 12."""
    x = np.arange(-4, 20, dtype="int32").reshape(2, 3, 4)
    x = np.abs(x) if operator == "ReduceLogSum" else x
    if opset >= (13 if operator == "ReduceSum" else 18):
        made = node(operator, ["x", "a"], ["y"], keepdims=keep)
        compare(model([made], {"x": x}, {"a": np.array([0, -1])}, opset), {"x": x})
    else:
        made = node(operator, ["x"], ["y"], keepdims=keep, axes=[0, -1])
        compare(model([made], {"x": x}, opset=opset), {"x": x})


@pytest.mark.parametrize(
    "operator", ["L1", "L2", "LogSum", "LogSumExp", "Max", "Prod", "Sum", "SumSquare"]
)
@pytest.mark.parametrize("stored", [{}, {"a": np.zeros(0, "int64")}])
def test_reductions_over_no_axes(operator, stored):
    x = numbers(2, 3)
    x = np.abs(x) if operator == "LogSum" else x
    for noop in (0, 1):
        made = node(f"Reduce{operator}", ["x", *stored], ["y"], noop_with_empty_axes=noop)
        compare(model([made], {"x": x}, stored, opset=18), {"x": x})


@pytest.mark.parametrize("keep", [0, 1])
@pytest.mark.parametrize("opset", [11, 13, 18])
def test_logarithms_of_sums_of_infinite_powers(opset, keep):
    inf = np.inf
    x = np.array([[inf, 1], [-inf, -inf], [1000, 1001], [-inf, 2], [np.nan, 1]], "float32")
    stored = {"a": np.array([-1])} if opset >= 18 else {}
    axes = {} if stored else {"axes": [1]}
    made = node("ReduceLogSumExp", ["x", *stored], ["y"], keepdims=keep, **axes)
    wanted = np.array([inf, -inf, 1000 + np.log1p(np.e), 2, np.nan], "float32")
    proto = model([made], {"x": x}, stored, opset)
    compare(proto, {"x": x}, [wanted[:, None] if keep else wanted])


def test_the_largest_none():
    x = numbers(4)
    nodes = [node("TopK", ["x", "k"], ["v", "i"]), node("Concat", ["v", "x"], ["y"], axis=0)]
    compare(model(nodes, {"x": x}, {"k": np.array([0])}), {"x": x})


@pytest.mark.parametrize(
    ("operator", "setting"),
    [
        ("Expand", [2, 3]), ("Reshape", [3, 2]), ("Tile", [1, 2]), ("Unsqueeze", [0]), ("ReduceSum", [0]),
        ("Pad", [0, 1, 0, 1]), ("CumSum", [0]), ("TopK", [2]),
    ],
)  # fmt: skip
def test_settings_from_the_values_of_inputs(operator, setting):
    x, given = numbers(2, 3), np.array(setting[0] if operator == "CumSum" else setting)
    outputs = ("y", "i") if operator == "TopK" else ("y",)
    made = node(operator, ["x", "s"], outputs, name="n")
    refused(
        model([made], {"x": x, "s": given}, outputs=outputs),
        rf"{operator} \(node 'n'\).*values of an input at run time",
        UnsupportedOperatorError,
    )
    compare(model([made], {"x": x}, {"s": given}, outputs=outputs), {"x": x})


def test_settings_from_the_sizes_of_inputs():
    x = numbers(2, 3)
    nodes = [
        node("Shape", ["z"], ["s"]),
        node("Expand", ["x", "s"], ["e"]),
        node("Add", ["e", "z"], ["y"]),
    ]
    inputs = {"x": x, "z": numbers(4, 2, 3)}
    compare(model(nodes, inputs), inputs)
    proto = model(nodes, inputs)
    proto.graph.input[1].type.tensor_type.shape.dim[0].dim_param = "n"
    with checking_here():
        load(proto)


@pytest.mark.parametrize("scales", [[-0.5, 1, 1, 1], [1, 1, 2, -1], [-0.1, 1, 0.1, 1]])
def test_negative_scales_are_refused(scales):
    resize = node("Resize", ["x", "", "scales"], ["y"], name="r", mode="linear")
    stored = {"scales": np.array(scales, "float32")}
    message = r"Resize \(node 'r'\).*(a size of -|from nothing)"
    refused(model([resize], {"x": numbers(2, 1, 4, 4)}, stored), message)
