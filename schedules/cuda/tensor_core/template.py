"""The template: sums of 16-bit (or TF32) products with float32 accumulators on tensor cores."""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable

from ....compat import Target, tirx
from ....devices import DeviceSpec, device_for
from ....guards.bulk_tiles import BulkTile, bulk_choices
from ....guards.grouped_products import joinable
from ....guards.patch_tiles import PatchTile, patch_choices
from ....guards.split_tiles import best_choices
from ....guards.tensor_tiles import Choice, Tile
from ...base import CONSTANTS, MEMBER, PACKED, ScheduleTemplate, arch_number, limits
from ...decisions import OF_CHOICE, alternatives
from .access import access_of
from .bulk import bulk_kernel, takes
from .bulk_operand import bulk_operands
from .form import Anchor, Products
from .groups import group_of, join_groups
from .kernel import kernel
from .packing import pack
from .patch import patch_kernel
from .patch_form import patch_problem
from .recognition import products
from .split import split_kernel
from .tile import problem_of
from .warpgroup import warpgroup_kernel

_TYPES = frozenset(("float16", "bfloat16"))

#: Rows below which an instruction's sixteen are mostly idle, and shorter reductions than which there is little to copy.
_LEAST_ROWS, _LEAST_DEPTH = 4, 16

#: More tiles than there are.
_ALL = 1 << 16


class TensorCore(ScheduleTemplate):
    """Convolutions and matrix products of 16-bit operands that meet in elementwise outputs.

    Those of float32 operands too, in TF32, for targets that allow it (``targets.with_products``).
    """

    name = "tensor_core"
    kind = "cuda"
    #: ``cp.async``, and ``mma.sync.m16n8k16`` and ``.m16n8k8.tf32``.
    min_arch = 80

    def apply(self, func: tirx.PrimFunc, target: Target) -> tirx.PrimFunc | None:
        """Return the kernel; None when the function has another form, type, or too few rows."""
        found = products_of(func, target)
        if found is None:
            return None
        forms, packed = found
        member, device = is_member(func), device_of(target)
        best = _search(func, target)
        ranked = functools.partial(_ranked, forms, device, best)
        count = operator.attrgetter("count")
        for chosen in alternatives("groups", ranked, values=count) if len(forms) > 1 else ranked(1):
            problem = problem_of(chosen.form)
            tiles = functools.partial(best, problem, device)
            if not _is_for_any_chip(func, target):
                tiles = functools.partial(_with_others, tiles, _bulk(chosen.form, device))
            if not member:
                tiles = functools.partial(_with_others, tiles, _patches(chosen.form, device))
            for choice in alternatives("tile", tiles, **OF_CHOICE):
                if isinstance(choice.tile, BulkTile):
                    made = bulk_kernel(chosen.form, choice.tile, device)
                elif isinstance(choice.tile, PatchTile):
                    made = patch_kernel(chosen.form, choice.tile, device)
                else:
                    requested = 0 if member else choice.tile.requested_bytes(problem, device)
                    made = kernel_of(chosen.form, choice.tile, requested)
                return made.with_attr(PACKED, packed) if packed else made
        return None


def _bulk(form: Products, device: DeviceSpec) -> tuple[Choice, ...]:
    """Tiles of the copy engine that a function may have; none where it cannot bring the operands."""
    operands = bulk_operands(form)
    if operands is None:
        return ()
    found = bulk_choices(problem_of(form), device, _ALL)
    return tuple(choice for choice in found if takes(operands, choice.tile))


def _patches(form: Products, device: DeviceSpec) -> tuple[Choice, ...]:
    """Tiles whose windows are read from a patch of an image of few channels; none of other functions."""
    problem = patch_problem(form)
    return patch_choices(problem, device, _ALL) if problem is not None else ()


def _with_others(
    tiles: Callable[[int], tuple[Choice, ...]], others: tuple[Choice, ...], count: int
) -> tuple[Choice, ...]:
    """Tiles with those of another kind among them, by predicted time."""
    # All of the other kind where there is room: the last of the first are more than anybody looks at.
    found = [*others[:count], *tiles(max(1, count - len(others)))]
    return tuple(sorted(found, key=operator.attrgetter("microseconds"))[:count])


@dataclasses.dataclass(frozen=True)
class Joined:
    """A function with so many groups of a convolution as one product, and the time of its best tile."""

    count: int
    form: Products
    microseconds: float


def products_of(
    func: tirx.PrimFunc, target: Target
) -> tuple[dict[int, Products], dict[str, list[int]]] | None:
    """What tensor cores can make of a function, by how many groups are joined; and its permuted parameters."""
    form = products(func)
    if form is None:
        return None
    numbers = constants_of(func)
    form, packed = pack(form, numbers, whole_words=True)
    constants = tuple(form.params[number] for number in sorted(numbers))
    form = dataclasses.replace(form, constants=constants)
    forms = {count: made for count, made in joined(form) if fits(made, target)}
    return (forms, packed) if forms else None


def _search(func: tirx.PrimFunc, target: Target) -> Callable:
    """The search for tiles that a target and function allow.

    Members of a kernel are merged as they are, with threads and shared memory of their own, and without clusters;
    instructions of one chip alone are for targets that name its variant.
    """
    any_chip = _is_for_any_chip(func, target)
    return functools.partial(best_choices, warpgroups=not any_chip, clusters=not is_member(func))


def _is_for_any_chip(func: tirx.PrimFunc, target: Target) -> bool:
    """Whether a kernel may not use instructions that one chip alone has."""
    return is_member(func) or not str(target.attrs["arch"]).endswith("a")


def _ranked(
    forms: dict[int, Products], device: DeviceSpec, best: Callable, most: int
) -> list[Joined]:
    """Counts of groups to join, by the time of the best tile; of equal times, the fewest."""
    found = [
        Joined(count, form, choice.microseconds)
        for count, form in forms.items()
        for choice in best(problem_of(form), device)
    ]
    return sorted(found, key=operator.attrgetter("microseconds"))[:most]


def predicted(func: tirx.PrimFunc, target: Target) -> float | None:
    """Microseconds that this template's model predicts for a function; None where it does not take it."""
    found = products_of(func, target) if arch_number(target) >= TensorCore.min_arch else None
    ranked = _ranked(found[0], device_of(target), _search(func, target), 1) if found else []
    return ranked[0].microseconds if ranked else None


def joined(form: Products) -> list[tuple[int, Products]]:
    """A function, and where it is a convolution of narrow groups, with several of them as one product each."""
    group = group_of(form)
    if group is None:
        return [(1, form)]
    counts = joinable(group.extent, form.column_count, form.anchors[0].reduced[-1].extent)
    return [(n, form if n == 1 else join_groups(form, n)) for n in counts]


def kernel_of(form: Products, tile: Tile, requested: int = 0) -> tirx.PrimFunc:
    """Write the kernel of a function (see ``kernel.kernel``) with a tile of any kind."""
    if tile.slices > 1:
        return split_kernel(form, tile, requested)
    return (warpgroup_kernel if tile.warpgroup else kernel)(form, tile, requested)


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


def fits(form: Products, target: Target) -> bool:
    """Whether tensor cores may be used for a function of this form, and are worth it."""
    dtypes = {anchor.rows.dtype for anchor in form.anchors}
    if not (dtypes <= _TYPES or (dtypes == {"float32"} and device_for(target).tf32)):
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
