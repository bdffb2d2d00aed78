"""The template: sums of float32 products by multiply-adds."""

from __future__ import annotations

import dataclasses
import functools

from ....compat import Target, ir, tirx
from ....guards.fma_tiles import Tile
from ....guards.split_tiles import best_fma_choices
from ...analysis import nodes_of
from ...base import PACKED, ScheduleTemplate, arch_number
from ...decisions import OF_CHOICE, alternatives
from ..contraction import stages_in_shared
from ..tensor_core.affine import uses
from ..tensor_core.form import InnerSum, Products
from ..tensor_core.packing import pack
from ..tensor_core.recognition import products
from ..tensor_core.template import constants_of, device_of, is_member
from .kernel import kernel
from .problem import problem_of
from .split import split_kernel

#: Rows and columns below which a thread has too few products for what it loads, and shorter reductions than which
#: there is little to copy.
_LEAST_LINES, _LEAST_DEPTH = 4, 16


class MultiplyAdd(ScheduleTemplate):
    """Convolutions and matrix products of float32 operands that meet in elementwise outputs."""

    name = "multiply_add"
    kind = "cuda"
    #: ``cp.async``.
    min_arch = 80

    def apply(self, func: tirx.PrimFunc, target: Target) -> tirx.PrimFunc | None:
        """Return the kernel; None when the function has another form or type, or is too small."""
        found = _products_of(func)
        if found is None:
            return None
        form, packed = found
        problem, device = problem_of(form), device_of(target)
        # Members of a kernel are merged as they are, without clusters.
        member = is_member(func)
        ranked = functools.partial(best_fma_choices, problem, device, clusters=not member)
        for choice in alternatives("tile", ranked, **OF_CHOICE):
            requested = 0 if member else choice.tile.requested_bytes(problem, device)
            made = kernel_of(form, choice.tile, requested)
            return made.with_attr(PACKED, packed) if packed else made
        return None


def _products_of(func: tirx.PrimFunc) -> tuple[Products, dict[str, list[int]]] | None:
    """A function in the form of this template, and its permuted parameters."""
    form = None if stages_in_shared(func) else products(func, symmetric=True)
    if form is None or not fits(form):
        return None
    numbers = constants_of(func)
    form, packed = pack(form, numbers, reduction_first=True)
    constants = tuple(form.params[number] for number in sorted(numbers))
    return dataclasses.replace(form, constants=constants), packed


def predicted(func: tirx.PrimFunc, target: Target) -> float | None:
    """Microseconds that this template's model predicts for a function; None where it does not take it."""
    found = _products_of(func) if arch_number(target) >= MultiplyAdd.min_arch else None
    if found is None:
        return None
    chosen = best_fma_choices(problem_of(found[0]), device_of(target), clusters=not is_member(func))
    return chosen[0].microseconds if chosen else None


def kernel_of(form: Products, tile: Tile, requested: int = 0) -> tirx.PrimFunc:
    """Write the kernel of a function (see ``kernel.kernel``) with a tile of one or several slices."""
    return (split_kernel if tile.slices > 1 else kernel)(form, tile, requested)


def fits(form: Products) -> bool:
    """Whether this template is worth using for a function of this form."""
    if any(anchor.rows.dtype != "float32" for anchor in form.anchors):
        return False
    if min(form.row_count, form.column_count) < _LEAST_LINES:
        return False
    if not all(map(_is_depthwise, form.inner)):
        return False
    return max(anchor.depth for anchor in form.anchors) >= _LEAST_DEPTH


def _is_depthwise(inner: InnerSum) -> bool:
    """Whether a sum runs over a window alone: over channels, it is worth keeping for the tiles beside this one.

    Along a window, an index is moved by an iterator that the other factor does not have.
    """
    wide = [iterator.var for iterator in inner.reduced if iterator.extent > 1]
    loads = nodes_of(inner.value, ir.TensorLoad)

    def is_window(load: ir.TensorLoad, index: tirx.PrimExpr, var: tirx.Var) -> bool:
        moved = [v for v in nodes_of(index, tirx.Var) if not any(v.same_as(w) for w in wide)]
        others = [i for other in loads if other is not load for i in other.indices]
        return (
            bool(moved)
            and uses(index, var)
            and not any(uses(other, v) for other in others for v in moved)
        )

    return all(
        any(is_window(load, index, var) for load in loads for index in load.indices) for var in wide
    )
