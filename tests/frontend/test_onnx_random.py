"""Single operators with random shapes and attributes, against onnxruntime."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

from tvm_fusion.errors import FusionError
from tvm_fusion.frontend.onnx import load
from tvm_fusion.testing.onnx_suite import checking_here

onnxruntime = pytest.importorskip("onnxruntime")

CASES = {}


def case(function):
    """Add a function from a random generator to (node, inputs, stored, opset) under its name."""
    CASES[function.__name__] = function
    return function


def shape(rng, low=1, high=4):
    return [int(n) for n in rng.integers(2, 6, rng.integers(low, high + 1))]


def array(rng, dims, dtype="float32"):
    return rng.standard_normal(dims).astype(dtype)


def flag(rng):
    return int(rng.integers(2))


def axis_of(rng, dims):
    return int(rng.integers(-len(dims), len(dims)))


def broadcast(rng, dims):
    """Return a shape that broadcasts with ``dims``."""
    kept = dims[int(rng.integers(len(dims))) :]
    return [n if rng.random() < 0.7 else 1 for n in kept]


def node(operator, inputs, outputs=("y",), **attributes):
    return helper.make_node(operator, list(inputs), list(outputs), **attributes)


@case
def pad(rng):
    dims = shape(rng, 2, 4)
    mode = str(rng.choice(["constant", "reflect", "edge", "wrap"]))
    amounts = rng.integers(0, 2, 2 * len(dims))
    if mode == "constant" and flag(rng):
        amounts = rng.integers(-1, 3, 2 * len(dims))
    stored = {"p": amounts}
    names = ["x", "p"]
    if mode == "constant":
        names.append("v")
        stored["v"] = np.array(1.5, "float32")
    return node("Pad", names, mode=mode), {"x": array(rng, dims)}, stored, 19


@case
def slices(rng):
    dims = shape(rng, 2, 4)
    axes = rng.permutation(len(dims))[: rng.integers(1, len(dims) + 1)]
    steps = rng.choice([-2, -1, 1, 2], len(axes))
    starts, ends = [], []
    for a, step in zip(axes, steps, strict=True):
        low, high = sorted(rng.choice(dims[a] + 1, 2, replace=False).tolist())
        low, high = (low, high) if step > 0 else (high - 1, low - 1)
        starts.append(low - dims[a] if flag(rng) and low else low)
        # Past the beginning: a large negative number, since -1 is the last element.
        ends.append(-99 if high < 0 else high - dims[a] if flag(rng) and high < dims[a] else high)
    starts, ends = np.array(starts), np.array(ends)
    stored = {"s": starts, "e": ends, "a": axes, "t": steps}
    return node("Slice", ["x", "s", "e", "a", "t"]), {"x": array(rng, dims)}, stored, 17


@case
def gather(rng):
    dims = shape(rng, 1, 3)
    axis = axis_of(rng, dims)
    index = rng.integers(-dims[axis], dims[axis], shape(rng, 1, 2))
    return node("Gather", ["x", "i"], axis=axis), {"x": array(rng, dims), "i": index}, {}, 17


@case
def gather_elements(rng):
    dims = shape(rng, 1, 3)
    axis = axis_of(rng, dims)
    index = rng.integers(-dims[axis], dims[axis], dims)
    return (
        node("GatherElements", ["x", "i"], axis=axis),
        {"x": array(rng, dims), "i": index},
        {},
        17,
    )


@case
def gather_nd(rng):
    dims = shape(rng, 2, 4)
    batch = int(rng.integers(0, 2))
    depth = int(rng.integers(1, len(dims) - batch + 1))
    lead = [*dims[:batch], 3]
    index = np.stack([rng.integers(-n, n, lead) for n in dims[batch : batch + depth]], -1)
    return (
        node("GatherND", ["x", "i"], batch_dims=batch),
        {"x": array(rng, dims), "i": index},
        {},
        17,
    )


@case
def scatter_elements(rng):
    dims = shape(rng, 1, 3)
    axis = axis_of(rng, dims)
    reduction = str(rng.choice(["add", "mul", "max", "min"]))
    index = rng.integers(-dims[axis], dims[axis], dims)
    inputs = {"x": array(rng, dims), "i": index, "u": array(rng, dims)}
    return node("ScatterElements", inputs, axis=axis, reduction=reduction), inputs, {}, 18


@case
def reduction(rng):
    dims = shape(rng, 1, 4)
    kind = str(
        rng.choice(["Sum", "Mean", "Max", "Min", "Prod", "L1", "L2", "LogSumExp", "SumSquare"])
    )
    axes = sorted(rng.permutation(len(dims))[: rng.integers(1, len(dims) + 1)].tolist())
    axes = [a - len(dims) if flag(rng) else a for a in axes]
    keep = flag(rng)
    inputs = {"x": array(rng, dims)}
    if flag(rng):
        return node(f"Reduce{kind}", ["x", "a"], keepdims=keep), inputs, {"a": np.array(axes)}, 18
    return node(f"Reduce{kind}", ["x"], keepdims=keep, axes=axes), inputs, {}, 12


@case
def reduction_of_everything(rng):
    kind = str(rng.choice(["Sum", "Mean", "Max", "Min", "L2"]))
    made = node(f"Reduce{kind}", ["x"], keepdims=flag(rng))
    return made, {"x": array(rng, shape(rng))}, {}, int(rng.choice([11, 18]))


@case
def softmax(rng):
    dims = shape(rng, 1, 4)
    kind = str(rng.choice(["Softmax", "LogSoftmax", "Hardmax"]))
    opset = int(rng.choice([11, 13]))
    return node(kind, ["x"], axis=axis_of(rng, dims)), {"x": array(rng, dims)}, {}, opset


@case
def flatten(rng):
    dims = shape(rng, 2, 4)
    made = node("Flatten", ["x"], axis=int(rng.integers(-len(dims), len(dims) + 1)))
    return made, {"x": array(rng, dims)}, {}, 13


@case
def split(rng):
    dims = shape(rng, 1, 3)
    axis = axis_of(rng, dims)
    cut = int(rng.integers(1, dims[axis]))
    sizes = np.array([cut, dims[axis] - cut])
    return (
        node("Split", ["x", "s"], ["y", "z"], axis=axis),
        {"x": array(rng, dims)},
        {"s": sizes},
        13,
    )


@case
def split_into(rng):
    dims = [*shape(rng, 1, 2), int(rng.integers(3, 8))]
    return node("Split", ["x"], ["y", "z"], axis=-1, num_outputs=2), {"x": array(rng, dims)}, {}, 18


@case
def top_k(rng):
    dims = shape(rng, 1, 3)
    axis = axis_of(rng, dims)
    made = node("TopK", ["x", "k"], ["y", "i"], axis=axis, largest=flag(rng), sorted=1)
    return (
        made,
        {"x": array(rng, dims)},
        {"k": np.array([int(rng.integers(1, dims[axis] + 1))])},
        11,
    )


@case
def arg_extreme(rng):
    dims = shape(rng, 1, 3)
    made = node(
        str(rng.choice(["ArgMax", "ArgMin"])), ["x"], axis=axis_of(rng, dims), keepdims=flag(rng),
        select_last_index=flag(rng),
    )  # fmt: skip
    return made, {"x": rng.integers(0, 3, dims).astype("float32")}, {}, 13


@case
def cumulative_sum(rng):
    dims = shape(rng, 1, 3)
    made = node("CumSum", ["x", "a"], exclusive=flag(rng), reverse=flag(rng))
    return made, {"x": array(rng, dims)}, {"a": np.array(axis_of(rng, dims))}, 14


@case
def depth_and_space(rng):
    b = int(rng.integers(2, 4))
    n, c, h, w = (int(v) for v in rng.integers(1, 4, 4))
    if flag(rng):
        made = node("DepthToSpace", ["x"], blocksize=b, mode=str(rng.choice(["DCR", "CRD"])))
        return made, {"x": array(rng, [n, c * b * b, h, w])}, {}, 13
    return node("SpaceToDepth", ["x"], blocksize=b), {"x": array(rng, [n, c, h * b, w * b])}, {}, 13


@case
def gemm(rng):
    m, k, n = (int(v) for v in rng.integers(1, 5, 3))
    a, b = flag(rng), flag(rng)
    inputs = {"a": array(rng, [k, m] if a else [m, k]), "b": array(rng, [n, k] if b else [k, n])}
    names = ["a", "b"]
    if flag(rng):
        inputs["c"] = array(rng, [[n], [m, 1], [m, n], [1]][int(rng.integers(4))])
        names.append("c")
    return node("Gemm", names, transA=a, transB=b, alpha=0.7, beta=1.3), inputs, {}, 13


@case
def matmul(rng):
    m, k, n = (int(v) for v in rng.integers(1, 5, 3))
    lead = shape(rng, 1, 2)
    left = [[k], [m, k], [*lead, m, k]][int(rng.integers(3))]
    right = [[k], [k, n], [*broadcast(rng, lead), k, n]][int(rng.integers(3))]
    return node("MatMul", ["a", "b"]), {"a": array(rng, left), "b": array(rng, right)}, {}, 13


@case
def normalization(rng):
    dims = [2, 4, *shape(rng, 1, 2)]
    kind = str(
        rng.choice(["InstanceNormalization", "BatchNormalization", "LRN", "LpNormalization"])
    )
    inputs = {"x": array(rng, dims)}
    if kind == "LRN":
        return (
            node("LRN", ["x"], size=int(rng.choice([1, 3, 5])), alpha=0.1, bias=1.5),
            {"x": array(rng, [2, 5, 3, 4])},
            {},
            13,
        )
    if kind == "LpNormalization":
        return node(kind, ["x"], axis=axis_of(rng, dims), p=1 + flag(rng)), inputs, {}, 13
    stored = {"s": array(rng, [4]), "b": array(rng, [4])}
    if kind == "BatchNormalization":
        stored |= {"m": array(rng, [4]), "v": rng.random(4).astype("float32") + 0.5}
    return node(kind, ["x", *stored], epsilon=0.01), inputs, stored, 15


@case
def elementwise(rng):
    dims = shape(rng)
    kind = str(rng.choice(["Add", "Sub", "Mul", "Div", "Pow", "Max", "Min", "PRelu"]))
    a, b = array(rng, dims), array(rng, broadcast(rng, dims))
    if kind == "Pow":
        a, b = np.abs(a), b
    return node(kind, ["a", "b"]), {"a": a, "b": b}, {}, 16


@case
def whole_numbers(rng):
    dims = shape(rng)
    kind = str(rng.choice(["Add", "Sub", "Mul", "Div", "Mod", "Max", "Min", "Pow"]))
    dtype = str(rng.choice(["int32", "int64"]))
    a = rng.integers(-20, 20, dims).astype(dtype)
    b = rng.integers(1, 5, broadcast(rng, dims)).astype(dtype)
    if kind in ("Mod", "Div"):
        b = b * rng.choice([-1, 1], b.shape).astype(dtype)
    return node(kind, ["a", "b"]), {"a": a, "b": b}, {}, 16


@case
def where(rng):
    dims = shape(rng)
    inputs = {"c": rng.random(broadcast(rng, dims)) < 0.5, "a": array(rng, dims)}
    inputs["b"] = array(rng, broadcast(rng, dims))
    return node("Where", inputs), inputs, {}, 16


@case
def triangle(rng):
    made = node("Trilu", ["x", "k"], upper=flag(rng))
    return made, {"x": array(rng, shape(rng, 2, 4))}, {"k": np.array(int(rng.integers(-3, 4)))}, 14


@case
def repeated(rng):
    dims = shape(rng, 1, 4)
    return (
        node("Tile", ["x", "r"]),
        {"x": array(rng, dims)},
        {"r": rng.integers(1, 3, len(dims))},
        13,
    )


@case
def grid_sample(rng):
    n, c, h, w = (int(v) for v in rng.integers(1, 5, 4))
    inputs = {
        "x": array(rng, [n, c, h, w]),
        "g": rng.uniform(-1.4, 1.4, (n, 3, 4, 2)).astype("float32"),
    }
    made = node(
        "GridSample", ["x", "g"], mode=str(rng.choice(["bilinear", "nearest", "bicubic"])),
        padding_mode=str(rng.choice(["zeros", "border", "reflection"])), align_corners=flag(rng),
    )  # fmt: skip
    return made, inputs, {}, 16


@case
def reshape(rng):
    dims = shape(rng, 2, 3)
    target = [0, -1] if flag(rng) else [-1, dims[-1]]
    return node("Reshape", ["x", "s"]), {"x": array(rng, dims)}, {"s": np.array(target)}, 13


@case
def activation(rng):
    kinds = {
        "Elu": ["alpha"], "LeakyRelu": ["alpha"], "Selu": ["alpha", "gamma"], "HardSigmoid": ["alpha", "beta"],
        "ThresholdedRelu": ["alpha"], "Celu": ["alpha"], "Shrink": ["lambd", "bias"],
    }  # fmt: skip
    kind = str(rng.choice(list(kinds)))
    settings = {name: float(rng.uniform(0.1, 2)) for name in kinds[kind]}
    return node(kind, ["x"], **settings), {"x": 2 * array(rng, shape(rng))}, {}, 16


@case
def cast(rng):
    types = ["float32", "float16", "int32", "int64", "uint8", "bool", "float64", "int8"]
    start, end = rng.choice(types, 2, replace=False)
    x = np.abs(20 * array(rng, shape(rng))).astype(start)
    to = helper.np_dtype_to_tensor_dtype(np.dtype(str(end)))
    return node("Cast", ["x"], to=to), {"x": x}, {}, 13


@case
def rounding(rng):
    x = rng.integers(-9, 9, shape(rng)).astype("float32") / 2
    return node(str(rng.choice(["Round", "Floor", "Ceil", "Sign"])), ["x"]), {"x": x}, {}, 13


def model(made, inputs, stored, opset):
    values = [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(a.dtype), a.shape)
        for name, a in inputs.items()
    ]
    results = [
        helper.make_tensor_value_info(name, TensorProto.UNDEFINED, None) for name in made.output
    ]
    for result in results:
        result.ClearField("type")
    constants = [numpy_helper.from_array(a, name) for name, a in stored.items()]
    graph = helper.make_graph([made], "g", values, results, constants)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)


def compare(run_module, made, inputs, stored, opset):
    """Compare with onnxruntime; a refusal must name the operator."""
    proto = model(made, inputs, stored, opset)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    try:
        wanted = onnxruntime.InferenceSession(proto.SerializeToString(), options).run(None, inputs)
    except Exception:  # noqa: BLE001 - its errors have no common class
        return
    try:
        with checking_here():
            mod = load(proto)
    except FusionError as error:
        assert made.op_type in str(error) or "computes nothing" in str(error)
        return
    got = run_module(mod, *inputs.values())
    for mine, right in zip(got, wanted, strict=True):
        assert (mine.shape, mine.dtype) == (right.shape, right.dtype), made
        np.testing.assert_allclose(mine, right, rtol=1e-3, atol=1e-5, err_msg=str((made, stored)))


def run(run_module, name, seeds):
    for seed in seeds:
        drawn = CASES[name](np.random.default_rng(seed))
        if drawn is not None:
            compare(run_module, *drawn)


@pytest.mark.parametrize("name", CASES)
def test_a_few(run_module, name):
    run(run_module, name, range(2))


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_many(run_module, name):
    run(run_module, name, range(2, 30))
