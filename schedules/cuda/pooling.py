"""Pooling over small windows: each thread computes its output elements alone, windows and epilogue included.

Where channels are neighbours in memory a thread has several of them and reads them at once. Neighbouring threads read
overlapping windows, which the cache serves; a prologue is computed again for every window that an input element falls
into.
"""

from __future__ import annotations

from ...compat import Target, s_tir, tirx
from ..analysis import structure
from ..base import ScheduleTemplate, limits
from ..decisions import alternatives
from ..steps import inline_injective, isolate_outputs, move_into_threads
from .early_bfloat16 import widens_bfloat16
from .row_across import AcrossRows
from .row_shape import row_work, shapes_of
from .window_stages import WINDOW, window_function

_THREADS = 128


class Pooling(ScheduleTemplate):
    """Reductions of one operand over small sliding windows, any number side by side, with prologue and epilogue."""

    name = "pooling"
    kind = "cuda"

    def apply(self, func: tirx.PrimFunc, target: Target) -> s_tir.Schedule | tirx.PrimFunc | None:
        """Return the schedule; None for a reduction without a window or with a large one, or that feeds another."""
        sch = s_tir.Schedule(func)
        info = structure(sch)
        if info is None or not (info.is_static and info.is_regular) or not info.reductions:
            return None
        names = {block.name for block in info.reductions}
        for block in info.reductions:
            slides = block.has_window and len(block.reads) == 1
            if not slides or block.extent(block.reduced) > WINDOW or names & info.ancestors(block):
                return None
        kernel = window_kernel(func, target)
        if kernel is not None:
            return kernel
        isolate_outputs(sch)
        info = inline_injective(sch)
        if any(not (block.is_reduction or block.is_output) for block in info.blocks):
            return None
        if len({output.extents for output in info.outputs}) != 1:
            return None
        move_into_threads(sch, info, min(_THREADS, limits(target).threads))
        return sch


def window_kernel(func: tirx.PrimFunc, target: Target) -> tirx.PrimFunc | None:
    """Write a kernel in which a thread reduces the windows of a few neighbouring output elements.

    Parameters
    ----------
    func : PrimFunc
        The function; left untouched.
    target : Target
        Where it will run.

    Returns
    -------
    PrimFunc or None
        None when the function has another form.
    """
    # Before sm_80 TVM computes bfloat16 on integers, which has no vectors.
    form = None if widens_bfloat16(func, target) else window_function(func)
    if form is None:
        return None
    work = row_work(form, across=True)
    for shape in alternatives("shape", shapes_of(work, target, most_lines=1)):
        return None if shape.rounds > 1 else AcrossRows(form, shape).function()
    return None
