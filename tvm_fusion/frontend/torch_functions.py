"""Converters of ATen operators that TVM 0.27 has no converter for, and that PyTorch defines by nothing smaller."""

from __future__ import annotations

import math
from collections.abc import Callable

from torch import fx

from ..compat import ir, relax
from .torch_arguments import (
    Arguments,
    Converter,
    Importer,
    axes_of,
    in_dtype,
    result_dtype,
    static_dims,
)


def _variance_and_mean(importer: Importer, node: fx.Node) -> tuple[ir.Expr, ir.Expr]:
    """``var_mean``: squares of differences from the mean, divided by their number less ``correction``."""
    builder, arguments = importer.block_builder, Arguments(importer.env, node)
    emit, op, x = builder.emit, relax.op, arguments["self"]
    sizes = static_dims(arguments.fake("self"))
    axes = axes_of(arguments["dim"] if "dim" in arguments else None, len(sizes))
    if "correction" in arguments:
        correction = arguments["correction"]
        correction = 1 if correction is None else correction
    else:
        correction = int(arguments["unbiased"])
    count = math.prod(sizes[axis] for axis in axes)
    mean = emit(op.mean(x, axes, keepdims=True))
    difference = emit(op.subtract(x, mean))
    squares = emit(op.sum(emit(op.multiply(difference, difference)), axes, keepdims=True))
    divisor = relax.const(max(count - correction, 0), str(x.ty.dtype))
    results = (emit(op.divide(squares, divisor)), mean)
    if "keepdim" in arguments and arguments["keepdim"] is True:
        return results
    return tuple(emit(op.squeeze(result, axes)) for result in results)


def _product(importer: Importer, node: fx.Node) -> ir.Expr:
    builder, arguments = importer.block_builder, Arguments(importer.env, node)
    value = in_dtype(builder, arguments["self"], result_dtype(node))
    axes = axes_of(arguments["dim"], int(value.ty.ndim))
    if not axes:
        return value
    return builder.emit(relax.op.prod(value, axes, keepdims=bool(arguments["keepdim"])))


def _ignoring_nan(operator: Callable[[ir.Expr, ir.Expr], ir.Expr]) -> Converter:
    """``fmax`` and ``fmin``: NaN only where both operands are."""

    def convert(importer: Importer, node: fx.Node) -> ir.Expr:
        builder, arguments = importer.block_builder, Arguments(importer.env, node)
        emit, op, dtype = builder.emit, relax.op, result_dtype(node)
        a, b = (in_dtype(builder, arguments[name], dtype) for name in ("self", "other"))
        if "float" not in dtype:
            return emit(operator(a, b))
        either = emit(op.where(emit(op.isnan(a)), b, a)), emit(op.where(emit(op.isnan(b)), a, b))
        return emit(operator(*either))

    return convert


def _power_of_two(importer: Importer, node: fx.Node) -> ir.Expr:
    builder, dtype = importer.block_builder, result_dtype(node)
    value = in_dtype(builder, Arguments(importer.env, node)["self"], dtype)
    return builder.emit(relax.op.power(relax.const(2.0, dtype), value))


#: Coefficients of t in the exponent of ``erfc``, from the lowest: W. H. Press et al., Numerical Recipes in C, second
#: edition (1992), section 6.2, ``erfcc``; relative error 1.2e-7.
_ERFC = (
    -1.26551223, 1.00002368, 0.37409196, 0.09678418, -0.18628806, 0.27886807, -1.13520398, 1.48851587, -0.82215223,
    0.17087277,
)  # fmt: skip


def _complementary_error(importer: Importer, node: fx.Node) -> ir.Expr:
    """``erfc`` without the cancellation of ``1 - erf(x)``; in float32, to whose precision the coefficients are."""
    builder, dtype = importer.block_builder, result_dtype(node)
    emit, op = builder.emit, relax.op
    if dtype == "float64":
        raise NotImplementedError("erfc of float64 is not supported")
    x = in_dtype(builder, Arguments(importer.env, node)["self"], "float32")

    def number(value: float) -> ir.Expr:
        return relax.const(value, "float32")

    z = emit(op.abs(x))
    t = emit(op.divide(number(1), emit(op.add(number(1), emit(op.multiply(z, number(0.5)))))))
    power = number(_ERFC[-1])
    for coefficient in _ERFC[-2::-1]:
        power = emit(op.add(emit(op.multiply(t, power)), number(coefficient)))
    power = emit(op.subtract(power, emit(op.multiply(z, z))))
    upper = emit(op.multiply(t, emit(op.exp(power))))
    lower = emit(op.subtract(number(2), upper))
    return in_dtype(builder, emit(op.where(emit(op.less(x, number(0))), lower, upper)), dtype)


