"""Change 2-d convolutions and all that stands between them to channels-last (NHWC) layout."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ...compat import ir, relax, tvm
from .constants import is_constant, to_constant, to_numpy
from .remove_no_ops import permutation
from .rewrite import BindingRewriter, bindings_of, dims, op_name, substitute, variables


@tvm.transform.module_pass(opt_level=0, name="tvm_fusion.ConvertLayout")
class ConvertLayout:
    """NCHW/OIHW convolutions -> NHWC/OHWI, without a transpose left between two convolutions.

    Channels-last spreads from each convolution through elementwise operators, residual additions,
    pooling, concat and split (axes are renumbered), reductions, padding, resizing, softmax, and
    reshapes that only touch channels (channel shuffle). Where an operator has no rule, its operands
    are transposed back. Weights and biases are permuted at compile time, also those of a fully
    connected layer behind a flatten. Parameters and outputs keep their layout.
    """

    def transform_module(self, mod: tvm.IRModule, ctx: tvm.transform.PassContext) -> tvm.IRModule:
        return LayoutRewriter(mod["main"]).transform(mod)


def last_order(ndim: int) -> list[int]:
    """Return the axes of (N, C..., H, W) in channels-last order (N, H, W, C...)."""
    return [0, ndim - 2, ndim - 1, *range(1, ndim - 2)]


class LayoutRewriter(BindingRewriter):
    """Keeps, for a value computed channels-last, a placeholder of the original type that stands for it."""

    def __init__(self, func: relax.Function) -> None:
        super().__init__()
        self._physical: dict[relax.Var, ir.Expr] = {}  # placeholder -> the channels-last value
        self._restored: dict[relax.Var, ir.Expr] = {}  # placeholder -> the value transposed back
        self._transposed: dict[
            relax.Var, ir.Expr
        ] = {}  # plain value -> the value transposed to channels-last
        self.flattened: dict[
            relax.Var, tuple[int, int, int]
        ] = {}  # flattened channels-last value -> its (C, H, W)
        self.consumers: dict[
            relax.Var, list[ir.Expr]
        ] = {}  # by the variables of the given function
        values = [binding.value for binding in bindings_of(func)]
        for value in [*values, func.body.body]:
            for var in variables(value):
                self.consumers.setdefault(var, []).append(value)

    def visit(self, name: str, value: ir.Expr) -> ir.Expr:
        from .layout_rules import RULES  # the rules are written in terms of this class

        rule = RULES.get(op_name(value) or "")
        result = rule(self, name, value) if rule is not None else None
        return self.make_plain(value) if result is None else result

    def visit_output(self, output: ir.Expr) -> ir.Expr:
        return self.plain(output)

    def is_last(self, expr: ir.Expr) -> bool:
        """Return whether ``expr`` stands for a value that is computed channels-last."""
        return isinstance(expr, relax.Var) and expr in self._physical

    def placeholder(self, name: str, physical: ir.Expr) -> relax.Var:
        """Bind a channels-last value and return its stand-in, typed in the original order of axes."""
        bound = self.emit(name, physical)
        order = last_order(bound.ty.ndim)
        dims = list(bound.ty.shape.values)
        shape = [dims[order.index(axis)] for axis in range(len(order))]
        var = relax.DataflowVar(name, relax.TensorType(shape, bound.ty.dtype))
        self._physical[var] = bound
        return var

    def last(self, expr: ir.Expr, name: str) -> ir.Expr:
        """Return ``expr`` channels-last, transposing a plain value (once)."""
        if self.is_last(expr):
            return self._physical[expr]
        order = last_order(expr.ty.ndim)
        if is_constant(expr):
            return to_constant(np.transpose(to_numpy(expr), order))
        if expr not in self._transposed:
            source = self.producer(expr, "permute_dims")
            axes = [permutation(source)[axis] for axis in order] if source is not None else order
            base = source.args[0] if source is not None else expr
            unchanged = axes == list(range(len(axes)))
            self._transposed[expr] = base if unchanged else self.emit(name, _transpose(base, axes))
        return self._transposed[expr]

    def plain(self, expr: ir.Expr) -> ir.Expr:
        """Return ``expr`` in its original order of axes, transposing a channels-last value (once)."""
        if not self.is_last(expr):
            return expr
        if expr not in self._restored:
            order = last_order(expr.ty.ndim)
            back = [order.index(axis) for axis in range(len(order))]
            self._restored[expr] = self.emit(expr.name, _transpose(self._physical[expr], back))
        return self._restored[expr]

    def make_plain(self, value: ir.Expr) -> ir.Expr:
        """Return ``value`` with every channels-last operand transposed back."""
        lazy = {var: self.plain(var) for var in variables(value) if self.is_last(var)}
        return substitute(value, lazy) if lazy else value


def _transpose(expr: ir.Expr, axes: Sequence[int]) -> ir.Expr:
    """Return the transposition, as a reshape when it moves only axes of extent one."""
    sizes = dims(expr)
    if sizes is not None:
        moved = [axis for axis in axes if sizes[axis] != 1]
        if moved == sorted(moved):
            return relax.op.reshape(expr, [sizes[axis] for axis in axes])
    return relax.op.permute_dims(expr, list(axes))
