"""Sort bfloat16 as float32, which has the same order: TVM sorts its bits as those of another type, without an error."""

from __future__ import annotations

from ...compat import ir, relax, tvm
from .rewrite import BindingRewriter, dtype_of, op_name, with_args

_ORDERS = frozenset({"argsort", "sort", "topk"})


@tvm.transform.module_pass(opt_level=0, name="tvm_fusion.WidenOrders")
class WidenOrders:
    """topk(x) of bfloat16 -> topk(astype(x, "float32")), its values cast back; likewise sort and argsort.

    The values are exact, since each is one of the operand's. Other types are left alone.
    """

    def transform_module(self, mod: tvm.IRModule, ctx: tvm.transform.PassContext) -> tvm.IRModule:
        return _Rewriter().transform(mod)


class _Rewriter(BindingRewriter):
    def visit(self, name: str, value: ir.Expr) -> ir.Expr:
        if op_name(value) not in _ORDERS or dtype_of(value.args[0]) != "bfloat16":
            return value
        data = self.emit(name, relax.op.astype(value.args[0], "float32"))
        wide = self.emit(name, with_args(value, data))
        if not isinstance(wide.ty, ir.TupleType):
            return self._narrow(wide)
        fields = [self.emit(name, relax.TupleGetItem(wide, i)) for i in range(len(wide.ty.fields))]
        return relax.Tuple([self.emit(name, self._narrow(field)) for field in fields])

    def _narrow(self, wide: ir.Expr) -> ir.Expr:
        return relax.op.astype(wide, "bfloat16") if dtype_of(wide) == "float32" else wide
