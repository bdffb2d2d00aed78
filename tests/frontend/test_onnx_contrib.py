"""onnxruntime's own operators, as its optimiser leaves them in models: values against onnxruntime, or refusals."""

from __future__ import annotations

import numpy as np
import pytest

import tvm_fusion as tf
from tvm_fusion.errors import InvalidModelError, UnsupportedOperatorError

onnx = pytest.importorskip("onnx")
runtime = pytest.importorskip("onnxruntime")

B, S, H, D = 2, 6, 2, 8
RNG = np.random.default_rng(0)


def real(*shape: int, dtype: str = "float32") -> np.ndarray:
    return RNG.standard_normal(shape).astype(dtype)


def ones(*shape: int) -> np.ndarray:
    return (RNG.random(shape) > 0.3).astype("int32")


def model(op, operands, attributes=None, results=("y",), domain="com.microsoft", opset=17):
    """One node; its operands are inputs."""
    names = [f"x{i}" if a is not None else "" for i, a in enumerate(operands)]
    node = onnx.helper.make_node(
        op, names, results, name="node", domain=domain, **(attributes or {})
    )
    code = onnx.helper.np_dtype_to_tensor_dtype
    given = {n: a for n, a in zip(names, operands, strict=True) if a is not None}
    inputs = [
        onnx.helper.make_tensor_value_info(n, code(a.dtype), a.shape) for n, a in given.items()
    ]
    outputs = [
        onnx.helper.make_tensor_value_info(n, code(operands[0].dtype), None) for n in results if n
    ]
    graph = onnx.helper.make_graph([node], "contrib", inputs, outputs)
    imports = [onnx.helper.make_opsetid("", opset), onnx.helper.make_opsetid("com.microsoft", 1)]
    return onnx.helper.make_model(graph, opset_imports=imports, ir_version=8), given


