"""Write powers of small constant exponents as products, roots and quotients."""

from __future__ import annotations

from ...compat import ir, relax, tvm
from .constants import is_constant, to_constant, to_numpy, widen
from .rewrite import BindingRewriter, dims, dtype_of, op_name, same_dim

_FLOATS = ("float64", "float32", "float16", "bfloat16")


@tvm.transform.module_pass(opt_level=0, name="tvm_fusion.ExpandPowers")
class ExpandPowers:
    """power(x, 2) -> square(x); also for the exponents 3, 4, 1/2, -1/2 and -1.

    Frameworks write the square of a normalisation as a power. A power costs a logarithm and an exponential, and as
    CUDA's fast form is NaN for negative numbers.
    """

    def transform_module(self, mod: tvm.IRModule, ctx: tvm.transform.PassContext) -> tvm.IRModule:
        return _Rewriter().transform(mod)


class _Rewriter(BindingRewriter):
    def visit(self, name: str, value: ir.Expr) -> ir.Expr:
        if op_name(value) != "power" or dtype_of(value.args[0]) not in _FLOATS:
            return value
        base, exponent = value.args
        number = _number(exponent)
        if number is None or not _same_shape(base, self.typed(value)):
            return value
        if number == 0.5:
            return relax.op.sqrt(base)
        if number == -0.5:
            return relax.op.rsqrt(base)
        if number == -1:
            return relax.op.divide(to_constant(to_numpy(exponent) * -1), base)
        if number not in (2, 3, 4):
            return value
        square = relax.op.square(base)
        if number == 2:
            return square
        square = self.emit(name, square)
        return relax.op.square(square) if number == 4 else relax.op.multiply(square, base)


def _number(expr: ir.Expr) -> float | None:
    """The value of a constant whose elements are all equal."""
    if not is_constant(expr):
        return None
    values = widen(to_numpy(expr)).ravel()
    return float(values[0]) if values.size and (values == values[0]).all() else None


def _same_shape(a: ir.Expr, b: ir.Expr) -> bool:
    left, right = dims(a), dims(b)
    if left is None or right is None or len(left) != len(right):
        return False
    return all(same_dim(x, y) for x, y in zip(left, right, strict=True))
