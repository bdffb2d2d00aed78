"""Convolutions and matrix products as a register-tiled kernel over packed panels.

Both are sums of products ``C[.., r, l] += A[r, k] * B[k, l]`` once the innermost axes of the result that come from one
operand are fused into ``l`` (the pixels of an NCHW image, the channels of an NHWC one, the columns of a matrix) and an
axis of the other operand is taken as ``r``. A task packs the panel ``B[:, l tile]`` once, so that its vectors are
contiguous whatever the strides, padding and layout, and then runs all tiles of ``r`` against it; a tile of the result
stays in registers over the whole sum and goes through the fused epilogue while it is hot.
"""

from __future__ import annotations

import dataclasses
import functools
import math

from ...compat import s_tir, tirx
from ..analysis import Block, nodes_of, structure
from ..decisions import alternatives
from ..index_forms import IndexForms
from .loops import block_of
from .tiles import Tiles

#: Tasks that a kernel offers to the thread pool, where the problem has them: enough for large machines to balance.
_TASKS = 64

#: Rows that a task must keep so that packing its panel pays.
_ROWS_PER_PANEL = 64


@dataclasses.dataclass(frozen=True)
class Roles:
    """Which iterators of a contraction play which part.

    Attributes
    ----------
    fused : tuple of int
        The trailing spatial iterators that become the vector axis.
    row : int or None
        The iterator tiled in registers beside it; None for a product with a vector.
    panel : int
        Number of the read that has the vector axis.
    """

    fused: tuple[int, ...]
    row: int | None
    panel: int


def roles(block: Block) -> Roles | None:
    """Return the parts of the iterators, or None when the block is no contraction in the sense of this file."""
    spatial, reduced = block.spatial, block.reduced
    if len(block.reads) != 2 or len(block.writes) != 1 or block.writes[0].plain != spatial:
        return None
    if (
        not reduced
        or None in block.extents
        or block.kinds != "S" * len(spatial) + "R" * len(reduced)
    ):
        return None
    uses = [frozenset().union(*read.indices) for read in block.reads]
    if any(not uses[0] & uses[1] >= {i} for i in reduced if block.extents[i] > 1):
        return None
    wide = [i for i in spatial if block.extents[i] > 1]
    if not wide or wide[-1] in uses[0] & uses[1] or wide[-1] not in uses[0] | uses[1]:
        return None
    panel = 0 if wide[-1] in uses[0] else 1
    fused: list[int] = []
    for i in reversed(spatial):
        if block.extents[i] > 1 and (i not in uses[panel] or i in uses[1 - panel]):
            break
        fused.insert(0, i)
    rows = [i for i in wide if i not in fused and i in uses[1 - panel] and i not in uses[panel]]
    return Roles(tuple(fused), rows[-1] if rows else None, panel)


def is_product_sum(sch: s_tir.Schedule, block: Block) -> bool:
    """Whether the block adds products of its two operands to a sum that starts at zero."""
    body, init = sch.get(block.handle).body, sch.get(block.handle).init
    if not isinstance(body, tirx.BufferStore) or not isinstance(init, tirx.BufferStore):
        return False
    if block.extent(block.reduced) == 1:
        # One product and no sum, which the primitives below would simplify away.
        return False
    zero = isinstance(init.value, tirx.FloatImm | tirx.IntImm) and init.value.value == 0
    return zero and isinstance(body.value, tirx.Add) and isinstance(body.value.b, tirx.Mul)


def grouped_channel(sch: s_tir.Schedule, block: Block) -> tuple[int, int] | None:
    """Return the channel iterator of a grouped convolution and the channels in a group.

    It is the first iterator that the index of a read divides.
    """
    stmt = sch.get(block.handle)
    for region in stmt.reads:
        for dim in region.region:
            for node in nodes_of(dim.min, tirx.FloorDiv):
                number = next(
                    (i for i, axis in enumerate(stmt.iter_vars) if axis.var.same_as(node.a)), None
                )
                if number is None or not isinstance(node.b, tirx.IntImm):
                    continue
                size = int(node.b)
                if size > 1 and number in block.spatial and block.extents[number] % size == 0:
                    return number, size
    return None


def is_contraction(sch: s_tir.Schedule, block: Block) -> bool:
    """Whether ``schedule_contraction`` handles a block."""
    if not is_product_sum(sch, block):
        return False
    if grouped_channel(sch, block) is not None:
        return True
    parts = roles(block)
    return parts is not None and (parts.row is not None or _is_contiguous(block, parts))


def _splitting(number: int, size: int, ndim: int) -> tirx.IndexMap:
    def split(*i: tirx.Var) -> list[tirx.Expr]:
        return [
            *i[:number],
            tirx.floordiv(i[number], size),
            tirx.floormod(i[number], size),
            *i[number + 1 :],
        ]

    return tirx.IndexMap.from_func(split, ndim=ndim)


