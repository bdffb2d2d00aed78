"""ONNX's own Attention, by emulation of its plan's kernels and on the CPU, against onnx's reference evaluator."""

from __future__ import annotations

import numpy as np
import pytest

import tvm_fusion as tf
from tvm_fusion.targets import parse_target
from tvm_fusion.testing.emulated_plan import EmulatedPlan

onnx = pytest.importorskip("onnx")

#: Operands in the operator's order.
NAMES = ("Q", "K", "V", "mask", "past_key", "past_value", "lengths")

#: Attributes of operands of three axes, heads side by side.
FLAT = {"q_num_heads": 4, "kv_num_heads": 4}


def sizes(heads=4, own=4, queries=24, keys=24, flat=False):
    """Shapes of queries, keys and values."""
    lengths = ((heads, queries), (own, keys), (own, keys))
    if flat:
        return [(2, length, count * 32) for count, length in lengths]
    return [(2, count, length, 32) for count, length in lengths]


def model(arrays: dict[str, np.ndarray], attributes: dict, results=("Y",), opset: int = 23):
    """One Attention with named operands."""
    last = max(NAMES.index(name) for name in arrays) + 1
    given = [name if name in arrays else "" for name in NAMES[:last]]
    node = onnx.helper.make_node("Attention", given, results, name="attention", **attributes)
    code = onnx.helper.np_dtype_to_tensor_dtype
    inputs = [
        onnx.helper.make_tensor_value_info(name, code(a.dtype), a.shape)
        for name, a in arrays.items()
    ]
    outputs = [
        onnx.helper.make_tensor_value_info(name, code(arrays["Q"].dtype), None)
        for name in results
        if name
    ]
    graph = onnx.helper.make_graph([node], "attention", inputs, outputs)
    imports = [onnx.helper.make_opsetid("", opset)]
    return onnx.helper.make_model(graph, opset_imports=imports, ir_version=11)


def operands(shapes, mask=None, truth=False, past=None, lengths=None):
    """Random operands; of a mask three rows hide every key."""
    rng = np.random.default_rng(0)
    found = {
        name: rng.standard_normal(s).astype("float16")
        for name, s in zip("QKV", shapes, strict=True)
    }
    if mask is not None:
        shown = rng.random(mask) > 0.3
        shown[..., [1, 5, -1], :] = False
        numbers = np.where(shown, rng.standard_normal(mask), -np.inf)
        found["mask"] = shown if truth else numbers.astype("float16")
    if past is not None:
        for name in ("past_key", "past_value"):
            found[name] = rng.standard_normal(past).astype("float16")
    if lengths is not None:
        found["lengths"] = np.array(lengths, "int64")
    return found


def check(made, arrays, results) -> None:
    """Results are onnx's own, rounded a few times."""
    from onnx.reference import ReferenceEvaluator

    for found, want in zip(results, ReferenceEvaluator(made).run(None, arrays), strict=True):
        found, want = np.asarray(found, "float64"), np.asarray(want, "float64")
        assert (np.isnan(found) == np.isnan(want)).all()
        assert np.nan_to_num(np.abs(found - want)).max() <= 6e-3 * max(
            1.0, np.nan_to_num(np.abs(want)).max()
        )


def on_cpu(module, arrays) -> list[np.ndarray]:
    results = tf.compile(module, target="llvm")(*arrays.values())
    return list(results) if isinstance(results, list | tuple) else [results]


#: Operands, attributes, results, opset.
CASES = {
    "plain": (operands(sizes()), {}),
    "numbers": (operands(sizes(), (24, 24)), {}),
    "numbers of heads": (operands(sizes(), (2, 4, 24, 24)), {"scale": 0.3}),
    "truth": (operands(sizes(), (2, 1, 24, 24), truth=True), {}),
    "truth, causal": (operands(sizes(), (24, 24), truth=True), {"is_causal": 1}),
    "causal": (operands(sizes(queries=16, keys=40)), {"is_causal": 1}),
    "soft cap": (operands(sizes(), (24, 24)), {"softcap": 5.0}),
    "in float32": (operands(sizes(), (24, 24)), {"softmax_precision": 1}),
    "grouped": (operands(sizes(own=2), (24, 24)), {}),
    "flat": (operands(sizes(flat=True), (24, 24)), FLAT),
    "flat, grouped": (
        operands(sizes(own=2, flat=True), (24, 24), truth=True),
        {**FLAT, "kv_num_heads": 2, "is_causal": 1},
    ),
    "cache": (
        operands(sizes(queries=8, keys=8), (8, 24), past=(2, 4, 16, 32)),
        {"is_causal": 1},
        ("Y", "keys", "values"),
    ),
    "cache, grouped": (
        operands(sizes(own=2, queries=1, keys=1, flat=True), past=(2, 2, 31, 32)),
        {**FLAT, "kv_num_heads": 2},
        ("Y", "keys", "values"),
        24,
    ),
    "shorter mask": (operands(sizes(), (24, 16)), {}, ("Y",), 24),
    "lengths": (operands(sizes(), lengths=(5, 24)), {}, ("Y",), 24),
}


#: What is tried without ``--slow``.
QUICK = ("numbers", "truth, causal", "flat, grouped", "cache")


@pytest.mark.parametrize(
    "name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in CASES]
)
def test_one_kernel(name: str) -> None:
    """Neither scores nor weights reach memory."""
    arrays, attributes, *rest = CASES[name]
    made = model(arrays, attributes, *rest)
    module = tf.frontend.onnx.load(made)
    plan = EmulatedPlan(module, parse_target("cuda:sm_90"))
    kernels = [t for t in plan.templates.values() if t != "default"]
    assert kernels.count("attention") == 1
    assert not {"matmul", "tensor_core", "tensor_rows", "rows"} & set(kernels)
    check(made, arrays, plan(*arrays.values()))


@pytest.mark.parametrize("name", ["flat, grouped", "cache"])
def test_on_cpu(name: str) -> None:
    arrays, attributes, *rest = CASES[name]
    made = model(arrays, attributes, *rest)
    check(made, arrays, on_cpu(tf.frontend.onnx.load(made), arrays))


def test_scores_that_are_a_result() -> None:
    """They reach memory; the product is named."""
    arrays = operands(sizes(), (24, 24))
    made = model(arrays, {"qk_matmul_output_mode": 0}, ("Y", "", "", "scores"))
    module = tf.frontend.onnx.load(made)
    text = str(tf.explain(module, target="cuda:sm_90"))
    assert "(matmul) stops attention around" in text and "is a result of the model" in text
    check(made, arrays, on_cpu(module, arrays))


def test_a_mask_that_is_stored() -> None:
    """Its rows are known: the condition is a constant, which the kernel reads."""
    arrays = operands(sizes(), (24, 24))
    made = model(arrays, {})
    made.graph.initializer.append(onnx.numpy_helper.from_array(arrays["mask"], "mask"))
    del made.graph.input[3]
    plan = EmulatedPlan(tf.frontend.onnx.load(made), parse_target("cuda:sm_90"))
    assert list(plan.templates.values()) == ["attention"]
    rest = {name: arrays[name] for name in "QKV"}
    check(made, rest, plan(*rest.values()))
