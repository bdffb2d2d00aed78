"""Tiles of tensor-core kernels whose rows are reduced, and what the reductions add to a product's time.

Whole rows have to be in reach of each other: in one block, or, where the chip has them, in the blocks of a cluster,
each of which has some of the columns. The size of a cluster follows from a tile's columns.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools

import numpy as np

from ..devices import DeviceSpec
from .clusters import most_blocks, reached, spread_bytes
from .fastest import fastest
from .tensor_tiles import (
    COLUMNS,
    FEW_BLOCKS,
    FRAGMENTS,
    RATES,
    ROWS,
    STEP,
    Choice,
    Problem,
    Tile,
    microseconds_of,
    resident_blocks,
)

#: Accumulators of a thread, so that what the stages keep and read fits beside them; half with more than 256 threads.
_SUMS = 96

#: Most columns and threads of a block.
_MOST_COLUMNS, _MOST_THREADS = 1024, 512


@dataclasses.dataclass(frozen=True)
class RowProblem:
    """What the search knows of a function: products whose rows are reduced before the outputs.

    Attributes
    ----------
    product : Problem
        The products.
    length : int
        Columns of a row that is reduced; the product's columns are one or several rows of this length.
    reductions : int
        How often it is reduced.
    """

    product: Problem
    length: int
    reductions: int

    @property
    def segments(self) -> int:
        """Rows that are reduced of each row of the product."""
        return self.product.columns // self.length


@dataclasses.dataclass(frozen=True)
class RowRates:
    """Constants of the model beside those of products, in cycles.

    ``among_blocks``, ``part`` and ``cluster`` were fitted to 58 kernels of five problems on an H200: mean deviation of
    the time 7 %, at most 18 % for tiles within a tenth of the best. None of them has whole rows in a block.

    Attributes
    ----------
    among_blocks, among_warps, among_lanes : float
        An exchange of partial results by blocks of a cluster, warps of a block and lanes of a warp.
    part : float
        Each partial result that goes to a block of a cluster: a store of four bytes to another block's shared memory.
    element : float
        A stage's arithmetic for an accumulator, of 128 threads each.
    cluster : float
        What the start of a cluster takes longer than that of blocks.
    """

    among_blocks: float = 805.0
    among_warps: float = 120.0
    among_lanes: float = 60.0
    part: float = 1.41
    element: float = 5.0
    cluster: float = 349.0


ROW_RATES = RowRates()


@functools.lru_cache(maxsize=1024)
def best_row_tiles(problem: RowProblem, device: DeviceSpec, count: int = 1) -> tuple[Choice, ...]:
    """Return the tiles of least predicted time, best first; none where a row does not fit.

    Parameters
    ----------
    problem : RowProblem
        The function.
    device : DeviceSpec
        The device.
    count : int
        How many at most.
    """
    size = problem.product.element_bytes
    tiles = _tiles(problem.length, problem.segments, most_blocks(device), size)
    tiles = tiles[_fits(problem, device, tiles.T)]
    if not len(tiles):
        return ()
    times = _microseconds(problem, device, tiles.T)
    order = fastest(tiles, times, count)
    return tuple(Choice(Tile(*map(int, tiles[i])), float(times[i])) for i in order)


@functools.lru_cache(maxsize=256)
def _tiles(length: int, segments: int, blocks: int, element_bytes: int) -> np.ndarray:
    """Every tile whose columns, times at most so many blocks, cover a row."""
    found = []
    for cluster, warp_columns in itertools.product(range(1, blocks + 1), (1, 2, 3, 4, 6, 8)):
        step = 16 * warp_columns
        columns = -(-length // (cluster * step)) * step
        divides = length % columns == 0 or segments == 1
        if columns > _MOST_COLUMNS or -(-length // columns) != cluster or not divides:
            continue
        for rows, warp_rows, warp_depth in itertools.product(
            (16, 32, 64, 128), (1, 2, 4, 8), (1, 2, 4)
        ):
            threads = 32 * warp_rows * warp_columns * warp_depth
            # Warps that share the reduction divide its rows among them, then its columns.
            among = max(1, warp_depth * ROWS * warp_rows // (2 * rows))
            if not 64 <= threads <= _MOST_THREADS or rows % (ROWS * warp_rows):
                continue
            if columns > 8 * threads or (columns // warp_columns // COLUMNS) % among:
                continue
            for nbytes, stages in itertools.product((64, 128, 256), (2, 3, 4, 6)):
                if (nbytes // STEP) % warp_depth == 0:
                    depth = nbytes // element_bytes
                    found.append(
                        (rows, columns, depth, warp_rows, warp_columns, warp_depth, stages)
                    )
    return np.array(found, dtype=np.int64).reshape(-1, 7)


def _fits(problem: RowProblem, device: DeviceSpec, tiles: np.ndarray) -> np.ndarray:
    rows, columns, depth, warp_rows, warp_columns, warp_depth, _ = tiles
    product = problem.product
    threads = 32 * warp_rows * warp_columns * warp_depth
    row_fragments, column_fragments = rows // warp_rows // ROWS, columns // warp_columns // COLUMNS
    sums = 4 * row_fragments * column_fragments * sum(product.copies)
    most = np.where(threads > 256, _SUMS // 2, _SUMS)
    covering = max(ROWS, 1 << max(0, (product.rows - 1).bit_length()))
    return (
        (rows <= covering)
        & (sums <= most)
        & (4 * row_fragments + 2 * column_fragments <= FRAGMENTS)
        & ((depth == 64 // product.element_bytes) | (depth <= 2 * max(product.depths)))
        & (_shared_bytes(problem, tiles) <= device.shared_memory_per_block_optin)
        & (threads <= device.max_threads_per_block)
    )


def _parts(problem: RowProblem, tiles: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Partial results of a row, and blocks that share it."""
    rows, columns, _, warp_rows, warp_columns, warp_depth, _ = tiles
    among = np.maximum(1, warp_depth * ROWS * warp_rows // (2 * rows))
    blocks = -(-problem.length // columns)
    return warp_columns * among * blocks, blocks


def _grid(problem: RowProblem, tiles: np.ndarray) -> np.ndarray:
    """Blocks of a kernel."""
    _, blocks = _parts(problem, tiles)
    return -(-problem.product.rows // tiles[0]) * problem.segments * problem.product.batch * blocks


def _shared_bytes(problem: RowProblem, tiles: np.ndarray) -> np.ndarray:
    rows, columns, depth, _, _, warp_depth, stages = tiles
    total = sum(problem.product.copies)
    size = problem.product.element_bytes
    ring = stages * size * depth * (rows + max(problem.product.copies) * columns)
    met = np.where(warp_depth > 1, 4 * warp_depth * rows * columns * total, 0)
    parts, _ = _parts(problem, tiles)
    places = np.where(parts > 1, 4 * rows * (-(-parts // 4) * 4), 0)
    return -(-np.maximum(ring, met) // 16) * 16 + problem.reductions * places


def _microseconds(
    problem: RowProblem, device: DeviceSpec, tiles: np.ndarray, rates: RowRates = ROW_RATES
) -> np.ndarray:
    """Predicted time of each tile."""
    rows, columns = tiles[0], tiles[1]
    parts, blocks = _parts(problem, tiles)
    resident = resident_blocks(problem.product, device, tiles)
    busy = reached(device, resident, blocks)
    share = np.ceil(_grid(problem, tiles) / busy)
    waves = np.ceil(share / np.minimum(share, resident))
    exchange = np.where(
        blocks > 1, rates.among_blocks, np.where(parts > 1, rates.among_warps, rates.among_lanes)
    )
    start = np.where(blocks > 1, rates.cluster, 0.0)
    sent = np.where(blocks > 1, rates.part * rows * parts, 0.0)
    element = rates.element * rows * columns / 128
    work = problem.reductions * sent + (problem.reductions + 1) * element
    cycles = waves * (start + problem.reductions * exchange) + share * work
    product = microseconds_of(problem.product, device, tiles, RATES, busy)
    return product + cycles / RATES.clock


def predict_rows(problem: RowProblem, device: DeviceSpec, tile: Tile) -> float:
    """Predicted time of one tile in microseconds, launch included."""
    return float(_microseconds(problem, device, _one(tile))[0])


def row_tile_bytes(problem: RowProblem, tile: Tile) -> int:
    """Shared memory of a block."""
    return int(_shared_bytes(problem, _one(tile))[0])


def requested_row_bytes(problem: RowProblem, tile: Tile, device: DeviceSpec) -> int:
    """Shared memory that a block asks for, so that blocks spread evenly (`clusters.spread_bytes`).

    Tuning on an H200: 7.0 to 8.7 microseconds with room for two blocks where each multiprocessor's share is one, 6.3 to
    6.7 for the same tiles with more stages, which leave room for one.
    """
    cluster = -(-problem.length // tile.columns)
    needed, blocks = row_tile_bytes(problem, tile), row_blocks(problem, tile)
    return spread_bytes(device, needed, blocks, cluster, FEW_BLOCKS)


def row_blocks(problem: RowProblem, tile: Tile) -> int:
    """Blocks of a kernel."""
    return int(_grid(problem, _one(tile))[0])


def _one(tile: Tile) -> np.ndarray:
    return np.array([dataclasses.astuple(tile)[:7]], dtype=np.int64).T
