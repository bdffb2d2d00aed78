"""What no other template takes: legal code for any loop nests, in one kernel where that is possible.

Tried in this order: each thread computes its output elements with all they need (one kernel); a block computes a tile
of the outputs with all it needs in shared memory (one kernel); one kernel per block, with intermediates in global
memory. A group (``tvm_fusion.strategy``) has to be one kernel and is refused otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from ...compat import Target, s_tir, tirx
from ..allocation import local_bytes, shared_bytes
from ..analysis import Structure, structure
from ..base import Limits, ScheduleTemplate
from ..steps import (
    allow_registers,
    fuse_loops,
    inline_injective,
    isolate_outputs,
    loops_of,
    move_into_threads,
)
from .early_bfloat16 import limits_for

_THREADS = 128

#: Bytes of intermediates that a thread may keep; more than registers hold would go to slow local memory.
_LOCAL_BYTES = 256

#: Largest number of output elements that a block computes when intermediates go to shared memory.
_TILE = 512

#: Tiles are made smaller until every multiprocessor has one, but not below this: neighbours share what they need.
_SMALL_TILE = 64


class Fallback(ScheduleTemplate):
    """The last template: any function whose blocks are plain loop nests."""

    name = "fallback"
    kind = "cuda"

    def apply(self, func: tirx.PrimFunc, target: Target) -> s_tir.Schedule | tirx.PrimFunc | None:
        """Return the schedule; None for a group that cannot be one kernel, and for opaque loop nests."""
        bounds = limits_for(func, target)
        info = structure(s_tir.Schedule(func))
        if info is None or not info.is_ordered:
            return None
        if info.is_static:
            one = _serial(func, bounds) or _tiled(func, bounds)
            if one is not None:
                return one
        is_group = func.attrs is not None and "tvm_fusion.strategy" in func.attrs
        return None if is_group else _kernel_per_block(func, bounds)


def _prepare(func: tirx.PrimFunc) -> tuple[s_tir.Schedule, Structure] | None:
    """Inline what can be; None when the outputs have different shapes, which one loop nest cannot produce."""
    sch = s_tir.Schedule(func)
    isolate_outputs(sch)
    info = inline_injective(sch)
    return (sch, info) if len({output.extents for output in info.outputs}) == 1 else None


def _serial(func: tirx.PrimFunc, bounds: Limits) -> tirx.PrimFunc | None:
    """Every thread for itself, where no reduction feeds another: nothing is then computed twice over."""
    prepared = _prepare(func)
    if prepared is None:
        return None
    sch, info = prepared
    inner = [block for block in info.blocks if not block.is_output]
    names = {block.name for block in inner}
    if any(names & info.ancestors(block) for block in inner):
        return None
    move_into_threads(sch, info, min(_THREADS, bounds.threads))
    return allow_registers(sch) if local_bytes(sch.mod["main"]) <= _LOCAL_BYTES else None


def _tiled(func: tirx.PrimFunc, bounds: Limits) -> tirx.PrimFunc | None:
    """A tile of the outputs per block; what the tile needs is computed by all threads into shared memory."""
    prepared = _prepare(func)
    if prepared is None or not prepared[1].is_regular:
        return None
    base, info = prepared
    threads = min(_THREADS, bounds.threads)
    extents = info.outputs[0].extents
    for sizes in _tile_sizes(extents):
        blocks = math.prod(-(-extent // size) for extent, size in zip(extents, sizes, strict=True))
        if blocks < bounds.multiprocessors and math.prod(sizes) > _SMALL_TILE:
            continue
        sch = base.copy()
        _schedule_tile(sch, info, sizes, threads)
        if shared_bytes(sch.mod["main"]) <= bounds.shared_bytes:
            return allow_registers(sch)
    return None


def _tile_sizes(extents: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Tiles from large to a single element: the largest side is halved each time, and once to nothing at the end."""
    sizes = list(extents)
    while True:
        if math.prod(sizes) <= _TILE:
            yield tuple(sizes)
        if math.prod(sizes) <= 1:
            return
        widest = max(range(len(sizes)), key=lambda i: sizes[i])
        sizes[widest] = (sizes[widest] + 1) // 2


def _schedule_tile(
    sch: s_tir.Schedule, info: Structure, sizes: tuple[int, ...], threads: int
) -> None:
    grids, inners = [], []
    for output in info.outputs:
        parts = [
            sch.split(loop, [None, size])
            for loop, size in zip(loops_of(sch, output.handle), sizes or (1,), strict=True)
        ]
        sch.reorder(*[part[0] for part in parts], *[part[1] for part in parts])
        grids.append(fuse_loops(sch, [part[0] for part in parts]))
        inners.append([part[1] for part in parts])
    grid = sch.merge(*grids) if len(grids) > 1 else grids[0]
    # Bound while it holds the outputs alone: overlapping tiles of what they need would look like a dependence.
    sch.bind(grid, "blockIdx.x")
    # A sum is made in a register and stored once: barriers may not stand under the conditions of a partial tile.
    stores = {
        block.name: [sch.cache_write(block.handle, i, "local") for i in range(len(block.writes))]
        for block in info.reductions
    }
    for block in reversed(info.blocks):
        for store in () if block.is_output else stores.get(block.name, (block.handle,)):
            sch.compute_at(store, grid, preserve_unit_loops=True)
            sch.set_scope(store, 0, "shared")
        if block.is_reduction:
            lane = _spread(sch, stores[block.name][-1], threads)
            sch.compute_at(block.handle, lane, preserve_unit_loops=True)
        else:
            _spread(sch, block.handle, threads)


def _spread(sch: s_tir.Schedule, block, threads: int):
    """Divide the loops of a block inside the grid loop among the threads."""
    _, lane = sch.split(fuse_loops(sch, sch.get_loops(block)[1:]), [None, threads])
    sch.bind(lane, "threadIdx.x")
    return lane


def _kernel_per_block(func: tirx.PrimFunc, bounds: Limits) -> s_tir.Schedule:
    """One kernel per block that is left: spatial loops over threads, reductions serial."""
    sch = s_tir.Schedule(func)
    info = inline_injective(sch)
    for block in info.blocks:
        loops = loops_of(sch, block.handle)
        if block.extents:
            spatial = [loops[i] for i in block.spatial]
            if not spatial:
                spatial = [sch.add_unit_loop(loops[0])]
            sch.reorder(*spatial, *[loops[i] for i in block.reduced])
            loops = spatial
        outer, lane = sch.split(fuse_loops(sch, loops), [None, min(_THREADS, bounds.threads)])
        sch.bind(outer, "blockIdx.x")
        sch.bind(lane, "threadIdx.x")
    return sch
