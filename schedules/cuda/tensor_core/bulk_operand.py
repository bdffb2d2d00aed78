"""Operands that the copy engine can bring: plain reads of a tensor, described as its *tensor map* needs them.

A map says where a tensor is, its extents and strides, and the box that one copy brings. Its axes, the innermost first,
are the reduction, the lines (rows or columns of the product), and each iterator of the batch. A step along the
reduction brings 64 elements, 128 bytes, of as many lines as the tile has: one line of shared memory each, pieces of 16
bytes exchanged as ``wgmma`` wants them. What lies outside the tensor is zero, at no cost: tails need no predicate.

Lines may arrive in another order than the tensor has. With the columns of ``group`` fragments of eight interleaved (see
``fragments.interleave``), column ``2 * group * q + 2 * f + e`` stands in line ``8 * f + 2 * q + e``, and that is an
order of three axes, ``e``, ``q`` and ``f``: the map has them instead of the lines, and nobody computes an address.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from ....compat import tirx
from ....guards.tensor_tiles import COLUMNS
from .access import PIECE_BYTES
from .affine import as_copy, steps_in
from .form import Anchor, Iterator, Operand, Products

#: Axes of a map at most, lines of a box at most, and elements of two bytes in a line of shared memory.
_MOST_AXES, _MOST_LINES, DEPTH = 5, 256, 64


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
    lines, depth, line_step : int
        Lines of the operand, length of the reduction, distance of neighbouring lines in elements.
    batch : tuple
        Iterators of the batch that it depends on, with their distances.
    """

    buffer: tirx.Buffer
    lines: int
    depth: int
    line_step: int
    batch: tuple[tuple[Iterator, int], ...]

    def axes(self, lines: int, group: int = 1) -> tuple[Axis, ...]:
        """The axes of the map of boxes of so many lines, of which ``group`` fragments of columns are interleaved."""
        depth = Axis(self.depth, 1, DEPTH, "depth")
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
        batch = [Axis(iterator.extent, step, 1, iterator.var) for iterator, step in self.batch]
        return (depth, *across, *batch)

    def may_interleave(self, group: int) -> bool:
        """Whether a map can have columns interleaved."""
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
    line_step = flat_step(lines, steps)
    if flat_step(anchor.reduced, steps) != 1 or not line_step:
        return None
    batch = tuple(
        (iterator, steps[iterator.var.__chandle__()])
        for iterator in reversed(form.batch)
        if iterator.extent > 1 and steps.get(iterator.var.__chandle__(), 0)
    )
    # Strides of a map are multiples of 16 bytes.
    if any(step % (PIECE_BYTES // 2) for step in (line_step, *(step for _, step in batch))):
        return None
    if 2 + len(batch) > _MOST_AXES:
        return None
    count = math.prod(iterator.extent for iterator in lines)
    return BulkOperand(copy.buffer, count, anchor.depth, line_step, batch)


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
