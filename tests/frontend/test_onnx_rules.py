"""Operators that are rewritten before TVM's import, with random attributes, against onnxruntime."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

import tvm_fusion
from tvm_fusion.errors import UnsupportedOperatorError
from tvm_fusion.frontend.onnx import load
from tvm_fusion.testing.onnx_suite import checking_here

onnxruntime = pytest.importorskip("onnxruntime")

#: Each example compiles a model.
some = settings(max_examples=8, derandomize=True, suppress_health_check=list(HealthCheck))

TYPES = {"float32": TensorProto.FLOAT, "float16": TensorProto.FLOAT16, "uint8": TensorProto.UINT8,
         "int8": TensorProto.INT8, "int64": TensorProto.INT64, "bool": TensorProto.BOOL,
         "float64": TensorProto.DOUBLE}  # fmt: skip


def model(node, inputs, outputs=("float32",), stored=(), opset=17):
    """Return a model of one node; ``inputs`` are arrays by name, ``stored`` too."""
    values = [
        helper.make_tensor_value_info(name, TYPES[array.dtype.name], array.shape)
        for name, array in inputs.items()
    ]
    results = [
        helper.make_tensor_value_info(name, TYPES[dtype], None)
        for name, dtype in zip(node.output, outputs, strict=True)
    ]
    constants = [numpy_helper.from_array(array, name) for name, array in dict(stored).items()]
    graph = helper.make_graph([node], "g", values, results, constants)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)


def compare(run_module, proto, inputs, rtol=1e-4, atol=1e-5):
    """Compare with onnxruntime; skip the example where onnxruntime refuses the model."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    try:
        session = onnxruntime.InferenceSession(proto.SerializeToString(), options)
        wanted = session.run(None, inputs)
    except Exception:  # noqa: BLE001 - its errors have no common class
        assume(False)
    with checking_here():
        mod = load(proto)
    got = run_module(mod, *inputs.values())
    for mine, right in zip(got, wanted, strict=True):
        assert mine.shape == right.shape
        np.testing.assert_allclose(mine, right, rtol=rtol, atol=atol)


def numbers(*shape, seed=0, dtype="float32"):
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


@st.composite
def windows(draw):
    """Sizes and attributes of a pooling in one or two dimensions."""
    rank = draw(st.integers(1, 2))
    ints = lambda low, high: [draw(st.integers(low, high)) for _ in range(rank)]  # noqa: E731
    attributes = {"kernel_shape": ints(1, 4), "strides": ints(1, 3)}
    if draw(st.booleans()):
        attributes["auto_pad"] = draw(st.sampled_from(["SAME_UPPER", "SAME_LOWER", "VALID"]))
        # Steps over elements make the padding negative, which each runtime reads in its own way.
        pairs = zip(attributes["strides"], attributes["kernel_shape"], strict=True)
        attributes["strides"] = [min(s, k) for s, k in pairs]
    else:
        most = [k - 1 for k in attributes["kernel_shape"]]
        attributes["pads"] = [draw(st.integers(0, m)) for m in most * 2]
        attributes["ceil_mode"] = draw(st.integers(0, 1))
        if draw(st.booleans()):
            attributes["dilations"] = ints(1, 2)
    return [2, 3, *ints(4, 9)], attributes


def pool(run_module, operator, shape, attributes, outputs=1, opset=19):
    node = helper.make_node(operator, ["x"], ["y", "i"][:outputs], **attributes)
    x = numbers(*shape)
    proto = model(node, {"x": x}, ["float32", "int64"][:outputs], opset=opset)
    compare(run_module, proto, {"x": x})


@some
@given(windows())
def test_max_pool(run_module, case):
    pool(run_module, "MaxPool", *case)


@some
@given(windows(), st.integers(0, 1))
def test_max_pool_with_indices(run_module, case, order):
    shape, attributes = case
    pool(run_module, "MaxPool", shape, {**attributes, "storage_order": order}, 2)


@some
@given(windows(), st.integers(0, 1))
def test_average_pool(run_module, case, count):
    shape, attributes = case
    pool(run_module, "AveragePool", shape, {**attributes, "count_include_pad": count})


