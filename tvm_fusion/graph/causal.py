"""Constant masks that hide what is behind a row's own position."""

from __future__ import annotations

import dataclasses

import numpy as np

from ..compat import Constant, relax, tirx

#: Constants up to which a mask hides a score, as the kernel's template has it (schedules/cuda/attention/score.py).
_HIDDEN = -1e4


@dataclasses.dataclass(frozen=True)
class CausalMask:
    """A mask that lets through keys up to ``row + shift``.

    Attributes
    ----------
    data : relax.Expr
        The scores that it masks.
    shift : int
        How much further than its own position a row sees; not negative.
    hidden : float
        What takes the place of a hidden score.
    """

    data: relax.Expr
    shift: int
    hidden: float


def causal_mask(call: relax.Call) -> CausalMask | None:
    """Read an addition of a constant mask, or a selection by one; None for anything else."""
    name = getattr(call.op, "name", "")
    if name == "relax.add":
        data, mask = call.args[0], call.args[1]
        if isinstance(data, Constant):
            data, mask = mask, data
        found = _read(mask, data, None)
    elif name == "relax.where":
        mask, one, other = call.args
        found = None
        for data, hidden, visible in ((one, other, True), (other, one, False)):
            if isinstance(hidden, Constant) and all(extent == 1 for extent in hidden.ty.shape):
                number = float(hidden.value.numpy().reshape(()))
                found = found or _read(mask, data, number, visible)
    else:
        return None
    return found


def _read(
    mask: relax.Expr, data: relax.Expr, hidden: float | None, shown: bool = True
) -> CausalMask | None:
    """A mask of numbers that are added, or (with what takes a hidden score's place) of what a truth value shows."""
    if not isinstance(mask, Constant) or not isinstance(data, relax.Var) or mask.ty.ndim < 2:
        return None
    if getattr(data.ty, "shape", None) is None or str(data.ty.dtype) == "bool":
        return None
    sizes, scores = list(mask.ty.shape), list(data.ty.shape)
    if not all(isinstance(extent, tirx.IntImm) for extent in scores) or len(sizes) > len(scores):
        return None
    sizes, scores = [int(extent) for extent in sizes], [int(extent) for extent in scores]
    if sizes[-2:] != scores[-2:] or any(extent != 1 for extent in sizes[:-2]) or 0 in sizes:
        return None
    values = mask.value.numpy().reshape(sizes[-2:])
    if hidden is None:
        hidden = float(values[0, -1])
        if not hidden <= _HIDDEN:
            return None
        values = values.astype("float64")
        visible = values == 0
        if not (visible | (values == hidden)).all():
            return None
    else:
        visible = values.astype(bool) == shown
    shift = int(visible[0].sum()) - 1
    if not hidden <= _HIDDEN or not 0 <= shift < sizes[-1] - 1:
        return None
    rows, keys = np.arange(sizes[-2])[:, None], np.arange(sizes[-1])[None]
    return CausalMask(data, shift, hidden) if (visible == (keys - rows <= shift)).all() else None
