"""Converters of ATen operators that TVM 0.27 lacks, or that it imports wrongly.

Each is called with the importer and an fx node. TVM's own ignore ``alpha``, divide integers by rounding scalars to
integers, lose the bound of ``clamp_max``, and take reductions of booleans for numbers; here PyTorch's promoted types
decide, as its tracer recorded them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import fx

from ..compat import ir, relax
from .torch_arguments import (
    Arguments,
    Converter,
    Importer,
    Refusal,
    axes_of,
    dtype_name,
    in_dtype,
    result_dtype,
    seen_as,
)
from .torch_division import DIVISIONS
from .torch_functions import FUNCTIONS
from .torch_order import ORDER
from .torch_pooling import POOLS
from .torch_resize import RESIZES
from .torch_scatter import SCATTERS
from .torch_views import VIEWS

Operator = Callable[[ir.Expr, ir.Expr], ir.Expr]


def _operands(importer: Importer, node: fx.Node, dtype: str | None = None) -> list[ir.Expr]:
    """The first two arguments in one type: the given one, or what PyTorch promotes both to."""
    arguments = Arguments(importer.env, node)
    names = [argument.name for argument in node.target._schema.arguments[:2]]
    if dtype is None:
        dtype = dtype_name(torch.result_type(*(arguments.fake(name) for name in names)))
    return [in_dtype(importer.block_builder, arguments[name], dtype) for name in names]


def _arithmetic(operator: Operator) -> Converter:
    """``operator`` of both operands in the type of the result; the second one times ``alpha`` where there is one."""

    def convert(importer: Importer, node: fx.Node) -> ir.Expr:
        emit, dtype = importer.block_builder.emit, result_dtype(node)
        left, right = _operands(importer, node, dtype)
        arguments = Arguments(importer.env, node)
        alpha = arguments["alpha"] if "alpha" in arguments else 1
        if alpha != 1:
            right = emit(relax.op.multiply(right, in_dtype(importer.block_builder, alpha, dtype)))
        if operator is relax.op.multiply and "float" in dtype and _is_zero(arguments):
            return _times_zero(importer, left)
        # LLVM has no sums and products of truth values.
        truth = _OF_TRUTH.get(operator) if dtype == "bool" else None
        return emit((truth or operator)(left, right))

    return convert


def _is_zero(arguments: Arguments) -> bool:
    factor = arguments.fake("other")
    return isinstance(factor, int | float) and factor == 0


def _times_zero(importer: Importer, value: ir.Expr) -> ir.Expr:
    """A product with 0: NaN for NaN and infinity, which TVM's simplifier takes for 0 too."""
    emit, op, dtype = importer.block_builder.emit, relax.op, str(value.ty.dtype)
    undefined = emit(op.logical_or(emit(op.isnan(value)), emit(op.isinf(value))))
    return emit(op.where(undefined, relax.const(np.nan, dtype), relax.const(0.0, dtype)))


def _reversed_subtract(importer: Importer, node: fx.Node) -> ir.Expr:
    """``other - alpha * self``."""
    emit, dtype = importer.block_builder.emit, result_dtype(node)
    left, right = _operands(importer, node, dtype)
    alpha = Arguments(importer.env, node)["alpha"]
    if alpha != 1:
        left = emit(relax.op.multiply(left, in_dtype(importer.block_builder, alpha, dtype)))
    return emit(relax.op.subtract(right, left))


def _comparison(operator: Operator) -> Converter:
    def convert(importer: Importer, node: fx.Node) -> ir.Expr:
        emit = importer.block_builder.emit
        left, right = _operands(importer, node)
        if left.same_as(right) and "float" in str(left.ty.dtype):
            # A test for NaN; of the comparison TVM's simplifier would make a constant.
            nan = emit(relax.op.isnan(left))
            if operator is relax.op.not_equal:
                return nan
            if operator in (relax.op.equal, relax.op.less_equal, relax.op.greater_equal):
                return emit(relax.op.logical_not(nan))
        return emit(operator(left, right))

    return convert


