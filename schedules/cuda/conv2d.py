"""Direct convolution: NCHW and NHWC, any stride, dilation and groups, one or several joined in one epilogue."""

from __future__ import annotations

from ...compat import Target, s_tir, tirx
from ..analysis import structure
from ..base import ScheduleTemplate, limits
from .contraction import apply_contraction


class Conv2d(ScheduleTemplate):
    """Sums of products over sliding windows, accumulated in registers.

    Several convolutions may meet in the epilogue (their accumulators are registers of the same thread), one
    convolution may have a branch axis that the epilogue joins, and there may be several outputs.
    """

    name = "conv2d"
    kind = "cuda"

    def apply(self, func: tirx.PrimFunc, target: Target) -> tirx.PrimFunc | None:
        """Return the schedule; None when no reduction walks a window, or one feeds another."""
        info = structure(s_tir.Schedule(func))
        if info is None or not any(block.has_window for block in info.reductions):
            return None
        return apply_contraction(func, limits(target))
