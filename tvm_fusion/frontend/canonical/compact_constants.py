"""Shrink constants that repeat one slice along an axis to what broadcasting needs."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ...compat import ir, tvm
from .constants import is_constant, to_constant, to_numpy
from .elementwise import BINARY
from .rewrite import BindingRewriter, dims, op_name, same_type, with_args


@tvm.transform.module_pass(opt_level=0, name="tvm_fusion.CompactConstants")
class CompactConstants:
    """A full [1, 64, 56, 56] bias whose values repeat over H and W -> [1, 64, 1, 1].

    Only operands of broadcasting elementwise operators, and only along axes whose extent the other
    operand gives. A side of ``where`` that is one number, whatever its shape, becomes a scalar; a condition that is
    the same everywhere leaves one side.
    """

    def transform_module(self, mod: tvm.IRModule, ctx: tvm.transform.PassContext) -> tvm.IRModule:
        return _Rewriter().transform(mod)


class _Rewriter(BindingRewriter):
    def visit(self, name: str, value: ir.Expr) -> ir.Expr:
        if not any(is_constant(arg) for arg in getattr(value, "args", ())):
            return value
        if op_name(value) == "where":
            side = _only_side(self.typed(value))
            return self._scalar_sides(value) if side is None else side
        if op_name(value) not in BINARY:
            return value
        return compact_operands(
            self.typed(value), lambda e: to_numpy(e) if is_constant(e) else None
        )

    def _scalar_sides(self, call: ir.Call) -> ir.Call:
        """Return a ``where`` whose constant sides of one number are scalars, if the other operands give the shape."""
        condition, *sides = call.args
        wanted = self.typed(call)
        for i, side in enumerate(sides):
            if not is_constant(side) or side.ty.ndim == 0 or not _is_one_number(to_numpy(side)):
                continue
            made = list(sides)
            made[i] = to_constant(to_numpy(side).flat[:1].reshape(()))
            if same_type(self.typed(with_args(call, condition, *made)), wanted):
                sides = made
        same = all(a is b for a, b in zip(sides, call.args[1:], strict=True))
        return call if same else with_args(call, condition, *sides)


def _is_one_number(array: np.ndarray) -> bool:
    """Whether all elements are the same number, to the sign of a zero."""
    if array.size <= 1:
        return array.size == 1
    first = array.flat[0]
    return bool(np.all(array == first) and np.all(np.signbit(array) == np.signbit(first)))


def _only_side(call: ir.Call) -> ir.Expr | None:
    """What a ``where`` of a constant condition gives, if that is one side as it is."""
    condition, one, other = call.args
    if not is_constant(condition) or to_numpy(condition).size == 0:
        return None
    values = to_numpy(condition)
    if not (values.all() or not values.any()):
        return None
    side = one if values.all() else other
    return side if same_type(side, call) and not is_constant(side) else None


def compact_operands(call: ir.Call, array_of: Callable[[ir.Expr], np.ndarray | None]) -> ir.Call:
    """Return the elementwise ``call`` with each constant operand as small as broadcasting allows.

    Parameters
    ----------
    call : Call
        A typed binary elementwise call.
    array_of : callable
        Gives the value of an operand, or None for one that is not constant.
    """
    args = list(call.args)
    if dims(call) is None:
        return call
    for i, arg in enumerate(args):
        array = array_of(arg)
        if array is None:
            continue
        other = dims(args[1 - i])
        small = array if other is None else _compact(array, other)
        if small.shape != array.shape or not is_constant(arg):
            args[i] = to_constant(small)
    return (
        call
        if all(a is b for a, b in zip(args, call.args, strict=True))
        else with_args(call, *args)
    )


def _compact(array: np.ndarray, other: list[int | ir.Expr]) -> np.ndarray:
    """Keep one slice along every axis that repeats and that ``other`` (right-aligned) spans by itself."""
    for axis in range(array.ndim):
        position = axis - array.ndim + len(other)
        extent = array.shape[axis]
        if extent <= 1 or position < 0 or other[position] != extent:
            continue
        first = array[(slice(None),) * axis + (slice(0, 1),)]
        if array.strides[axis] == 0 or _repeats(array, first, axis):
            array = first
    # One number is a scalar, which is part of the operator and no tensor that is read.
    return array.reshape(()) if array.size == 1 and len(other) >= array.ndim else array


def _repeats(array: np.ndarray, first: np.ndarray, axis: int) -> bool:
    second = array[(slice(None),) * axis + (slice(1, 2),)]
    return bool(np.array_equal(first, second)) and bool(np.all(array == first))
