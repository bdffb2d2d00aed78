"""The template: sums of 16-bit products with float32 accumulators on tensor cores."""

from __future__ import annotations

import dataclasses
import functools

from ....compat import Target, tirx
from ....devices import DeviceSpec, device_for
from ....guards.tensor_tiles import best_tiles
from ....guards.warpgroup_tiles import best_choices
from ...base import CONSTANTS, MEMBER, PACKED, ScheduleTemplate, limits
from ...decisions import OF_CHOICE, alternatives
from .form import Anchor, Products
from .kernel import kernel
from .operand import access_of
from .packing import pack
from .recognition import products
from .tile import problem_of
from .warpgroup import warpgroup_kernel

_TYPES = ("float16", "bfloat16")

#: Rows below which an instruction's sixteen are mostly idle, and shorter reductions than which there is little to copy.
_LEAST_ROWS, _LEAST_DEPTH = 4, 16


class TensorCore(ScheduleTemplate):
    """Convolutions and matrix products of 16-bit operands that meet in elementwise outputs."""

    name = "tensor_core"
    kind = "cuda"
    #: ``cp.async`` and ``mma.sync.m16n8k16``.
    min_arch = 80

    def apply(self, func: tirx.PrimFunc, target: Target) -> tirx.PrimFunc | None:
        """Return the kernel; None when the function has another form, type, or too few rows."""
        form = products(func)
        if form is None:
            return None
        numbers = constants_of(func)
        form, packed = pack(form, numbers)
        if not fits(form):
            return None
        constants = tuple(form.params[number] for number in sorted(numbers))
        form = dataclasses.replace(form, constants=constants)
        problem, device = problem_of(form), device_of(target)
        # Members of a kernel are merged as they are, with threads and shared memory of their own; instructions of one
        # chip alone are for targets that name its variant.
        member = is_member(func)
        any_chip = member or not str(target.attrs["arch"]).endswith("a")
        best = best_tiles if any_chip else best_choices
        for choice in alternatives("tile", functools.partial(best, problem, device), **OF_CHOICE):
            tile = choice.tile
            requested = 0 if member else tile.requested_bytes(problem, device)
            made = (warpgroup_kernel if tile.warpgroup else kernel)(form, tile, requested)
            return made.with_attr(PACKED, packed) if packed else made
        return None


def device_of(target: Target) -> DeviceSpec:
    """The target's device, with no more threads in a block than the target allows."""
    return dataclasses.replace(device_for(target), max_threads_per_block=limits(target).threads)


def is_member(func: tirx.PrimFunc) -> bool:
    """Whether a function becomes one of several members of a kernel."""
    return func.attrs is not None and MEMBER in func.attrs


def constants_of(func: tirx.PrimFunc) -> set[int]:
    """Numbers of the parameters that are constants wherever a function is called."""
    numbers = func.attrs.get(CONSTANTS) if func.attrs is not None else None
    return {int(number) for number in numbers or ()}


def fits(form: Products) -> bool:
    """Whether tensor cores are worth using for a function of this form."""
    if any(anchor.rows.dtype not in _TYPES for anchor in form.anchors):
        return False
    if form.row_count < _LEAST_ROWS or form.column_count < 8:
        return False
    if max(anchor.depth for anchor in form.anchors) < _LEAST_DEPTH:
        return False
    return all(_columns_are_copied(form, anchor) for anchor in form.anchors)


def _columns_are_copied(form: Products, anchor: Anchor) -> bool:
    """Whether the column operand is read as it is: computed element by element, it takes longer than multiply-adds."""
    across = (*form.batch, *anchor.copies, *form.columns)
    return access_of(anchor.columns, across, anchor.reduced).copy is not None
