"""Write a reduction over freshly stacked tensors as a chain of elementwise operators."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce

from ...compat import ir, relax, tvm
from .rewrite import BindingRewriter, dtype_of, op_name, static_shape

_PAIRWISE: dict[str, Callable[[ir.Expr, ir.Expr], ir.Expr]] = {
    "sum": relax.op.add,
    "mean": relax.op.add,
    "max": relax.op.maximum,
    "min": relax.op.minimum,
}


@tvm.transform.module_pass(opt_level=0, name="tvm_fusion.UnstackReductions")
class UnstackReductions:
    """sum(stack(a, b, c), 0) -> (a + b) + c; likewise mean, max and min, and concat of pieces of extent one.

    This is how ONNX Sum (the shortcut of a ResNet) arrives. Anything else than a reduction over
    exactly the stacked axis is left alone.
    """

    def transform_module(self, mod: tvm.IRModule, ctx: tvm.transform.PassContext) -> tvm.IRModule:
        return _Rewriter().transform(mod)


class _Rewriter(BindingRewriter):
    def visit(self, name: str, value: ir.Expr) -> ir.Expr:
        op = op_name(value)
        if op not in _PAIRWISE:
            return value
        stacked = self.producer(value.args[0])
        if op_name(stacked) not in ("stack", "concat") or not isinstance(
            stacked.args[0], relax.Tuple
        ):
            return value
        ndim = value.args[0].ty.ndim
        axis = (0 if stacked.attrs.axis is None else int(stacked.attrs.axis)) % ndim
        axes = value.attrs.axis
        if (
            axes is None
            or [int(a) % ndim for a in axes] != [axis]
            or len(stacked.args[0].fields) < 1
        ):
            return value
        parts = list(stacked.args[0].fields)
        if op_name(stacked) == "concat" and any(
            (static_shape(p) or (0,) * ndim)[axis] != 1 for p in parts
        ):
            return value
        result = self.typed(value)
        shape = getattr(result.ty, "shape", None)
        if not isinstance(shape, relax.ShapeExpr):
            return value
        total = reduce(lambda a, b: self.emit(name, _PAIRWISE[op](a, b)), parts)
        if op == "mean":
            total = self.emit(
                name, relax.op.divide(total, relax.const(len(parts), dtype_of(total)))
            )
        same_rank = op_name(stacked) == ("concat" if value.attrs.keepdims else "stack")
        return total if same_rank else relax.op.reshape(total, shape)
