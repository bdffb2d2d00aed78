"""Forms of operators that TVM 0.27 computes otherwise than Relay did, one at a time, in modules written here.

Relay's own numbers for the same forms are compared in ``test_relay_networks`` (``forms``).
"""

from __future__ import annotations

import base64
import struct
from typing import Any

import numpy as np
import pytest

from tvm_fusion.errors import InvalidModelError, UnsupportedOperatorError
from tvm_fusion.frontend import relay
from tvm_fusion.targets import parse_target
from tvm_fusion.testing.emulated_plan import EmulatedPlan


class Module:
    """A saved module of one operator call; its operands are inputs x0, x1, ..."""

    def __init__(self, op: str, kind: str, attrs: dict[str, Any], arrays: list[np.ndarray]) -> None:
        self.nodes: list[dict[str, Any]] = [{"type_key": ""}]
        params = [self._input(f"x{i}", array) for i, array in enumerate(arrays)]
        self.nodes.append({"type_key": "Op", "repr_str": op})
        call = {"op": len(self.nodes) - 1, "args": self.array(params), "span": 0}
        call["attrs"] = self.node(f"relay.attrs.{kind}", **attrs) if kind else 0
        body = self.node("relay.Call", **call)
        self.main = self.node(
            "relay.Function", params=self.array(params), body=body, ret_type=0, attrs=0
        )

    def node(self, kind: str, **fields: Any) -> int:
        """A node; lists and texts in brackets become nodes of their own."""
        attrs = {key: str(self._field(value)) for key, value in fields.items()}
        self.nodes.append({"type_key": kind, "attrs": attrs})
        return len(self.nodes) - 1

    def _field(self, value: Any) -> Any:
        if isinstance(value, list):
            return self.array([self.node("IntImm", value=n, dtype="int32") for n in value])
        return int(value) if isinstance(value, bool) else value

    def array(self, items: list[int]) -> int:
        self.nodes.append({"type_key": "Array", "data": items})
        return len(self.nodes) - 1

    def text(self, text: str) -> int:
        """A String; what is not ASCII in base64, as TVM writes it."""
        data = struct.pack("<Q", len(text.encode())) + text.encode()
        encoded = {"repr_b64": base64.b64encode(data).decode()}
        node = {"repr_str": text} if text.isascii() else encoded
        self.nodes.append({"type_key": "runtime.String", **node})
        return len(self.nodes) - 1

    def _input(self, name: str, array: np.ndarray) -> int:
        kind = self.node("relay.TensorType", shape=list(array.shape), dtype=array.dtype)
        vid = self.node("relay.Id", name_hint=self.text(name))
        return self.node("relay.Var", vid=vid, type_annotation=kind)

    def document(self, version: str = "0.16.dev0") -> dict[str, Any]:
        attrs = {"tvm_version": version}
        return {"root": self.main, "nodes": self.nodes, "b64ndarrays": [], "attrs": attrs}


def read(op: str, kind: str, attrs: dict[str, Any], *arrays: Any, version: str = "0.16.dev0"):
    """The Relax module of one call."""
    return relay.from_document(Module(op, kind, attrs, list(arrays)).document(version))


def numbers(*shape: int, dtype: str = "float32", seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).uniform(-2, 2, shape).astype(dtype)


def normalised(x: np.ndarray, axes: tuple[int, ...]) -> np.ndarray:
    x = x.astype("float64")
    distance = x - x.mean(axes, keepdims=True)
    return distance / np.sqrt((distance**2).mean(axes, keepdims=True) + 1e-5)


