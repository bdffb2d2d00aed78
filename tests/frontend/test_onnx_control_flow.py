"""If, Loop and Scan: written out where their course is known, refused by name elsewhere."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

from tvm_fusion.errors import UnsupportedOperatorError
from tvm_fusion.frontend.onnx import load
from tvm_fusion.testing.onnx_suite import checking_here

onnxruntime = pytest.importorskip("onnxruntime")


def value(name, shape=None, dtype=TensorProto.FLOAT):
    return helper.make_tensor_value_info(name, dtype, shape)


def constant(name, array):
    return helper.make_node(
        "Constant", [], [name], value=numpy_helper.from_array(np.asarray(array))
    )


def model(nodes, inputs, outputs, stored=()):
    constants = [numpy_helper.from_array(np.asarray(a), n) for n, a in dict(stored).items()]
    graph = helper.make_graph(nodes, "g", inputs, outputs, constants)
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    return proto


def compare(run_module, proto, **inputs):
    wanted = onnxruntime.InferenceSession(proto.SerializeToString()).run(None, inputs)
    with checking_here():
        got = run_module(load(proto), *inputs.values())
    for mine, right in zip(got, wanted, strict=True):
        assert mine.shape == right.shape
        np.testing.assert_allclose(mine, right, rtol=1e-5, atol=1e-6)


def branch(operator, name):
    node = helper.make_node(operator, ["x"], [name], name=name)
    return helper.make_graph([node], name, [], [value(name)])


def numbers(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype("float32")


@pytest.mark.parametrize("condition", [True, False])
def test_if_with_a_stored_condition(run_module, condition):
    node = helper.make_node(
        "If", ["c"], ["y"], then_branch=branch("Exp", "t"), else_branch=branch("Abs", "e")
    )
    x = numbers(3)
    compare(run_module, model([node], [value("x", [3])], [value("y")], {"c": condition}), x=x)


def test_if_on_a_shape(run_module):
    """Torch exports squeeze(1) of an unknown shape as an If on the size."""
    nodes = [
        helper.make_node("Shape", ["x"], ["s"]),
        helper.make_node("Gather", ["s", "one"], ["d"]),
        helper.make_node("Equal", ["d", "one"], ["c"]),
        helper.make_node(
            "If", ["c"], ["y"], then_branch=branch("Exp", "t"), else_branch=branch("Abs", "e")
        ),
    ]
    proto = model(nodes, [value("x", [3, 2])], [value("y")], {"one": np.array(1)})
    compare(run_module, proto, x=numbers(3, 2))


def test_if_with_a_recurrent_layer_inside(run_module):
    inner = [
        helper.make_node("LSTM", ["x", "w", "r"], ["a", "", "last"], hidden_size=2),
        helper.make_node("Identity", ["last"], ["t"]),
    ]
    then = helper.make_graph(inner, "then", [], [value("t")])
    other = helper.make_graph([constant("e", numbers(1, 1, 2))], "else", [], [value("e")])
    node = helper.make_node("If", ["c"], ["y"], then_branch=then, else_branch=other)
    stored = {"c": True, "w": numbers(1, 8, 3, seed=1), "r": numbers(1, 8, 2, seed=2)}
    compare(
        run_module, model([node], [value("x", [4, 1, 3])], [value("y")], stored), x=numbers(4, 1, 3)
    )


def test_if_on_a_computed_condition_is_refused():
    nodes = [
        helper.make_node("ReduceSum", ["x"], ["s"], keepdims=0),
        helper.make_node("Cast", ["s"], ["c"], to=TensorProto.BOOL),
        helper.make_node(
            "If",
            ["c"],
            ["y"],
            name="fork",
            then_branch=branch("Exp", "t"),
            else_branch=branch("Abs", "e"),
        ),
    ]
    with pytest.raises(UnsupportedOperatorError, match=r"If \(node 'fork'\)"):
        load(model(nodes, [value("x", [3])], [value("y")]))


def loop_body(keep_going=True):
    """state = state * x + i; the states of all iterations are returned, too."""
    nodes = [
        helper.make_node("Cast", ["i"], ["f"], to=TensorProto.FLOAT),
        helper.make_node("Mul", ["state", "x"], ["p"]),
        helper.make_node("Add", ["p", "f"], ["next"]),
        helper.make_node("Identity", ["next"], ["row"]),
    ]
    if keep_going:
        nodes.append(helper.make_node("Identity", ["go"], ["on"]))
    else:
        nodes += [
            helper.make_node("ReduceMax", ["next"], ["m"], keepdims=0),
            helper.make_node("Less", ["m", "limit"], ["on"]),
        ]
    inputs = [
        value("i", [], TensorProto.INT64), value("go", [], TensorProto.BOOL), value("state", [3])
    ]  # fmt: skip
    outputs = [value("on", [], TensorProto.BOOL), value("next", [3]), value("row", [3])]
    return helper.make_graph(nodes, "body", inputs, outputs)


def looped(keep_going=True, **stored):
    node = helper.make_node(
        "Loop", ["n", "c", "x"], ["last", "rows"], name="again", body=loop_body(keep_going)
    )
    return model([node], [value("x", [3])], [value("last"), value("rows")], stored)


def test_loop_of_constant_length(run_module):
    compare(run_module, looped(n=np.array(4), c=True), x=numbers(3))


def test_loop_that_may_stop_early_is_refused():
    with pytest.raises(UnsupportedOperatorError, match=r"Loop \(node 'again'\)"):
        load(looped(False, n=np.array(4), c=True, limit=np.array(2, "float32")))


def test_loop_inside_an_if(run_module):
    loop = helper.make_node("Loop", ["n", "c", "x"], ["last", "rows"], body=loop_body())
    then = helper.make_graph([loop], "then", [], [value("last")])
    node = helper.make_node("If", ["c"], ["y"], then_branch=then, else_branch=branch("Abs", "e"))
    proto = model([node], [value("x", [3])], [value("y")], {"n": np.array(2), "c": True})
    compare(run_module, proto, x=numbers(3))


@pytest.mark.parametrize("backward", [0, 1])
def test_scan(run_module, backward):
    nodes = [
        helper.make_node("Add", ["state", "row"], ["sum"]),
        helper.make_node("Mul", ["sum", "row"], ["out"]),
    ]
    body = helper.make_graph(
        nodes, "body", [value("state", [2]), value("row", [2])], [value("sum"), value("out")]
    )
    node = helper.make_node(
        "Scan", ["s", "x"], ["last", "rows"], body=body, num_scan_inputs=1, scan_input_axes=[1],
        scan_input_directions=[backward], scan_output_directions=[1 - backward], scan_output_axes=[1],
    )  # fmt: skip
    inputs = [value("s", [2]), value("x", [2, 5])]
    proto = model([node], inputs, [value("last"), value("rows")])
    compare(run_module, proto, s=numbers(2), x=numbers(2, 5, seed=1))


def test_range_over_a_shape(run_module):
    nodes = [
        helper.make_node("Shape", ["x"], ["s"]),
        helper.make_node("Gather", ["s", "one"], ["n"]),
        helper.make_node("Range", ["zero", "n", "one"], ["r"]),
        helper.make_node("Cast", ["r"], ["f"], to=TensorProto.FLOAT),
        helper.make_node("Add", ["x", "f"], ["y"]),
    ]
    stored = {"zero": np.array(0), "one": np.array(1)}
    compare(run_module, model(nodes, [value("x", [2, 5])], [value("y")], stored), x=numbers(2, 5))