def _hypotenuse(importer: Importer, node: fx.Node) -> ir.Expr:
    """``hypot`` by the larger leg, so that squares neither overflow nor vanish."""
    builder, arguments = importer.block_builder, Arguments(importer.env, node)
    emit, op, dtype = builder.emit, relax.op, result_dtype(node)
    a, b = (emit(op.abs(in_dtype(builder, arguments[name], dtype))) for name in ("self", "other"))
    large, small = emit(op.maximum(a, b)), emit(op.minimum(a, b))
    zero, one = relax.const(0.0, dtype), relax.const(1.0, dtype)
    safe = emit(op.where(emit(op.greater(large, zero)), large, one))
    ratio = emit(op.divide(small, safe))
    root = emit(op.sqrt(emit(op.add(one, emit(op.multiply(ratio, ratio))))))
    return emit(op.where(emit(op.isinf(large)), large, emit(op.multiply(large, root))))


def _is_negative(importer: Importer, x: ir.Expr) -> ir.Expr:
    """The sign bit of floats that are not NaN: -0 has it."""
    emit, op, dtype = importer.block_builder.emit, relax.op, str(x.ty.dtype)
    zero = relax.const(0, dtype)
    below = emit(op.less(x, zero))
    if "float" not in dtype:
        return below
    inverse = emit(op.less(emit(op.divide(relax.const(1.0, dtype), x)), zero))
    return emit(op.where(emit(op.equal(x, zero)), inverse, below))


def _sign_bit(importer: Importer, node: fx.Node) -> ir.Expr:
    return _is_negative(importer, Arguments(importer.env, node)["self"])


def _copy_sign(importer: Importer, node: fx.Node) -> ir.Expr:
    builder, arguments, dtype = (
        importer.block_builder, Arguments(importer.env, node), result_dtype(node),
    )  # fmt: skip
    emit, op = builder.emit, relax.op
    size = emit(op.abs(in_dtype(builder, arguments["self"], dtype)))
    sign = _is_negative(importer, in_dtype(builder, arguments["other"], dtype))
    return emit(op.where(sign, emit(op.negative(size)), size))


def _where(importer: Importer, node: fx.Node) -> ir.Expr:
    """``where`` of values in the promoted type."""
    builder, arguments, dtype = (
        importer.block_builder, Arguments(importer.env, node), result_dtype(node),
    )  # fmt: skip
    values = [in_dtype(builder, arguments[name], dtype) for name in ("self", "other")]
    return builder.emit(relax.op.where(in_dtype(builder, arguments["condition"], "bool"), *values))


def _extreme_with_place(
    extreme: Callable[..., ir.Expr], place: Callable[..., ir.Expr]
) -> Converter:
    """``max`` and ``min`` along an axis, with the places of the first extremes."""

    def convert(importer: Importer, node: fx.Node) -> tuple[ir.Expr, ir.Expr]:
        emit, arguments = importer.block_builder.emit, Arguments(importer.env, node)
        x, axis, keep = arguments["self"], arguments["dim"], bool(arguments["keepdim"])
        return emit(extreme(x, [axis], keepdims=keep)), emit(place(x, axis, keepdims=keep))

    return convert


#: Name of the reduction in Relax and its neutral element.
_SCATTERED = {
    "sum": ("add", 0.0), "prod": ("mul", 1.0), "amax": ("max", -math.inf), "amin": ("min", math.inf),
}  # fmt: skip


