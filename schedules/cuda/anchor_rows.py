"""A matrix product and what works on its rows, in one kernel: softmax, layer and RMS norm, sums and maxima.

A thread block holds whole rows. The product accumulates in registers, a few rows of some columns a thread, and goes to
shared memory with the elementwise operators that follow it; the statistics of the rows and the rest are computed from
there, as ``row_blocks`` does for rows that are read from memory.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

from ...compat import Target, ir, s_tir, tirx
from ..allocation import planned_shared_bytes
from ..analysis import Block, Structure, dtype_bytes, structure
from ..base import Limits, ScheduleTemplate
from ..decisions import alternatives
from ..steps import (
    LoopRV,
    SBlockRV,
    accumulate_in_registers,
    allow_registers,
    fuse_loops,
    inline_injective,
    isolate_outputs,
    read_in_order,
    unroll,
)
from .early_bfloat16 import limits_for, widens_bfloat16
from .matmul import is_product
from .row_blocks import Rows, rows_of
from .row_tiles import COPIES, RowProblem, RowTile, row_tiles

#: How many tiles to try until one fits into shared memory.
_ATTEMPTS = 6

#: Bytes of shared memory left for the exchange of partial results between warps.
_EXCHANGE = 1024


class AnchorRows(ScheduleTemplate):
    """A product whose rows are reduced, once or several times, with elementwise operators between and after."""

    name = "anchor_rows"
    kind = "cuda"

    def apply(self, func: tirx.PrimFunc, target: Target) -> tirx.PrimFunc | None:
        """Return the schedule; None when the function has another form or a row does not fit on chip."""
        form = recognise(func)
        if form is None:
            return None
        bounds, problem = limits_for(func, target), form.problem
        if widens_bfloat16(func, target):
            problem = dataclasses.replace(problem, right_bytes=4)
        ranked = functools.partial(row_tiles, problem, bounds, _EXCHANGE)
        for tile in alternatives("tile", ranked, count=_ATTEMPTS):
            scheduled = with_tile(form, tile, bounds)
            if scheduled is not None:
                return scheduled
        return None


@dataclasses.dataclass(frozen=True)
class AnchorRow:
    """A function of this form.

    Parameters
    ----------
    sch : s_tir.Schedule
        Its outputs isolated, and nothing inlined yet.
    handle : SBlockRV
        The product in ``sch``.
    anchor, staged : Block
        The product, and the block that fills the rows in shared memory, as they are after inlining.
    rows : Rows
        The rows that the staged block, the reductions after it and the outputs share.
    column : int
        The iterator of ``staged`` that walks the columns.
    left, right : int
        Which operand of the product has the rows, and which the columns.
    problem : RowProblem
        What the tile search knows.
    """

    sch: s_tir.Schedule
    handle: SBlockRV
    anchor: Block
    staged: Block
    rows: Rows
    column: int
    left: int
    right: int
    problem: RowProblem


def recognise(func: tirx.PrimFunc) -> AnchorRow | None:
    """Bring a function into this form.

    Returns
    -------
    AnchorRow or None
        None when the function has another form: no product, several, or reductions that do not share the last axis of
        its result.
    """
    sch = s_tir.Schedule(func)
    info = structure(sch)
    if info is None or not (info.is_static and info.is_regular) or len(info.reductions) < 2:
        return None
    info = isolate_outputs(sch)
    anchor = _anchor(info)
    if anchor is None:
        return None
    staged = _staged(info, anchor)
    if staged is None:
        # The reductions read the product itself: copy it out of the registers.
        handle = sch.cache_write(anchor.handle, 0, "global")
        staged = next(
            b for b in structure(sch).blocks if sch.get(b.handle).same_as(sch.get(handle))
        )
    # The operands get copies of their own before anything is inlined, so that is tried on a copy.
    handle = info[anchor.name].handle
    info = inline_injective(sch.copy(), keep={staged.name})
    kept = [b for b in info.blocks if b.name != anchor.name]
    if any(not (b.is_reduction or b.is_output or b.name == staged.name) for b in kept):
        return None
    return _form(sch, handle, info, info[anchor.name], info[staged.name], kept)


def _anchor(info: Structure) -> Block | None:
    """The product that every other reduction depends on."""
    first = info.reductions[0]
    if not is_product(first) or first.has_window:
        return None
    others = info.reductions[1:]
    return first if all(first.name in info.ancestors(block) for block in others) else None


def _staged(info: Structure, anchor: Block) -> Block | None:
    """The elementwise block through which alone everything after it reads the product; the narrowest, then the last.

    None when a reduction or an output reads the product itself.
    """
    after = [b for b in info.blocks if anchor.name in info.ancestors(b)]
    count = anchor.extent(anchor.spatial)
    found = []
    for block in after:
        before = info.ancestors(block) | {anchor.name}
        inside = {b.name for b in after if b.name in before} | {anchor.name}
        passed = all(
            not inside & {producer.name for producer in info.producers(other)}
            for other in after
            if other.name not in before and other is not block
        )
        reduces = any(info[name].is_reduction for name in inside - {anchor.name})
        whole = block.extent(range(len(block.extents))) == count
        if block.is_injective and not block.is_output and passed and whole and not reduces:
            found.append(block)
    return min(reversed(found), key=lambda b: dtype_bytes(b.writes[0].dtype), default=None)


def _form(
    sch: s_tir.Schedule,
    handle: SBlockRV,
    info: Structure,
    anchor: Block,
    staged: Block,
    kept: Sequence[Block],
) -> AnchorRow | None:
    rows = rows_of(info, kept)
    # The staged block reads the product position by position, so that their iterators are the same axes.
    reads = [a for a in staged.reads if a.buffer == anchor.writes[0].buffer]
    if rows is None or len(reads) != 1 or sum(anchor.extents[i] > 1 for i in anchor.reduced) != 1:
        return None
    places = zip(reads[0].plain, reads[0].indices, anchor.writes[0].plain, strict=True)
    twin = {}
    for number, used, anchor_number in places:
        if number is None and used:
            return None
        twin[number] = anchor_number
    row_iters = rows.row_iters[staged.name]
    columns = [i for i in staged.spatial if staged.extents[i] != 1 and i not in row_iters]
    if len(columns) != 1 or any(i > columns[0] for i in row_iters):
        return None
    if not {*row_iters, *columns} <= set(twin):
        return None
    with_columns = [
        i
        for i, access in enumerate(anchor.reads)
        if twin[columns[0]] in set().union(*access.indices)
    ]
    if len(with_columns) != 1:
        return None
    right = with_columns[0]
    problem = _problem(anchor, staged, rows, [twin[i] for i in row_iters], twin[columns[0]], right)
    return AnchorRow(sch, handle, anchor, staged, rows, columns[0], 1 - right, right, problem)


def _problem(
    anchor: Block, staged: Block, rows: Rows, row_iters: list[int], column: int, right: int
) -> RowProblem:
    weight = anchor.reads[right]
    used = set().union(*weight.indices)
    last = row_iters[-1] if row_iters else None
    wide = [
        indices for indices, size in zip(weight.indices, weight.shape, strict=True) if size != 1
    ]
    return RowProblem(
        rows=anchor.extents[last] if last is not None else 1,
        outer=anchor.extent(i for i in row_iters[:-1]),
        columns=anchor.extents[column],
        depth=anchor.extent(anchor.reduced),
        reductions=len([b for b in rows.info.reductions if b.name != anchor.name]),
        shares_weight=last not in used,
        is_contiguous=bool(wide) and column in wide[-1],
        row_bytes=dtype_bytes(staged.writes[0].dtype),
        left_bytes=dtype_bytes(anchor.reads[1 - right].dtype),
        right_bytes=dtype_bytes(weight.dtype),
    )


def with_tile(form: AnchorRow, tile: RowTile, bounds: Limits) -> tirx.PrimFunc | None:
    """Schedule a function with a given tile.

    Parameters
    ----------
    form : AnchorRow
        The function; left untouched.
    tile : RowTile
        The choice.
    bounds : Limits
        Limits of the target.

    Returns
    -------
    tirx.PrimFunc or None
        None when TVM cannot follow the tile, or it takes more shared memory than there is.
    """
    sch = form.sch.copy()
    try:
        if not _schedule(sch, form, tile):
            return None
    except s_tir.ScheduleError:
        return None
    func = sch.mod["main"]
    fits = planned_shared_bytes(func) + _EXCHANGE <= bounds.shared_bytes
    return allow_registers(sch) if fits else None


def _schedule(sch: s_tir.Schedule, form: AnchorRow, tile: RowTile) -> bool:
    """Apply a tile; False when a slice has no constant size."""
    # Only the product reads the copies: its operands may be a residual or another operand as well.
    vector = sch.cache_read(form.handle, form.right, "local", [form.handle])
    left = sch.cache_read(form.handle, form.left, "shared", [form.handle])
    right = sch.cache_read(vector, 0, "shared", [vector]) if tile.stages_right else None
    info = inline_injective(sch, keep={form.staged.name})
    anchor, staged = info[form.anchor.name], info[form.staged.name]
    reductions = [info[b.name] for b in form.rows.info.reductions if b.name != anchor.name]
    lane, grid = _rows_to_threads(sch, info.outputs, reductions, form.rows.row_iters, tile)
    sch.set_scope(staged.handle, 0, "shared")
    sch.compute_at(staged.handle, grid, preserve_unit_loops=True)
    loops = list(sch.get_loops(staged.handle))[-len(staged.extents) :]
    column = loops.pop(form.column)
    # A thread's columns are neighbours: what it needs of the product has to be one box.
    chunk, upper, lower, inner = sch.split(column, [None, *tile.threads, tile.columns])
    sch.reorder(chunk, upper, lower, *loops, inner)
    sch.bind(upper, "threadIdx.y")
    sch.bind(lower, "threadIdx.x")
    sch.bind(lane, "threadIdx.y")
    sch.annotate(chunk, "disable_unroll", True)
    unroll(sch, [*loops, inner])
    sums = tile.rows * tile.columns
    steps = [min(tile.step, anchor.extents[i]) for i in anchor.reduced]
    few = [min(tile.batch, step) for step in steps]
    slices, batches = accumulate_in_registers(sch, anchor, lower, (steps, few), sums)
    _load_vectors(sch, vector, batches, tile)
    for copy, index in ((left, form.left), (right, form.right)):
        rank = len(form.anchor.reads[index].shape)
        if copy is not None and not _copy(sch, copy, slices, tile, rank):
            return False
    if right is not None:
        # Filled along the sum and read along the columns: an odd multiple of a vector keeps both off common banks.
        sch.storage_align(right, 0, axis=-2, factor=2 * tile.columns, offset=tile.columns)
    sch.decompose_reduction(anchor.handle, slices)
    return True


def _load_vectors(sch: s_tir.Schedule, copy: SBlockRV, at: LoopRV, tile: RowTile) -> None:
    """Let a thread read the weights of its columns at once, and for several products before it uses the first."""
    before = len(sch.get_loops(copy))
    sch.compute_at(copy, at, preserve_unit_loops=True)
    loops = sch.get_loops(copy)[-before:]
    body = sch.get(copy).body
    is_copy = isinstance(body, tirx.BufferStore) and isinstance(body.value, ir.TensorLoad)
    if is_copy and int(sch.get(loops[-1]).extent) == tile.columns > 1:
        sch.vectorize(loops.pop())
    unroll(sch, loops)


def _rows_to_threads(
    sch: s_tir.Schedule,
    outputs: Sequence[Block],
    reductions: Sequence[Block],
    row_iters: dict[str, tuple[int, ...]],
    tile: RowTile,
) -> tuple[LoopRV, LoopRV]:
    """Spread the rows of outputs and reductions; return the loop over a block's rows and the grid's loop."""
    height, width = tile.threads
    lanes = []
    for output in outputs:
        loops = list(sch.get_loops(output.handle)) or [sch.add_unit_loop(output.handle)]
        rows = [loops[i] for i in row_iters[output.name]]
        columns = [loop for i, loop in enumerate(loops) if i not in row_iters[output.name]]
        if not columns:
            columns = [sch.add_unit_loop(output.handle)]
        if not rows:
            rows = [sch.add_unit_loop(columns[0])]
        outer, serial, lane = sch.split(rows[-1], [None, tile.rows // height, height])
        sch.reorder(*rows[:-1], outer, serial, lane, *columns)
        fuse_loops(sch, [*rows[:-1], outer])
        sch.bind(sch.split(fuse_loops(sch, columns), [None, width])[1], "threadIdx.x")
        lanes.append(lane)
    lane = sch.merge(*lanes) if len(lanes) > 1 else lanes[0]
    for block in reversed(reductions):
        sch.compute_at(block.handle, lane, preserve_unit_loops=True)
        loops = sch.get_loops(block.handle)[-len(block.extents) :]
        spread = [loops[i] for i in block.reduced]
        sch.reorder(*[loops[i] for i in block.spatial], *spread)
        sch.bind(sch.split(fuse_loops(sch, spread), [None, width])[1], "threadIdx.x")
    # A reduction ends with its result in every thread, so that each keeps its own copy (see ``row_blocks``).
    for block in reductions:
        for index in range(len(block.writes)):
            sch.set_scope(block.handle, index, "local")
    grid = sch.get_loops(outputs[0].handle)[0]
    sch.bind(grid, "blockIdx.x")
    return lane, grid


def _copy(sch: s_tir.Schedule, block: SBlockRV, at: LoopRV, tile: RowTile, rank: int) -> bool:
    """Fill a staged operand with all threads; False when its size is not constant."""
    read_in_order(sch, block)
    sch.compute_at(block, at, preserve_unit_loops=True)
    fused = fuse_loops(sch, sch.get_loops(block)[-rank:])
    if not isinstance(sch.get(fused).extent, tirx.IntImm):
        return False
    # A few loads of a thread at a time: left alone, nvcc unrolls the whole loop and runs out of registers.
    rounds, _, upper, lower = sch.split(fused, [None, COPIES, *tile.threads])
    sch.annotate(rounds, "disable_unroll", True)
    sch.bind(upper, "threadIdx.y")
    sch.bind(lower, "threadIdx.x")
    return True
