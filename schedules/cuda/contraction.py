"""Sums of products in registers: what convolution and matrix multiplication templates share.

Every thread keeps a small tile of each anchor's output in registers, the block stages both operands in shared memory
one slice of the reduction at a time, and the epilogue runs on the registers. Several anchors that meet in one
elementwise output ("register joined") run one after the other in the same thread.

With the option ``stage=shared``, for functions that spill otherwise, each anchor's sums go through shared memory to a
loop nest of its own for the epilogue: one anchor's sums, or the epilogue's operands, are in registers at a time.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

from ...compat import s_tir, tirx
from ..allocation import planned_shared_bytes, shared_bytes
from ..analysis import Block
from ..base import Limits
from ..decisions import alternatives
from ..steps import (
    LoopRV,
    SBlockRV,
    accumulate_in_registers,
    allow_registers,
    copy_together,
    fuse_loops,
    inline_injective,
    tile_loops,
    unroll,
    with_simple_indices,
)
from .contraction_form import Contraction, gathered, problem, recognise
from .tiles import ACCUMULATORS, Tile, tiles

#: How many tiles to try until one fits into shared memory.
_ATTEMPTS = 12


def apply_contraction(func: tirx.PrimFunc, bounds: Limits) -> tirx.PrimFunc | None:
    """Schedule a function of contraction form with the best tile that fits.

    Parameters
    ----------
    func : tirx.PrimFunc
        The function.
    bounds : Limits
        Limits of the target.

    Returns
    -------
    tirx.PrimFunc or None
        None when the function has another form or no tile fits.
    """
    base = s_tir.Schedule(with_simple_indices(func))
    form = recognise(base)
    if form is None:
        return None
    through_shared = stages_in_shared(func)
    described = problem(form, base, through_shared=through_shared)
    if described.accumulators > ACCUMULATORS:
        return None
    apply_tile = _through_shared if through_shared else _in_registers
    ranked = functools.partial(tiles, described, bounds)
    for tile in alternatives("tile", ranked, count=_ATTEMPTS):
        sch = base.copy()
        if apply_tile(sch, form, tile) and _fits(sch, bounds):
            return allow_registers(sch)
    return None


def stages_in_shared(func: tirx.PrimFunc) -> bool:
    """Whether sums are to go through shared memory, because a kernel that keeps them in registers spills."""
    options = func.attrs.get("tvm_fusion.options") if func.attrs is not None else None
    return options is not None and str(options.get("stage", "")) == "shared"


def _fits(sch: s_tir.Schedule, bounds: Limits) -> bool:
    """Whether the block has the shared memory, of which anchors that run one after the other reuse each other's."""
    func, most = sch.mod["main"], bounds.shared_bytes
    return shared_bytes(func) <= most or planned_shared_bytes(func) <= most


def _in_registers(sch: s_tir.Schedule, form: Contraction, tile: Tile) -> bool:
    """Apply a tile, the epilogue on the registers; False when a slice has no constant size."""
    staged = _stage_operands(sch, form)
    inline_injective(sch)
    nest = []
    for output in form.outputs:
        loops = sch.get_loops(output.handle)
        _, thread, inner = tile_loops(sch, loops, tile.threads, tile.registers, tile.groups)
        nest.append((thread, inner))
    merged = sch.merge(*[thread for thread, _ in nest]) if len(nest) > 1 else nest[0][0]
    for _, inner in nest:
        unroll(sch, inner)
    sch.bind(sch.get_loops(form.outputs[0].handle)[0], "blockIdx.x")
    sch.bind(merged, "threadIdx.x")
    return all(
        _accumulate(sch, anchor, merged, tile, steps, staged[anchor.name])
        for anchor, steps in reversed(list(zip(form.anchors, tile.steps, strict=True)))
    )


