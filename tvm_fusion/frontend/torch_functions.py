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
    length = emit(op.multiply(large, root))
    infinite = emit(op.logical_or(emit(op.isinf(a)), emit(op.isinf(b))))  # were the other leg NaN
    return emit(op.where(infinite, relax.const(math.inf, dtype), length))


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


def _shift(left: bool) -> Converter:
    """``<<`` and ``>>``; by counts outside of the type's bits to zero, or to the sign, which LLVM leaves undefined."""

    def convert(importer: Importer, node: fx.Node) -> ir.Expr:
        builder, arguments = importer.block_builder, Arguments(importer.env, node)
        emit, op, dtype = builder.emit, relax.op, result_dtype(node)
        if "int" not in dtype:
            raise NotImplementedError(f"shifts of {dtype} are not supported")
        x, count = (in_dtype(builder, arguments[name], dtype) for name in ("self", "other"))
        bits = int(dtype.lstrip("uint"))
        most = bits - 1 if dtype.startswith("int") and not left else bits
        zero = relax.const(0, dtype)
        outside = op.logical_or(
            emit(op.less(count, zero)), emit(op.greater_equal(count, relax.const(most, dtype)))
        )
        outside = emit(outside)
        inside = emit(op.where(outside, zero, count))
        if left:
            return emit(op.where(outside, zero, emit(op.left_shift(x, inside))))
        sign = (
            emit(op.where(emit(op.less(x, zero)), relax.const(-1, dtype), zero))
            if most < bits
            else zero
        )
        return emit(op.where(outside, sign, emit(op.right_shift(x, inside))))

    return convert


def _convolution(importer: Importer, node: fx.Node) -> ir.Expr:
    """``convolution``; of TVM's converter only the transposed one of three dimensions is missing."""
    arguments = Arguments(importer.env, node)
    x, weight, bias = (arguments[name] for name in ("input", "weight", "bias"))
    if not arguments["transposed"] or int(x.ty.ndim) != 5:
        return importer.stock["convolution.default"](node)
    emit, op = importer.block_builder.emit, relax.op
    y = op.nn.conv3d_transpose(
        x, weight, arguments["stride"], arguments["padding"], arguments["output_padding"], arguments["dilation"],
        arguments["groups"],
    )  # fmt: skip
    y = emit(y)
    return y if bias is None else emit(op.add(y, emit(op.reshape(bias, [1, -1, 1, 1, 1]))))


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
    "grid_sampler_2d.default": _grid_sample,
    "grid_sampler_3d.default": _grid_sample,
    "adaptive_max_pool2d.default": _adaptive_max_pool,
    "convolution.default": _convolution,
    **{f"{name}.{kind}": _shift(True) for name in ("__lshift__", "bitwise_left_shift")
       for kind in ("Scalar", "Tensor", "Tensor_Scalar")},
    **{f"{name}.{kind}": _shift(False) for name in ("__rshift__", "bitwise_right_shift")
       for kind in ("Scalar", "Tensor", "Tensor_Scalar")},
}  # fmt: skip
