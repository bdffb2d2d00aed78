"""Relay operators that are several operators of the graph: norms, logarithms, stacks, pools of whole maps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from .compat import relay
from .nodes import Node, Structure, Value


class Expansion:
    """Writes one call as a chain of operators, each with an expression of its own.

    Parameters
    ----------
    builder : object
        What reads the function.
    call : relay.Call
        The call; it stays whole unless a group takes a part of the chain.
    """

    def __init__(self, builder: Any, call: Any) -> None:
        self.builder, self.call = builder, call
        self.helpers: list[Node] = []

    def step(
        self,
        op: str,
        inputs: Sequence[Value],
        expr: Any,
        shape: tuple[int | None, ...],
        attrs: dict[str, Any] | None = None,
        dtype: str | None = None,
    ) -> Value:
        """Add one operator before the last."""
        result = Value(shape, dtype or inputs[0].dtype)
        self.builder.emit(op, attrs or {}, list(inputs), expr, result, origin=self.call)
        if result.node is not None:
            self.helpers.append(result.node)
        return result

    def last(
        self, op: str, inputs: Sequence[Value], expr: Any, attrs: dict[str, Any] | None = None
    ) -> Structure:
        """Add the operator whose result is the call's."""
        apart = expr if self.helpers else None
        return self.builder.emit(
            op, attrs or {}, list(inputs), self.call, apart=apart, helpers=self.helpers
        )


def number(value: float, dtype: str) -> tuple[Any, Value]:
    """A number as a Relay constant and as a value of the graph."""
    constant = relay.const(value, dtype)
    return constant, Value((), dtype, is_constant=True, data=np.asarray(value))


def logarithm(builder: Any, call: Any, args: list[Value], attrs: dict[str, Any]) -> Structure:
    """A logarithm to another base is the natural one, scaled."""
    (data,) = args
    base = 2.0 if call.op.name == "log2" else 10.0
    chain = Expansion(builder, call)
    natural = relay.log(call.args[0])
    result = chain.step("log", [data], natural, data.shape)
    constant, scale = number(1.0 / math.log(base), data.dtype)
    return chain.last("multiply", [result, scale], relay.multiply(natural, constant))


def away_from_zero(
    builder: Any, call: Any, args: list[Value], attrs: dict[str, Any]
) -> Structure | None:
    """The nearest whole number, halves away from zero, by what today's TVM computes alike."""
    (data,) = args
    if "float" not in data.dtype:
        return data
    chain, x, shape = Expansion(builder, call), call.args[0], data.shape
    truncated = relay.trunc(x)
    whole = chain.step("trunc", [data], truncated, shape)
    difference = relay.subtract(x, truncated)
    rest = chain.step("subtract", [data, whole], difference, shape)
    distance = relay.abs(difference)
    size = chain.step("abs", [rest], distance, shape)
    constant, half = number(0.5, data.dtype)
    condition = relay.greater_equal(distance, constant)
    further = chain.step("greater_equal", [size, half], condition, shape, dtype="bool")
    signs = relay.sign(x)
    sign = chain.step("sign", [data], signs, shape)
    sum_ = relay.add(truncated, signs)
    above = chain.step("add", [whole, sign], sum_, shape)
    return chain.last("where", [further, above, whole], relay.where(condition, sum_, truncated))


def variance(builder: Any, call: Any, args: list[Value], attrs: dict[str, Any]) -> Structure | None:
    """The mean of the squared distances from a mean that is given."""
    data, mean = args
    rank = len(data.shape)
    axes = attrs["axis"] if attrs["axis"] is not None else tuple(range(rank))
    kept = tuple(1 if i in axes else n for i, n in enumerate(data.shape))
    if attrs.get("unbiased") or mean.shape != kept or not data.is_static:
        return None
    chain = Expansion(builder, call)
    difference = relay.subtract(*call.args)
    distance = chain.step("subtract", [data, mean], difference, data.shape)
    product = relay.multiply(difference, difference)
    square = chain.step("multiply", [distance, distance], product, data.shape)
    keep = bool(attrs["keepdims"])
    kinds = {"axis": tuple(axes), "keepdims": keep}
    return chain.last("mean", [square], relay.mean(product, list(axes), keep), kinds)


