"""Attention with constants that become part of its kernel: causal masks, and numbers that are selected.

A constant mask that hides what is behind a row's own position becomes a condition: a kernel that knows it reads no mask
and leaves out the keys that no row of a block sees. A number that ``where`` selects becomes an immediate, not a tensor.
"""

from __future__ import annotations

from ..compat import Constant, relax, te, tirx
from ..graph.causal import causal_mask
from .rewrite_members import GroupBody


def changes_attention(group: GroupBody) -> bool:
    """Whether a group has a causal mask or a number that becomes part of its kernel, or a split that becomes slices."""
    splits = any(operator.op == "split" for operator in group.graph.operators)
    calls = group.calls.values()
    return splits or any(causal_mask(c) is not None or _numbers(c) for c in calls)


def emit_attention(group: GroupBody) -> None:
    """Keep the operators, but for causal masks and selected numbers."""
    for operator in group.graph.operators:
        call = group.calls[operator.name]
        mask = causal_mask(call)
        if mask is not None:
            scores = group.values[mask.data]
            made = group.builder.call_te(_masked, scores, mask.shift, mask.hidden)
        elif _numbers(call):
            made = relax.op.where(*_with_tensor(group, call))
        else:
            group.replay([operator.name])
            continue
        group.bind(operator.name, group.builder.emit(made, name_hint=operator.name))


def _numbers(call: relax.Call) -> list[int]:
    """Which operands of a selection are numbers, if another one is a variable of the result's type."""
    if getattr(call.op, "name", "") != "relax.where":
        return []
    found = [i for i in (1, 2) if isinstance(call.args[i], Constant) and call.args[i].ty.ndim == 0]
    return found if len(found) == 1 and isinstance(call.args[3 - found[0]], relax.Var) else []


def _with_tensor(group: GroupBody, call: relax.Call) -> list[relax.Expr]:
    """Operands of a selection with a filled tensor where a number was."""
    args = [group.values.get(arg, arg) if isinstance(arg, relax.Var) else arg for arg in call.args]
    (place,) = _numbers(call)
    number = float(args[place].value.numpy())
    args[place] = group.builder.emit(group.builder.call_te(_full, args[3 - place], number))
    return args


def _full(like: te.Tensor, number: float) -> te.Tensor:
    """TVM's own ``full`` fails where the number is infinite."""
    filling = tirx.const(number, str(like.dtype))
    return te.compute(like.shape, lambda *index: filling, name="filled")


def _masked(scores: te.Tensor, shift: int, hidden: float) -> te.Tensor:
    def element(*index: tirx.Expr) -> tirx.Expr:
        hides = tirx.const(hidden, str(scores.dtype))
        return tirx.if_then_else(index[-1] - index[-2] <= shift, scores(*index), hides)

    return te.compute(scores.shape, element, name="causal_mask")
