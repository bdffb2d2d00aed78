"""Attention in ONNX with one more node on each of its edges: it fires, with right values, or the node is named."""

from __future__ import annotations

import numpy as np
import pytest

import tvm_fusion as tf
from tvm_fusion.targets import parse_target
from tvm_fusion.testing.attention import error_of, expected
from tvm_fusion.testing.emulated_plan import EmulatedPlan

onnx = pytest.importorskip("onnx")
helper, FLOAT, DOUBLE = onnx.helper, onnx.TensorProto.FLOAT, onnx.TensorProto.DOUBLE

#: Edges by their place: what the nodes of `attention` read and write.
EDGES = ("q", "k", "v", "turned", "product", "scores", "weights", "out")

SHAPE = (1, 2, 32, 32)


def inserted(kind: str, source: str) -> list:
    """Nodes that turn ``source`` into ``source_changed``; the first is named ``Stray``."""
    target = f"{source}_changed"
    if kind == "Cast":
        return [
            helper.make_node("Cast", [source], ["wide"], "Stray", to=DOUBLE),
            helper.make_node("Cast", ["wide"], [target], "Back", to=FLOAT),
        ]
    attributes = {"perm": [0, 1, 3, 2]} if kind == "Transpose" else {}
    return [helper.make_node(kind, [source], [target], "Stray", **attributes)]


def attention(kind: str, edge: str):
    """Attention of two heads, of opset 17, with one node on one edge."""
    scale = onnx.numpy_helper.from_array(np.array(0.125, "float32"), "scale")
    nodes = [
        ("Transpose", ["k"], "turned", {"perm": [0, 1, 3, 2]}),
        ("MatMul", ["q", "turned"], "product", {}),
        ("Mul", ["product", "scale"], "scores", {}),
        ("Softmax", ["scores"], "weights", {"axis": -1}),
        ("MatMul", ["weights", "v"], "out", {}),
    ]
    made = inserted(kind, edge) if edge in "qkv" else []
    for op, inputs, output, attributes in nodes:
        read = [f"{edge}_changed" if name == edge else name for name in inputs]
        made.append(helper.make_node(op, read, [output], f"{op}_{output}", **attributes))
        if output == edge:
            made += inserted(kind, edge)
    result = "out_changed" if edge == "out" else "out"
    values = {name: helper.make_tensor_value_info(name, FLOAT, SHAPE) for name in (*"qkv", result)}
    inputs = [values[name] for name in "qkv"]
    graph = helper.make_graph(made, "attention", inputs, [values[result]], [scale])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def wanted(kind: str, edge: str, arrays: list[np.ndarray]) -> np.ndarray:
    """The result in float64."""
    q, k, v = (a.astype("float64") for a in arrays)
    turn = kind == "Transpose"
    flip = {
        name: (lambda a: a.swapaxes(-1, -2)) if turn and edge == name else (lambda a: a)
        for name in EDGES
    }
    q, k, v = flip["q"](q), flip["k"](k), flip["v"](v)
    if turn and edge == "turned":
        k = k.swapaxes(-1, -2)
    assert not (turn and edge in ("product", "scores", "weights"))
    return flip["out"](expected(q, k, v))


def load(kind: str, edge: str):
    """The model in float16."""
    return tf.frontend.onnx.load(attention(kind, edge), dtype="float16")


def stopped(kind: str, edge: str) -> bool:
    """Whether no kernel can read through the node."""
    if kind == "Transpose":
        # Scores are moved; keys lie as they are multiplied, which no kernel reads.
        return edge in ("product", "scores", "weights", "k", "turned")
    # A conversion by way of float64 of keys that were turned: a kernel of its own writes them so.
    return kind == "Cast" and edge == "turned"


ALL = [(kind, edge) for kind in ("Identity", "Cast", "Dropout", "Transpose") for edge in EDGES]


@pytest.mark.parametrize(("kind", "edge"), [c for c in ALL if not stopped(*c)])
def test_fires(kind: str, edge: str) -> None:
    module = load(kind, edge)
    plan = EmulatedPlan(module, parse_target("cuda:sm_90"))
    assert "attention" in plan.templates.values()
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal(SHAPE).astype("float16") for _ in range(3)]
    (found,) = plan(*arrays)
    assert error_of(found.astype("float64"), wanted(kind, edge, arrays)) <= 2e-3


@pytest.mark.parametrize(("kind", "edge"), [c for c in ALL if stopped(*c)])
def test_is_named(kind: str, edge: str) -> None:
    module = load(kind, edge)
    plan = tf.plan(module, target="cuda:sm_90")
    assert not any(g.options.get("form") == "attention" for g in plan.groups)
    # Two transposes of keys are none: the product itself reads them as they are.
    name = (
        "MatMul_product"
        if (kind, edge) in (("Transpose", "k"), ("Transpose", "turned"))
        else "Stray"
    )
    name = "Back" if kind == "Cast" else name
    for node in {"Softmax_weights", name}:
        text = str(tf.explain(module, target="cuda:sm_90", node=node))
        assert f"{name} (" in text and "stops attention around Softmax_weights" in text


@pytest.mark.parametrize(
    ("keys", "attributes"),
    [(2, {}), (2, {"is_causal": 1}), (1, {}), (2, {"softcap": 2.0})],
    ids=["plain", "causal", "grouped", "cap"],
)
def test_the_operator_of_onnx(keys: int, attributes: dict) -> None:
    """Its function selects zeros for rows without any key, of which there are none without a mask."""
    shapes = [SHAPE, *[(1, keys, *SHAPE[2:])] * 2]
    values = [
        helper.make_tensor_value_info(n, FLOAT, s) for n, s in zip("qkv", shapes, strict=True)
    ]
    result = helper.make_tensor_value_info("out", FLOAT, SHAPE)
    node = helper.make_node("Attention", [*"qkv"], ["out"], "Attention", **attributes)
    graph = helper.make_graph([node], "attention", values, [result])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=10)
    module = tf.frontend.onnx.load(model, dtype="float16")
    plan = EmulatedPlan(module, parse_target("cuda:sm_90"))
    # A view of repeated heads may be left, which is no kernel.
    assert "attention" in plan.templates.values()
    assert set(plan.templates.values()) <= {"attention", "default"}