def check(made, given) -> None:
    options = runtime.SessionOptions()
    options.log_severity_level = 4
    session = runtime.InferenceSession(
        made.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    found = tf.compile(tf.frontend.onnx.load(made), target="llvm")(*given.values())
    found = list(found) if isinstance(found, list | tuple) else [found]
    for one, want in zip(found, session.run(None, given), strict=True):
        assert np.asarray(one).shape == want.shape
        np.testing.assert_allclose(np.asarray(one), want, rtol=1e-4, atol=1e-4)


JOINT = [real(B, S, H * D), real(H * D, 3 * H * D) / 4, real(3 * H * D)]
ROWS = [real(B, S, H * D) for _ in range(3)]
CACHE = [real(B, H, 3, D) for _ in range(2)]
TABLES = [real(32, D // 2) for _ in range(2)]
PLACES = np.arange(B * S).reshape(B, S) % 32
HEADS = {"num_heads": H}
LATER = {**HEADS, "unidirectional": 1}

ATTENTION = {
    "plain": (JOINT, HEADS),
    "mask of keys": ([*JOINT, ones(B, S)], {**HEADS, "mask_filter_value": -3.0}),
    "mask of rows and keys": ([*JOINT, ones(B, S, S)], {**HEADS, "scale": 0.1}),
    "lengths": ([*JOINT, np.array([2, S], "int32")], HEADS),
    "later keys": (JOINT, LATER),
    "later keys and a mask": ([*JOINT, ones(B, S), None, real(1, H, S, S)], LATER),
    "cache": ([*JOINT, None, real(2, B, H, 3, D)], LATER, ("y", "present")),
    "sizes": (
        [JOINT[0], real(H * D, 2 * H * D + 8) / 4, real(2 * H * D + 8)],
        {**HEADS, "qkv_hidden_sizes": [H * D, H * D, 8]},
    ),
}

MULTI_HEAD = {
    "plain": (ROWS, HEADS),
    "bias": ([*ROWS, real(3 * H * D)], {**HEADS, "scale": 0.2}),
    "mask": ([*ROWS, None, ones(B, S), real(1, H, S, S)], HEADS),
    "cache": ([*ROWS, None, None, None, *CACHE], LATER, ("y", "keys", "values")),
    "keys by heads": ([ROWS[0], *CACHE], HEADS),
}


@pytest.mark.parametrize("opset", [12, 17])
@pytest.mark.parametrize("name", ATTENTION)
def test_attention(name: str, opset: int) -> None:
    if opset == 12 and name not in ("cache", "later keys and a mask"):
        pytest.skip("forms of opsets meet in these")
    check(*model("Attention", *ATTENTION[name], opset=opset))


@pytest.mark.parametrize("name", MULTI_HEAD)
def test_multi_head_attention(name: str) -> None:
    check(*model("MultiHeadAttention", *MULTI_HEAD[name]))


@pytest.mark.parametrize("opset", [12, 17, 20])
@pytest.mark.parametrize("bias", [True, False])
def test_skip_layer_norm(bias: bool, opset: int) -> None:
    row = real(H * D)
    operands = [*ROWS[:2], row, row + 1, row / 2 if bias else None]
    check(*model("SkipLayerNormalization", operands, results=("y", "", "", "sum"), opset=opset))


@pytest.mark.parametrize("skip", [(B, S, H * D), (S, H * D)])
def test_skip_simplified_layer_norm(skip) -> None:
    operands = [ROWS[0], real(*skip), real(H * D)]
    results = ("y", "", "", "sum") if len(skip) == 3 else ("y",)
    check(*model("SkipSimplifiedLayerNormalization", operands, {"epsilon": 1e-4}, results))


@pytest.mark.parametrize("op", ["LayerNormalization", "SimplifiedLayerNormalization"])
def test_norms_of_the_default_domain_in_old_models(op: str) -> None:
    """onnxruntime puts them there whatever the opset."""
    check(*model(op, [ROWS[0], real(H * D)], {"epsilon": 1e-4}, domain="", opset=12))
    check(*model(op, [ROWS[0], real(S, H * D)], {"axis": 1}, domain="", opset=12))


@pytest.mark.parametrize("opset", [12, 20])
@pytest.mark.parametrize("op", ["Gelu", "BiasGelu", "FastGelu", "QuickGelu"])
def test_activations(op: str, opset: int) -> None:
    operands = [ROWS[0], real(H * D)] if op in ("BiasGelu", "FastGelu") else ROWS[:1]
    check(*model(op, operands, {"alpha": 1.5} if op == "QuickGelu" else {}, opset=opset))


def test_products() -> None:
    check(*model("FusedMatMul", [CACHE[0], CACHE[1]], {"transB": 1, "alpha": 0.25}))
    check(*model("FusedMatMul", [CACHE[0], CACHE[1]], {"transA": 1}))


@pytest.mark.parametrize("interleaved", [0, 1])
@pytest.mark.parametrize(
    ("shape", "places"),
    [((B, S, H * D), PLACES), ((B, H, S, D), PLACES), ((B, H, S, D), np.array([3]))],
)
def test_rotary_embedding(shape, places, interleaved: int) -> None:
    attributes = {"interleaved": interleaved, "num_heads": H}
    check(*model("RotaryEmbedding", [real(*shape), places, *TABLES], attributes))


@pytest.mark.parametrize(
    ("op", "operands", "attributes", "results", "words"),
    [
        pytest.param(
            "MultiHeadAttention", [real(B, S, H, 3, D)], HEADS, ("y",), "packed", id="packed"
        ),
        pytest.param(
            "MultiHeadAttention", [*ROWS, None, np.array([1, 2], "int32")], HEADS, ("y",), "mask",
            id="mask of one axis that holds",
        ),
        pytest.param("Attention", JOINT, {**HEADS, "do_rotary": 1}, ("y",), "do_rotary", id="rotary"),
        pytest.param(
            "Attention", [*JOINT, np.array([2, S, 0, 0], "int32")], HEADS, ("y",), "no length",
            id="first and last keys",
        ),
        pytest.param(
            "SkipLayerNormalization", [*ROWS[:2], real(H * D)], {}, ("y", "mean"), "statistics",
            id="statistics",
        ),
        pytest.param("SparseAttention", ROWS, HEADS, ("y",), "SparseAttention", id="unknown"),
    ],
)  # fmt: skip
def test_refused_by_name(op, operands, attributes, results, words) -> None:
    if op == "MultiHeadAttention" and words == "mask":
        operands = [*operands[:4], np.arange(3 * B + 2, dtype="int32")]
    made, _ = model(op, operands, attributes, results)
    with pytest.raises(UnsupportedOperatorError, match=words) as caught:
        tf.frontend.onnx.load(made)
    assert op in str(caught.value) and "'node'" in str(caught.value)


@pytest.mark.parametrize(
    ("op", "attributes"),
    [
        ("Attention", {}),
        ("Attention", {"num_heads": 0}),
        ("Attention", {**HEADS, "qkv_hidden_sizes": [1]}),
        ("MultiHeadAttention", {"num_heads": 5}),
        ("FusedMatMul", {"transA": 1}),
        ("SkipLayerNormalization", {"epsilon": float("nan")}),
    ],
)
@pytest.mark.parametrize("count", [0, 1, 3])
def test_what_is_no_node_is_refused(op, attributes, count: int) -> None:
    """A damaged file: attributes that are missing or cannot be, operands that are left out."""
    made, _ = model(op, JOINT[:count] or [real(1)], attributes)
    if not count:
        del made.graph.node[0].input[:]
    with pytest.raises((UnsupportedOperatorError, InvalidModelError)):
        tf.frontend.onnx.load(made)


def test_float16_behind_operators_that_onnx_does_not_know() -> None:
    """Types and sizes are guessed from operands."""
    half = [a.astype("float16") for a in (*ROWS[:2], real(H * D), *ROWS[1:])]
    made, _ = model("SkipLayerNormalization", half[:3])
    node = onnx.helper.make_node(
        "MultiHeadAttention",
        ["y", "k", "v"],
        ["z"],
        name="next",
        domain="com.microsoft",
        num_heads=H,
    )
    made.graph.node.append(node)
    for name, array in zip("kv", half[3:], strict=True):
        code = onnx.TensorProto.FLOAT16
        made.graph.input.append(onnx.helper.make_tensor_value_info(name, code, array.shape))
    made.graph.output[0].name = "z"
    plan = tf.plan(tf.frontend.onnx.load(made), target="cuda:sm_90")
    assert [g.options.get("form") for g in plan.groups].count("attention") == 1


def test_sizes_behind_operators_that_onnx_does_not_know() -> None:
    """Two layers of BERT's attention as the optimiser writes them: the second one's mask of lengths needs its keys."""
    made, given = model("Attention", ATTENTION["lengths"][0], HEADS)
    given |= {"w": real(H * D, H * D) / 4, "scale": real(H * D)}
    nodes = [
        onnx.helper.make_node("MatMul", ["y", "w"], ["product"], name="product"),
        onnx.helper.make_node(
            "SkipLayerNormalization", ["product", "x0", "scale"], ["normed"], name="norm",
            domain="com.microsoft",
        ),
        onnx.helper.make_node("MatMul", ["normed", "w"], ["again"], name="again"),
        onnx.helper.make_node(
            "Attention", ["again", "x1", "x2", "x3"], ["z"], name="next", domain="com.microsoft", **HEADS
        ),
    ]  # fmt: skip
    made.graph.node.extend(nodes)
    for name in ("w", "scale"):
        code = onnx.TensorProto.FLOAT
        made.graph.input.append(onnx.helper.make_tensor_value_info(name, code, given[name].shape))
    made.graph.output[0].name = "z"
    check(made, given)


def test_a_function_of_the_model_by_that_name_is_the_models_own() -> None:
    made, given = model("Gelu", [ROWS[0]])
    body = [onnx.helper.make_node("Neg", ["a"], ["b"])]
    imports = [onnx.helper.make_opsetid("", 17)]
    made.functions.append(
        onnx.helper.make_function("com.microsoft", "Gelu", ["a"], ["b"], body, imports)
    )
    (found,) = tf.compile(tf.frontend.onnx.load(made), target="llvm")(*given.values())
    np.testing.assert_array_equal(np.asarray(found), -ROWS[0])


def grouped(
    batch=1, rows=5, past=0, packed=False, lengths=None, tables=0, places=False, bias=False,
    sink=False, width=16, dtype="float32", **attributes,
):  # fmt: skip
    """A GroupQueryAttention of four heads that share two, and its operands."""
    heads, own, keys = 4, 2, past + rows
    shares = (heads + 2 * own,) if packed else (heads, own, own)
    parts = [real(batch, rows, n * width, dtype=dtype) for n in shares]
    parts += [None] * (3 - len(parts))
    cache = [real(batch, own, past, width, dtype=dtype) if past else None for _ in range(2)]
    lengths = np.array([keys - 1] * batch if lengths is None else lengths, "int32")
    angles = [real(64, tables // 2, dtype=dtype) if tables else None for _ in range(2)]
    more = [
        np.tile(np.arange(rows) + past, (batch, 1)) if places else None,
        real(1, heads, rows, keys, dtype=dtype) if bias else None,
        real(heads, dtype=dtype) if sink else None,
    ]
    operands = [*parts, *cache, lengths, np.array(keys, "int32"), *angles, *more]
    while operands[-1] is None:
        operands.pop()
    attributes = {"num_heads": heads, "kv_num_heads": own, **attributes}
    if tables:
        attributes["do_rotary"] = 1
    return operands, attributes, ("y", "keys", "values")


GROUPED = {
    "plain": {},
    "packed": {"packed": True, "scale": 0.3},
    "cache": {"past": 3},
    "rotated": {"tables": 16},
    "rotated, packed, interleaved": {"tables": 16, "packed": True, "rotary_interleaved": 1},
    "rotated behind a cache": {"tables": 16, "past": 7, "rows": 1},
    "rotated in part": {"tables": 16, "width": 32, "past": 2},
    "positions": {"tables": 16, "places": True, "past": 2},
    "window": {"rows": 9, "local_window_size": 3},
    "window behind a cache": {"rows": 3, "past": 9, "local_window_size": 4},
    "soft cap and biases": {"softcap": 2.0, "bias": True, "past": 2},
    "batch": {"batch": 2, "past": 6, "rows": 1, "tables": 16},
    "caches of different lengths": {
        "batch": 2, "past": 6, "rows": 1, "tables": 16, "lengths": [6, 3], "local_window_size": 4,
    },
    "softmax1": {"smooth_softmax": 1, "past": 2},
    "sinks": {"sink": True, "past": 2},
}  # fmt: skip


@pytest.mark.parametrize("name", GROUPED)
def test_grouped_query_attention(name: str) -> None:
    check(*model("GroupQueryAttention", *grouped(**GROUPED[name])))


def test_rows_behind_a_shorter_prompt_are_padding() -> None:
    """Rows that a prompt has are onnxruntime's, and so are its keys; what stands in rows behind it means nothing."""
    made, given = model("GroupQueryAttention", *grouped(batch=2, lengths=[4, 2]))
    session = runtime.InferenceSession(made.SerializeToString())
    found = tf.compile(tf.frontend.onnx.load(made), target="llvm")(*given.values())
    for one, want, axis in zip(found, session.run(None, given), (1, 2, 2), strict=True):
        for element, rows in enumerate((5, 3)):
            pair = (np.take(a[element], range(rows), axis - 1) for a in (np.asarray(one), want))
            np.testing.assert_allclose(*pair, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("kinds", "words"),
    [
        pytest.param({"qk_output": 1}, "qk_output is 1", id="scores"),
        pytest.param({"k_quant_type": "PER_TENSOR"}, "k_quant_type", id="quantised"),
        pytest.param({"kv_num_heads": 3}, "do not share", id="heads"),
        pytest.param({"do_rotary": 1}, "tables are not known", id="no tables"),
    ],
)
def test_other_grouped_query_attention_is_refused_by_name(kinds, words: str) -> None:
    with pytest.raises(UnsupportedOperatorError, match=f"GroupQueryAttention.*'node'.*{words}"):
        tf.frontend.onnx.load(model("GroupQueryAttention", *grouped(**kinds))[0])


@pytest.mark.parametrize("kind", ["buffer", "total", "unknown"])
def test_caches_that_are_kept_are_refused(kind: str) -> None:
    """A buffer of as many places after as before, a total that is less, and a cache of unknown size."""
    operands, attributes, results = grouped(past=8, rows=1)
    made, _ = model("GroupQueryAttention", operands, attributes, results)
    if kind == "buffer":
        for result in made.graph.output[1:]:
            result.CopyFrom(onnx.helper.make_tensor_value_info(result.name, 1, operands[3].shape))
    elif kind == "total":
        total = onnx.numpy_helper.from_array(np.array(5, "int32"), "x6")
        made.graph.initializer.append(total)
        del made.graph.input[6]
    else:
        for given in made.graph.input[3:5]:
            given.type.tensor_type.shape.dim[2].dim_param = "past"
    words = "not known" if kind == "unknown" else "is a buffer that is kept"
    with pytest.raises((UnsupportedOperatorError, InvalidModelError), match=words):
        tf.frontend.onnx.load(made)


def test_grouped_query_attention_is_one_kernel() -> None:
    """Behind its product with joint weights, without a cache: attention reads heads, sinks and mask in place."""
    operands, attributes, _ = grouped(packed=True, rows=32, width=32, dtype="float16", sink=True)
    made, _ = model("GroupQueryAttention", operands, attributes)
    plan = tf.plan(tf.frontend.onnx.load(made), target="cuda:sm_90")
    (group,) = plan.groups
    assert group.options["form"] == "attention" and not plan.ungrouped
