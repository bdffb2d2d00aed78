"""Operands that the copy engine can bring: plain reads of a tensor, described as its *tensor map* needs them.

A map says where a tensor is, its extents and strides, and the box that one copy brings. Its axes, the innermost first,
are the reduction, the lines (rows or columns of the product), and each iterator of the batch. A step along the
reduction brings 64 elements, 128 bytes, of as many lines as the tile has: one line of shared memory each, pieces of 16
bytes exchanged as ``wgmma`` wants them. What lies outside the tensor is zero, at no cost: tails need no predicate.

Where the lines are innermost, a copy brings 64 of them, 128 bytes, for each of the 64 steps, and a tile takes several
copies: *slabs* of 8 KiB. ``wgmma`` reads them as they are, transposed; only their order is that of the tensor.

Lines may arrive in another order than the tensor has. With the columns of ``group`` fragments of eight interleaved (see
``fragments.interleave``), column ``2 * group * q + 2 * f + e`` stands in line ``8 * f + 2 * q + e``, and that is an
order of three axes, ``e``, ``q`` and ``f``: the map has them instead of the lines, and nobody computes an address.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from ....compat import tirx
from ....guards.tensor_tiles import COLUMNS, PIECE_BYTES
from .affine import as_copy, steps_in
from .form import Anchor, Iterator, Operand, Products

#: Axes of a map at most, elements of two bytes in 128 bytes, and bytes of 64 of those.
_MOST_AXES, DEPTH, SLAB_BYTES = 5, 64, 8192


@dataclasses.dataclass(frozen=True)
class Axis:
    """An axis of a tensor map.

    Attributes
    ----------
    extent, step : int
        Its extent, and the distance of neighbours in elements.
    box : int
        Elements that one copy brings.
    follows : tirx.Var or str
        What its coordinate is: the value of a batch's iterator, ``"depth"``, ``"line"`` (divided by ``scale``), or
        ``"zero"``.
    scale : int
        Lines of one element.
    """

    extent: int
    step: int
    box: int
    follows: tirx.Var | str
    scale: int = 1


@dataclasses.dataclass(frozen=True)
class BulkOperand:
    """An operand that the copy engine can bring.

    Attributes
    ----------
    buffer : Buffer
        A parameter.
    lines, depth : int
        Lines of the operand and length of the reduction.
    line_step, depth_step : int
        Distance of neighbours along each in elements; one of them is 1.
    batch : tuple
        Iterators of the batch that it depends on, with their distances.
    """

    buffer: tirx.Buffer
    lines: int
    depth: int
    line_step: int
    depth_step: int
    batch: tuple[tuple[Iterator, int], ...]

    @property
    def is_transposed(self) -> bool:
        """Whether the lines are innermost."""
        return self.depth_step != 1

    def slabs(self, lines: int) -> int:
        """Copies that bring so many lines."""
        return lines // DEPTH if self.is_transposed else 1

    def axes(self, lines: int, group: int = 1) -> tuple[Axis, ...]:
        """The axes of the map of boxes of so many lines, of which ``group`` fragments of columns are interleaved."""
        depth = Axis(self.depth, self.depth_step, DEPTH, "depth")
        batch = [Axis(iterator.extent, step, 1, iterator.var) for iterator, step in self.batch]
        if self.is_transposed:
            return (Axis(self.lines, 1, DEPTH, "line"), depth, *batch)
        if group == 1:
            across = [Axis(self.lines, self.line_step, lines, "line")]
        else:
            whole, step = COLUMNS * group, self.line_step
            across = [
                Axis(2, step, 2, "zero"),
                Axis(COLUMNS // 2, 2 * group * step, COLUMNS // 2, "zero"),
                Axis(group, 2 * step, group, "zero"),
                Axis(self.lines // whole, whole * step, lines // whole, "line", whole),
            ]
        return (depth, *across, *batch)

    def takes(self, lines: int, group: int = 1) -> bool:
        """Whether copies can bring so many lines, of which ``group`` fragments of columns are interleaved."""
        if self.is_transposed:
            return group == 1 and lines % DEPTH == 0
        return group == 1 or (not self.batch and self.lines % (COLUMNS * group) == 0)


def bulk_operands(form: Products) -> tuple[BulkOperand, BulkOperand] | None:
    """The operands of a function of one product; None where the copy engine cannot bring both.

    Parameters
    ----------
    form : Products
        The function.
    """
    if len(form.anchors) != 1 or form.inner:
        return None
    (anchor,) = form.anchors
    if anchor.copy_count != 1:
        return None
    rows = _operand(form, anchor, anchor.rows, form.rows)
    columns = _operand(form, anchor, anchor.columns, form.columns)
    return (rows, columns) if rows is not None and columns is not None else None


def _operand(
    form: Products, anchor: Anchor, operand: Operand, lines: Sequence[Iterator]
) -> BulkOperand | None:
    copy = as_copy(operand.value)
    if copy is None or copy.conditions or operand.dtype not in ("float16", "bfloat16"):
        return None
    steps = steps_in(copy.offset)
    if steps is None or steps.get(0, 0) or str(copy.buffer.dtype) != operand.dtype:
        return None
    known = [*form.batch, *lines, *anchor.reduced]
    if not steps.keys() - {0} <= {iterator.var.__chandle__() for iterator in known}:
        return None
    line_step, depth_step = flat_step(lines, steps), flat_step(anchor.reduced, steps)
    if not line_step or not depth_step or 1 not in (line_step, depth_step):
        return None
    outer = line_step if depth_step == 1 else depth_step
    batch = tuple(
        (iterator, steps[iterator.var.__chandle__()])
        for iterator in reversed(form.batch)
        if iterator.extent > 1 and steps.get(iterator.var.__chandle__(), 0)
    )
    # Strides of a map are multiples of 16 bytes.
    if any(step % (PIECE_BYTES // 2) for step in (outer, *(step for _, step in batch))):
        return None
    if 2 + len(batch) > _MOST_AXES:
        return None
    count = math.prod(iterator.extent for iterator in lines)
    return BulkOperand(copy.buffer, count, anchor.depth, line_step, depth_step, batch)


def flat_step(iterators: Sequence[Iterator], steps: dict[int, int]) -> int | None:
    """Distance of neighbours among the positions of iterators, the last running fastest; None if it differs."""
    found = None
    expected = 0
    for iterator in reversed(iterators):
        if iterator.extent == 1:
            continue
        step = steps.get(iterator.var.__chandle__(), 0)
        if found is None:
            found = step
        elif step != expected:
            return None
        expected = step * iterator.extent
    # A single position has neighbours nowhere: any distance will do that a map takes.
    return PIECE_BYTES // 2 if found is None else found
