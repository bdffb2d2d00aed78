"""Merge chains of multiplications and additions by constants into one of each."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ...compat import ir, relax, tvm
from .constants import cast, is_constant, is_float, to_constant, to_numpy, widen
from .rewrite import BindingRewriter, dtype_of, op_name, same_type


@tvm.transform.module_pass(opt_level=0, name="tvm_fusion.MergeScaleShifts")
class MergeScaleShifts:
    """((x * a + b) * c + d) -> x * (a c) + (b c + d), over add, subtract, multiply, divide and negative.

    Only through values that nothing else reads, only when no constant grows the result's shape, and
    only when the merged constants are finite. Constants go to the right-hand side; the subtraction
    of a constant becomes the addition of its negative. Merged in float64, rounded once.
    """

    def transform_module(self, mod: tvm.IRModule, ctx: tvm.transform.PassContext) -> tvm.IRModule:
        return _Rewriter().transform(mod)


class _Step(NamedTuple):
    """``base * scale + shift``; exactly one of the two is given, except in ``constant - base``."""

    base: ir.Expr
    scale: np.ndarray | None
    shift: np.ndarray | None
    name: str


class _Rewriter(BindingRewriter):
    def visit(self, name: str, value: ir.Expr) -> ir.Expr:
        step = self._step(name, value)
        if step is None:
            return value
        chain = [step]
        while self.single_use(chain[-1].base):
            base = chain[-1].base
            inner = (
                self._step(base.name, self.producer(base)) if isinstance(base, relax.Var) else None
            )
            if inner is None:
                break
            chain.append(inner)
        if len(chain) == 1 and not _wants_rewrite(value):
            return value
        if (
            len(chain) == 2
            and chain[0].scale is None
            and chain[1].shift is None
            and not _wants_rewrite(value)
        ):
            return value  # already one multiplication and one addition
        return self._merge(name, value, chain[::-1])

    def _merge(self, name: str, value: ir.Expr, chain: list[_Step]) -> ir.Expr:
        """Return the merged form of a chain, innermost step first, or ``value`` when it does not exist."""
        scale = shift = None
        scale_name = name
        with np.errstate(all="ignore"):
            for step in chain:
                if step.scale is not None:
                    scale = step.scale if scale is None else scale * step.scale
                    shift = None if shift is None else shift * step.scale
                    scale_name = step.name
                if step.shift is not None:
                    shift = step.shift if shift is None else shift + step.shift
        base, dtype = chain[0].base, dtype_of(chain[0].base)
        for constant in (scale, shift):
            if constant is not None and not np.isfinite(cast(constant, dtype)).all():
                return value
        out = base
        if scale is not None:
            out = relax.op.multiply(base, to_constant(scale, dtype))
            if shift is not None:
                out = self.emit(scale_name, out)
        if shift is not None:
            out = relax.op.add(out, to_constant(shift, dtype))
        return out

    def _step(self, name: str, expr: ir.Expr | None) -> _Step | None:
        op = op_name(expr)
        if op not in ("add", "subtract", "multiply", "divide", "negative"):
            return None
        constants = [widen(to_numpy(arg)) if is_constant(arg) else None for arg in expr.args]
        if op == "negative":
            step = _Step(expr.args[0], np.float64(-1.0), None, name)
        elif (constants[0] is None) == (constants[1] is None):
            return None
        elif constants[1] is not None:
            base, constant = expr.args[0], constants[1]
            with np.errstate(all="ignore"):
                step = {
                    "add": lambda: _Step(base, None, constant, name),
                    "subtract": lambda: _Step(base, None, -constant, name),
                    "multiply": lambda: _Step(base, constant, None, name),
                    "divide": lambda: _Step(base, 1.0 / constant, None, name),
                }[op]()
        elif op == "divide":
            return None
        else:
            base, constant = expr.args[1], constants[0]
            step = {
                "add": _Step(base, None, constant, name),
                "subtract": _Step(base, np.float64(-1.0), constant, name),
                "multiply": _Step(base, constant, None, name),
            }[op]
        dtype = dtype_of(step.base)
        if dtype is None or not is_float(dtype) or not same_type(self.typed(expr), step.base):
            return None
        return step


def _wants_rewrite(value: ir.Expr) -> bool:
    """Return whether a single step is better written otherwise: constant on the left, or subtracted."""
    op = op_name(value)
    if op in ("add", "multiply"):
        return is_constant(value.args[0])
    return op == "subtract" and is_constant(value.args[1])