def _clamp(importer: Importer, node: fx.Node) -> ir.Expr:
    """``clamp``, ``clamp_min`` and ``clamp_max`` by numbers or tensors."""
    builder, dtype = importer.block_builder, result_dtype(node)
    arguments = Arguments(importer.env, node)
    value = in_dtype(builder, arguments["self"], dtype)
    low = arguments["min"] if "min" in arguments else None
    high = arguments["max"] if "max" in arguments else None
    numbers = [bound for bound in (low, high) if isinstance(bound, int | float)]
    if len(numbers) == 2 and low <= high:
        return builder.emit(relax.op.clip(value, low, high))
    if low is not None:
        value = builder.emit(relax.op.maximum(value, in_dtype(builder, low, dtype)))
    if high is not None:
        value = builder.emit(relax.op.minimum(value, in_dtype(builder, high, dtype)))
    return value


def _extremum(operator: Callable[..., ir.Expr]) -> Converter:
    """``amax`` and ``amin``; of booleans as of numbers."""

    def convert(importer: Importer, node: fx.Node) -> ir.Expr:
        builder, arguments = importer.block_builder, Arguments(importer.env, node)
        value = arguments["self"]
        axes = axes_of(arguments["dim"], int(value.ty.ndim))
        if not axes:
            return value
        wide = "int8" if str(value.ty.dtype) == "bool" else str(value.ty.dtype)
        value = in_dtype(builder, value, wide)
        found = builder.emit(operator(value, axes, keepdims=bool(arguments["keepdim"])))
        return in_dtype(builder, found, result_dtype(node))

    return convert


def _truth(operator: Callable[..., ir.Expr]) -> Converter:
    """``any`` and ``all``: the largest and the least of whether values differ from zero."""

    def convert(importer: Importer, node: fx.Node) -> ir.Expr:
        builder, arguments = importer.block_builder, Arguments(importer.env, node)
        value = arguments["self"]
        keep = bool(arguments["keepdim"]) if "keepdim" in arguments else False
        dim = arguments["dim"] if "dim" in arguments else None
        axes = axes_of(dim, int(value.ty.ndim))
        truth = in_dtype(builder, in_dtype(builder, value, "bool"), "int8")
        if axes:
            truth = builder.emit(operator(truth, axes, keepdims=keep))
        return in_dtype(builder, truth, result_dtype(node))

    return convert


def _of_floats(name: str) -> Converter:
    """TVM's converter of a function whose result is a float, of integers too."""

    def convert(importer: Importer, node: fx.Node) -> Any:
        user, dtype = node.args[0], result_dtype(node)
        value = in_dtype(importer.block_builder, importer.env[user], dtype)
        with seen_as(importer, {user: value}):
            return importer.stock[name](node)

    return convert


def _linear_combination(product: str) -> Converter:
    """``addmv``, ``addbmm``: beta * self + alpha * a product; without self where beta is 0, were it NaN."""

    def convert(importer: Importer, node: fx.Node) -> ir.Expr:
        builder, arguments = importer.block_builder, Arguments(importer.env, node)
        emit, dtype = builder.emit, result_dtype(node)
        factors = [arguments[argument.name] for argument in node.target._schema.arguments[1:3]]
        value = emit(relax.op.matmul(*factors))
        if product == "addbmm":
            value = emit(relax.op.sum(value, [0]))
        if arguments["alpha"] != 1:
            value = emit(relax.op.multiply(value, relax.const(arguments["alpha"], dtype)))
        beta, base = arguments["beta"], arguments["self"]
        if beta == 0:
            return value
        if beta != 1:
            base = emit(relax.op.multiply(base, relax.const(beta, dtype)))
        return emit(relax.op.add(base, value))

    return convert


