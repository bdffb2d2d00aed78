"""Tile sizes for a product whose rows stay in a thread block, with the model of ``tiles``.

Every thread has all rows of the block and some columns, so that a block reads each weight once; more rows in a block
mean fewer reads of the weights in all, fewer rows mean more blocks.
"""

from __future__ import annotations

import dataclasses
import functools
import heapq
from collections.abc import Iterator

from ..base import Limits
from .stage_costs import BARRIER, COPY, SHARED_LOAD, kernel_time, resident_blocks

#: Sums that a thread keeps.
_ACCUMULATORS = 64

#: Multiply-adds in the time of a load through the cache, of an element of a row in one of its stages, and of a
#: reduction across threads.
_CACHE_LOAD, _ELEMENT, _REDUCTION = 4.0, 6.0, 80.0

#: Bytes that a multiprocessor gets from the second-level cache in a cycle, in which it does 128 multiply-adds: when it
#: reads alone, and when all of them do.
_ALONE, _ALL = 64.0, 24.0

#: Cycles until a load from there arrives.
_CYCLES = 600.0

#: Weights that a thread holds, so that many loads are under way, and loads of a thread while it fills shared memory.
_BATCH, COPIES = 32, 8

#: The widest load of a thread.
_VECTOR_BYTES = 16


@dataclasses.dataclass(frozen=True)
class RowProblem:
    """What the tile search knows.

    Parameters
    ----------
    rows, outer : int
        Extent of the last row axis, which is tiled, and of all others together, which go to the grid.
    columns, depth : int
        Columns of the product, and products in a sum.
    reductions : int
        Reductions of a row.
    shares_weight : bool
        Whether neighbouring rows use the same weights.
    is_contiguous : bool
        Whether neighbouring columns of the weight are neighbours in memory.
    row_bytes, left_bytes, right_bytes : int
        Bytes of an element of the staged rows and of the product's operands.
    """

    rows: int
    outer: int
    columns: int
    depth: int
    reductions: int
    shares_weight: bool
    is_contiguous: bool
    row_bytes: int
    left_bytes: int
    right_bytes: int


@dataclasses.dataclass(frozen=True)
class RowTile:
    """A choice.

    Parameters
    ----------
    rows : int
        Rows of a block.
    threads : tuple of (int, int)
        Rows that are reduced at a time, and threads of each; the product uses all threads for columns.
    columns : int
        Neighbouring chunks of columns of which a thread has one element each.
    step : int
        Part of the sum whose operands are staged at a time.
    stages_right : bool
        Whether the weights go through shared memory.
    nbytes : int
        Estimated shared memory.
    """

    rows: int
    threads: tuple[int, int]
    columns: int
    step: int
    stages_right: bool
    nbytes: int

    @property
    def batch(self) -> int:
        """Products of a sum whose weights a thread reads before it uses the first."""
        return max(
            1, min(16, _BATCH // self.columns, 4 * _ACCUMULATORS // (self.rows * self.columns))
        )


@functools.lru_cache(maxsize=256)
def row_tiles(
    problem: RowProblem, bounds: Limits, reserved: int, count: int = 6
) -> tuple[RowTile, ...]:
    """Return the best tiles whose estimated shared memory fits, best first.

    Parameters
    ----------
    problem : RowProblem
        The product and its rows.
    bounds : Limits
        Limits of the target.
    reserved : int
        Bytes of shared memory to leave free.
    count : int
        How many to return at most.
    """
    scored = [
        (_cost(problem, tile, bounds), number, tile)
        for number, tile in enumerate(_candidates(problem, bounds))
        if tile.nbytes + reserved <= bounds.shared_bytes
    ]
    return tuple(tile for _, _, tile in heapq.nsmallest(count, scored))


def _candidates(problem: RowProblem, bounds: Limits) -> Iterator[RowTile]:
    most = min(bounds.threads, 512)
    vectors = [
        size
        for size in (1, 2, 4, 8)
        if problem.columns % size == 0 and size * problem.right_bytes <= _VECTOR_BYTES
    ]
    for rows in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32):
        if rows > 1 and (rows >= 2 * problem.rows or not problem.shares_weight):
            break
        for height in (h for h in range(1, min(rows, 16) + 1) if rows % h == 0):
            for width in (32, 64, 96, 128, 192, 256, 384, 512):
                threads = height * width
                for columns in vectors:
                    fits = 64 <= threads <= most and rows * columns <= _ACCUMULATORS
                    if fits and (columns == 1 or threads * columns < 2 * problem.columns):
                        yield from _steps(problem, rows, (height, width), columns)


def _steps(
    problem: RowProblem, rows: int, threads: tuple[int, int], columns: int
) -> Iterator[RowTile]:
    whole = rows * problem.columns * problem.row_bytes
    chunk = min(columns * threads[0] * threads[1], problem.columns) + 2 * columns
    for step in (64, 32, 16, 8):
        if step >= 2 * problem.depth and step > 8:
            continue
        left = rows * min(step, problem.depth) * problem.left_bytes
        right = chunk * min(step, problem.depth) * problem.right_bytes
        if problem.is_contiguous:
            yield RowTile(rows, threads, columns, step, False, whole + left)
        else:
            yield RowTile(rows, threads, columns, step, True, whole + left + right)


def _cost(problem: RowProblem, tile: RowTile, bounds: Limits) -> float:
    """Estimated time in arbitrary units."""
    height, width = tile.threads
    threads = height * width
    chunks = -(-problem.columns // (tile.columns * threads))
    slices = -(-problem.depth // tile.step)
    loads = SHARED_LOAD * tile.rows
    loads += (SHARED_LOAD if tile.stages_right else _CACHE_LOAD) * (1 + tile.columns) / 2
    copied = tile.rows * (1 + 8 / tile.step)
    if tile.stages_right:
        copied += min(tile.columns * threads, problem.columns) * (1 + 8 / tile.step)
    work = problem.depth * (tile.rows * tile.columns + loads)
    work += slices * (COPY * tile.step * copied / threads + BARRIER)
    serial = tile.rows // height
    stage = -(-problem.columns // width) * _ELEMENT * (problem.reductions + 1)
    per_thread = chunks * work + serial * (stage + _REDUCTION * problem.reductions)
    blocks = problem.outer * -(-problem.rows // tile.rows)
    # Every block reads the whole weight, from the second-level cache.
    resident = resident_blocks(threads, tile.nbytes, bounds)
    together = -(-min(blocks, bounds.multiprocessors * resident) // bounds.multiprocessors)
    held = COPIES if tile.stages_right else tile.batch * tile.columns
    under_way = together * threads * held * problem.right_bytes
    share = _ALL * bounds.multiprocessors / min(blocks, bounds.multiprocessors)
    rate = min(_ALONE, share, under_way / _CYCLES)
    weight = problem.columns * problem.depth * problem.right_bytes
    return kernel_time(per_thread, blocks, threads, tile.nbytes, bounds, weight / rate)
