"""Functions whose reductions share their rows, as stages: ``row_blocks`` finds which iterators walk rows."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ...compat import ir, s_tir, tirx
from ..analysis import Block, structure
from ..steps import inline_injective, isolate_outputs
from .row_blocks import Rows, rows_of
from .row_form import RowFunction, Stage, digit, is_supported, stages_of_block


def row_function(func: tirx.PrimFunc, keep: bool = True) -> tuple[RowFunction, Rows] | None:
    """Bring a function into stages.

    Parameters
    ----------
    func : PrimFunc
        The function; left untouched.
    keep : bool
        Whether what several stages read is a stage of its own; else each computes it again.

    Returns
    -------
    tuple of (RowFunction, Rows) or None
        None when the function has another form: reductions that do not share their rows, or of several values.
    """
    sch = s_tir.Schedule(func)
    info = structure(sch)
    if info is None or not (info.is_static and info.is_regular) or not info.reductions:
        return None
    if any(block.has_window for block in info.reductions):
        return None
    info = isolate_outputs(sch)
    whole = max(block.extent(range(len(block.extents))) for block in info.reductions)
    # Conversions go first, so that the readers of what they convert are counted.
    kept = {b.name for b in info.blocks if not (b.is_injective and _is_conversion(sch, b))}
    info = inline_injective(sch, keep=kept)
    shared = {
        block.name
        for block in info.blocks
        if keep
        and block.is_injective
        and not block.is_output
        and len(info.consumers(block)) > 1
        and block.extent(range(len(block.extents))) == whole
        and not _is_conversion(sch, block)
    }
    info = inline_injective(sch, keep=shared)
    if any(not (b.is_reduction or b.is_output or b.name in shared) for b in info.blocks):
        return None
    rows = rows_of(info, info.blocks)
    if rows is None:
        return None
    columns = _columns(rows)
    if columns is None:
        return None
    row, column = tirx.Var("row", "int64"), tirx.Var("column", "int64")
    extents = _row_extents(rows)
    stages = []
    for block in info.blocks:
        made = _stages(sch.get(block.handle), block, rows, columns, extents, (row, column))
        if made is None:
            return None
        stages += made
    length = math.prod(extent for _, extent in columns)
    if length < 2:
        return None
    found = RowFunction(tuple(func.params), tuple(stages), row, column, math.prod(extents), length)
    return (found, rows) if is_supported(found) else None


def _is_conversion(sch: s_tir.Schedule, block: Block) -> bool:
    """Whether a block does no more than convert what it loads, which a second reader may do again."""
    value = sch.get(block.handle).body.value
    while isinstance(value, tirx.Cast):
        value = value.value
    return isinstance(value, ir.TensorLoad)


def _row_extents(rows: Rows) -> list[int]:
    first = rows.info.blocks[0]
    return [first.extents[i] for i in rows.row_iters[first.name]]


def _columns(rows: Rows) -> list[tuple[int, int]] | None:
    """The column axes as (class, extent), in the order of memory; None where the blocks differ in them."""
    wide = {}
    for block in rows.info.blocks:
        numbers = [i for i in range(len(block.extents)) if block.extents[i] != 1]
        axes = {
            rows.classes[block.name, i]: block.extents[i]
            for i in numbers
            if i not in rows.row_iters[block.name]
        }
        if axes:
            wide[block.name] = axes
    if not wide:
        return []
    axes = next(iter(wide.values()))
    if any(other != axes for other in wide.values()):
        return None
    if len(axes) == 1:
        return list(axes.items())
    block = rows.info[next(iter(wide))]
    source = max(block.reads, key=lambda access: access.nbytes or 0)
    order = [rows.classes[block.name, i] for i in source.plain if i is not None]
    if not set(axes) <= set(order):
        return None
    return [(label, axes[label]) for label in order if label in axes]


def _stages(
    block: s_tir.SBlock,
    described: Block,
    rows: Rows,
    columns: Sequence[tuple[int, int]],
    extents: Sequence[int],
    variables: tuple[tirx.Var, tirx.Var],
) -> list[Stage] | None:
    own = rows.row_iters[described.name]
    wide = any(e != 1 and i not in own for i, e in enumerate(described.extents))
    if described.is_reduction and not wide:
        return (
            None  # of one element (a softmax over one column): a stage would add it once a column
        )
    replaced = _by_row_and_column(block, described, rows, columns, extents, variables)
    return stages_of_block(block, described, replaced, wide)


def _by_row_and_column(
    block: s_tir.SBlock,
    described: Block,
    rows: Rows,
    columns: Sequence[tuple[int, int]],
    extents: Sequence[int],
    variables: tuple[tirx.Var, tirx.Var],
) -> dict[int, tirx.PrimExpr]:
    """Value of each iterator of a block, by handle."""
    row, column = variables
    own, labels = rows.row_iters[described.name], [label for label, _ in columns]
    replaced: dict[int, tirx.PrimExpr] = {}
    for number, iter_var in enumerate(block.iter_vars):
        if described.extents[number] == 1:
            value = tirx.IntImm(str(iter_var.var.ty.dtype), 0)
        elif number in own:
            value = digit(row, extents, own.index(number))
        else:
            place = labels.index(rows.classes[described.name, number])
            value = digit(column, [extent for _, extent in columns], place)
        replaced[iter_var.var.__chandle__()] = value
    return replaced
