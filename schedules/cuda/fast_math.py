"""Arithmetic as kernels do it: in float32 whatever the types of memory, with forms of few instructions.

An element of a memory-bound kernel has time for about forty instructions, which CUDA's ``erff`` and divisions use up
alone. `fast_math` widens float16 and bfloat16 arithmetic to float32 (what is between a load and a store is rounded only
by the intrinsic of ``rounding.py``) and writes error functions, exponentials, sigmoids and quotients in forms whose
errors are small against the rounding of the result. ``tests/schedules/test_cuda_fast_math.py`` measures them over the
whole range.
"""

from __future__ import annotations

from collections.abc import Callable

from ...compat import cuda_func_call, ir, structural_equal, tirx
from ..rounding import device_rounding, rounded_type

#: Types whose arithmetic is done in float32.
NARROW = ("float16", "bfloat16")

#: ``log2(erfc(t / sqrt(2)) / 2) + 1`` is about ``t * p(t)`` for t >= 0, the coefficients of p from the lowest: least
#: largest error of ``erfc / 2``, found by Lawson's iteration (1961) on 4001 Chebyshev points of [0, 5.6]. The last
#: coefficient is negative, so that the exponential goes to 0 beyond. Errors of ``erfc / 2``: 3.0e-7 and 8e-9.
_SHORT = (-1.15109134, -0.459254712, -0.0525611676, 0.00739746448, -0.000520448666)
_LONG = (
    -1.15110517, -0.45920819, -0.0524961799, 0.00706342002,
    -0.00013693636, -0.000186180245, 3.937769e-05, -2.83491272e-06,
)  # fmt: skip

_LOG2_E = 1.4426950408889634
_SQRT_HALF = 0.7071067811865476

#: A constant of a model is this close to one of ours: float16 rounds the square root of 1/2 by 2e-4 at most.
_CLOSE = 5e-4


def horner(coefficients: tuple[float, ...], x: str, constant: float) -> str:
    """C expression of ``constant + x * (c0 + x * (c1 + ...))``."""
    text = f"{coefficients[-1]:.9g}f"
    for coefficient in (*coefficients[-2::-1], constant):
        text = f"fmaf({text}, {x}, {coefficient:#.9g}f)"
    return text


def _instruction(ptx: str, plain: str) -> str:
    """C statement that replaces y; CUDA's own functions have guards around the instruction for denormal numbers."""
    return (
        "#ifdef __CUDA_ARCH__\n"
        f'  asm("{ptx}.approx.ftz.f32 %0, %0;" : "+f"(y));\n'
        "#else\n"
        f"  y = {plain};\n"
        "#endif\n"
    )


def _gelu_source(coefficients: tuple[float, ...]) -> str:
    """``max(x, 0) - |x| erfc(|x| / sqrt(2)) / 2``, which keeps NaN and infinity."""
    return (
        "  float t = fminf(fabsf(x), 1e30f), positive;\n"
        f"  float y = {horner(coefficients, 't', -1.0)};\n"
        "#ifdef __CUDA_ARCH__\n"
        '  asm("ex2.approx.ftz.f32 %0, %0;" : "+f"(y));\n'
        "#if __CUDA_ARCH__ >= 800\n"
        '  asm("max.NaN.f32 %0, %1, 0f00000000;" : "=f"(positive) : "f"(x));\n'
        "#endif\n"
        "#if __CUDA_ARCH__ < 800\n"
        "  positive = x < 0.0f ? 0.0f : x;\n"
        "#endif\n"
        "#else\n"
        "  y = exp2f(y), positive = x < 0.0f ? 0.0f : x;\n"
        "#endif\n"
        "  return fmaf(-t, y, positive);\n"
    )


