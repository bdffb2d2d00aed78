"""Reductions whose stages share their rows: one kernel in which a thread block owns whole rows.

``softmax``, ``layer_norm``, means and matrix-vector products all read a row, reduce it once or several times, and
write a row or a number. All stages are moved under one loop over rows, their reductions run across threads, and what
a stage hands to the next stays in shared memory.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from ...compat import s_tir, tirx
from ..allocation import shared_bytes
from ..analysis import Block, Structure, axis_classes, dtype_bytes, structure
from ..base import Limits
from ..steps import fuse_loops, inline_injective, isolate_outputs

#: Threads that keep a multiprocessor busy when each handles a few elements.
_THREADS = 256

#: Elements that one thread should reduce before a second one helps; below that the exchange costs more.
_PER_THREAD = 4


@dataclasses.dataclass(frozen=True)
class Rows:
    """A function in row form.

    Parameters
    ----------
    info : Structure
        Its structure after inlining.
    row_iters : dict of str to tuple of int
        Per block the iterators that walk rows, in the same order everywhere.
    row_count, length : int
        Number of rows, and elements reduced per row (of the longest reduction).
    across : bool
        Whether neighbouring addresses belong to neighbouring rows rather than to one row.
    classes : dict of (block name, iterator number) to int
        Iterators that walk the same axis have the same number.
    """

    info: Structure
    row_iters: dict[str, tuple[int, ...]]
    row_count: int
    length: int
    across: bool
    classes: dict[tuple[str, int], int]


def recognise(sch: s_tir.Schedule, bounds: Limits) -> Rows | None:
    """Bring a function into row form, inlining what is cheap to compute again.

    Returns
    -------
    Rows or None
        None when the reductions do not share their rows.
    """
    info = structure(sch)
    if info is None or not (info.is_static and info.is_regular) or not info.reductions:
        return None
    if any(block.has_window for block in info.reductions):
        return None
    info = isolate_outputs(sch)
    staged = _worth_staging(info, bounds)
    info = inline_injective(sch, keep=staged)
    if any(not (b.is_reduction or b.is_output or b.name in staged) for b in info.blocks):
        return None
    return rows_of(info, info.blocks)


def _worth_staging(info: Structure, bounds: Limits) -> set[str]:
    """Elementwise blocks that several stages read, computed from more than parameters alone or from several of them.

    A copy of a parameter is not worth shared memory: its second read comes from the cache.
    """
    found: set[str] = set()
    room = bounds.shared_bytes // 2
    reduced = max(block.extent(block.reduced) for block in info.reductions)
    for block in info.blocks:
        if not block.is_injective or block.is_output or len(info.consumers(block)) < 2:
            continue
        row = reduced * dtype_bytes(block.writes[0].dtype)
        whole = max(r.extent(range(len(r.extents))) for r in info.reductions)
        if block.extent(range(len(block.extents))) == whole and row <= room:
            room -= row
            found.add(block.name)
    return found


def rows_of(info: Structure, blocks: Sequence[Block]) -> Rows | None:
    """Find the rows that blocks share.

    Parameters
    ----------
    info : Structure
        The function.
    blocks : sequence of Block
        Blocks of it in program order: at least one reduction, and the outputs last.

    Returns
    -------
    Rows or None
        None when the reductions do not share their rows.
    """
    names = [block.name for block in blocks]
    classes = axis_classes(info, names, through_params=True) or axis_classes(info, names)
    # A function has lost its output to inlining where that depends on no input any more.
    if classes is None or not info.outputs:
        return None

    def wide(block: Block, numbers) -> list[int]:
        return [classes[block.name, i] for i in numbers if block.extents[i] != 1]

    first = next(block for block in blocks if block.is_reduction)
    last = info.outputs[0]
    row_set = set(wide(first, first.spatial))
    # The order of the output's axes, which is the order in memory.
    row_order = [label for label in wide(last, last.spatial) if label in row_set]
    for block in blocks:
        spatial = set(wide(block, block.spatial))
        if block.is_reduction and (spatial != row_set or row_set & set(wide(block, block.reduced))):
            return None
        if not row_set <= spatial:
            return None
    row_iters = {
        block.name: tuple(
            next(
                i
                for i in block.spatial
                if classes[block.name, i] == label and block.extents[i] != 1
            )
            for label in row_order
        )
        for block in blocks
    }
    if not first.reads:  # sums of a number: integers times 0 are no reads
        return None
    source = max(first.reads, key=lambda access: access.nbytes)
    innermost = [used for used, size in zip(source.indices, source.shape, strict=True) if size != 1]
    across = bool(innermost) and not any(i in first.reduced for i in innermost[-1])
    count = first.extent(row_iters[first.name])
    length = max(block.extent(block.reduced) for block in blocks)
    return Rows(info, row_iters, count, length, across, classes)


def apply_rows(func: tirx.PrimFunc, bounds: Limits) -> s_tir.Schedule | None:
    """Schedule a function of row form.

    Parameters
    ----------
    func : tirx.PrimFunc
        The function.
    bounds : Limits
        Limits of the target.

    Returns
    -------
    s_tir.Schedule or None
        None when the function has another form.
    """
    sch = s_tir.Schedule(func)
    rows = recognise(sch, bounds)
    if rows is None:
        return None
    if rows.across:
        _schedule(sch, rows, *_threads_across(rows, bounds), across=True)
    else:
        _schedule(sch, rows, *_threads_along(rows, bounds), across=False)
    return sch if shared_bytes(sch.mod["main"]) <= bounds.shared_bytes else None


def _threads_along(rows: Rows, bounds: Limits) -> tuple[int, int]:
    """Rows of a block and threads of a row, where a row is contiguous: whole warps, several rows if they are short."""
    most = min(bounds.threads, 2 * _THREADS)
    threads = bounds.warp
    while threads * 2 <= most and threads * _PER_THREAD < rows.length:
        threads *= 2
    return _divisor(rows.row_count, max(1, _THREADS // threads // 2)), threads


def _threads_across(rows: Rows, bounds: Limits) -> tuple[int, int]:
    """Rows of a block and threads of a row, where neighbouring rows are neighbours in memory."""
    width = _divisor(rows.row_count, 2 * bounds.warp)
    if width < bounds.warp // 2:
        # No good divisor: the last block is partly idle, and a row has one thread, because an exchange between
        # threads must not sit under a condition.
        return (
            (min(2 * bounds.warp, rows.row_count), 1)
            if rows.row_count > 1
            else (1, bounds.threads // 4)
        )
    blocks = rows.row_count // width
    threads = 1
    most = min(bounds.threads, 1024) // width
    while threads * 2 <= most and threads * 2 * _PER_THREAD <= rows.length:
        if (
            threads * width >= 128
            and blocks * threads * width >= bounds.multiprocessors * 2 * _THREADS
        ):
            break
        threads *= 2
    return width, threads


def _divisor(number: int, most: int) -> int:
    return max(d for d in range(1, most + 1) if number % d == 0)


def _schedule(sch: s_tir.Schedule, rows: Rows, height: int, threads: int, *, across: bool) -> None:
    row_tag, column_tag = (
        ("threadIdx.x", "threadIdx.y") if across else ("threadIdx.y", "threadIdx.x")
    )
    nests = []
    for output in rows.info.outputs:
        row, column = _row_and_column(sch, output, rows)
        _, inner = sch.split(row, [None, height])
        _, lane = sch.split(column, [None, threads])
        sch.bind(lane, column_tag)
        nests.append(inner)
    inner = sch.merge(*nests) if len(nests) > 1 else nests[0]
    for block in reversed(rows.info.blocks):
        if block.is_output:
            continue
        sch.compute_at(block.handle, inner, preserve_unit_loops=True)
        loops = sch.get_loops(block.handle)[-len(block.extents) :]
        spread = loops
        if block.is_reduction:
            spread = [loops[i] for i in block.reduced]
            sch.reorder(*[loops[i] for i in block.spatial], *spread)
        _, lane = sch.split(fuse_loops(sch, spread), [None, threads])
        sch.bind(lane, column_tag)
    # Scopes and the threads of the rows come last: compute_at would make every thread compute the rows of all.
    # A reduction ends with its result in every thread, so that each keeps its own copy; in shared memory, TVM 0.27
    # would leave out the barrier before a result that it takes for the thread's own (index by one of two threads).
    for block in rows.info.blocks:
        if not block.is_output:
            for index in range(len(block.writes)):
                sch.set_scope(block.handle, index, "local" if block.is_reduction else "shared")
    sch.bind(sch.get_loops(rows.info.outputs[0].handle)[0], "blockIdx.x")
    sch.bind(inner, row_tag)


def _row_and_column(sch: s_tir.Schedule, output: Block, rows: Rows):
    """Reorder an output's loops to rows and the rest, each fused to one loop (a unit loop where there are none)."""
    loops = list(sch.get_loops(output.handle)) or [sch.add_unit_loop(output.handle)]
    inside = [loops[i] for i in rows.row_iters[output.name]]
    outside = [loop for i, loop in enumerate(loops) if i not in rows.row_iters[output.name]]
    if not outside:
        outside = [sch.add_unit_loop(output.handle)]
    if not inside:
        inside = [sch.add_unit_loop(outside[0])]
    sch.reorder(*inside, *outside)
    return fuse_loops(sch, inside), fuse_loops(sch, outside)
