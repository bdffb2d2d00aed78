"""The template: attention of 16-bit operands on tensor cores."""

from __future__ import annotations

import functools

from ....compat import Target, tirx
from ....devices import device_for
from ....guards.attention_tiles import best_attention_tiles
from ...base import ScheduleTemplate
from ...decisions import OF_CHOICE, alternatives
from ..fast_math import NARROW
from .kernel import attention_kernel, problem_of
from .recognition import attention


class AttentionTemplate(ScheduleTemplate):
    """Two products around a softmax, scaled and masked, rows of which never reach memory."""

    name = "attention"
    kind = "cuda"
    #: ``cp.async`` and ``mma.sync``.
    min_arch = 80

    def apply(self, func: tirx.PrimFunc, target: Target) -> tirx.PrimFunc | None:
        """Return the kernel; None when the function has another form, another type, or no tile fits."""
        form = attention(func)
        if form is None or form.dtype not in NARROW:
            return None
        ranked = functools.partial(best_attention_tiles, problem_of(form), device_for(target))
        for choice in alternatives("tile", ranked, **OF_CHOICE):
            return attention_kernel(form, choice.tile)
        return None
