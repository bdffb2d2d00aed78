"""Attention whose mask is a constant that hides what is behind a row's own position: the mask becomes a condition.

A kernel that knows the condition reads no mask and leaves out the keys that no row of a block sees.
"""

from __future__ import annotations

from ..compat import te, tirx
from ..graph.causal import causal_mask
from .rewrite_members import GroupBody


def changes_attention(group: GroupBody) -> bool:
    """Whether a group has a causal mask that becomes a condition, or a split that becomes slices."""
    splits = any(operator.op == "split" for operator in group.graph.operators)
    return splits or any(causal_mask(call) is not None for call in group.calls.values())


def emit_attention(group: GroupBody) -> None:
    """Keep the operators, but for causal masks."""
    for operator in group.graph.operators:
        mask = causal_mask(group.calls[operator.name])
        if mask is None:
            group.replay([operator.name])
            continue
        scores = group.values[mask.data]
        made = group.builder.call_te(_masked, scores, mask.shift, mask.hidden)
        group.bind(operator.name, group.builder.emit(made, name_hint=operator.name))


def _masked(scores: te.Tensor, shift: int, hidden: float) -> te.Tensor:
    def element(*index: tirx.Expr) -> tirx.Expr:
        hides = tirx.const(hidden, str(scores.dtype))
        return tirx.if_then_else(index[-1] - index[-2] <= shift, scores(*index), hides)

    return te.compute(scores.shape, element, name="causal_mask")
