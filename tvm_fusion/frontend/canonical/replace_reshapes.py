"""Write flatten, squeeze and expand_dims as reshape, so that later passes match one operator."""

from __future__ import annotations

from ...compat import ir, relax, tvm
from .rewrite import BindingRewriter, op_name

_RESHAPES = {"flatten", "squeeze", "expand_dims"}


@tvm.transform.module_pass(opt_level=0, name="tvm_fusion.ReplaceReshapes")
class ReplaceReshapes:
    """flatten, squeeze, expand_dims -> reshape, where the output's shape is known."""

    def transform_module(self, mod: tvm.IRModule, ctx: tvm.transform.PassContext) -> tvm.IRModule:
        return _Rewriter().transform(mod)


class _Rewriter(BindingRewriter):
    def visit(self, name: str, value: ir.Expr) -> ir.Expr:
        if op_name(value) not in _RESHAPES:
            return value
        shape = getattr(self.typed(value).ty, "shape", None)
        if not isinstance(shape, relax.ShapeExpr):
            return value
        return relax.op.reshape(value.args[0], shape)