def schedule_contraction(
    sch: s_tir.Schedule,
    handle: s_tir.schedule.SBlockRV,
    consumer: s_tir.schedule.SBlockRV | None,
    width: int,
) -> bool:
    """Tile, pack and parallelise one contraction.

    Parameters
    ----------
    sch : Schedule
        Changed in place, also when the answer is False: pass a copy.
    handle : SBlockRV
        The contraction, not yet scheduled.
    consumer : SBlockRV or None
        A block that reads nothing of the result but its own element, to be computed with each tile.
    width : int
        float32 lanes of a vector register.

    Returns
    -------
    bool
        False when the block has no form that this file handles.
    """
    block = block_of(sch, handle)
    if not is_product_sum(sch, block):
        return False
    changed = (handle,) if consumer is None else (handle, consumer)
    if any(IndexForms(sch.get(one)).has_suspects() for one in changed):
        return False  # the layouts of these blocks change
    group = grouped_channel(sch, block)
    if group is not None:
        sch.transform_block_layout(handle, _splitting(*group, len(block.extents)))
        # The consumer walks channels, not groups of them; it becomes a loop nest of its own.
        consumer = None
    back = sch.reindex(handle, ("write", 0))
    block = block_of(sch, handle)
    parts = roles(block)
    if parts is None:
        return False
    if parts.row is None and not _is_contiguous(block, parts):
        return False
    rows = 1 if parts.row is None else block.extents[parts.row]
    can_pad = None not in block.reads[1 - parts.panel].plain
    ranked = functools.partial(Tiles.ranked, block.extent(parts.fused), rows, width, can_pad)
    (tiles,) = alternatives("tile", ranked, values=lambda tiles: tiles.sizes)[:1]
    panel = sch.reindex(handle, ("read", parts.panel))
    epilogue = _flatten_axes(sch, handle, panel, back, consumer, parts)
    panel = _pad(sch, handle, panel, parts, tiles)
    task, row_loop, sums, tile = _tile_loops(sch, handle, parts, tiles)
    if tiles.rows > 1 or tiles.padded:
        _place_panel(sch, handle, panel, task, parts, tiles)
    else:
        sch.compute_inline(panel)
    sch.reverse_compute_at(epilogue, row_loop)
    inner = _loops_inside(sch, epilogue, row_loop)
    if math.prod(int(sch.get(loop).extent) for loop in inner) > tiles.vector * tiles.row:
        return False  # TVM could not tell which part of a flattened axis the tile is
    if inner:  # a tile of one element has no loop: the innermost is not its own
        _vectorize_epilogue(sch, inner[-1], tiles)
    for loop in tile[:-1]:
        sch.unroll(loop)
    sch.vectorize(tile[-1])
    if 1 < int(sch.get(sums[-1]).extent) <= 7:
        sch.unroll(sums[-1])
    first = sch.get_loops(sch.decompose_reduction(handle, sums[0]))
    sch.vectorize(first[-1])
    for loop in first[-len(tile) : -1]:
        sch.unroll(loop)
    return True


def _loops_inside(
    sch: s_tir.Schedule, block: s_tir.schedule.SBlockRV, at: s_tir.schedule.LoopRV
) -> list[s_tir.schedule.LoopRV]:
    """The loops of a block that a loop around it holds."""
    loops = sch.get_loops(block)
    place = next(i for i, loop in enumerate(loops) if sch.get(loop).same_as(sch.get(at)))
    return list(loops[place + 1 :])


def _vectorize_epilogue(sch: s_tir.Schedule, lane: s_tir.schedule.LoopRV, tiles: Tiles) -> None:
    """Take vectors of the tile that are stored wholly or not at all, where there are any."""
    if not tiles.padded:
        sch.vectorize(lane)
        return
    vector = math.gcd(tiles.lanes_extent, tiles.vector)
    if 1 < vector and int(sch.get(lane).extent) % vector == 0:
        sch.vectorize(sch.split(lane, [None, vector])[1])


def _is_contiguous(block: Block, parts: Roles) -> bool:
    """Whether the vector axis is the last dimension of the operand that has it."""
    read = block.reads[parts.panel]
    wide = [i for i in parts.fused if block.extents[i] > 1]
    return len(wide) == 1 and read.plain[-1] == wide[0]


def _flatten_axes(
    sch: s_tir.Schedule,
    handle: s_tir.schedule.SBlockRV,
    panel: s_tir.schedule.SBlockRV,
    back: s_tir.schedule.SBlockRV,
    consumer: s_tir.schedule.SBlockRV | None,
    parts: Roles,
) -> s_tir.schedule.SBlockRV:
    """Fuse the iterators of the vector axis in the contraction, its panel and its result.

    Returns
    -------
    SBlockRV
        The block that takes the result on: the consumer, or the plain write-back.
    """
    block = block_of(sch, handle)
    extents = block.extents

    def fuse(order: list[int | None]):
        """Map indices, each given by the iterator it follows; those of the vector axis become one."""
        present = [i for i in order if i in parts.fused]

        def mapping(*i: tirx.Var) -> list[tirx.Expr]:
            value = dict(zip(order, i, strict=True))
            index = tirx.const(0, "int64")
            for number in present:
                index = index * extents[number] + value[number]
            out: list[tirx.Expr] = []
            for number, var in zip(order, i, strict=True):
                if number not in parts.fused:
                    out.append(var)
                elif number == present[0]:
                    out.append(index)
            return out

        return tirx.IndexMap.from_func(mapping, ndim=len(order))

    read_order = list(block.reads[parts.panel].plain)
    sch.transform_layout(handle, ("read", parts.panel), fuse(read_order))
    sch.transform_block_layout(panel, fuse(read_order))
    sch.transform_layout(handle, ("write", 0), fuse(list(block.spatial)))
    if consumer is not None:
        sch.compute_inline(back)
        back = consumer
    sch.transform_block_layout(back, fuse(list(block.spatial)))
    sch.transform_block_layout(handle, fuse(list(range(len(extents)))))
    return back


