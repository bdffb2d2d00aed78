"""What the search for a tile needs to know of a function."""

from __future__ import annotations

import math

from ....compat import tirx
from ....guards.tensor_tiles import Problem
from ...analysis import dtype_bytes, nodes_of
from .access import access_of
from .form import Anchor, Products


def problem_of(form: Products) -> Problem:
    """Describe a function to the search."""
    part = 0
    for store in form.stores:
        for condition in store.conditions:
            for bound in nodes_of(condition, tirx.IntImm):
                part = math.gcd(part, int(bound))
    return Problem(
        form.row_count,
        form.column_count,
        form.batch_count,
        tuple(anchor.depth for anchor in form.anchors),
        tuple(anchor.copy_count for anchor in form.anchors),
        part,
        form.column_count if form.inner else 0,
        max((math.prod(i.extent for i in inner.reduced) for inner in form.inner), default=0),
        all(_reduction_is_inner(form, anchor) for anchor in form.anchors),
        dtype_bytes(form.anchors[0].rows.dtype),
        any(_is_gathered(form, anchor) for anchor in form.anchors),
    )


def _is_gathered(form: Products, anchor: Anchor) -> bool:
    """Whether the row operand is read element by element."""
    across = (*form.batch, *form.rows)
    return access_of(anchor.rows, across, anchor.reduced, form.inner).elements is not None


def _reduction_is_inner(form: Products, anchor: Anchor) -> bool:
    rows = access_of(anchor.rows, (*form.batch, *form.rows), anchor.reduced, form.inner)
    across = (*form.batch, *anchor.copies, *form.columns)
    return rows.major == access_of(anchor.columns, across, anchor.reduced).major == "k"
