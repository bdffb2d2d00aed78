"""Reductions and normalisations over rows: softmax, layer and RMS norm, variance, mean, with what surrounds them."""

from __future__ import annotations

from ...compat import Target, s_tir, tirx
from ..base import ScheduleTemplate
from ..decisions import alternatives
from .early_bfloat16 import limits_for, widens_bfloat16
from .row_across import AcrossRows
from .row_along import AlongRows
from .row_blocks import apply_rows
from .row_shape import row_work, shapes_of
from .row_stages import row_function


class RowReduction(ScheduleTemplate):
    """One or several reductions over the same rows, contiguous or not, with prologue, epilogue and several outputs."""

    name = "rows"
    kind = "cuda"

    def apply(self, func: tirx.PrimFunc, target: Target) -> s_tir.Schedule | tirx.PrimFunc | None:
        """Return the kernel or schedule; None when the reductions do not share their rows."""
        kernel = row_kernel(func, target)
        return apply_rows(func, limits_for(func, target)) if kernel is None else kernel


def row_kernel(func: tirx.PrimFunc, target: Target) -> tirx.PrimFunc | None:
    """Write a kernel that reads rows into registers.

    Parameters
    ----------
    func : PrimFunc
        The function; left untouched.
    target : Target
        Where it will run.

    Returns
    -------
    PrimFunc or None
        None when the function has another form: reductions that do not share their rows, or whose results depend on
        each other (the place of a largest element), or windows.
    """
    # Before sm_80 TVM computes bfloat16 on integers, which has no vectors.
    if widens_bfloat16(func, target):
        return None
    found = row_function(func)
    if found is None:
        return None
    form, rows = found
    for shape in alternatives("shape", shapes_of(row_work(form, rows.across), target)):
        if shape.rounds > 1:
            form, rows = row_function(func, keep=False)
        write = AcrossRows if rows.across else AlongRows
        return write(form, shape).function()
    return None
