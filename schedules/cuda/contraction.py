"""Sums of products in registers: what convolution and matrix multiplication templates share.

Every thread keeps a small tile of each anchor's output in registers, the block stages both operands in shared memory
one slice of the reduction at a time, and the epilogue runs on the registers. Several anchors that meet in one
elementwise output ("register joined") run one after the other in the same thread.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from ...compat import s_tir, tirx
from ..analysis import Access, Block, Structure, nodes_of, shared_bytes, structure
from ..base import Limits
from ..steps import allow_registers, copy_together, inline_injective, isolate_outputs, tile_loops
from .tiles import ACCUMULATORS, Axis, Operand, Problem, Tile, tiles

#: Statements of the innermost body that may be unrolled; more only costs instruction cache and compile time.
_UNROLL = 256

#: How many tiles to try until one fits into shared memory.
_ATTEMPTS = 12


@dataclasses.dataclass(frozen=True)
class Contraction:
    """A function that this form fits.

    Parameters
    ----------
    info : Structure
        Its structure, outputs isolated and injective blocks not yet inlined.
    anchors : tuple of Block
        Reductions of two operands, none of which depends on another.
    outputs : tuple of Block
        Output blocks, all over the same iteration space.
    axes : tuple of dict of str to int
        For each output axis, which iterator of each anchor walks it.
    """

    info: Structure
    anchors: tuple[Block, ...]
    outputs: tuple[Block, ...]
    axes: tuple[dict[str, int], ...]


def recognise(sch: s_tir.Schedule) -> Contraction | None:
    """Bring a function into contraction form.

    Parameters
    ----------
    sch : s_tir.Schedule
        A fresh schedule; its outputs get isolated.

    Returns
    -------
    Contraction or None
        None when the function has another form.
    """
    info = structure(sch)
    if info is None or not (info.is_static and info.is_regular) or not info.reductions:
        return None
    if any(len(block.reads) != 2 or len(block.writes) != 1 for block in info.reductions):
        return None
    names = {block.name for block in info.reductions}
    if any(names & info.ancestors(block) for block in info.reductions):
        return None
    info = isolate_outputs(sch)
    if len({output.extents for output in info.outputs}) != 1:
        return None
    anchors = info.reductions
    axes = _axes(info, anchors)
    return None if axes is None else Contraction(info, anchors, info.outputs, axes)


def _axes(info: Structure, anchors: tuple[Block, ...]) -> tuple[dict[str, int], ...] | None:
    """Match each anchor's spatial iterators with the output axes through the elementwise blocks between them.

    An iterator that meets no output axis (a branch axis, read at constant places) stays whole in every thread.
    """
    rank = len(info.outputs[0].extents)
    axes: tuple[dict[str, int], ...] = tuple({} for _ in range(rank))
    # Blocks on the way back to the anchors, with the output axis that each of their iterators follows.
    todo = [(output, tuple(range(rank))) for output in info.outputs]
    while todo:
        block, positions = todo.pop()
        for access in block.reads:
            producer = _producer(info, access, anchors)
            if producer is None:
                continue
            mapped = _through(access, producer, positions)
            if mapped is None or not (producer.is_reduction or producer.is_injective):
                return None
            if producer.is_injective:
                todo.append((producer, mapped))
                continue
            for number, axis in enumerate(mapped):
                if axis is not None and axes[axis].setdefault(producer.name, number) != number:
                    return None
    return axes


def _producer(info: Structure, access: Access, anchors: tuple[Block, ...]) -> Block | None:
    """The block that writes what is read, where an anchor is behind it."""
    names = {anchor.name for anchor in anchors}
    for block in info.blocks:
        if any(write.buffer == access.buffer for write in block.writes):
            return block if block.name in names or names & info.ancestors(block) else None
    return None


def _through(
    access: Access, producer: Block, positions: tuple[int | None, ...]
) -> tuple[int | None, ...] | None:
    """For each iterator of ``producer`` the output axis that it follows, None where it follows none."""
    write = next(w for w in producer.writes if w.buffer == access.buffer)
    mapped: list[int | None] = [None] * len(producer.extents)
    for dim, (number, used) in enumerate(zip(access.plain, access.indices, strict=True)):
        if number is None and used:
            return None
        target = write.plain[dim]
        if target is not None and number is not None:
            mapped[target] = positions[number]
    return tuple(mapped)


def problem(form: Contraction, sch: s_tir.Schedule) -> Problem:
    """Describe the largest anchor to the tile search."""
    anchor = max(form.anchors, key=lambda block: block.extent(range(len(block.extents))))
    extents = form.outputs[0].extents
    axis_of = {
        axes[anchor.name]: number for number, axes in enumerate(form.axes) if anchor.name in axes
    }
    copies = 0
    for block in form.anchors:
        whole = [i for i in block.spatial if i not in {axes.get(block.name) for axes in form.axes}]
        copies += block.extent(whole)
    operands = []
    for access in anchor.reads:
        dims = []
        for size, used in zip(access.shape, access.indices, strict=True):
            spatial = [axis_of[i] for i in used if i in axis_of]
            reduced = [i for i in used if i in anchor.reduced]
            dims.append((size, tuple(spatial), tuple(anchor.reduced.index(i) for i in reduced)))
        operands.append(Operand(tuple(dims), access.dtype))
    divisors = _divisors(sch, anchor)
    axes = tuple(
        Axis(extent, divisors.get(form.axes[number].get(anchor.name, -1)))
        for number, extent in enumerate(extents)
    )
    reduced = tuple(anchor.extents[i] for i in anchor.reduced)
    return Problem(axes, reduced, tuple(operands), copies, len(form.anchors))


def _divisors(sch: s_tir.Schedule, anchor: Block) -> dict[int, int]:
    """Iterators that an index divides, with the divisor: the output channels of a group of a grouped convolution."""
    block = sch.get(anchor.handle)
    numbers = {iter_var.var.__chandle__(): i for i, iter_var in enumerate(block.iter_vars)}
    found = {}
    for node in nodes_of(block.body, tirx.FloorDiv):
        if isinstance(node.a, tirx.Var) and isinstance(node.b, tirx.IntImm):
            found[numbers.get(node.a.__chandle__(), -1)] = int(node.b)
    return found


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
    base = s_tir.Schedule(func)
    form = recognise(base)
    if form is None:
        return None
    described = problem(form, base)
    if described.copies > ACCUMULATORS:
        return None
    for tile in tiles(described, bounds, _ATTEMPTS):
        sch = base.copy()
        fits = _schedule(sch, form, tile)
        if fits and shared_bytes(sch.mod["main"]) <= bounds.shared_bytes:
            return allow_registers(sch)
    return None


def _schedule(sch: s_tir.Schedule, form: Contraction, tile: Tile) -> bool:
    """Apply a tile; False when a slice has no constant size."""
    staged = {
        anchor.name: [
            (sch.cache_read(anchor.handle, index, "shared"), len(access.shape))
            for index, access in enumerate(anchor.reads)
        ]
        for anchor in form.anchors
    }
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
    for anchor in reversed(form.anchors):
        slices = _accumulate(sch, anchor, merged, tile)
        for copy, rank in staged[anchor.name]:
            if not copy_together(sch, copy, slices, tile.thread_count, rank):
                return False
        sch.decompose_reduction(anchor.handle, slices)
    return True


def _accumulate(sch: s_tir.Schedule, anchor: Block, thread, tile: Tile):
    """Move an anchor into the registers of a thread; return the loop over slices of the reduction."""
    block = anchor.handle
    sch.set_scope(block, 0, "local")
    sch.compute_at(block, thread, preserve_unit_loops=True)
    loops = sch.get_loops(block)[-len(anchor.extents) :]
    spatial = [loops[i] for i in anchor.spatial]
    outer, inner = [], []
    for number, step in zip(anchor.reduced, tile.steps, strict=True):
        part = sch.split(loops[number], [None, step])
        outer.append(part[0])
        inner.append(part[1])
    # The channels of a slice outside, the window inside: neighbours in a window share addresses.
    inner.sort(key=lambda loop: -int(sch.get(loop).extent))
    sch.reorder(*outer, *inner, *spatial)
    slices = outer[0] if len(outer) == 1 else sch.fuse(*outer)
    unroll(sch, spatial)
    body = tile.register_count
    for loop in reversed(inner):
        body *= int(sch.get(loop).extent)
        if body > _UNROLL:
            break
        sch.unroll(loop)
    return slices


def unroll(sch: s_tir.Schedule, loops: Iterable) -> None:
    """Unroll the loops over registers: an indexed register would live in memory."""
    for loop in loops:
        sch.unroll(loop)
