"""The CPU templates: one for each kind of function, all on the stages of ``stages.py``, and the legal fallback."""

from __future__ import annotations

from typing import ClassVar

from ...compat import Target, s_tir, tirx
from ..analysis import structure
from ..base import ScheduleTemplate
from .loops import parallel_outer
from .stages import kind_of, schedule_stages


class _Staged(ScheduleTemplate):
    """Accepts the functions whose most demanding stage is ``stage``."""

    kind = "llvm"
    stage: ClassVar[str]

    def apply(self, func: tirx.PrimFunc, target: Target) -> s_tir.Schedule | None:
        """Return the schedule; ``None`` for a function of another kind, with symbolic extents, or not in block form."""
        return schedule_stages(func, target) if kind_of(func) == self.stage else None


class CpuContraction(_Staged):
    """Convolutions (plain, grouped, transposed) and matrix products with any prologue and epilogue."""

    name = "cpu_contraction"
    stage = "contraction"


class CpuWindow(_Staged):
    """Pooling, depthwise convolutions and other reductions whose neighbouring results read neighbouring elements."""

    name = "cpu_window"
    stage = "window"


class CpuRows(_Staged):
    """Reductions along the innermost axis: softmax, layer norm, global means."""

    name = "cpu_rows"
    stage = "rows"


class CpuElementwise(_Staged):
    """Functions without reductions."""

    name = "cpu_elementwise"
    stage = "elementwise"


class CpuFallback(ScheduleTemplate):
    """Legal for every function: blocks run one after the other, outer spatial loops in parallel where that is legal."""

    name = "cpu_fallback"
    kind = "llvm"

    def apply(self, func: tirx.PrimFunc, target: Target) -> s_tir.Schedule | tirx.PrimFunc:
        """Return the schedule, or the function itself when it is not in block form."""
        if not isinstance(func.body, s_tir.SBlockRealize):
            return func
        sch = s_tir.Schedule(func)
        info = structure(sch)
        for block in info.blocks if info is not None else ():
            parallel_outer(sch, block.handle)
        return sch
