"""Sort in a wider type what TVM cannot sort: bfloat16, whose bits it takes for another type, and short integers."""

from __future__ import annotations

from ...compat import ir, relax, tvm
from ...errors import UnsupportedOperatorError
from .rewrite import BindingRewriter, dtype_of, op_name, with_args

_ORDERS = frozenset({"argsort", "sort", "topk"})

#: Types that hold every value of those that cannot be sorted, in the same order.
_WIDER = {
    "bfloat16": "float32", "bool": "int32", "int8": "int32", "uint8": "int32", "int16": "int32", "uint16": "int32",
    "uint32": "int64",
}  # fmt: skip


@tvm.transform.module_pass(opt_level=0, name="tvm_fusion.WidenOrders")
class WidenOrders:
    """topk(x) of bfloat16 -> topk(astype(x, "float32")), its values cast back; likewise sort and argsort, and integers.

    The values are exact, since each is one of the operand's. What TVM can sort is left alone.

    Raises
    ------
    UnsupportedOperatorError
        For uint64, which no type that TVM can sort holds.
    """

    def transform_module(self, mod: tvm.IRModule, ctx: tvm.transform.PassContext) -> tvm.IRModule:
        return _Rewriter().transform(mod)


class _Rewriter(BindingRewriter):
    def visit(self, name: str, value: ir.Expr) -> ir.Expr:
        op = op_name(value)
        dtype = dtype_of(value.args[0]) if op in _ORDERS else None
        if dtype == "uint64":
            raise UnsupportedOperatorError(
                f"operator {op} ({name}) is of uint64, which TVM cannot sort; cast its operand to int64"
            )
        if dtype not in _WIDER:
            return value
        data = self.emit(name, relax.op.astype(value.args[0], _WIDER[dtype]))
        wide = self.emit(name, with_args(value, data))
        if not isinstance(wide.ty, ir.TupleType):
            return wide if op == "argsort" or _is_places(value) else relax.op.astype(wide, dtype)
        values, places = (self.emit(name, relax.TupleGetItem(wide, i)) for i in range(2))
        return relax.Tuple([self.emit(name, relax.op.astype(values, dtype)), places])


def _is_places(call: ir.Call) -> bool:
    """Whether a topk returns places only."""
    return str(getattr(call.attrs, "ret_type", "")) == "indices"
