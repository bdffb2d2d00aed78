"""The template: convolutions with few channels a group, such as depthwise ones."""

from __future__ import annotations

import functools

from ....compat import Target, tirx
from ....guards.strip_model import best_strips, promised_blocks
from ...base import PACKED, ScheduleTemplate
from ...decisions import OF_CHOICE, alternatives
from ..early_bfloat16 import widens_bfloat16
from ..simt.template import predicted as by_multiply_adds
from ..tensor_core.template import constants_of, device_of, is_member
from ..tensor_core.template import predicted as on_tensor_cores
from .form import pack, problem_of, strips
from .kernel import kernel


class StripConvolution(ScheduleTemplate):
    """Depthwise and narrow grouped convolutions that meet in elementwise outputs, any window, both layouts."""

    name = "strips"
    kind = "cuda"

    def apply(self, func: tirx.PrimFunc, target: Target) -> tirx.PrimFunc | None:
        """Return the kernel; None when the function has another form, or is a product that takes less time."""
        # Before sm_80 TVM computes bfloat16 on integers.
        form = None if widens_bfloat16(func, target) else strips(func)
        if form is None:
            return None
        form, packed = pack(form, constants_of(func))
        problem, device = problem_of(form), device_of(target)
        best = best_strips(problem, device)
        if not best or (
            any(anchor.rest for anchor in form.anchors)
            and _is_product(func, target, best[0].microseconds)
        ):
            return None
        ranked = functools.partial(best_strips, problem, device)
        for choice in alternatives("tile", ranked, **OF_CHOICE):
            resident = 1 if is_member(func) else promised_blocks(problem, device, choice.tile)
            made = kernel(form, choice.tile, resident)
            return made.with_attr(PACKED, packed) if packed else made
        return None


def _is_product(func: tirx.PrimFunc, target: Target, microseconds: float) -> bool:
    """Whether a template of products computes a grouped convolution in less time."""
    # In the order in which they are tried.
    times = (predicted(func, target) for predicted in (on_tensor_cores, by_multiply_adds))
    return next((t for t in times if t is not None), microseconds) < microseconds
