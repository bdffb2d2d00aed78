"""Pooling over small windows: each thread computes its output element alone, window and epilogue included.

Neighbouring threads read overlapping windows, which the cache serves; a prologue is computed again for every window
that an input element falls into.
"""

from __future__ import annotations

from ...compat import Target, s_tir, tirx
from ..analysis import structure
from ..base import ScheduleTemplate, limits
from ..steps import inline_injective, isolate_outputs, move_into_threads

#: The largest window that one thread walks alone.
_WINDOW = 64

_THREADS = 128


class Pooling(ScheduleTemplate):
    """Reductions of one operand over small sliding windows, any number side by side, with prologue and epilogue."""

    name = "pooling"
    kind = "cuda"

    def apply(
        self, func: tirx.PrimFunc, target: Target, tunable: bool = False
    ) -> s_tir.Schedule | None:
        """Return the schedule; None for a reduction without a window or with a large one, or that feeds another."""
        sch = s_tir.Schedule(func)
        info = structure(sch)
        if info is None or not (info.is_static and info.is_regular) or not info.reductions:
            return None
        names = {block.name for block in info.reductions}
        for block in info.reductions:
            slides = block.has_window and len(block.reads) == 1
            if not slides or block.extent(block.reduced) > _WINDOW or names & info.ancestors(block):
                return None
        isolate_outputs(sch)
        info = inline_injective(sch)
        if any(not (block.is_reduction or block.is_output) for block in info.blocks):
            return None
        if len({output.extents for output in info.outputs}) != 1:
            return None
        move_into_threads(sch, info, min(_THREADS, limits(target).threads))
        return sch
