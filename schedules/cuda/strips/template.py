"""The template: convolutions with few channels a group, such as depthwise ones."""

from __future__ import annotations

from ....compat import Target, tirx
from ....guards.strip_model import best_strips
from ...base import PACKED, ScheduleTemplate
from ..model import widens_bfloat16
from ..tensor_core.template import constants_of, device_of
from .form import pack, problem_of, strips
from .kernel import kernel


class StripConvolution(ScheduleTemplate):
    """Depthwise and narrow grouped convolutions that meet in elementwise outputs, any window, both layouts."""

    name = "strips"
    kind = "cuda"

    def apply(
        self, func: tirx.PrimFunc, target: Target, tunable: bool = False
    ) -> tirx.PrimFunc | None:
        """Return the kernel; None when the function has another form."""
        # Before sm_80 TVM computes bfloat16 on integers.
        form = None if widens_bfloat16(func, target) else strips(func)
        if form is None:
            return None
        form, packed = pack(form, constants_of(func))
        for choice in best_strips(problem_of(form), device_of(target)):
            made = kernel(form, choice.tile)
            return made.with_attr(PACKED, packed) if packed else made
        return None
