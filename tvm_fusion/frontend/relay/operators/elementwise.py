"""Elementwise operators."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

from ....compat import ir, relax
from ..site import Site
from .registry import operator, register

#: Relay's name -> Relax's function, for operators of one operand without attributes.
_UNARY: dict[str, Callable[[ir.Expr], ir.Expr]] = {
    "abs": relax.op.abs, "acos": relax.op.acos, "acosh": relax.op.acosh, "asin": relax.op.asin,
    "asinh": relax.op.asinh, "atan": relax.op.atan, "atanh": relax.op.atanh, "bitwise_not": relax.op.bitwise_not,
    "ceil": relax.op.ceil, "cos": relax.op.cos, "cosh": relax.op.cosh, "erf": relax.op.erf, "exp": relax.op.exp,
    "fast_erf": relax.op.erf, "fast_exp": relax.op.exp, "fast_tanh": relax.op.tanh, "floor": relax.op.floor,
    "isfinite": relax.op.isfinite, "isinf": relax.op.isinf, "isnan": relax.op.isnan, "log": relax.op.log,
    "logical_not": relax.op.logical_not, "negative": relax.op.negative, "nn.relu": relax.op.nn.relu,
    "rsqrt": relax.op.rsqrt, "sigmoid": relax.op.sigmoid, "sign": relax.op.sign,
    "sin": relax.op.sin, "sinh": relax.op.sinh, "sqrt": relax.op.sqrt, "tan": relax.op.tan, "tanh": relax.op.tanh,
    "trunc": relax.op.trunc,
}  # fmt: skip

#: The same for operators of two operands, which broadcast.
_BINARY: dict[str, Callable[[ir.Expr, ir.Expr], ir.Expr]] = {
    "add": relax.op.add, "bitwise_and": relax.op.bitwise_and, "bitwise_or": relax.op.bitwise_or,
    "bitwise_xor": relax.op.bitwise_xor, "divide": relax.op.divide,
    "floor_divide": relax.op.floor_divide, "floor_mod": relax.op.floor_mod, "greater": relax.op.greater,
    "greater_equal": relax.op.greater_equal, "left_shift": relax.op.left_shift, "less": relax.op.less,
    "less_equal": relax.op.less_equal, "logical_and": relax.op.logical_and, "logical_or": relax.op.logical_or,
    "logical_xor": relax.op.logical_xor, "maximum": relax.op.maximum, "minimum": relax.op.minimum,
    "mod": relax.op.mod, "multiply": relax.op.multiply, "power": relax.op.power,
    "right_shift": relax.op.right_shift, "subtract": relax.op.subtract,
}  # fmt: skip

#: Operators whose operands must be truth values, and those that compute with floating numbers only.
_LOGICAL = ("logical_not", "logical_and", "logical_or", "logical_xor")
_BITWISE = ("bitwise_not", "bitwise_and", "bitwise_or", "bitwise_xor", "left_shift", "right_shift")
_FLOATING = (
    "acos", "acosh", "asin", "asinh", "atan", "atanh", "cos", "cosh", "erf", "exp", "fast_erf", "fast_exp",
    "fast_tanh", "log", "rsqrt", "sigmoid", "sin", "sinh", "sqrt", "tan", "tanh",
)  # fmt: skip


def _check_dtype(site: Site, dtype: str) -> None:
    op = site.node.op
    wrong = (
        (op in _LOGICAL and dtype != "bool")
        or (op in _BITWISE and "float" in dtype)
        or (op in _FLOATING and "float" not in dtype)
        or (dtype == "bool" and op not in (*_LOGICAL, *_BITWISE))
    )
    if wrong:
        site.refuse(f"its operand is of dtype {dtype}: cast it first")


def _unary(function: Callable[[ir.Expr], ir.Expr], site: Site, x: ir.Expr) -> ir.Expr:
    _check_dtype(site, str(x.ty.dtype))
    return site.emit(function(x))


def _binary(
    function: Callable[[ir.Expr, ir.Expr], ir.Expr], site: Site, a: ir.Expr, b: ir.Expr
) -> ir.Expr:
    if str(a.ty.dtype) != str(b.ty.dtype):
        site.damaged(f"its operands are of dtypes {a.ty.dtype} and {b.ty.dtype}")
    _check_dtype(site, str(a.ty.dtype))
    check_broadcast(site, a, b)
    return site.emit(function(a, b))


def check_broadcast(site: Site, *operands: ir.Expr) -> None:
    """Refuse operands that do not broadcast."""
    shapes = [site.shape(operand) for operand in operands]
    for extents in zip(*(_padded(s, max(map(len, shapes))) for s in shapes), strict=True):
        if len({n for n in extents if n != 1}) > 1:
            site.damaged(f"its operands' shapes {' and '.join(map(str, shapes))} do not broadcast")


def _padded(shape: tuple[int, ...], rank: int) -> tuple[int, ...]:
    return (1,) * (rank - len(shape)) + shape


for _name, _function in _UNARY.items():
    register(_name, partial(_unary, _function), 1)
for _name, _function in _BINARY.items():
    register(_name, partial(_binary, _function), 2)


@operator("round")
def away_from_zero(site: Site, x: ir.Expr) -> ir.Expr:
    """The nearest whole number; halves go away from zero, where TVM's own operator now takes the even one."""
    _check_dtype(site, str(x.ty.dtype))
    if "float" not in str(x.ty.dtype):
        return x
    whole = site.emit(relax.op.trunc(x))
    rest = site.emit(relax.op.abs(site.emit(relax.op.subtract(x, whole))))
    # An infinity has the rest NaN, and stays.
    further = site.emit(relax.op.greater_equal(rest, site.number_like(0.5, x)))
    above = site.emit(relax.op.add(whole, site.emit(relax.op.sign(x))))
    return site.emit(relax.op.where(further, above, whole))