#: Bodies of the device functions ``float tvmf_<name>(float x)``, without PTX where they are compiled for a CPU.
_BODIES = {
    "reciprocal": "  float y = x;\n" + _instruction("rcp", "1.0f / y") + "  return y;\n",
    "exp": f"  float y = x * {_LOG2_E:.9g}f;\n" + _instruction("ex2", "exp2f(y)") + "  return y;\n",
    "sigmoid": (
        f"  float y = x * {-_LOG2_E:.9g}f;\n"
        + _instruction("ex2", "exp2f(y)")
        + "  y += 1.0f;\n"
        + _instruction("rcp", "1.0f / y")
        + "  return y;\n"
    ),
    "erf": (
        f"  float t = fabsf(x) * {1 / _SQRT_HALF:.9g}f, y = {horner(_SHORT, 't', 0.0)};\n"
        + _instruction("ex2", "exp2f(y)")
        + "  return copysignf(1.0f - y, x);\n"
    ),
    "gelu": _gelu_source(_SHORT),
    "gelu_long": _gelu_source(_LONG),
}

#: CUDA source of each device function.
SOURCES = {
    name: f"__device__ __forceinline__ float tvmf_{name}(float x) {{\n{body}}}\n"
    for name, body in _BODIES.items()
}

_BINARY = (tirx.Add, tirx.Sub, tirx.Mul, tirx.Div, tirx.Min, tirx.Max, tirx.Mod)
_COMPARED = (tirx.EQ, tirx.NE, tirx.LT, tirx.LE, tirx.GT, tirx.GE)
_JOINED = (tirx.And, tirx.Or)

#: Calls that may be done in float32 as well: functions of their arguments alone.
_WIDENED = frozenset((
    "acos", "acosh", "asin", "asinh", "atan", "atan2", "atanh", "ceil", "copysign", "cos", "cosh", "erf", "exp",
    "exp10", "exp2", "fabs", "floor", "fmod", "hypot", "if_then_else", "isfinite", "isinf", "isnan", "likely", "log",
    "log10", "log1p", "log2", "nearbyint", "pow", "round", "rsqrt", "sigmoid", "sin", "sinh", "sqrt", "tan", "tanh",
    "trunc", "tvm_fusion_key_nan_first", "tvm_fusion_key_nan_last",
))  # fmt: skip

Replace = Callable[["tirx.PrimExpr", Callable], "tirx.PrimExpr | None"]


def dtype_of(expr: tirx.PrimExpr) -> str:
    """Return the type of an expression, such as ``"float16"``."""
    return str(expr.ty.dtype)


def function_of(expr: tirx.PrimExpr) -> str:
    """Return the name of what a call calls without its namespace (``"exp"``), empty for anything else."""
    return getattr(expr.op, "name", "").rsplit(".", 1)[-1] if isinstance(expr, ir.Call) else ""


def fast_math(
    value: tirx.PrimExpr,
    *,
    narrow: bool,
    replace: Replace | None = None,
    is_uniform: Callable[[tirx.PrimExpr], bool] | None = None,
) -> tirx.PrimExpr:
    """Rewrite an expression without float16 and bfloat16 arithmetic and with fast forms of costly functions.

    Parameters
    ----------
    value : PrimExpr
        Scalar expression.
    narrow : bool
        Whether the result is rounded to float16 or bfloat16, which allows errors of about 1e-6; else forms are used
        whose error is that of a few roundings in float32.
    replace : callable or None
        What stands for a load or a call (float32 for one of a narrow type), given that and a function that rewrites
        its parts; None from it leaves that to be rewritten.
    is_uniform : callable or None
        Whether an expression (as it was) has the same value for many elements, so that its reciprocal is worth having.

    Returns
    -------
    PrimExpr
        float32 where ``value`` was narrow.
    """
    keep, never = (lambda *_: None), (lambda _: False)
    return _Rewriter(narrow, replace or keep, is_uniform or never).visit(value)


def to_type(value: tirx.PrimExpr, dtype: str) -> tirx.PrimExpr:
    """Return a value in a type, itself if it has it."""
    return value if dtype_of(value) == dtype else tirx.Cast(dtype, value)


