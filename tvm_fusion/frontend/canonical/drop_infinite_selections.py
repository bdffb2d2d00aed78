"""Leave out what a model selects for infinities among values that are never infinite."""

from __future__ import annotations

import math

from ...compat import ir, tvm
from .constants import is_constant, to_numpy
from .rewrite import BindingRewriter, dtype_of, op_name, same_type

#: Operators whose results lie between -1 and 1, or are NaN.
_BOUNDED = ("nn.softmax", "sigmoid", "tanh", "sin", "cos", "erf")

_FLOATS = ("float64", "float32", "float16", "bfloat16")


@tvm.transform.module_pass(opt_level=0, name="tvm_fusion.DropInfiniteSelections")
class DropInfiniteSelections:
    """where(softmax(x) == inf, number, softmax(x)) -> softmax(x)

    PyTorch's ``nan_to_num`` selects three times: for NaN, which stays, and for both infinities. Of a softmax, a sigmoid
    or a tanh, also with numbers for its NaN, there are none.
    """

    def transform_module(self, mod: tvm.IRModule, ctx: tvm.transform.PassContext) -> tvm.IRModule:
        return _Rewriter().transform(mod)


class _Rewriter(BindingRewriter):
    def visit(self, name: str, value: ir.Expr) -> ir.Expr:
        if op_name(value) != "where" or not self._is_false(value.args[0]):
            return value
        kept = value.args[2]
        return kept if same_type(self.typed(value), kept) else value

    def _is_false(self, condition: ir.Expr) -> bool:
        """Whether a condition is that a value that is never infinite is."""
        made = self.producer(condition)
        op = op_name(made)
        if op == "logical_and":
            return any(self._is_false(arg) for arg in made.args)
        if op == "isinf":
            return self._is_bounded(made.args[0])
        if op == "equal":
            pairs = (made.args, made.args[::-1])
            return any(_is_infinite(b) and self._is_bounded(a) for a, b in pairs)
        return False

    def _is_bounded(self, expr: ir.Expr) -> bool:
        made = self.producer(expr)
        op = op_name(made)
        if op in ("astype", "reshape"):
            return dtype_of(made.args[0]) in _FLOATS and self._is_bounded(made.args[0])
        if op == "where":
            return all(_is_small(arg) or self._is_bounded(arg) for arg in made.args[1:])
        return op in _BOUNDED


def _is_infinite(expr: ir.Expr) -> bool:
    return is_constant(expr) and bool((abs(to_numpy(expr).astype("float64")) == math.inf).all())


def _is_small(expr: ir.Expr) -> bool:
    """Whether a constant is between -1 and 1, which is finite in every type."""
    if not is_constant(expr):
        return False
    values = to_numpy(expr).astype("float64")
    return bool(values.size) and bool((abs(values) <= 1).all())