@operator("equal", "not_equal")
def equality(site: Site, a: ir.Expr, b: ir.Expr) -> ir.Expr:
    """Whether elements are equal; of truth values by an exclusive or, since TVM compares those as floats."""
    if not str(a.ty.dtype) == str(b.ty.dtype) == "bool":
        return _binary(
            relax.op.equal if site.node.op == "equal" else relax.op.not_equal, site, a, b
        )
    check_broadcast(site, a, b)
    differ = site.emit(relax.op.logical_xor(a, b))
    return differ if site.node.op == "not_equal" else site.emit(relax.op.logical_not(differ))


@operator("copy", "nn.dropout", "annotation.stop_fusion")
def identity(site: Site, x: ir.Expr) -> ir.Expr:
    """Operators that change nothing in inference; a dropout's second result, its mask, is not offered."""
    return x


@operator("log2", "log10")
def logarithm(site: Site, x: ir.Expr) -> ir.Expr:
    """A logarithm to another base, by the natural one."""
    _check_dtype(site, str(x.ty.dtype))
    base = 2.0 if site.node.op == "log2" else 10.0
    scale = site.number_like(1.0 / math.log(base), x)
    return site.emit(relax.op.multiply(site.emit(relax.op.log(x)), scale))


@operator("clip")
def clip(site: Site, x: ir.Expr) -> ir.Expr:
    """Values kept between two numbers."""
    low, high = site.number("a_min"), site.number("a_max")
    dtype = str(x.ty.dtype)
    if "int" in dtype:
        bits = int(dtype.lstrip("uint"))
        least, most = (
            (0, 2**bits - 1) if dtype.startswith("u") else (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
        )
        if not math.isfinite(low) or not math.isfinite(high):
            site.refuse("a bound of integers is not finite")
        return site.emit(relax.op.clip(x, max(int(low), least), min(int(high), most)))
    if dtype == "bool":
        site.refuse("its operand is of dtype bool: cast it first")
    return site.emit(relax.op.clip(x, low, high))


@operator("nn.leaky_relu")
def leaky_relu(site: Site, x: ir.Expr) -> ir.Expr:
    """A rectifier with a slope below zero."""
    return site.emit(relax.op.nn.leakyrelu(x, site.number("alpha")))


@operator("nn.prelu")
def prelu(site: Site, x: ir.Expr, slopes: ir.Expr) -> ir.Expr:
    """A rectifier with a slope for each channel."""
    axis = site.axis("axis", site.rank(x))
    if site.shape(slopes) != (site.shape(x)[axis],):
        site.damaged(
            f"it has slopes of shape {site.shape(slopes)} for {site.shape(x)[axis]} channels"
        )
    return site.emit(relax.op.nn.prelu(x, slopes, axis))


@operator("cast")
def cast(site: Site, x: ir.Expr) -> ir.Expr:
    """Another dtype."""
    return site.cast(x, site.text("dtype"))


@operator("cast_like")
def cast_like(site: Site, x: ir.Expr, like: ir.Expr) -> ir.Expr:
    """The dtype of another tensor."""
    return site.cast(x, str(like.ty.dtype))


@operator("where")
def where(site: Site, condition: ir.Expr, a: ir.Expr, b: ir.Expr) -> ir.Expr:
    """A choice between two tensors, by element."""
    if str(a.ty.dtype) != str(b.ty.dtype):
        site.damaged(f"its operands are of dtypes {a.ty.dtype} and {b.ty.dtype}")
    shape = site.shape(condition)
    rows = len(shape) == 1 and site.rank(a) > 1 and shape == site.shape(a)[:1] == site.shape(b)[:1]
    broadcasts = rows and {site.shape(a)[-1], site.shape(b)[-1]} <= {1, *shape}
    if rows and (not broadcasts or site.version.startswith(("0.6", "0.7"))):
        # Before TVM 0.8 a vector chose whole rows; later it is broadcast like any operand.
        condition = site.reshape(condition, [shape[0], *[1] * (site.rank(a) - 1)])
    check_broadcast(site, condition, a, b)
    return site.emit(relax.op.where(site.cast(condition, "bool"), a, b))