class _Rewriter:
    def __init__(self, narrow: bool, replace: Replace, is_uniform: Callable) -> None:
        self.narrow, self.replace, self.is_uniform = narrow, replace, is_uniform
        self._done: dict[int, tuple] = {}

    def visit(self, expr: tirx.PrimExpr) -> tirx.PrimExpr:
        """Rewrite an expression; a shared one once."""
        key = expr.__chandle__()
        if key not in self._done:
            # The expression is kept with its result: a handle is only unique while its object lives.
            self._done[key] = (expr, self._visit(expr))
        return self._done[key][1]

    def _visit(self, expr: tirx.PrimExpr) -> tirx.PrimExpr:
        kind = type(expr)
        if isinstance(expr, ir.TensorLoad | ir.Call):
            found = self.replace(expr, self.visit)
            if found is not None:
                return found
        if isinstance(expr, tirx.FloatImm):
            return _float(expr.value) if dtype_of(expr) in NARROW else expr
        if isinstance(expr, tirx.Cast):
            return self._cast(expr)
        if isinstance(expr, tirx.Div) and dtype_of(expr) in (*NARROW, "float32"):
            return self._quotient(expr)
        if isinstance(expr, tirx.Mul) and dtype_of(expr) in (*NARROW, "float32"):
            return self._product(expr)
        if isinstance(expr, _BINARY + _COMPARED):
            return kind(self.visit(expr.a), self.visit(expr.b))
        if isinstance(expr, _JOINED):
            return kind(self.visit(expr.a), self.visit(expr.b))
        if isinstance(expr, tirx.Not):
            return tirx.Not(self.visit(expr.a))
        if isinstance(expr, tirx.Select):
            parts = (expr.condition, expr.true_value, expr.false_value)
            return tirx.Select(*map(self.visit, parts))
        if isinstance(expr, ir.Call):
            return self._call(expr)
        return _widened(expr)

    def _cast(self, expr: tirx.Cast) -> tirx.PrimExpr:
        value, dtype = self.visit(expr.value), dtype_of(expr)
        if dtype in NARROW:
            dtype = "float32"
        return to_type(value, dtype)

    def _call(self, expr: ir.Call) -> tirx.PrimExpr:
        name = function_of(expr)
        narrow = rounded_type(expr)
        if narrow:
            return device_rounding(self.visit(expr.args[0]), narrow)
        if name not in _WIDENED:
            # Its arguments may be a buffer's place: what is inside stays as it is.
            return _widened(expr)
        args = [self.visit(arg) for arg in expr.args]
        dtype = "float32" if dtype_of(expr) in NARROW else dtype_of(expr)
        if dtype == "float32":
            if name == "sigmoid":
                return self._sigmoid(args[0])
            if self.narrow and name in ("exp", "erf"):
                return _call(name, args[0])
        return tirx.call_intrin(dtype, expr.op, *args)

    def _sigmoid(self, x: tirx.PrimExpr) -> tirx.PrimExpr:
        if self.narrow:
            return _call("sigmoid", x)
        # One plus an exponential is in the range in which the approximation is exact to a unit.
        return _call("reciprocal", _float(1) + tirx.exp(_float(0) - x))

    def _quotient(self, expr: tirx.Div) -> tirx.PrimExpr:
        left, right = self.visit(expr.a), self.visit(expr.b)
        if isinstance(right, tirx.FloatImm) and right.value not in (0.0, float("inf")):
            return self.times(left, _float(1 / right.value))
        if self.narrow and (self.is_uniform(expr.b) or dtype_of(expr) == "float16"):
            return left * _call("reciprocal", right)
        if self.is_uniform(expr.b):
            return left * (_float(1) / right)
        return left / right

    def _product(self, expr: tirx.Mul) -> tirx.PrimExpr:
        """A product, of which one factor may be ``k + k erf(u)`` or ``k + k tanh(u)``."""
        factors = _factors(expr)
        for place, factor in enumerate(factors):
            found = _one_plus(factor)
            if found is None:
                continue
            scale, name, u = found
            rest = factors[:place] + factors[place + 1 :]
            if name == "tanh" and dtype_of(expr) in (*NARROW, "float32"):
                # (1 + tanh(u)) / 2 is the sigmoid of 2 u, and has no cancellation.
                return self._times_all(rest, self._sigmoid(self.visit(u) * _float(2)), 2 * scale)
            owner = _gelu_argument(u, rest) if name == "erf" else None
            if owner is not None:
                x = self.visit(rest.pop(owner))
                gelu = _call("gelu" if self.narrow else "gelu_long", x)
                return self._times_all(rest, gelu, 2 * scale)
        return self.times(self.visit(expr.a), self.visit(expr.b))

    def _times_all(
        self, factors: list[tirx.PrimExpr], value: tirx.PrimExpr, scale: float
    ) -> tirx.PrimExpr:
        rest = []
        for factor in factors:
            if isinstance(factor, tirx.FloatImm):
                scale *= factor.value
            else:
                rest.append(factor)
        for factor in rest:
            value = self.times(value, self.visit(factor))
        return value if abs(scale - 1) < _CLOSE else value * _float(scale)

    @staticmethod
    def times(left: tirx.PrimExpr, right: tirx.PrimExpr) -> tirx.PrimExpr:
        """A product, with constants moved together."""
        if isinstance(right, tirx.FloatImm) and isinstance(left, tirx.Mul):
            if isinstance(left.b, tirx.FloatImm):
                return left.a * _float(left.b.value * right.value)
        return left * right