def _scan(operator: Callable[..., ir.Expr]) -> Converter:
    """``cumsum`` and ``cumprod``; of a single number the number itself."""

    def convert(importer: Importer, node: fx.Node) -> ir.Expr:
        builder, arguments = importer.block_builder, Arguments(importer.env, node)
        value = in_dtype(builder, arguments["self"], result_dtype(node))
        if int(value.ty.ndim) == 0:
            return value
        return builder.emit(operator(value, arguments["dim"]))

    return convert


def _elu(importer: Importer, node: fx.Node) -> ir.Expr:
    """``scale * (max(0, x) + min(0, alpha * (exp(x * input_scale) - 1)))``, as ATen defines it."""
    builder, op, arguments = importer.block_builder, relax.op, Arguments(importer.env, node)
    emit, x = builder.emit, arguments["self"]
    dtype = str(x.ty.dtype)
    given = {name: float(arguments[name]) for name in ("alpha", "scale", "input_scale")}
    alpha, scale, input_scale = (relax.const(value, dtype) for value in given.values())
    one, zero = relax.const(1.0, dtype), relax.const(0.0, dtype)
    grown = emit(op.exp(x if given["input_scale"] == 1 else emit(op.multiply(x, input_scale))))
    below = emit(op.multiply(emit(op.subtract(grown, one)), alpha))
    value = emit(op.add(emit(op.nn.relu(x)), emit(op.minimum(below, zero))))
    return value if given["scale"] == 1 else emit(op.multiply(value, scale))


def _group_norm(importer: Importer, node: fx.Node) -> ir.Expr:
    """``native_group_norm``; ones and zeros where weights are None, which TVM's own converter fails on."""
    _refuse_float64(node)
    arguments = Arguments(importer.env, node)
    x, dtype = arguments["input"], result_dtype_of_first(node)
    channels = int(arguments["C"])
    gamma = arguments["weight"]
    beta = arguments["bias"]
    gamma = relax.const(np.ones(channels), dtype) if gamma is None else gamma
    beta = relax.const(np.zeros(channels), dtype) if beta is None else beta
    norm = relax.op.nn.group_norm(
        x, gamma, beta, num_groups=arguments["group"], channel_axis=1, axes=list(range(2, int(x.ty.ndim))),
        epsilon=arguments["eps"],
    )  # fmt: skip
    return importer.block_builder.emit(norm)


def _norm(name: str) -> Converter:
    """TVM's converter; of float64, which TVM cannot lower, PyTorch's definition by smaller operators."""

    def convert(importer: Importer, node: fx.Node) -> Any:
        _refuse_float64(node)
        return importer.stock[name](node)

    return convert


def _refuse_float64(node: fx.Node) -> None:
    if result_dtype_of_first(node) == "float64":
        raise NotImplementedError("TVM has no such norm of float64")


def result_dtype_of_first(node: fx.Node) -> str:
    """Return the type of the first of a node's results."""
    return dtype_name(node.meta["val"][0].dtype)


def _log1p(importer: Importer, node: fx.Node) -> ir.Expr:
    """log(1 + x), right for small x too: x * log(u) / (u - 1) with u = 1 + x, and x where u is 1.

    Goldberg, What every computer scientist should know about floating-point arithmetic, theorem 4 (1991).
    """
    builder, op, dtype = importer.block_builder, relax.op, result_dtype(node)
    emit = builder.emit
    x = in_dtype(builder, Arguments(importer.env, node)["self"], dtype)
    one = relax.const(1.0, dtype)
    u = emit(op.add(x, one))
    small = emit(op.equal(u, one))
    rest = emit(op.where(small, one, emit(op.subtract(u, one))))
    infinite = emit(op.isinf(u))
    log = emit(op.log(u))
    scaled = emit(op.multiply(x, emit(op.divide(log, rest))))
    return emit(op.where(small, x, emit(op.where(infinite, log, scaled))))


def _refusal(reason: str) -> Converter:
    def convert(importer: Importer, node: fx.Node) -> Any:
        raise Refusal(reason)

    return convert


