"""What the search for a tile needs to know of a function, and how the function's operands are read."""

from __future__ import annotations

import math

from ....compat import ir
from ....guards.fma_tiles import Problem, Side
from ...analysis import nodes_of
from ..tensor_core.affine import uses
from ..tensor_core.form import Anchor, Products
from .access import Access, access_of


def accesses(form: Products, anchor: Anchor) -> tuple[Access, Access]:
    """How both operands of an anchor are read."""
    rows = (*form.batch, *anchor.copies, *form.rows)
    columns = (*form.batch, *anchor.copies, *form.columns)
    return (
        access_of(anchor.rows, rows, anchor.reduced, form.inner),
        access_of(anchor.columns, columns, anchor.reduced, form.inner),
    )


def sides(anchor: Anchor) -> tuple[int, int]:
    """Tiles of each operand: as many as copies, of the operand that has them."""
    if any(uses(anchor.rows.value, copy.var) for copy in anchor.copies):
        return anchor.copy_count, 1
    return 1, anchor.copy_count


def _taps(form: Products, anchor: Anchor, side: int) -> int:
    """Products that the sums have which an operand reads; 1 where it reads none."""
    value = (anchor.rows, anchor.columns)[side].value
    sources = [load.source for load in nodes_of(value, ir.TensorLoad)]
    read = [inner for inner in form.inner if any(inner.buffer.same_as(s) for s in sources)]
    return max((math.prod(i.extent for i in inner.reduced) for inner in read), default=1)


def problem_of(form: Products) -> Problem:
    """Describe a function to the search."""
    reads = [accesses(form, anchor) for anchor in form.anchors]
    copies = [sides(anchor) for anchor in form.anchors]
    described = []
    for side, count in enumerate((form.row_count, form.column_count)):
        own = [pair[side] for pair in reads]
        width = min(0 if access.copy is None else access.width for access in own)
        most = max(pair[side] for pair in copies)
        taps = max(_taps(form, anchor, side) for anchor in form.anchors)
        transposed = any(access.transposed for access in own)
        described.append(Side(count, most, width, transposed, taps))
    return Problem(
        *described,
        form.batch_count,
        tuple(anchor.depth for anchor in form.anchors),
        tuple(anchor.copy_count for anchor in form.anchors),
    )