def _pad(
    sch: s_tir.Schedule,
    handle: s_tir.schedule.SBlockRV,
    panel: s_tir.schedule.SBlockRV,
    parts: Roles,
    tiles: Tiles,
) -> s_tir.schedule.SBlockRV:
    """Round the tiled axes up to whole tiles; the surplus is computed on zeros and not stored.

    Returns
    -------
    SBlockRV
        The block that fills the panel.
    """
    block = block_of(sch, handle)
    factors = [1] * len(block.extents)
    factors[parts.fused[0]] = tiles.vector
    if parts.row is not None:
        factors[parts.row] = tiles.row
    if all(extent % factor == 0 for extent, factor in zip(block.extents, factors, strict=True)):
        return panel
    sch.pad_einsum(handle, factors)
    info, block = structure(sch), block_of(sch, handle)
    source = next(
        other for other in info.blocks if other.writes[0].buffer == block.reads[parts.panel].buffer
    )
    if not sch.get(source.handle).same_as(sch.get(panel)):
        sch.compute_inline(panel)
    sch.compute_inline(info.consumers(block)[0].handle)
    return source.handle


def _tile_loops(
    sch: s_tir.Schedule, handle: s_tir.schedule.SBlockRV, parts: Roles, tiles: Tiles
) -> tuple[s_tir.schedule.LoopRV, s_tir.schedule.LoopRV, list, list]:
    """Order the loops: parallel task, register tiles of rows, sums, register tile.

    Returns
    -------
    tuple
        The task loop, the loop whose body computes one register tile, the loops of the sum, the loops of the tile.
    """
    block = block_of(sch, handle)
    loops = sch.get_loops(handle)
    in_panel = frozenset().union(*block.reads[parts.panel].indices)
    lane = parts.fused[0]
    lane_outer, lane_inner = sch.split(loops[lane], [None, tiles.vector])
    sums = [loops[i] for i in block.reduced]
    others = [i for i in block.spatial if i not in (lane, parts.row)]
    shared = [loops[i] for i in others if i in in_panel]
    inner = [loops[i] for i in others if i not in in_panel]
    if parts.row is None:
        sch.reorder(*shared, *inner, lane_outer, *sums, lane_inner)
        task = sch.fuse(*shared, *inner, lane_outer)
        sch.parallel(task)
        return task, task, sums, [lane_inner]
    row_outer, row_inner = sch.split(loops[parts.row], [None, tiles.row])
    sch.reorder(*shared, lane_outer, *inner, row_outer, *sums, row_inner, lane_inner)
    row_loop = sch.fuse(*inner, row_outer)
    panels = int(sch.get(lane_outer).extent)
    for loop in shared:
        panels *= int(sch.get(loop).extent)
    count = int(sch.get(row_loop).extent)
    chunk, row_loop = sch.split(row_loop, [_chunks(panels, count, tiles.row), None])
    task = sch.fuse(*shared, lane_outer, chunk)
    sch.parallel(task)
    return task, row_loop, sums, [row_inner, lane_inner]


def _chunks(panels: int, count: int, rows: int) -> int:
    """Return how often to share a panel's ``count`` tiles of ``rows`` rows among tasks that each pack it."""
    for chunks in range(1, count + 1):
        if count % chunks == 0 and panels * chunks >= _TASKS:
            return chunks if count // chunks * rows >= _ROWS_PER_PANEL else 1
    return 1


def _place_panel(
    sch: s_tir.Schedule,
    handle: s_tir.schedule.SBlockRV,
    panel: s_tir.schedule.SBlockRV,
    task: s_tir.schedule.LoopRV,
    parts: Roles,
    tiles: Tiles,
) -> None:
    """Fill the panel once a task, in the order in which the tile reads it."""
    order = block_of(sch, handle).reads[parts.panel].plain
    at = order.index(parts.fused[0])

    def layout(*i: tirx.Var) -> list[tirx.Expr]:
        lane = i[at]
        return [
            *i[:at],
            tirx.floordiv(lane, tiles.vector),
            *i[at + 1 :],
            tirx.floormod(lane, tiles.vector),
        ]

    sch.transform_layout(
        handle, ("read", parts.panel), tirx.IndexMap.from_func(layout, ndim=len(order))
    )
    sch.compute_at(panel, task, preserve_unit_loops=True)
    loops = sch.get_loops(panel)[1:]
    sch.reorder(*loops[:at], *loops[at + 1 :], loops[at])