def mean(builder: Any, call: Any, args: list[Value], attrs: dict[str, Any]) -> Structure | None:
    """The mean of integers is their sum, divided."""
    (data,) = args
    if "float" in data.dtype or not data.is_static:
        return None
    rank, keep = len(data.shape), bool(attrs["keepdims"])
    axes = tuple(range(rank)) if attrs["axis"] is None else attrs["axis"]
    kept = [1 if i in axes else n for i, n in enumerate(data.shape) if keep or i not in axes]
    chain = Expansion(builder, call)
    total = relay.sum(call.args[0], list(axes), keep)
    kinds = {"axis": axes, "keepdims": keep}
    result = chain.step("sum", [data], total, tuple(kept), kinds)
    constant, count = number(
        math.prod(n or 0 for i, n in enumerate(data.shape) if i in axes), data.dtype
    )
    return chain.last("divide", [result, count], relay.divide(total, constant))


def l2_normalize(
    builder: Any, call: Any, args: list[Value], attrs: dict[str, Any]
) -> Structure | None:
    """x / sqrt(max(sum(x * x), eps))."""
    (data,) = args
    if not data.is_static or not attrs["axis"]:
        return None
    axes = sorted({int(a) % len(data.shape) for a in attrs["axis"]})
    kept = tuple(1 if i in axes else n for i, n in enumerate(data.shape))
    chain, x = Expansion(builder, call), call.args[0]
    product = relay.multiply(x, x)
    square = chain.step("multiply", [data, data], product, data.shape)
    sum_ = relay.sum(product, axes, True)
    kinds = {"axis": tuple(axes), "keepdims": True}
    total = chain.step("sum", [square], sum_, kept, kinds)
    constant, least = number(attrs["eps"], data.dtype)
    bounded = relay.maximum(sum_, constant)
    above = chain.step("maximum", [total, least], bounded, kept)
    root = relay.sqrt(bounded)
    norm = chain.step("sqrt", [above], root, kept)
    return chain.last("divide", [data, norm], relay.divide(x, root))


def local_response_norm(
    builder: Any, call: Any, args: list[Value], attrs: dict[str, Any]
) -> Structure | None:
    """x / (bias + alpha * mean of the neighbouring channels' squares) ** beta, the mean as a pooling of rows."""
    (data,) = args
    size = int(attrs["size"])
    if not data.is_static or len(data.shape) != 4 or attrs["axis"] != 1 or size % 2 == 0:
        return None
    n, c, h, w = data.shape
    rows, half = (n, 1, c, h * w), size // 2
    chain, x = Expansion(builder, call), call.args[0]
    product = relay.multiply(x, x)
    value = chain.step("multiply", [data, data], product, data.shape)
    flat = relay.reshape(product, rows)
    value = chain.step("reshape", [value], flat, rows, {"arg1": rows})
    window = {
        "pool_size": (size, 1), "strides": (1, 1), "padding": (half, 0, half, 0), "count_include_pad": True,
    }  # fmt: skip
    pooled = relay.nn.avg_pool2d(flat, **window)
    value = chain.step("avg_pool2d", [value], pooled, rows, {**window, "layout": "NCHW"})
    expr = relay.reshape(pooled, data.shape)
    value = chain.step("reshape", [value], expr, data.shape, {"arg1": data.shape})
    steps = (
        ("multiply", relay.multiply, "alpha"), ("add", relay.add, "bias"), ("power", relay.power, "beta"),
    )  # fmt: skip
    for op, make, name in steps:
        if name == "beta" and attrs[name] == 0.5:  # as of any power
            expr = relay.sqrt(expr)
            value = chain.step("sqrt", [value], expr, data.shape)
            continue
        constant, operand = number(attrs[name], data.dtype)
        expr = make(expr, constant)
        value = chain.step(op, [value, operand], expr, data.shape)
    return chain.last("divide", [data, value], relay.divide(x, expr))


