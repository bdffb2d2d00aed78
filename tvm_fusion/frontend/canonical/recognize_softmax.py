"""Write a softmax that a model spells out as one operator."""

from __future__ import annotations

import math

from ...compat import ir, relax, tvm
from .constants import is_constant, to_numpy
from .rewrite import BindingRewriter, op_name, same_type, static_shape


@tvm.transform.module_pass(opt_level=0, name="tvm_fusion.RecognizeSoftmax")
class RecognizeSoftmax:
    """exp(x - max(x)) / sum(exp(x - max(x))) -> softmax(x); also softmax(x - max(x)) and exp(log_softmax(x))

    Over one axis, which the largest and the sum keep, or get back by a reshape or a broadcast; the sum may divide, or
    its reciprocal multiply. Without the subtraction of the largest the chain stays: it overflows where a softmax does
    not. A value of the chain that something else reads, too, keeps the chain.
    """

    def transform_module(self, mod: tvm.IRModule, ctx: tvm.transform.PassContext) -> tvm.IRModule:
        return _Rewriter().transform(mod)


class _Rewriter(BindingRewriter):
    def visit(self, name: str, value: ir.Expr) -> ir.Expr:
        op = op_name(value)
        if op == "exp":
            log = self.producer(value.args[0], "nn.log_softmax")
            if log is not None and self.single_use(value.args[0]):
                return relax.op.nn.softmax(log.args[0], int(log.attrs.axis))
        if op in ("nn.softmax", "nn.log_softmax"):
            return self._unshifted(value)
        pairs = ()
        if op == "divide":
            pairs = (tuple(value.args),)
        elif op == "multiply":
            pairs = ((a, self._inverted(b)) for a, b in (value.args, value.args[::-1]))
        for power, total in pairs:
            found = self._softmax(power, total)
            # A sum with more axes than the tensor gives the quotient those, too.
            if found is not None and same_type(self.typed(value), power):
                return found
        return value

    def _unshifted(self, value: ir.Expr) -> ir.Expr:
        """The softmax of what the largest was subtracted from, which it does itself."""
        difference = self.producer(value.args[0], "subtract")
        if difference is None or not self.single_use(value.args[0]):
            return value
        data, largest = difference.args
        if static_shape(data) is None or not same_type(data, value.args[0]):
            return value
        axis = int(value.attrs.axis) % len(static_shape(data))
        if self._over_axis(largest, "max", data) != axis:
            return value
        return relax.Call(value.op, [data], value.attrs)

    def _inverted(self, expr: ir.Expr) -> ir.Expr | None:
        """``x`` of 1 / x."""
        inverse = self.producer(expr, "divide")
        if inverse is None or not self.single_use(expr) or _number(inverse.args[0]) != 1:
            return None
        return inverse.args[1]

    def _softmax(self, power: ir.Expr, total: ir.Expr | None) -> ir.Expr | None:
        exp = self.producer(power, "exp")
        if exp is None or total is None or self.uses(power) != 2:
            return None
        difference = self.producer(exp.args[0], "subtract")
        if difference is None or not self.single_use(exp.args[0]):
            return None
        data, largest = difference.args
        if static_shape(data) is None or not same_type(data, power):
            return None
        sums, most = self._over_axis(total, "sum", power), self._over_axis(largest, "max", data)
        if sums is None or sums != most:
            return None
        return relax.op.nn.softmax(data, sums)

    def _over_axis(self, expr: ir.Expr, op: str, data: ir.Expr) -> int | None:
        """The axis over which ``expr`` reduces ``data`` and along which it broadcasts; None if it does not."""
        whole = static_shape(data)
        shape = static_shape(expr)
        if not self.single_use(expr):
            return None
        call = self.producer(expr)
        while op_name(call) in ("reshape", "broadcast_to", "maximum"):
            source = call.args[0]
            if op_name(call) == "broadcast_to":
                shape = static_shape(source)
            elif op_name(call) == "maximum":
                bound, source = call.args if is_constant(source) else call.args[::-1]
                if _number(bound) != -math.inf:
                    return None
            if not self.single_use(source):
                return None
            call = self.producer(source)
        if op_name(call) != op or not call.args[0].same_as(data) or call.attrs.axis is None:
            return None
        axes = [int(a) % len(whole) for a in call.attrs.axis]
        if len(axes) != 1:
            return None
        kept = tuple(1 if i == axes[0] else n for i, n in enumerate(whole))
        return axes[0] if shape == kept else None


def _number(expr: ir.Expr) -> float | None:
    """The value of a constant of one element."""
    if not is_constant(expr):
        return None
    array = to_numpy(expr)
    return float(array.reshape(-1)[0]) if array.size == 1 else None
