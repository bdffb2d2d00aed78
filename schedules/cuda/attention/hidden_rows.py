"""Rows that a condition of the model hides: zeros whatever their scores are."""

from __future__ import annotations

import tvm_ffi

from ....compat import ir, tirx
from ....compat import script_builder as T
from ...analysis import nodes_of
from ..tensor_core.affine import substitute, uses
from ..tensor_core.evaluate import integer, load_elements

#: Keys whose condition a thread reads at once, where their number is a multiple of it.
_KEYS = 8


def visible(body, row: tirx.PrimExpr, total: tirx.PrimExpr) -> tirx.PrimExpr:
    """Emit the condition that a row is not hidden.

    Parameters
    ----------
    body : Body
        The kernel.
    row : PrimExpr
        The row, which may lie behind the last one.
    total : PrimExpr
        The row's sum of weights: where any key is seen, and all scores are numbers, it is positive.
    """
    form = body.form
    if form.row.extent % body.tile.rows:
        row = tirx.min(row, integer(form.row.extent - 1))
    if not uses(form.hidden, form.key.var):
        return T.bind(tirx.Not(_at(body, row, integer(0), 1)[0]))
    keys = form.key.extent
    width = _KEYS if keys % _KEYS == 0 else 1
    seen = T.alloc_buffer((1,), "int32", scope="local")
    # Scores of hidden keys are minus infinity or NaN, so that few rows are looked at. TVM would turn the negation of a
    # comparison into the opposite one, which NaN does not fulfil either.
    positive = total > tirx.const(0, "float32")
    T.buffer_store(seen, tirx.Select(positive, integer(1), integer(0)), [0])
    with T.If(seen[0].equal(integer(0))), T.Then():
        with T.serial(integer(0), integer(keys // width)) as piece:
            hidden = _at(body, row, piece * integer(width), width)
            for condition in hidden:
                T.buffer_store(seen, tirx.Select(condition, seen[0], integer(1)), [0])
    return T.bind(seen[0] > integer(0))


def _at(body, row: tirx.PrimExpr, first: tirx.PrimExpr, width: int) -> list[tirx.PrimExpr]:
    """The condition at a row's neighbouring keys."""
    form = body.form
    names = {form.row.var: row, **body.batch}
    loads = {
        load.__chandle__(): load_elements(load, form.key.var, first, width, names, body.views)
        for load in nodes_of(form.hidden, ir.TensorLoad)
    }
    found = []
    for number in range(width):
        made = tvm_ffi.structural_map(
            form.hidden,
            [(ir.TensorLoad, lambda x, number=number: loads[x.__chandle__()](number))],
            order="pre",
        )
        found.append(substitute(made, {**names, form.key.var: first + integer(number)}))
    return found