def _float(value: float) -> tirx.FloatImm:
    return tirx.FloatImm("float32", value)


def _widened(expr: tirx.PrimExpr) -> tirx.PrimExpr:
    return tirx.Cast("float32", expr) if dtype_of(expr) in NARROW else expr


def _call(name: str, x: tirx.PrimExpr) -> tirx.PrimExpr:
    """Call one of our device functions."""
    return cuda_func_call(f"tvmf_{name}", x, source_code=SOURCES[name], return_type="float32")


def _without_casts(expr: tirx.PrimExpr) -> tirx.PrimExpr:
    """An expression without conversions between floating-point types around it."""
    while isinstance(expr, tirx.Cast) and all(
        dtype_of(part) in (*NARROW, "float32") for part in (expr, expr.value)
    ):
        expr = expr.value
    return expr


def _factors(expr: tirx.PrimExpr) -> list[tirx.PrimExpr]:
    """Factors of a product of products."""
    expr = _without_casts(expr)
    if isinstance(expr, tirx.Mul):
        return _factors(expr.a) + _factors(expr.b)
    if isinstance(expr, tirx.Div) and isinstance(expr.b, tirx.FloatImm) and expr.b.value:
        return [*_factors(expr.a), _float(1 / expr.b.value)]
    return [expr]


def _one_plus(expr: tirx.PrimExpr) -> tuple[float, str, tirx.PrimExpr] | None:
    """Recognise ``k + k f(u)`` for f an error function or hyperbolic tangent; return (k, name of f, u)."""
    if not isinstance(expr, tirx.Add):
        return None
    for constant, other in ((expr.a, expr.b), (expr.b, expr.a)):
        constant = _without_casts(constant)
        if not isinstance(constant, tirx.FloatImm):
            continue
        scale, calls = 1.0, []
        for factor in _factors(other):
            if isinstance(factor, tirx.FloatImm):
                scale *= factor.value
            else:
                calls.append(factor)
        if len(calls) == 1 and scale == constant.value:
            name = function_of(calls[0])
            if name in ("erf", "tanh"):
                return scale, name, calls[0].args[0]
    return None


def _gelu_argument(u: tirx.PrimExpr, others: list[tirx.PrimExpr]) -> int | None:
    """Which of some factors is x, if u is ``x / sqrt(2)``."""
    scale, rest = 1.0, []
    for factor in _factors(u):
        if isinstance(factor, tirx.FloatImm):
            scale *= factor.value
        else:
            rest.append(factor)
    if len(rest) != 1 or abs(scale - _SQRT_HALF) > _CLOSE:
        return None
    matches = (i for i, x in enumerate(others) if structural_equal(x, rest[0], map_free_vars=False))
    return next(matches, None)
