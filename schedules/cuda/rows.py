"""Reductions and normalisations over rows: softmax, layer and RMS norm, variance, mean, with what surrounds them."""

from __future__ import annotations

from ...compat import Target, s_tir, tirx
from ..base import ScheduleTemplate
from .model import limits_for
from .row_blocks import apply_rows


class RowReduction(ScheduleTemplate):
    """One or several reductions over the same rows, contiguous or not, with prologue, epilogue and several outputs."""

    name = "rows"
    kind = "cuda"

    def apply(
        self, func: tirx.PrimFunc, target: Target, tunable: bool = False
    ) -> s_tir.Schedule | None:
        """Return the schedule; None when the reductions do not share their rows."""
        return apply_rows(func, limits_for(func, target))
