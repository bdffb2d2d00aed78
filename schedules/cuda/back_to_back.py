"""Two sums of products of which the second reads the first, in one kernel.

Depthwise and pointwise convolution, a convolution and a 1x1 convolution, two matrix products, a 1x1 and a depthwise
convolution: a block keeps its tile of the second sum in registers and computes, slice by slice, what that tile needs of
the first sum into shared memory, with the elementwise operators between them applied.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

from ...compat import Target, s_tir, tirx
from ..allocation import planned_shared_bytes
from ..base import Limits, ScheduleTemplate
from ..decisions import alternatives
from ..steps import (
    LoopRV,
    SBlockRV,
    accumulate_in_registers,
    allow_registers,
    copy_together,
    inline_injective,
    read_in_order,
    tile_loops,
    unroll,
)
from .early_bfloat16 import limits_for
from .pair_form import Operand, Pair, PairProblem, recognise
from .pair_tiles import PairTile, pair_tiles

#: How many tiles to try until one fits into shared memory.
_ATTEMPTS = 8


class BackToBack(ScheduleTemplate):
    """Two dependent sums of products with elementwise operators before, between and after them.

    What a block needs of the first sum is computed again by every block that needs it.
    """

    name = "back_to_back"
    kind = "cuda"

    def apply(self, func: tirx.PrimFunc, target: Target) -> tirx.PrimFunc | None:
        """Return the schedule; None when the function has another form or no tile fits."""
        found = recognise(func)
        if found is None:
            return None
        bounds = limits_for(func, target)
        ranked = functools.partial(pair_tiles, found[2], bounds)
        for tile in alternatives("tile", ranked, count=_ATTEMPTS):
            scheduled = with_tile(*found, tile, bounds)
            if scheduled is not None:
                return scheduled
        return None


def with_tile(
    base: s_tir.Schedule, pair: Pair, problem: PairProblem, tile: PairTile, bounds: Limits
) -> tirx.PrimFunc | None:
    """Schedule a function with a given tile.

    Parameters
    ----------
    base, pair, problem : Schedule, Pair, PairProblem
        What ``recognise`` returned; left untouched.
    tile : PairTile
        The choice.
    bounds : Limits
        Limits of the target.

    Returns
    -------
    tirx.PrimFunc or None
        None when TVM cannot follow the tile, or it takes more shared memory than there is.
    """
    sch = base.copy()
    try:
        if not schedule_pair(sch, pair, problem, tile):
            return None
    except s_tir.ScheduleError:
        # Tiles with a rest can give loop bindings in which TVM does not recognise a sum any more.
        return None
    func = sch.mod["main"]
    if planned_shared_bytes(func) > bounds.shared_bytes:
        return None
    return allow_registers(sch)


def schedule_pair(sch: s_tir.Schedule, pair: Pair, problem: PairProblem, tile: PairTile) -> bool:
    """Apply a tile.

    Parameters
    ----------
    sch : s_tir.Schedule
        The schedule that ``recognise`` returned, or a copy; changed in place.
    pair, problem : Pair, PairProblem
        What ``recognise`` returned.
    tile : PairTile
        The choice.

    Returns
    -------
    bool
        False when a slice has no constant size; the schedule is then of no use.
    """
    first, second, count = pair.first, pair.second, tile.thread_count
    # Only the sums read the copies: their operands may be a residual or another operand as well.
    middle = sch.cache_read(second.handle, pair.middle, "shared", [second.handle])
    other = sch.cache_read(second.handle, 1 - pair.middle, "shared", [second.handle])
    copies = [
        (sch.cache_read(first.handle, index, tile.first.scope, [first.handle]), index)
        for index in range(len(first.reads))
        if tile.first.scope != "global"
    ]
    inline_injective(sch)
    nest = []
    for output in pair.outputs:
        _, thread, inner = tile_loops(
            sch, sch.get_loops(output.handle), tile.threads, tile.registers
        )
        nest.append((thread, inner))
    thread = sch.merge(*[lane for lane, _ in nest]) if len(nest) > 1 else nest[0][0]
    for _, inner in nest:
        unroll(sch, inner)
    sch.bind(sch.get_loops(pair.outputs[0].handle)[0], "blockIdx.x")
    sch.bind(thread, "threadIdx.x")
    slices, parts = accumulate_in_registers(
        sch, second, thread, (tile.steps, tile.part), tile.register_count
    )
    lanes = _lane_iterator(tile.threads, problem.walked)
    if not _stage(sch, other, parts, count, problem.second.operands[1 - pair.middle], lanes):
        return False
    if not _make_middle(sch, pair, problem, middle, slices, tile, copies):
        return False
    sch.decompose_reduction(second.handle, slices)
    return True


def _lane_iterator(threads: Sequence[int], walked: Sequence[int]) -> int:
    """The iterator that neighbouring threads walk, -1 for none."""
    return next((i for t, i in zip(reversed(threads), reversed(walked), strict=True) if t > 1), -1)


def _stage(
    sch: s_tir.Schedule, copy: SBlockRV, at: LoopRV, threads: int, operand: Operand, lanes: int
) -> bool:
    """Copy an operand to shared memory, off common banks; False when what is needed has no constant size."""
    read_in_order(sch, copy)
    if not copy_together(sch, copy, at, threads, len(operand.dims)):
        return False
    dims = [d for d, (_, terms) in enumerate(operand.dims) if any(i == lanes for i, _ in terms)]
    inner = math.prod(size for size, _ in operand.dims[dims[-1] + 1 :]) if dims else 1
    if inner > 1:
        # Neighbouring threads read with a stride, which has to be odd for them to use different banks.
        sch.storage_align(copy, 0, axis=dims[-1], factor=2, offset=1)
    return True


def _make_middle(
    sch: s_tir.Schedule,
    pair: Pair,
    problem: PairProblem,
    middle: SBlockRV,
    slices: LoopRV,
    tile: PairTile,
    copies: Sequence[tuple[SBlockRV, int]],
) -> bool:
    """Compute what a slice needs of the first sum into shared memory; False when it has no constant size."""
    sch.compute_at(middle, slices, preserve_unit_loops=True)
    loops = sch.get_loops(middle)[-len(tile.first.threads) :]
    if any(not isinstance(sch.get(loop).extent, tirx.IntImm) for loop in loops):
        return False
    rounds, lane, inner = tile_loops(sch, loops, tile.first.threads, tile.first.registers)
    if int(sch.get(rounds).extent) > 1:
        sch.annotate(rounds, "disable_unroll", True)
    sch.bind(lane, "threadIdx.x")
    unroll(sch, inner)
    (chunks,) = accumulate_in_registers(
        sch, pair.first, lane, (tile.first.steps,), tile.first.register_count
    )
    lanes = _lane_iterator(tile.first.threads, problem.made)
    for copy, index in copies:
        operand = problem.first.operands[index]
        if tile.first.scope == "local":
            sch.compute_at(copy, lane, preserve_unit_loops=True)
            unroll(sch, sch.get_loops(copy)[-len(operand.dims) :])
        elif not _stage(sch, copy, chunks, tile.thread_count, operand, lanes):
            return False
    sch.decompose_reduction(pair.first.handle, chunks)
    return True
