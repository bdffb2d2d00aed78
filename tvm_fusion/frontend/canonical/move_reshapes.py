"""Move reshapes that only regroup leading axes out of the way of fusion."""

from __future__ import annotations

import math

from ...compat import ir, relax, tvm
from .constants import to_constant, to_numpy
from .rewrite import BindingRewriter, op_name, static_shape, with_args, with_attrs

#: Operators of one tensor that compute each element by itself.
_UNARY = frozenset(
    f"{prefix}{op}"
    for prefix, ops in (
        ("nn.", "relu leakyrelu gelu gelu_tanh silu softplus relu6"),
        ("", "abs astype ceil clip cos erf exp floor log negative round rsqrt sigmoid sign sin sqrt square tanh"),
    )
    for op in ops.split()
)  # fmt: skip
_BINARY = frozenset(("add", "subtract", "multiply", "divide", "maximum", "minimum", "power"))
_ROWS = frozenset(("nn.layer_norm", "nn.rms_norm"))

#: Shape of a tensor.
Shape = tuple[int, ...]


@tvm.transform.module_pass(opt_level=0, name="tvm_fusion.MoveReshapes")
class MoveReshapes:
    """Let products, elementwise operators and row norms work on tensors as they were before a reshape.

    Frameworks flatten leading axes before a linear layer and restore them behind it. Only what has one shape shares a
    kernel, so those reshapes would part the product from the activation and the residual that follow it. A reshape
    that keeps the last axis commutes with all of them: it moves to the consumers, where it meets its opposite. One
    that cannot (behind it stands another tensor of its shape) moves towards the producers, if another reshape waits
    there to be merged with; behind a lookup in a table, it moves to the indices. Equal reshapes of a tensor become one.
    """

    def transform_module(self, mod: tvm.IRModule, ctx: tvm.transform.PassContext) -> tvm.IRModule:
        return _Rewriter().transform(mod)


class _Rewriter(BindingRewriter):
    def __init__(self) -> None:
        super().__init__()
        self._reshapes: dict[tuple[relax.Var, Shape], relax.Var] = {}

    def visit(self, name: str, value: ir.Expr) -> ir.Expr:
        op = op_name(value)
        if op == "reshape":
            return self._reshape(name, value)
        if op == "matmul" and len(static_shape(value.args[1]) or ()) == 2:
            moved = self._sunk(value, 0)
        elif op in _UNARY or (op in _ROWS and _is_over_last_axis(value)):
            moved = self._sunk(value, 0)
        elif op in _BINARY:
            moved = self._sunk_binary(value)
        else:
            moved = None
        shape = None if moved is None else static_shape(self.typed(value))
        return value if shape is None else self._view(name, self.emit(name, moved), shape)

    def _source(self, expr: ir.Expr) -> ir.Expr | None:
        """The tensor that ``expr`` is a reshape of, where that keeps the last of at least two axes."""
        view = self.producer(expr, "reshape")
        if view is None:
            return None
        before, after = static_shape(view.args[0]), static_shape(expr)
        if before is None or after is None or min(len(before), len(after)) < 2:
            return None
        return view.args[0] if before[-1] == after[-1] else None

    def _sunk(self, call: ir.Call, place: int) -> ir.Call | None:
        """The call on what its operand was reshaped from."""
        source = self._source(call.args[place])
        if source is None:
            return None
        args = [source if i == place else arg for i, arg in enumerate(call.args)]
        if op_name(call) in _ROWS:
            call = with_attrs(call, axes=[-1])
        return with_args(call, *args)

    def _sunk_binary(self, call: ir.Call) -> ir.Call | None:
        """A binary call on what was reshaped: both operands alike, or one, with one value a column."""
        sources = [self._source(arg) for arg in call.args]
        if None not in sources and static_shape(sources[0]) == static_shape(sources[1]):
            if static_shape(call.args[0]) == static_shape(call.args[1]):
                return with_args(call, *sources)
            return None
        for place, source in enumerate(sources):
            other = static_shape(call.args[1 - place])
            if (
                source is None
                or other is None
                or not same_shape(self.typed(call), call.args[place])
            ):
                continue
            if len(other) <= len(static_shape(source)) and math.prod(other[:-1]) == 1:
                return self._sunk(call, place)
        return None

    def _reshape(self, name: str, call: ir.Call) -> ir.Expr:
        before, after = static_shape(call.args[0]), static_shape(self.typed(call))
        if before is None or after is None:
            return call
        if min(len(before), len(after)) >= 2 and before[-1] == after[-1] and before != after:
            raised = self._raised(call.args[0], after[:-1])
            if raised is not None:
                return raised
        return self._view(name, call.args[0], after)

    def _view(self, name: str, source: ir.Expr, shape: Shape) -> ir.Expr:
        """A reshape of ``source``, merged with its own, and with an equal one that there is."""
        inner = self.producer(source, "reshape")
        if inner is not None:
            source = inner.args[0]
        if static_shape(source) == shape:
            return source
        if not isinstance(source, relax.Var):
            return to_constant(to_numpy(source).reshape(shape))
        if (source, shape) not in self._reshapes:
            self._reshapes[source, shape] = self.emit(name, relax.op.reshape(source, shape))
        return self._reshapes[source, shape]

    def _raised(self, expr: ir.Expr, leading: Shape) -> ir.Expr | None:
        """``expr`` computed with other leading axes, if that ends at a reshape or a lookup; None if it does not."""
        value = self.producer(expr)
        op = op_name(value)
        if op == "reshape":
            return self._view(expr.name, value.args[0], (*leading, static_shape(expr)[-1]))
        if op is None or not self.single_use(expr):
            return None
        if op == "take" and value.attrs.axis is not None:
            table, index = value.args
            sizes = static_shape(index)
            if int(value.attrs.axis) != 0 or len(static_shape(table) or ()) != 2 or sizes is None:
                return None
            return self.emit(
                expr.name, with_args(value, table, self._view(expr.name, index, leading))
            )
        place = self._regrouped(value)
        inner = None if place is None else self._raised(value.args[place], leading)
        if inner is None:
            return None
        args = [inner if i == place else arg for i, arg in enumerate(value.args)]
        return self.emit(expr.name, with_args(value, *args))

    def _regrouped(self, call: ir.Call) -> int | None:
        """The operand whose leading axes may be regrouped with the result's; None where there is none."""
        op = op_name(call)
        if op in _UNARY or (op == "matmul" and len(static_shape(call.args[1]) or ()) == 2):
            return 0
        for place in (0, 1) if op in _BINARY else ():
            other = static_shape(call.args[1 - place])
            if other is not None and len(other) < 2 and same_shape(call, call.args[place]):
                return place
        return None


def same_shape(a: ir.Expr, b: ir.Expr) -> bool:
    """Whether two tensors have one static shape."""
    shape = static_shape(a)
    return shape is not None and shape == static_shape(b)


def _is_over_last_axis(call: ir.Call) -> bool:
    ndim = call.args[0].ty.ndim
    return [int(axis) % ndim for axis in call.attrs.axes] == [ndim - 1]
