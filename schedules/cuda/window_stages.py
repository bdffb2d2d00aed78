"""Reductions over small windows, and functions without reductions, as stages of ``row_stages``.

Here every output element is a row of its own, the positions of its window are the columns, and rows are neighbours in
memory. Without a reduction all elements are columns of one row.
"""

from __future__ import annotations

import math

from ...compat import s_tir, tirx
from ..analysis import Block, Structure, structure
from ..steps import inline_injective, isolate_outputs
from .row_form import RowFunction, Stage, digit, is_supported, stages_of_block

#: The largest window that one thread walks alone.
WINDOW = 64


def window_function(func: tirx.PrimFunc) -> RowFunction | None:
    """Bring a function of windows into stages.

    Parameters
    ----------
    func : PrimFunc
        The function; left untouched.

    Returns
    -------
    RowFunction or None
        None when the function has another form: outputs of different shapes, reductions of different windows, or that
        feed each other.
    """
    sch = s_tir.Schedule(func)
    info = structure(sch)
    if info is None or not (info.is_static and info.is_regular):
        return None
    names = {block.name for block in info.reductions}
    if any(names & info.ancestors(block) for block in info.reductions):
        return None
    isolate_outputs(sch)
    info = inline_injective(sch)
    if any(not (block.is_reduction or block.is_output) for block in info.blocks):
        return None
    sizes = {block.extent(block.spatial) for block in info.blocks}
    if len(sizes) != 1 or any(not _keeps_order(block) for block in info.blocks):
        return None
    windows = {tuple(b.extents[i] for i in b.reduced) for b in info.reductions}
    if len(windows) > 1 or (windows and math.prod(*windows) > WINDOW):
        return None
    return _stages(sch, info, func, sizes.pop(), next(iter(windows), ()))


def _keeps_order(block: Block) -> bool:
    """Whether a block writes its elements in the order of its iterators, all of a buffer."""
    (write, *others) = block.writes
    if others or write.shape != tuple(block.extents[i] for i in block.spatial):
        return False
    wide = [
        (p, n) for p, n in zip(write.plain, block.spatial, strict=True) if block.extents[n] != 1
    ]
    return all(plain == number for plain, number in wide)


def _stages(
    sch: s_tir.Schedule,
    info: Structure,
    func: tirx.PrimFunc,
    count: int,
    window: tuple[int, ...],
) -> RowFunction | None:
    row, column = tirx.Var("row", "int64"), tirx.Var("column", "int64")
    element, position = (row, column) if window else (column, row)
    stages: list[Stage] = []
    for described in info.blocks:
        block = sch.get(described.handle)
        replaced = {}
        for numbers, var in ((described.spatial, element), (described.reduced, position)):
            extents = [described.extents[i] for i in numbers]
            for place, number in enumerate(numbers):
                iterator = block.iter_vars[number].var
                value = digit(var, extents, place)
                unit = extents[place] == 1
                replaced[iterator.__chandle__()] = tirx.IntImm("int64", 0) if unit else value
        wide = described.is_reduction or not window
        made = stages_of_block(block, described, replaced, wide)
        if made is None:
            return None
        stages += made
    rows, columns = (count, math.prod(window)) if window else (1, count)
    form = RowFunction(tuple(func.params), tuple(stages), row, column, rows, columns)
    return form if is_supported(form) else None
