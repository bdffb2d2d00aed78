"""Products of one input that the same row operator follows: one product of stacked weights.

The members stand along a first axis of the product's result, ``[members, ..., columns]``, so that a row operator over
the last axis works on each member's rows alone. Constant operands are stacked along the same axis.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ..compat import Constant, relax
from ..errors import LoweringError
from ..strategies.growth import POINTWISE
from ..strategies.horizontal import same_structure
from ..strategies.stacked_rows import STACKABLE_ROWS
from .legalize_horizontal import emit_unstack_store
from .rewrite_members import GroupBody, as_float, make_constant

if TYPE_CHECKING:
    from .rewrite_merged import Anchors


def emit_stacked_rows(group: GroupBody, anchors: Anchors) -> None:
    """Emit one product for all members, the operators that all run, and a store for each member.

    Parameters
    ----------
    group : GroupBody
        The group; its members are returned apart.
    anchors : Anchors
        Their products, of one input and with two-dimensional weights of one shape.

    Raises
    ------
    LoweringError
        If the members differ in more than constants, or run an operator that has no stacked form.
    """
    branches, head = group.shape.branches, anchors.call
    if not same_structure(group.graph, branches):
        raise LoweringError(
            "the members run different operators, or read more than constants; leave them apart"
        )
    if head.op.name != "relax.matmul" or {w.ndim for w in anchors.weights} != {2}:
        raise LoweringError("only products with two-dimensional weights can be stacked")
    if len({w.shape for w in anchors.weights}) > 1:
        raise LoweringError("the members' weights differ in shape; they cannot be stacked")
    before = [o.name for o in group.graph.operators if not group.depends(o.name, anchors.heads)]
    group.replay(before)
    rank, count = head.ty.ndim, len(branches)
    weight = np.stack(anchors.weights)
    weight = weight.reshape(count, *(1,) * (rank - 2), *weight.shape[1:])
    value: Any = group.builder.emit(
        relax.Call(
            head.op, [group.read(head.args[0]), make_constant(weight, anchors.dtype)], anchors.attrs
        ),
        name_hint=anchors.heads[0],
    )  # fmt: skip
    for names in zip(*(group.steps(branch) for branch in branches), strict=True):
        value = _step(group, value, names, rank)
    last = [branch.operators[-1] for branch in branches]
    value = group.rounded(value, group.var_of[last[0]])
    parts = group.builder.emit(emit_unstack_store(group.builder, value))
    for number, name in enumerate(last):
        part = relax.TupleGetItem(parts, number)
        group.bind(name, group.builder.emit(part, name_hint=group.var_of[name].name))


def _step(group: GroupBody, value: Any, names: tuple[str, ...], rank: int) -> Any:
    """Emit an operator that all members run, on the stacked value."""
    operator = group.graph.by_name[names[0]]
    calls = [group.calls[name] for name in names]
    call = calls[0]

    def stacked(position: int) -> Constant:
        return _stack([c.args[position] for c in calls], rank)

    if operator.op == "layer_norm":
        return _layer_norm(group, value, call, stacked(1), stacked(2))
    if operator.op == "rms_norm":
        return _rms_norm(group, value, call, stacked(1))
    if operator.op in STACKABLE_ROWS:
        return group.builder.emit(_along_last(call, value))
    if operator.pattern not in POINTWISE or operator.op == "prelu":
        raise LoweringError(f"members that run {operator.op} cannot be stacked")
    args = []
    for position, arg in enumerate(call.args):
        if isinstance(arg, Constant):
            args.append(stacked(position) if arg.ty.ndim else arg)
        else:
            args.append(value if isinstance(arg, relax.Var) else arg)
    if str(value.ty.dtype) == "float32":
        args = [group.wide(a) if isinstance(a, Constant) else a for a in args]
    return group.emit_wide(call, args)


def _stack(constants: list[Constant], rank: int) -> Constant:
    """Constants of members along a new first axis, aligned with a result of ``rank`` axes at the last one."""
    arrays = [as_float(constant) for constant in constants]
    arrays = [a.reshape((1,) * (rank - a.ndim) + a.shape) for a in arrays]
    return make_constant(np.stack(arrays), str(constants[0].ty.dtype))


def _along_last(call: relax.Call, value: Any) -> relax.Call:
    """A row operator over the last axis, which is still the last one of the stacked value."""
    name, rank = call.op.name.removeprefix("relax."), value.ty.ndim
    if name in ("nn.softmax", "nn.log_softmax"):
        if int(call.attrs.axis) not in (-1, rank - 2):
            raise LoweringError("a softmax over another axis than the columns cannot be stacked")
        return getattr(relax.op.nn, name.removeprefix("nn."))(value, axis=-1)
    axes = [int(axis) for axis in call.attrs.axis or ()]
    if axes not in ([-1], [rank - 2]):
        raise LoweringError("a reduction over another axis than the columns cannot be stacked")
    return getattr(relax.op, name)(value, axis=[-1], keepdims=bool(call.attrs.keepdims))


def _layer_norm(
    group: GroupBody, value: Any, call: relax.Call, scale: Constant, shift: Constant
) -> Any:
    """Layer norm, of which each member has its own scale and shift: relax's own takes one for all."""
    emit = group.builder.emit
    _check_last(call, value)
    wide = group.widen(value)
    mean = emit(relax.op.mean(wide, [-1], keepdims=True))
    centred = emit(relax.op.subtract(wide, mean))
    square = emit(relax.op.multiply(centred, centred))
    result = _normalised(group, centred, square, float(call.attrs.epsilon))
    if bool(call.attrs.scale):
        result = emit(relax.op.multiply(result, group.wide(scale)))
    if bool(call.attrs.center):
        result = emit(relax.op.add(result, group.wide(shift)))
    return group.rounded(result, value)


def _rms_norm(group: GroupBody, value: Any, call: relax.Call, scale: Constant) -> Any:
    """Norm by the root of the mean square, with each member's own scale."""
    emit = group.builder.emit
    _check_last(call, value)
    wide = group.widen(value)
    square = emit(relax.op.multiply(wide, wide))
    result = _normalised(group, wide, square, float(call.attrs.epsilon))
    result = emit(relax.op.multiply(result, group.wide(scale)))
    return group.rounded(result, value)


def _normalised(group: GroupBody, value: Any, square: Any, epsilon: float) -> Any:
    emit = group.builder.emit
    mean = emit(relax.op.mean(square, [-1], keepdims=True))
    root = emit(relax.op.rsqrt(emit(relax.op.add(mean, relax.const(epsilon, "float32")))))
    return emit(relax.op.multiply(value, root))


def _check_last(call: relax.Call, value: Any) -> None:
    axes = [int(axis) for axis in call.attrs.axes]
    if axes not in ([-1], [value.ty.ndim - 2]):
        raise LoweringError("a norm over other axes than the columns cannot be stacked")