def _scatter(importer: Importer, node: fx.Node) -> ir.Expr:
    """``scatter_add`` and ``scatter_reduce``; without the tensor's own values these are neutral where one comes."""
    builder, arguments = importer.block_builder, Arguments(importer.env, node)
    emit, op, x, axis = builder.emit, relax.op, arguments["self"], arguments["dim"]
    index, source, dtype = arguments["index"], arguments["src"], result_dtype(node)
    sizes = static_dims(arguments.fake("index"))
    kind = arguments["reduce"] if "reduce" in arguments else "sum"
    if kind not in _SCATTERED or "float" not in dtype or not sizes:
        raise NotImplementedError(f"scattering of {dtype} by {kind} is not supported")
    if sizes != static_dims(arguments.fake("src")):
        axes = list(range(len(sizes)))
        source = emit(op.strided_slice(source, axes, [0] * len(sizes), sizes))
    reduction, neutral = _SCATTERED[kind]
    if "include_self" in arguments and not arguments["include_self"]:
        start = emit(op.full(sizes, relax.const(neutral, dtype), dtype))
        x = emit(op.scatter_elements(x, index, start, axis, "update"))
    return emit(op.scatter_elements(x, index, source, axis, reduction))


def _grid_sample(importer: Importer, node: fx.Node) -> ir.Expr:
    """``grid_sampler``; TVM wants the coordinates as an axis before the places."""
    builder, arguments = importer.block_builder, Arguments(importer.env, node)
    mode, padding = arguments["interpolation_mode"], arguments["padding_mode"]
    corners = bool(arguments["align_corners"])
    if padding == 2 and corners and 1 in static_dims(arguments.fake("input"))[2:]:
        raise NotImplementedError("it reflects an axis of one element at that element")
    last = int(arguments["grid"].ty.ndim) - 1
    grid = builder.emit(relax.op.permute_dims(arguments["grid"], [0, last, *range(1, last)]))
    sampled = relax.op.image.grid_sample(
        arguments["input"], grid, method=("bilinear", "nearest", "bicubic")[mode],
        layout="NCHW" if last == 3 else "NCDHW", padding_mode=("zeros", "border", "reflection")[padding],
        align_corners=corners,
    )  # fmt: skip
    return builder.emit(sampled)


def _adaptive_max_pool(importer: Importer, node: fx.Node) -> tuple[ir.Expr, None]:
    """``adaptive_max_pool2d`` whose windows are all of one size, without their places."""
    builder, arguments = importer.block_builder, Arguments(importer.env, node)
    before = static_dims(arguments.fake("self"))
    after = arguments["output_size"]
    if any(size % count for size, count in zip(before[-2:], after, strict=True)):
        raise NotImplementedError(f"{before[-2:]} elements do not make {after} windows of one size")
    window = [size // count for size, count in zip(before[-2:], after, strict=True)]
    value = arguments["self"]
    value = builder.emit(relax.op.expand_dims(value, [0])) if len(before) == 3 else value
    value = builder.emit(relax.op.nn.max_pool2d(value, window, window))
    return (builder.emit(relax.op.squeeze(value, [0])) if len(before) == 3 else value), None


#: Converters by the name of the ATen overload.
FUNCTIONS: dict[str, Converter] = {
    **{f"var_mean.{kind}": _variance_and_mean for kind in ("correction", "dim", "default")},
    "prod.dim_int": _product,
    "fmax.default": _ignoring_nan(relax.op.maximum),
    "fmin.default": _ignoring_nan(relax.op.minimum),
    "exp2.default": _power_of_two,
    "erfc.default": _complementary_error,
    "special_erfc.default": _complementary_error,
    "hypot.default": _hypotenuse,
    "signbit.default": _sign_bit,
    "copysign.Tensor": _copy_sign,
    "copysign.Scalar": _copy_sign,
    "where.self": _where,
    "max.dim": _extreme_with_place(relax.op.max, relax.op.argmax),
    "min.dim": _extreme_with_place(relax.op.min, relax.op.argmin),
    "scatter_add.default": _scatter,
    "scatter_reduce.two": _scatter,
    "grid_sampler_2d.default": _grid_sample,
    "grid_sampler_3d.default": _grid_sample,
    "adaptive_max_pool2d.default": _adaptive_max_pool,
}
