"""Remove operators that compute nothing: dropout, identity reshapes, permutations, casts, slices, pads, ..."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ...compat import ir, relax, tvm
from .constants import is_constant, to_numpy
from .elementwise import BINARY
from .rewrite import BindingRewriter, dtype_of, op_name, same_type, static_shape, with_args


@tvm.transform.module_pass(opt_level=0, name="tvm_fusion.RemoveNoOps")
class RemoveNoOps:
    """Drop operators whose result is one of their operands, and merge neighbours that undo each other.

    dropout (inference), reshape/broadcast_to/astype/strided_slice/concat/pad to the same type,
    identity permute_dims (one that moves axes of one place only becomes a reshape), reshape of reshape, permute_dims
    of permute_dims, reshapes around a softmax of rows, multiplication by one, addition of zero, and broadcast_to in
    front of an elementwise operator that broadcasts anyway.
    """

    def transform_module(self, mod: tvm.IRModule, ctx: tvm.transform.PassContext) -> tvm.IRModule:
        return _Rewriter().transform(mod)


class _Rewriter(BindingRewriter):
    def visit(self, name: str, value: ir.Expr) -> ir.Expr:
        if isinstance(value, relax.TupleGetItem):
            source = self.producer(value.tuple_value)
            if op_name(source) == "nn.dropout" and value.index == 0:
                return source.args[0]
            if op_name(source) == "split" and len(value.tuple_value.ty.fields) == 1:
                return source.args[0]
            return value
        op = op_name(value)
        if op in BINARY:
            return self._binary(op, value)
        rule = _RULES.get(op or "")
        return value if rule is None else rule(self, value)

    def _binary(self, op: str, call: ir.Call) -> ir.Expr:
        typed = self.typed(call)
        args = list(call.args)
        for i, arg in enumerate(args):
            source = self.producer(arg, "broadcast_to")
            if source is None:
                continue
            trial = list(args)
            trial[i] = source.args[0]
            if same_type(self.typed(with_args(call, *trial)), typed):
                args = trial
        lhs, rhs = args
        if op in ("add", "subtract") and _is_splat(rhs, 0) and same_type(lhs, typed):
            return lhs
        if op == "add" and _is_splat(lhs, 0) and same_type(rhs, typed):
            return rhs
        if op in ("multiply", "divide") and _is_splat(rhs, 1) and same_type(lhs, typed):
            return lhs
        if op == "multiply" and _is_splat(lhs, 1) and same_type(rhs, typed):
            return rhs
        return call if args == list(call.args) else with_args(call, *args)

    def same(self, call: ir.Call) -> ir.Expr:
        """Drop a call whose type equals its first operand's."""
        return call.args[0] if same_type(self.typed(call), call.args[0]) else call

    def reshape(self, call: ir.Call) -> ir.Expr:
        if same_type(self.typed(call), call.args[0]):
            return call.args[0]
        source = self.producer(call.args[0], "reshape")
        if source is None:
            return self._unflattened(call)
        if same_type(self.typed(call), source.args[0]):
            return source.args[0]
        return relax.op.reshape(source.args[0], self.typed(call).ty.shape)

    def _unflattened(self, call: ir.Call) -> ir.Expr:
        """A softmax of rows that were flattened for it, as ONNX had it before opset 13, in the shape of its result."""
        softmax = self.producer(call.args[0], "nn.softmax")
        if softmax is None or not self.single_use(call.args[0]):
            return call
        flat = self.producer(softmax.args[0], "reshape")
        rows, shape = static_shape(softmax.args[0]), static_shape(self.typed(call))
        if flat is None or not rows or not shape or rows[-1] != shape[-1]:
            return call
        if int(softmax.attrs.axis) % len(rows) != len(rows) - 1:
            return call
        data = flat.args[0]
        if not same_type(self.typed(call), data):
            data = self.emit(softmax.args[0].name, self.reshape(relax.op.reshape(data, shape)))
        # Under its own name: that of the reshape, which is dropped, is another operator's.
        return self.emit(call.args[0].name, relax.op.nn.softmax(data, axis=-1))

    def permute(self, call: ir.Call) -> ir.Expr:
        axes = permutation(call)
        if axes == list(range(len(axes))):
            return call.args[0]
        shape = static_shape(call.args[0])
        wide = [axis for axis in axes if shape is None or shape[axis] != 1]
        if shape is not None and wide == sorted(wide):
            return self.reshape(relax.op.reshape(call.args[0], self.typed(call).ty.shape))
        source = self.producer(call.args[0], "permute_dims")
        if source is None:
            return call
        inner = permutation(source)
        axes = [inner[axis] for axis in axes]
        if axes == list(range(len(axes))):
            return source.args[0]
        return relax.op.permute_dims(source.args[0], axes)

    def concat(self, call: ir.Call) -> ir.Expr:
        fields = call.args[0].fields if isinstance(call.args[0], relax.Tuple) else []
        return fields[0] if len(fields) == 1 else call

    def slice(self, call: ir.Call) -> ir.Expr:
        """A slice that keeps the static shape keeps every element, unless it runs backwards."""
        if static_shape(call.args[0]) is None or not same_type(self.typed(call), call.args[0]):
            return call
        strides = call.args[4] if len(call.args) > 4 else None
        values = (
            []
            if strides is None
            else [getattr(v, "value", v) for v in getattr(strides, "fields", [])]
        )
        return call.args[0] if all(isinstance(v, int) and v > 0 for v in values) else call

    def pad(self, call: ir.Call) -> ir.Expr:
        return call.args[0] if all(int(p) == 0 for p in call.attrs.pad_width) else call

    def cast(self, call: ir.Call) -> ir.Expr:
        return call.args[0] if dtype_of(call.args[0]) == str(call.attrs.dtype) else call


_RULES: dict[str, Callable[[_Rewriter, ir.Call], ir.Expr]] = {
    "reshape": _Rewriter.reshape,
    "permute_dims": _Rewriter.permute,
    "broadcast_to": _Rewriter.same,
    "astype": _Rewriter.cast,
    "strided_slice": _Rewriter.slice,
    "concat": _Rewriter.concat,
    "nn.pad": _Rewriter.pad,
}


def permutation(call: ir.Call) -> list[int]:
    """Return the axes of a ``permute_dims`` (reversed when the attribute is absent), all non-negative."""
    ndim = call.args[0].ty.ndim
    if call.attrs.axes is None:
        return list(range(ndim))[::-1]
    return [int(axis) % ndim for axis in call.attrs.axes]


def _is_splat(expr: ir.Expr, number: float) -> bool:
    if not is_constant(expr):
        return False
    array = to_numpy(expr)
    # ``-0.0 == 0`` holds: x + (-0.0) is x, and x + 0.0 differs from x only in the sign of a zero.
    return array.size > 0 and array.flat[0] == number and bool(np.all(array == number))