@some
@given(windows(), st.integers(1, 3))
def test_lp_pool(run_module, case, p):
    shape, attributes = case
    attributes.pop("ceil_mode", None)  # onnxruntime counts windows otherwise than the specification
    pool(run_module, "LpPool", shape, {**attributes, "p": p}, opset=18)


@some
@given(windows(), st.sampled_from([1, 3]))
def test_conv(run_module, case, group):
    shape, attributes = case
    attributes.pop("ceil_mode", None)
    node = helper.make_node("Conv", ["x", "w", "b"], ["y"], group=group, **attributes)
    w = numbers(6, 3 // group, *attributes["kernel_shape"], seed=1)
    x, b = numbers(*shape), numbers(6, seed=2)
    compare(run_module, model(node, {"x": x}, stored={"w": w, "b": b}), {"x": x})


@some
@given(windows(), st.sampled_from([1, 3]), st.booleans(), st.data())
def test_conv_transpose(run_module, case, group, shaped, data):
    shape, attributes = case
    attributes.pop("ceil_mode", None)
    rank, strides = len(shape) - 2, attributes["strides"]
    if shaped:
        attributes.pop("pads", None)
        dilations = attributes.get("dilations", [1] * rank)
        natural = [
            (n - 1) * s + (k - 1) * d + 1
            for n, s, k, d in zip(
                shape[2:], strides, attributes["kernel_shape"], dilations, strict=True
            )
        ]
        attributes["output_shape"] = [n + data.draw(st.integers(-1, 1)) for n in natural]
    else:
        attributes["output_padding"] = [data.draw(st.integers(0, s - 1)) for s in strides]
    node = helper.make_node("ConvTranspose", ["x", "w", "b"], ["y"], group=group, **attributes)
    w = numbers(3, 2, *attributes["kernel_shape"], seed=1)
    x, b = numbers(*shape), numbers(2 * group, seed=2)
    compare(run_module, model(node, {"x": x}, stored={"w": w, "b": b}), {"x": x})


@st.composite
def resizings(draw):
    mode = draw(st.sampled_from(["nearest", "linear", "cubic"]))
    transform = draw(st.sampled_from(
        ["half_pixel", "pytorch_half_pixel", "align_corners", "asymmetric", "tf_crop_and_resize"]
    ))  # fmt: skip
    attributes = {"mode": mode, "coordinate_transformation_mode": transform}
    if mode == "nearest":
        names = ["round_prefer_floor", "round_prefer_ceil", "floor", "ceil"]
        attributes["nearest_mode"] = draw(st.sampled_from(names))
    if mode == "cubic":
        attributes["exclude_outside"] = draw(st.integers(0, 1))
    if mode != "nearest" and transform == "half_pixel":
        attributes["antialias"] = draw(st.integers(0, 1))
    by_size = draw(st.booleans())
    if by_size:
        factors = [draw(st.integers(1, 13)) for _ in range(2)]
    else:
        factors = [
            draw(st.sampled_from([0.4, 0.5, 0.61, 1.0, 1.5, 1.7, 2.0, 3.0])) for _ in range(2)
        ]
    return attributes, by_size, factors


@some
@given(resizings(), st.integers(3, 7), st.integers(3, 7))
def test_resize(run_module, case, height, width):
    attributes, by_size, factors = case
    assume(factors != ([height, width] if by_size else [1.0, 1.0]))
    # Sizes that are not whole are refused there.
    exact = all((f * n) % 1 == 0 for f, n in zip(factors, (height, width), strict=True))
    transform = attributes["coordinate_transformation_mode"]
    assume(by_size or exact or transform not in ("align_corners", "tf_crop_and_resize"))
    # Cubic antialiasing of onnxruntime differs from the specification where it clips.
    assume(not (attributes.get("antialias") and attributes["mode"] == "cubic"))
    stored = {"roi": np.array([0, 0, 0.1, 0.2, 1, 1, 0.8, 0.9], "float32")}
    if by_size:
        names = ["x", "roi", "", "n"]
        stored["n"] = np.array([2, 3, *factors], "int64")
    else:
        names = ["x", "roi", "s"]
        stored["s"] = np.array([1, 1, *factors], "float32")
    node = helper.make_node("Resize", names, ["y"], **attributes)
    x = numbers(2, 3, height, width)
    compare(run_module, model(node, {"x": x}, stored=stored, opset=18), {"x": x}, atol=1e-4)


@pytest.mark.parametrize("mode", ["nearest", "linear", "cubic"])
@pytest.mark.parametrize("factor", [1.6, 2.0, 0.5])
def test_half_pixels_of_opset_11(run_module, mode, factor):
    """``tf_half_pixel_for_nn``, which later versions do not have."""
    x = numbers(1, 2, 6, 10)
    node = helper.make_node(
        "Resize", ["x", "roi", "s"], ["y"], mode=mode, nearest_mode="floor",
        coordinate_transformation_mode="tf_half_pixel_for_nn",
    )  # fmt: skip
    stored = {"roi": np.zeros(0, "float32"), "s": np.array([1, 1, factor, 2.0], "float32")}
    proto = model(node, {"x": x}, stored=stored, opset=11)
    onnxruntime.InferenceSession(proto.SerializeToString())  # or the comparison would be skipped
    compare(run_module, proto, {"x": x})


@some
@given(
    st.sampled_from(["nearest", "linear"]),
    st.sampled_from([1.0, 1.5, 2.0, 2.3, 3.0]),
    st.sampled_from([7, 9]),
)
def test_upsample(run_module, mode, factor, opset):
    x = numbers(1, 2, 4, 5)
    factors = [1.0, 1.0, factor, 2.0]
    if opset == 7:
        node, stored = helper.make_node("Upsample", ["x"], ["y"], mode=mode, scales=factors), {}
    else:
        node = helper.make_node("Upsample", ["x", "s"], ["y"], mode=mode)
        stored = {"s": np.array(factors, "float32")}
    compare(run_module, model(node, {"x": x}, stored=stored, opset=opset), {"x": x})


@st.composite
def layers(draw):
    kind = draw(st.sampled_from(["RNN", "GRU", "LSTM"]))
    attributes = {
        "hidden_size": draw(st.integers(1, 4)),
        "direction": draw(st.sampled_from(["forward", "reverse", "bidirectional"])),
    }
    if draw(st.booleans()):
        attributes["clip"] = 0.7
    if kind == "GRU":
        attributes["linear_before_reset"] = draw(st.integers(0, 1))
    if kind == "LSTM":
        attributes["input_forget"] = draw(st.integers(0, 1))
    if draw(st.booleans()):
        count = {"RNN": 1, "GRU": 2, "LSTM": 3}[kind]
        names = ["Tanh", "Sigmoid", "Relu", "Softsign"]
        chosen = [draw(st.sampled_from(names)) for _ in range(count)]
        attributes["activations"] = chosen * (1 + (attributes["direction"] == "bidirectional"))
    flags = [draw(st.booleans()) for _ in range(4)]
    return kind, attributes, flags


@some
@given(layers(), st.integers(1, 4), st.integers(1, 3), st.integers(1, 3))
def test_recurrent_layers(run_module, case, length, batch, size):
    kind, attributes, (bias, lengths, state, peephole) = case
    hidden = attributes["hidden_size"]
    directions = 1 + (attributes["direction"] == "bidirectional")
    gates = {"RNN": 1, "GRU": 3, "LSTM": 4}[kind]
    inputs = {"x": numbers(length, batch, size)}
    stored = {
        "w": numbers(directions, gates * hidden, size, seed=1),
        "r": numbers(directions, gates * hidden, hidden, seed=2),
    }
    names = ["x", "w", "r", "", "", "", "", ""]
    if bias:
        names[3], stored["b"] = "b", numbers(directions, 2 * gates * hidden, seed=3)
    if lengths:
        names[4] = "n"
        stored["n"] = np.random.default_rng(0).integers(1, length + 1, batch).astype("int32")
    if state:
        names[5], inputs["h"] = "h", numbers(directions, batch, hidden, seed=4)
        if kind == "LSTM":
            names[6], inputs["c"] = "c", numbers(directions, batch, hidden, seed=5)
    if peephole and kind == "LSTM":
        names[7], stored["p"] = "p", numbers(directions, 3 * hidden, seed=6)
    outputs = ["y", "y_h", "y_c"][: 3 if kind == "LSTM" else 2]
    while not names[-1]:
        names.pop()
    node = helper.make_node(kind, names, outputs, **attributes)
    proto = model(node, inputs, ["float32"] * len(outputs), stored, opset=14)
    compare(run_module, proto, inputs)


@some
@given(st.integers(-3, 2), st.booleans(), st.sampled_from(["int8", "uint8"]))
def test_quantize_and_dequantize(run_module, axis, per_axis, dtype):
    x = 3 * numbers(2, 3, 4)
    size = x.shape[axis] if per_axis else 1
    scale = np.linspace(0.01, 0.05, size).astype("float32")
    zero = np.arange(size).astype(dtype)
    if not per_axis:
        scale, zero = scale[0], zero[0]
    stored = {"s": np.asarray(scale), "z": np.asarray(zero)}
    node = helper.make_node("QuantizeLinear", ["x", "s", "z"], ["y"], axis=axis)
    compare(run_module, model(node, {"x": x}, [dtype], stored), {"x": x}, atol=0)
    q = np.random.default_rng(0).integers(0, 100, x.shape).astype(dtype)
    node = helper.make_node("DequantizeLinear", ["q", "s", "z"], ["y"], axis=axis)
    compare(run_module, model(node, {"q": q}, stored=stored), {"q": q})


@some
@given(st.sampled_from(["none", "add", "mul", "max", "min"]), st.integers(1, 3))
def test_scatter_nd(run_module, reduction, depth):
    data = numbers(4, 5, 3)
    rng = np.random.default_rng(depth)
    index = np.stack([rng.integers(-n, n, 6) for n in data.shape[:depth]], -1)
    if reduction == "none":  # the order of writes to one place is open
        index = np.unique(index % np.array(data.shape[:depth]), axis=0)
    updates = numbers(len(index), *data.shape[depth:], seed=1)
    inputs = {"data": data, "updates": updates}
    node = helper.make_node("ScatterND", ["data", "i", "updates"], ["y"], reduction=reduction)
    compare(run_module, model(node, inputs, stored={"i": index}, opset=18), inputs)


@some
@given(st.integers(-3, 2), st.integers(1, 5))
def test_one_hot(run_module, axis, depth):
    index = np.random.default_rng(depth).integers(-depth - 2, depth + 2, (2, 3))
    stored = {"d": np.array([depth]), "v": np.array([-1, 4], "float32")}
    node = helper.make_node("OneHot", ["i", "d", "v"], ["y"], axis=axis)
    compare(run_module, model(node, {"i": index}, stored=stored), {"i": index})


@some
@given(st.integers(0, 3), st.integers(-9, 9), st.integers(-9, 9))
def test_slice_of_opset_9(run_module, axis, start, end):
    x = numbers(3, 4, 5, 6)
    node = helper.make_node("Slice", ["x"], ["y"], axes=[axis], starts=[start], ends=[end])
    assume(0 < len(range(*slice(start, end).indices(x.shape[axis]))) < x.shape[axis])
    compare(run_module, model(node, {"x": x}, opset=9), {"x": x})


@pytest.mark.parametrize("operator", ["Max", "Min"])
@pytest.mark.parametrize("second", ["computed", "stored"])
def test_nan_through_extremes(run_module, operator, second):
    x, y = numbers(4), numbers(4, seed=1)
    x[0] = y[1] = np.nan
    inputs = {"x": x, "y": y} if second == "computed" else {"x": x}
    stored = {} if second == "computed" else {"y": y}
    node = helper.make_node(operator, ["x", "y"], ["z"])
    compare(run_module, model(node, inputs, stored=stored), inputs)


@pytest.mark.parametrize("opset", [6, 13])
def test_nan_through_clip(run_module, opset):
    x = np.array([np.nan, -5, 5, 0.5, np.inf], "float32")
    if opset == 6:
        node, stored = helper.make_node("Clip", ["x"], ["y"], min=-1.0, max=1.0), {}
    else:
        node = helper.make_node("Clip", ["x", "a", "b"], ["y"])
        stored = {"a": np.array(-1, "float32"), "b": np.array(1, "float32")}
    compare(run_module, model(node, {"x": x}, stored=stored, opset=opset), {"x": x})


def _compiled(mod, *inputs):
    """Run by this package's lowering: TVM's own starts from the largest finite number."""
    return tvm_fusion.compile(mod, "llvm", verify=False)(*inputs)


@pytest.mark.parametrize(("operator", "sign"), [("ReduceMax", -1), ("ReduceMin", 1)])
def test_extreme_of_infinities(operator, sign):
    x = numbers(3, 4)
    x[0] = sign * np.inf
    x[1] = sign * np.finfo("float32").max
    node = helper.make_node(operator, ["x"], ["y"], axes=[1])
    compare(_compiled, model(node, {"x": x}), {"x": x})


def test_layer_normalization_with_all_outputs(run_module):
    x = numbers(2, 3, 4)
    stored = {"s": numbers(3, 4, seed=1), "b": numbers(3, 4, seed=2)}
    node = helper.make_node("LayerNormalization", ["x", "s", "b"], ["y", "m", "d"], axis=1)
    compare(run_module, model(node, {"x": x}, ["float32"] * 3, stored), {"x": x})


def test_layer_normalization_of_float64():
    """TVM imports it, and cannot lower it."""
    x, scale = numbers(2, 3, 4).astype("float64"), numbers(4, seed=1).astype("float64")
    node = helper.make_node("LayerNormalization", ["x", "s"], ["y"])
    compare(_compiled, model(node, {"x": x}, ["float64"], {"s": scale}), {"x": x})


@pytest.mark.parametrize(
    "operator",
    ["Celu", "Elu", "Gelu", "Mish", "Selu", "Softplus", "ThresholdedRelu", "HardSigmoid"],
)
def test_activations_in_float16(run_module, operator):
    x = np.concatenate([np.linspace(-12, 12, 97), [-300, 300]]).astype("float16")
    node = helper.make_node(operator, ["x"], ["y"])
    compared = []
    for dtype in ("float16", "float32"):
        proto = model(node, {"x": x.astype(dtype)}, [dtype], opset=20)
        if operator == "Celu" and dtype == "float16":
            proto.opset_import[0].version = 27  # float32 only before
        with checking_here():
            compared += run_module(load(proto), x.astype(dtype))
    np.testing.assert_allclose(compared[0].astype("float32"), compared[1], rtol=2e-3, atol=1e-4)


def test_soft_plus_neither_overflows_nor_vanishes(run_module):
    x = np.array([-30, -16, -1, 0, 1, 90, 200], "float32")
    node = helper.make_node("Softplus", ["x"], ["y"])
    with checking_here():
        (got,) = run_module(load(model(node, {"x": x})), x)
    np.testing.assert_allclose(got, np.logaddexp(0, x.astype("float64")), rtol=1e-5)


def test_no_elements_at_run_time():
    node = helper.make_node("ReduceSum", ["x", "axes"], ["y"])
    proto = model(node, {"x": numbers(2, 3)}, stored={"axes": np.array([0])})
    proto.graph.input[0].type.tensor_type.shape.dim[0].dim_param = "n"
    with checking_here():
        compiled = tvm_fusion.compile(load(proto), "llvm")
    np.testing.assert_allclose(compiled(np.ones((4, 3), "float32"))[0], [[4, 4, 4]])
    with pytest.raises(ValueError, match=r"'x' has no elements: its shape is \[0, 3\]"):
        compiled(np.ones((0, 3), "float32"))


def test_refusals_name_operator_and_node():
    node = helper.make_node("NonZero", ["x"], ["y"], name="where_it_is")
    with pytest.raises(UnsupportedOperatorError, match=r"NonZero \(node 'where_it_is'\).*values"):
        load(model(node, {"x": numbers(3)}, ["int64"]))


def test_a_constant_that_is_too_large_is_refused():
    node = helper.make_node("OneHot", ["i", "d", "v"], ["y"], name="wide")
    stored = {"d": np.array([1 << 40]), "v": np.array([0, 1], "float32")}
    with checking_here(), pytest.raises(UnsupportedOperatorError, match=r"OneHot \(node 'wide'\)"):
        load(model(node, {"i": np.arange(3)}, stored=stored))


def test_types_that_are_refused():
    node = helper.make_node("Cast", ["x"], ["y"], to=TensorProto.FLOAT8E4M3FN, name="narrow")
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, [3])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT8E4M3FN, [3])
    graph = helper.make_graph([node], "g", [x], [y])
    opset = [helper.make_opsetid("", 19)]
    with pytest.raises(UnsupportedOperatorError, match=r"Cast \(node 'narrow'\).*float8e4m3fn"):
        load(helper.make_model(graph, opset_imports=opset, ir_version=9))