#: Functions of real numbers that TVM's own converters compute right in the type of the result.
_REAL = (
    "acos", "acosh", "asin", "asinh", "atan", "atanh", "cos", "cosh", "erf", "exp", "expm1", "log", "log10", "log2",
    "reciprocal", "rsqrt", "sigmoid", "sin", "sinh", "sqrt", "tan", "tanh",
)  # fmt: skip

_RANDOM = "it draws random numbers, which a compiled model would repeat on every call"
_TRAINING = "it belongs to training: export the module in evaluation mode, module.eval()"

_ARITHMETIC: dict[str, Operator] = {
    "add": relax.op.add, "sub": relax.op.subtract, "mul": relax.op.multiply, "div": relax.op.divide,
}  # fmt: skip
_OF_TRUTH: dict[Operator, Operator] = {
    relax.op.add: relax.op.logical_or, relax.op.multiply: relax.op.logical_and,
    relax.op.maximum: relax.op.logical_or, relax.op.minimum: relax.op.logical_and,
}  # fmt: skip
_COMPARISONS: dict[str, Operator] = {
    "eq": relax.op.equal, "ne": relax.op.not_equal, "lt": relax.op.less, "le": relax.op.less_equal,
    "gt": relax.op.greater, "ge": relax.op.greater_equal,
}  # fmt: skip

#: Converters by the name of the ATen overload.
CONVERTERS: dict[str, Converter] = {
    **{f"{name}.{kind}": _arithmetic(op) for name, op in _ARITHMETIC.items() for kind in ("Tensor", "Scalar")},
    **{f"{name}.{kind}": _comparison(op) for name, op in _COMPARISONS.items() for kind in ("Tensor", "Scalar")},
    **{f"rsub.{kind}": _reversed_subtract for kind in ("Tensor", "Scalar")},
    "maximum.default": _arithmetic(relax.op.maximum),
    "minimum.default": _arithmetic(relax.op.minimum),
    "atan2.default": _arithmetic(relax.op.atan2),
    "clamp.default": _clamp,
    "clamp.Tensor": _clamp,
    "clamp_min.default": _clamp,
    "clamp_max.default": _clamp,
    "clamp_min.Tensor": _clamp,
    "clamp_max.Tensor": _clamp,
    "amax.default": _extremum(relax.op.max),
    "amin.default": _extremum(relax.op.min),
    **{f"any.{kind}": _truth(relax.op.max) for kind in ("default", "dim", "dims")},
    **{f"all.{kind}": _truth(relax.op.min) for kind in ("default", "dim", "dims")},
    **{f"{name}.default": _of_floats(f"{name}.default") for name in _REAL},
    "cumsum.default": _scan(relax.op.cumsum),
    "cumprod.default": _scan(relax.op.cumprod),
    "addmv.default": _linear_combination("addmv"),
    "addbmm.default": _linear_combination("addbmm"),
    "addmm.default": _linear_combination("addmm"),
    "baddbmm.default": _linear_combination("baddbmm"),
    "elu.default": _elu,
    "native_group_norm.default": _group_norm,
    **{name: _norm(name) for name in ("native_layer_norm.default", "_native_batch_norm_legit.no_stats")},
    "log1p.default": _log1p,
    **{name: _refusal(_RANDOM) for name in (
        "bernoulli.p", "bernoulli.default", "exponential.default", "randn.default", "randn_like.default",
        "rand.default", "rand_like.default", "native_dropout.default", "multinomial.default",
    )},
    **{name: _refusal(_TRAINING) for name in (
        "_native_batch_norm_legit_functional.default", "_native_batch_norm_legit.default",
    )},
    **DIVISIONS,
    **VIEWS,
    **POOLS,
    **RESIZES,
    **FUNCTIONS,
    **ORDER,
    **SCATTERS,
}  # fmt: skip


def bound_converters(importer: Importer) -> dict[str, Callable[[fx.Node], Any]]:
    """Return the converters as TVM's importer calls them."""
    return {name: partial(convert, importer) for name, convert in CONVERTERS.items()}