@pytest.mark.parametrize("scale", [True, False])
@pytest.mark.parametrize("center", [True, False])
@pytest.mark.parametrize(
    ("op", "kind", "axis", "axes"),
    [
        ("nn.layer_norm", "LayerNormAttrs", -1, (3,)),
        ("nn.layer_norm", "LayerNormAttrs", 1, (1,)),
        ("nn.instance_norm", "InstanceNormAttrs", 1, (2, 3)),
        ("nn.instance_norm", "InstanceNormAttrs", 3, (1, 2)),
        ("nn.group_norm", "GroupNormAttrs", 1, (2, 3)),
        ("nn.group_norm", "GroupNormAttrs", 3, ()),
    ],
)
def test_norms(run_module, op, kind, axis, axes, center, scale):
    """``center`` and ``scale`` say which factors count; TVM's own lowering applies both."""
    x = numbers(2, 4, 3, 8)
    channels = x.shape[axis]
    factors = [numbers(channels, seed=i) for i in (1, 2)]
    attrs = {"axis": axis, "epsilon": 1e-5, "center": center, "scale": scale}
    if op == "nn.group_norm":
        attrs["num_groups"] = 2
        place = axis % 4
        parts = [*x.shape[:place], 2, channels // 2, *x.shape[place + 1 :]]
        inside = tuple(range(place + 1, 5))  # as Relay computes it: not over the axes in front
        want = normalised(x.reshape(parts), inside).reshape(x.shape)
    else:
        want = normalised(x, axes)
    wide = [-1 if i == axis % 4 else 1 for i in range(4)]
    gamma, beta = (factor.reshape(wide) for factor in factors)
    want = want * (gamma if scale else 1) + (beta if center else 0)
    (got,) = run_module(read(op, kind, attrs, x, *factors), x, *factors)
    np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_round_takes_halves_away_from_zero(run_module, dtype):
    x = np.array(
        [-3.5, -2.5, -1.4, -0.5, -0.0, 0.25, 0.49999997, 0.5, 1.5, 2.5, np.inf, -np.inf, np.nan],
        dtype,
    )
    with np.errstate(invalid="ignore"):  # an infinity less itself
        want = np.trunc(x) + np.where(np.abs(x - np.trunc(x)) >= 0.5, np.sign(x), 0)
    (got,) = run_module(read("round", "", {}, x), x)
    np.testing.assert_array_equal(got, np.where(np.isinf(x), x, want).astype(dtype))


@pytest.mark.parametrize("op", ["equal", "not_equal"])
@pytest.mark.parametrize("dtype", ["bool", "int32", "float32"])
def test_equality(run_module, op, dtype):
    a, b = np.array([0, 0, 1, 1], dtype), np.array([[0], [1]], dtype)
    (got,) = run_module(read(op, "", {}, a, b), a, b)
    np.testing.assert_array_equal(got, a == b if op == "equal" else a != b)


@pytest.mark.parametrize(
    ("version", "columns", "rows"),
    [("0.16.dev0", 3, False), ("0.8.0", 3, False), ("0.7.0", 3, True), ("0.16.dev0", 4, True)],
)
@pytest.mark.filterwarnings("ignore:the module was saved by TVM 0.7")
def test_where_with_a_vector(run_module, version, columns, rows):
    """A vector is broadcast like any operand; where it cannot be, and before TVM 0.8, it chooses rows."""
    condition = np.array([True, False, True])
    a, b = numbers(3, columns), numbers(3, columns, seed=1)
    (got,) = run_module(read("where", "", {}, condition, a, b, version=version), condition, a, b)
    np.testing.assert_array_equal(got, np.where(condition[:, None] if rows else condition, a, b))


@pytest.mark.parametrize("strides", [[2], [1], [2, 3], []])
def test_missing_strides_are_one(run_module, strides):
    x = numbers(5, 6, 4)
    attrs = {"begin": [0, 1, 0], "end": [5, 6, 4], "strides": strides, "slice_mode": "end"}
    (got,) = run_module(read("strided_slice", "StridedSliceAttrs", attrs, x), x)
    steps = [*strides, 1, 1, 1]
    np.testing.assert_array_equal(got, x[:: steps[0], 1 :: steps[1], :: steps[2]])


def resized(x, size, rounding):
    attrs = {
        "size": size, "roi": [], "layout": "NCHW", "method": "nearest_neighbor", "cubic_alpha": -0.5,
        "coordinate_transformation_mode": "asymmetric", "rounding_method": rounding, "cubic_exclude": 0,
        "extrapolation_value": 0.0, "out_dtype": "",
    }  # fmt: skip
    return read("image.resize2d", "Resize2DAttrs", attrs, x)


@pytest.mark.parametrize("rounding", ["round", "floor", "ceil", "round_prefer_floor"])
@pytest.mark.parametrize("width", [12, 16])
def test_resize_by_the_nearest(run_module, rounding, width):
    """Halves are rounded up; an axis that grows by a whole factor was divided by it, whatever the rounding."""
    x = numbers(1, 1, 3, 8)
    (got,) = run_module(resized(x, [3, width], rounding), x)
    places = np.arange(width) * 8 / width
    functions = {"round": lambda n: np.floor(n + 0.5), "ceil": np.ceil, "floor": np.floor,
                 "round_prefer_floor": lambda n: np.ceil(n - 0.5)}  # fmt: skip
    places = (np.floor if width == 16 else functions[rounding])(places)
    np.testing.assert_array_equal(got, x[..., np.minimum(places, 7).astype(int)])


def test_resize_that_rounds_one_axis_only():
    x = numbers(1, 1, 3, 8)
    with pytest.raises(UnsupportedOperatorError, match="rounds by 'ceil' on the one axis"):
        resized(x, [6, 12], "ceil")
    resized(x, [6, 12], "floor")


WINDOW = {
    "pool_size": [3, 3],
    "strides": [3, 3],
    "dilation": [1, 1],
    "layout": "NCHW",
    "ceil_mode": True,
}


@pytest.mark.parametrize("op", ["nn.max_pool2d", "nn.avg_pool2d"])
def test_windows_behind_the_map(op):
    """TVM leaves them out, so that the result would be smaller: refused. One that begins inside is no such window."""
    kind = "MaxPool2DAttrs" if "max" in op else "AvgPool2DAttrs"
    x = numbers(1, 1, 7, 8)
    with pytest.raises(UnsupportedOperatorError, match="ceil_mode begins a window behind the map"):
        read(op, kind, {**WINDOW, "padding": [0, 0, 2, 2]}, x)
    mod = read(op, kind, {**WINDOW, "padding": [0, 0, 0, 0]}, x)
    assert [int(n) for n in mod["main"].ret_ty.shape.values] == [1, 1, 3, 3]


MEANS = {
    "mean": ("ReduceAttrs", {"axis": [2, 3], "keepdims": True, "exclude": False}),
    "nn.global_avg_pool2d": ("GlobalPool2DAttrs", {"layout": "NCHW"}),
    "nn.adaptive_avg_pool2d": ("AdaptivePool2DAttrs", {"output_size": [1, 1], "layout": "NCHW"}),
}


@pytest.mark.parametrize("dtype", ["int32", "int8", "uint8", "int64"])
@pytest.mark.parametrize("op", MEANS)
def test_means_of_integers(run_module, op, dtype):
    """Their sum, divided towards zero; TVM's own mean is an int64, whatever its type says."""
    low = 0 if dtype[0] == "u" else -9
    x = np.random.default_rng(0).integers(low, 9, (2, 3, 3, 4)).astype(dtype)
    (got,) = run_module(read(op, *MEANS[op], x), x)
    assert got.dtype == x.dtype
    want = np.trunc(x.sum((2, 3), keepdims=True, dtype="float64") / 12)
    np.testing.assert_array_equal(got, want)


def test_mean_of_more_integers_than_their_dtype_counts():
    with pytest.raises(UnsupportedOperatorError, match="mean of 144 numbers of int8: cast them"):
        read("mean", *MEANS["mean"], np.zeros((1, 2, 12, 12), "int8"))


@pytest.mark.parametrize(
    ("op", "kind", "attrs"),
    [
        ("nn.avg_pool2d", "AvgPool2DAttrs", {**WINDOW, "padding": [0, 0]}),
        (
            "nn.adaptive_avg_pool2d",
            "AdaptivePool2DAttrs",
            {"output_size": [2, 2], "layout": "NCHW"},
        ),
    ],
)
def test_means_of_integers_in_windows(op, kind, attrs):
    name = op.rpartition(".")[2]
    with pytest.raises(UnsupportedOperatorError, match=rf"{op} \(node '{name}_0'.*int32: cast it"):
        read(op, kind, attrs, np.zeros((1, 2, 6, 6), "int32"))
    read(op, kind, attrs, np.zeros((1, 2, 6, 6), "float32"))


@pytest.mark.parametrize("op", ["sum", "max", "prod"])
def test_reductions_of_integers_keep_their_dtype(run_module, op):
    x = np.arange(1, 7, dtype="int8").reshape(2, 3)
    attrs = {"axis": [1], "keepdims": False, "exclude": False}
    (got,) = run_module(read(op, "ReduceAttrs", attrs, x), x)
    assert got.dtype == x.dtype
    np.testing.assert_array_equal(got, getattr(np, op)(x, axis=1))


@pytest.mark.parametrize("op", ["argmax", "argmin"])
@pytest.mark.parametrize("dtype", ["int8", "uint8", "int32", "int64"])
def test_places_of_integers_for_cuda(op, dtype):
    """Their limits, and what the search starts from, may need more bits than places do."""
    limits = np.iinfo(dtype)
    x = np.array([[3, limits.max, 5, limits.max], [limits.min, 4, limits.min, 7]], dtype)
    attrs = {"axis": [1], "keepdims": False, "exclude": False, "select_last_index": False}
    mod = read(op, "ArgReduceAttrs", attrs, x)
    (got,) = EmulatedPlan(mod, parse_target("cuda:sm_90a"))(x)
    np.testing.assert_array_equal(got, getattr(np, op)(x, axis=1))


def test_no_axes_are_all(run_module):
    """As type inference has it: ``axis=[]`` leaves one number."""
    x = numbers(2, 3)
    attrs = {"axis": [], "keepdims": False, "exclude": False}
    (got,) = run_module(read("sum", "ReduceAttrs", attrs, x), x)
    np.testing.assert_allclose(got, x.sum(), rtol=1e-6)


@pytest.mark.parametrize("name", ["é", "入力", "a b/c:0", "x"])
def test_names_that_are_not_ascii(name):
    module = Module("exp", "", {}, [numbers(3)])
    var = next(node for node in module.nodes if node["type_key"] == "relay.Id")
    var["attrs"]["name_hint"] = str(module.text(name))
    content = module.document()
    assert [param.name for param in relay.from_document(content)["main"].params] == [name]
    with pytest.raises(InvalidModelError, match="every output is a constant"):
        relay.from_document(content, params={name: numbers(3)})


@pytest.mark.parametrize("raw", ["", "AA==", "!", 5, "AgAAAAAAAADD", "AgAAAAAAAAD/"])
def test_damaged_texts(raw):
    module = Module("exp", "", {}, [numbers(3)])
    next(n for n in module.nodes if n["type_key"] == "runtime.String")["repr_b64"] = raw
    with pytest.raises(InvalidModelError, match="holds no text: the file is damaged"):
        relay.from_document(module.document())
