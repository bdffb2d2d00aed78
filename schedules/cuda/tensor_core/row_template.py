"""The template: 16-bit (or TF32) products on tensor cores whose rows are reduced, in a block or a cluster."""

from __future__ import annotations

import dataclasses
import functools

from ....compat import Target, ir, tirx
from ....devices import device_for
from ....guards.tensor_rows import RowProblem, best_row_tiles, requested_row_bytes
from ...analysis import nodes_of
from ...base import PACKED, ScheduleTemplate
from ...decisions import OF_CHOICE, alternatives
from .packing import pack
from .row_form import RowProducts, row_products
from .row_kernel import row_kernel
from .template import constants_of, fits, is_member
from .tile import problem_of


class TensorRows(ScheduleTemplate):
    """Matrix products on tensor cores with softmax, a norm or a sum over the columns, and elementwise operators."""

    name = "tensor_rows"
    kind = "cuda"
    #: ``cp.async`` and ``mma.sync``; clusters are used where the chip has them.
    min_arch = 80

    def apply(self, func: tirx.PrimFunc, target: Target) -> tirx.PrimFunc | None:
        """Return the kernel; None when the function has another form, or a row does not fit on chip."""
        form = row_products(func)
        if form is None or form.length % 2 or not fits(form, target):
            return None
        numbers = constants_of(func)
        form, packed = pack(form, numbers - _read_by_stages(form), whole_words=True)
        constants = tuple(form.params[number] for number in sorted(numbers))
        form = dataclasses.replace(form, constants=constants)
        problem, device, member = row_problem(form), device_for(target), is_member(func)
        ranked = functools.partial(best_row_tiles, problem, device)
        for choice in alternatives("tile", ranked, **OF_CHOICE):
            requested = 0 if member else requested_row_bytes(problem, choice.tile, device)
            made = row_kernel(form, choice.tile, requested)
            return made.with_attr(PACKED, packed) if packed else made
        return None


def row_problem(form: RowProducts) -> RowProblem:
    """Describe a function to the search."""
    product = dataclasses.replace(problem_of(form), part=0)
    return RowProblem(product, form.length, form.reductions)


def _read_by_stages(form: RowProducts) -> set[int]:
    """Numbers of the parameters that are read after the products: they keep their layout."""
    values = [stage.value for stage in form.stages]
    sources = [load.source for value in values for load in nodes_of(value, ir.TensorLoad)]
    return {
        number
        for number, param in enumerate(form.params)
        if any(param.same_as(source) for source in sources)
    }