def _through_shared(sch: s_tir.Schedule, form: Contraction, tile: Tile) -> bool:
    """Apply a tile, the epilogue in a loop nest of its own; False when that does not work with this tile."""
    staged = _stage_operands(sch, form)
    stores = {}
    for anchor in form.anchors:
        sch.cache_write(anchor.handle, 0, "local")
        (stores[anchor.name],) = sch.get_consumers(anchor.handle)
        sch.set_scope(stores[anchor.name], 0, "shared")
    inline_injective(sch)
    grids = []
    for output in form.outputs:
        loops = sch.get_loops(output.handle)
        # All of a tile's elements are "registers" here: its threads are bound below.
        sizes = [t * r for t, r in zip(tile.threads, tile.registers, strict=True)]
        ones = [1] * len(sizes)
        grid, _, inner = tile_loops(sch, loops, ones, sizes, tile.groups)
        grids.append(grid)
        _, lane = sch.split(fuse_loops(sch, inner), [None, tile.thread_count])
        sch.bind(lane, "threadIdx.x")
    grid = sch.merge(*grids) if len(grids) > 1 else grids[0]
    sch.bind(grid, "blockIdx.x")
    for anchor, steps in reversed(list(zip(form.anchors, tile.steps, strict=True))):
        store = stores[anchor.name]
        sch.compute_at(store, grid, preserve_unit_loops=True)
        thread = _spread_store(sch, form, anchor, store, tile)
        if thread is None:
            return False
        if not _accumulate(sch, anchor, thread, tile, steps, staged[anchor.name]):
            return False
    return True


def _spread_store(
    sch: s_tir.Schedule, form: Contraction, anchor: Block, store: SBlockRV, tile: Tile
) -> LoopRV | None:
    """Divide an anchor's sums in shared memory among threads and registers; None where some threads have none."""
    axis_of = {axes.get(anchor.name): number for number, axes in enumerate(form.axes)}
    outer, inner = [], []
    for loop, iterator in zip(
        sch.get_loops(store)[-len(anchor.writes[0].shape) :], anchor.writes[0].plain, strict=True
    ):
        extent = sch.get(loop).extent
        axis = axis_of.get(iterator)
        threads = tile.threads[axis] if axis is not None else 1
        if not isinstance(extent, tirx.IntImm) or int(extent) % threads:
            return None
        parts = sch.split(loop, [threads, None])
        outer.append(parts[0])
        inner.append(parts[1])
    sch.reorder(*outer, *inner)
    thread = fuse_loops(sch, outer)
    if int(sch.get(thread).extent) != tile.thread_count:
        return None
    sch.bind(thread, "threadIdx.x")
    unroll(sch, inner)
    return thread


def _stage_operands(
    sch: s_tir.Schedule, form: Contraction
) -> dict[str, list[tuple[SBlockRV, int]]]:
    return {
        anchor.name: [_stage(sch, anchor, index) for index in range(len(anchor.reads))]
        for anchor in form.anchors
    }


def _stage(sch: s_tir.Schedule, anchor: Block, index: int) -> tuple[SBlockRV, int]:
    """Copy an operand to shared memory; return the copying block and the rank of the copy."""
    access = anchor.reads[index]
    order = gathered(anchor, access)
    if order is None:
        # For this anchor alone: the epilogue, or another anchor, may read the same tensor elsewhere.
        copy = sch.cache_read(anchor.handle, index, "shared", consumer_blocks=[anchor.handle])
        return copy, len(access.shape)
    places = tirx.IndexMap.from_func(
        lambda *iterators: [iterators[i] for i in order], ndim=len(anchor.extents)
    )
    return sch.reindex_cache_read(anchor.handle, index, "shared", places), len(order)


def _accumulate(
    sch: s_tir.Schedule,
    anchor: Block,
    thread: LoopRV,
    tile: Tile,
    steps: Sequence[int],
    staged: Sequence[tuple[SBlockRV, int]],
) -> bool:
    """Move an anchor into the registers of a thread; False when a slice of an operand has no constant size."""
    (slices,) = accumulate_in_registers(sch, anchor, thread, [steps], tile.register_count)
    if not all(copy_together(sch, copy, slices, tile.thread_count, rank) for copy, rank in staged):
        return False
    sch.decompose_reduction(anchor.handle, slices)
    return True