def position(builder: Any, call: Any, args: list[Value], attrs: dict[str, Any]) -> Structure | None:
    """Positions are counted in int64 and cast to Relay's int32."""
    (data,) = args
    result = builder.structure_of(call.checked_type)
    if attrs.get("select_last_index") or result.dtype != "int32":
        return None
    chain = Expansion(builder, call)
    wide = relay.cast(call, "int64")
    found = chain.step(call.op.name, [data], wide, result.shape, attrs, "int64")
    return chain.last("astype", [found], relay.cast(wide, "int32"), {"dtype": "int32"})


def stack(
    builder: Any, call: Any, args: list[Structure], attrs: dict[str, Any]
) -> Structure | None:
    """A concatenation of tensors that have got one more axis."""
    fields = args[0]
    if not isinstance(call.args[0], relay.Tuple) or not all(f.is_static for f in fields):
        return None
    axis = int(attrs["axis"]) % (len(fields[0].shape) + 1)
    shape = (*fields[0].shape[:axis], 1, *fields[0].shape[axis:])
    chain = Expansion(builder, call)
    views, exprs = [], []
    for value, expr in zip(fields, call.args[0].fields, strict=True):
        exprs.append(relay.reshape(expr, shape))
        views.append(chain.step("reshape", [value], exprs[-1], shape, {"arg1": shape}))
    if len(views) == 1:
        return builder.emit("reshape", {"arg1": shape}, fields, call)
    return chain.last("concat", views, relay.concatenate(exprs, axis), {"axis": axis})


def whole_map(
    builder: Any, call: Any, args: list[Value], attrs: dict[str, Any]
) -> Structure | None:
    """Pooling of a whole map is a reduction over its axes."""
    (data,) = args
    name = call.op.name
    layout = str(attrs.get("layout"))
    if len(layout) != len(data.shape):
        return None
    axes = tuple(i for i, letter in enumerate(layout) if letter not in "NC")
    if "adaptive" in name and any(
        n != 1 for n in attrs.get("output_size") or [data.shape[i] for i in axes]
    ):
        return None
    kinds = {"axis": axes, "keepdims": True}
    if "max" not in name:
        return mean(builder, call, args, kinds) or builder.emit("mean", kinds, [data], call)
    return builder.emit("max", kinds, [data], call)


def batch_norm(
    builder: Any, call: Any, args: list[Value], attrs: dict[str, Any]
) -> Structure | None:
    """With constant statistics a multiplication and an addition; mean and variance come back as they were."""
    data, *statistics = args
    if any(value.array is None for value in statistics) or not data.is_static:
        return None
    gamma, beta, mean, var = (value.array.astype(np.float64) for value in statistics)
    with np.errstate(all="ignore"):
        scale = 1.0 / np.sqrt(var + float(attrs["epsilon"]))
    scale = scale * gamma if attrs["scale"] else scale
    shift = -mean * scale + (beta if attrs["center"] else 0.0)
    if not (np.isfinite(scale).all() and np.isfinite(shift).all()):
        return None  # a negative variance, or an infinite one
    shape = [1] * len(data.shape)
    shape[int(attrs["axis"])] = -1
    numbers = [a.reshape(shape).astype(data.dtype) for a in (scale, shift)]
    values = [Value(a.shape, data.dtype, is_constant=True, data=a) for a in numbers]
    exprs = [relay.const(a) for a in numbers]
    product = relay.multiply(call.args[0], exprs[0])
    scaled = Value(data.shape, data.dtype)
    builder.emit("multiply", {}, [data, values[0]], product, scaled, origin=call)
    if scaled.node is None:
        return None
    root = relay.TupleGetItem(call, 0)
    result = builder.emit(
        "add", {}, [scaled, values[1]], root, Value(data.shape, data.dtype),
        apart=relay.add(product, exprs[1]), helpers=[scaled.node], origin=call,
    )  # fmt: skip
    return (result, statistics[2], statistics[3])
