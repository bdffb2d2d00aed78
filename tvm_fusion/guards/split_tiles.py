"""Tiles whose reduction several blocks share, for problems with fewer tiles than multiprocessors.

The blocks of a cluster each take a slice of the reduction. Their sums meet in each other's shared memory, where every
block adds up and finishes a part of the tile. The time is that of a problem with a shorter reduction and as many more
outputs, and what the cluster takes besides. Warps of one block share a reduction on all chips (``warp_depth``).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import numpy as np

from ..devices import DeviceSpec
from . import fma_model, fma_tiles, tensor_tiles, warpgroup_tiles
from .clusters import most_blocks, reached
from .fastest import fastest
from .tensor_rows import ROW_RATES
from .tensor_tiles import COLUMNS, ROWS

#: Blocks that share a reduction. Every size leaves whole clusters in a group of 16 multiprocessors.
SLICES = (2, 4, 8)

#: Bytes of shared memory that the driver keeps for itself in each block, and registers of a thread at most.
_RESERVED, _REGISTERS = 1024, 256


@dataclasses.dataclass(frozen=True)
class SplitRates:
    """Constants of the model, in cycles of a multiprocessor.

    Checked on 431 kernels of 26 problems on an H200 that overlap with their predecessor, with 1, 2, 4 and 8 slices
    (benchmarks/NOTES.md): mean deviation 9 %. Of the problems that are split, all 14 are faster for it, by 1 to 47 %.

    Attributes
    ----------
    cluster, exchange : float
        What the start of a cluster takes longer than that of blocks, and its barriers with the way of a number from one
        block to another: those of rows that are spread over a cluster (`tensor_rows.RowRates`, measured on an H200).
        Fitted again to splits alone, their sum is 1200 instead of 1154.
    sent : float
        Bytes a cycle that a multiprocessor sends to others. An H100's reach 3.3 TB/s together in clusters of two blocks
        and 2.7 TB/s in clusters of four, 14 and 11 bytes a cycle each (arXiv 2402.13499); fitted to splits: 14.
    margin : float
        Share of the time without clusters below which a split comes first. What the model put closer together could
        not be told apart.
    """

    cluster: float = ROW_RATES.cluster
    exchange: float = ROW_RATES.among_blocks
    sent: float = 14.0
    margin: float = 0.97


SPLIT_RATES = SplitRates()


@dataclasses.dataclass(frozen=True)
class _Tiles:
    """Tiles of one kind that are possible for a sliced problem, each field an array.

    Attributes
    ----------
    fields : array
        One tile a row.
    rows, columns, warp_depth, threads : array
        Sizes of a block.
    units : array
        Pieces of a thread's sums that blocks can finish apart.
    ring : array
        Shared memory of the tiles of the operands.
    store : array
        Cycles to store all outputs of a block, of which each block stores its share.
    times : callable
        From multiprocessors to the predicted time of each.
    make : callable
        From a row and the number of slices to the tile.
    clock : float
        Cycles in a microsecond.
    """

    fields: np.ndarray
    rows: np.ndarray
    columns: np.ndarray
    warp_depth: np.ndarray
    threads: np.ndarray
    units: np.ndarray
    ring: np.ndarray
    store: np.ndarray
    times: Callable[[np.ndarray], np.ndarray]
    make: Callable[[np.ndarray, int], tensor_tiles.Tile | fma_tiles.Tile]
    clock: float


def split_tiles(problem: tensor_tiles.Problem, device: DeviceSpec, count: int = 1) -> tuple:
    """Return the split tiles for ``mma.sync`` of least predicted time, best first; none without clusters."""
    return _search(problem, device, count, _mma, sum(problem.copies))


def split_warpgroup_tiles(
    problem: tensor_tiles.Problem, device: DeviceSpec, count: int = 1
) -> tuple:
    """Return the split tiles for warpgroup instructions of least predicted time, best first."""
    if not warpgroup_tiles.is_possible(problem, device):
        return ()
    return _search(problem, device, count, _warpgroup, sum(problem.copies))


@functools.lru_cache(maxsize=4096)
def best_choices(
    problem: tensor_tiles.Problem,
    device: DeviceSpec,
    count: int = 1,
    warpgroups: bool = True,
    clusters: bool = True,
) -> tuple[tensor_tiles.Choice, ...]:
    """Return the tiles of least predicted time, best first.

    Parameters
    ----------
    problem : Problem
        The function.
    device : DeviceSpec
        The device.
    count : int
        How many at most.
    warpgroups : bool
        Whether instructions of one chip alone may be used.
    clusters : bool
        Whether blocks may share a reduction; they do where that is faster by the margin of `SplitRates`.
    """
    search = warpgroup_tiles.best_choices if warpgroups else tensor_tiles.best_tiles
    found = search(problem, device, count)
    if not clusters or not found:
        return found
    split = split_tiles(problem, device, count)
    if warpgroups:
        split += split_warpgroup_tiles(problem, device, count)
    return _merged(found, split, count)


@functools.lru_cache(maxsize=4096)
def best_fma_choices(
    problem: fma_tiles.Problem, device: DeviceSpec, count: int = 1, clusters: bool = True
) -> tuple[fma_model.Choice, ...]:
    """Return the tiles of least predicted time of float32 multiply-adds, best first; see `best_choices`."""
    found = fma_model.best_tiles(problem, device, count)
    if not clusters or not found:
        return found
    return _merged(found, _search(problem, device, count, _fma, sum(problem.sums)), count)


def _merged(whole: tuple, split: tuple, count: int) -> tuple:
    """All tiles, best first; the first one is split only where the margin allows it."""
    found = sorted([*whole, *split], key=lambda choice: (choice.microseconds, choice.tile))
    if found[0].microseconds >= SPLIT_RATES.margin * whole[0].microseconds:
        found.remove(whole[0])
        found.insert(0, whole[0])
    return tuple(found[:count])


def _search(problem, device: DeviceSpec, count: int, kind: Callable, sums: int) -> tuple:
    """The best split tiles of one kind, for a problem with so many sums per output."""
    choices = []
    for slices in SLICES:
        if slices > most_blocks(device):
            break
        tiles = kind(sliced(problem, slices), device, slices)
        times = split_microseconds(problem, device, tiles, slices, sums)
        order = fastest(tiles.fields, times, count)
        best = [i for i in order if np.isfinite(times[i])]
        choice = fma_model.Choice if kind is _fma else tensor_tiles.Choice
        choices += [choice(tiles.make(tiles.fields[i], slices), float(times[i])) for i in best]
    return tuple(sorted(choices, key=lambda choice: (choice.microseconds, choice.tile))[:count])


def sliced(problem, slices: int):
    """The problem of blocks that share a reduction: each has a slice of it, and there are as many more outputs."""
    depths = tuple(-(-depth // slices) for depth in problem.depths)
    return dataclasses.replace(problem, batch=problem.batch * slices, depths=depths)


def split_microseconds(
    problem, device: DeviceSpec, tiles: _Tiles, slices: int, sums: int, rates=SPLIT_RATES
) -> np.ndarray:
    """Predicted time of each tile; infinite where it is not possible or more blocks than there is room for at once."""
    lines = [problem.rows, problem.columns]
    down, across = (getattr(side, "count", side) for side in lines)
    blocks = -(-down // tiles.rows) * -(-across // tiles.columns) * problem.batch * slices
    met = 4 * tiles.rows * tiles.columns * sums
    own = np.maximum(tiles.ring, np.where(tiles.warp_depth > 1, tiles.warp_depth * met, 0))
    shared = own + met
    resident = np.minimum(
        device.shared_memory_per_multiprocessor // (shared + _RESERVED),
        device.registers_per_multiprocessor // (_REGISTERS * tiles.threads),
    )
    resident = np.maximum(1, resident)
    busy = reached(device, resident, slices)
    share = np.ceil(blocks / busy)
    possible = (
        (share <= resident)
        & (shared <= device.shared_memory_per_block_optin)
        & (tiles.units % slices == 0)
    )
    cycles = rates.cluster + rates.exchange + share * met / rates.sent
    cycles = cycles - tiles.store * (1 - 1 / slices)
    return np.where(possible, tiles.times(busy) + cycles / tiles.clock, np.inf)


def _mma(problem: tensor_tiles.Problem, device: DeviceSpec, _: int) -> _Tiles:
    tiles = tensor_tiles.all_tiles(problem.element_bytes)
    tiles = tiles[tensor_tiles.fits(problem, device, tiles.T)]
    rates = tensor_tiles.RATES
    return _tensor(
        problem, tiles, 0, rates,
        lambda busy: tensor_tiles.microseconds_of(problem, device, tiles.T, rates, busy),
    )  # fmt: skip


def _warpgroup(problem: tensor_tiles.Problem, device: DeviceSpec, _: int) -> _Tiles:
    tiles = warpgroup_tiles.all_tiles()
    tiles = tiles[warpgroup_tiles.fits(problem, device, tiles.T)]
    rates = warpgroup_tiles.RATES
    return _tensor(
        problem, tiles, warpgroup_tiles.ALIGNMENT, rates,
        lambda busy: warpgroup_tiles.microseconds_of(problem, device, tiles.T, rates, busy),
    )  # fmt: skip


def _tensor(problem, tiles: np.ndarray, aligned: int, rates, times: Callable) -> _Tiles:
    rows, columns, depth, warp_rows, warp_columns, warp_depth, stages = tiles.T
    fragments = (rows // warp_rows // ROWS) * (columns // warp_columns // COLUMNS)
    lines = rows + max(problem.copies) * columns
    ring = stages * problem.element_bytes * depth * lines + aligned

    def make(fields: np.ndarray, slices: int) -> tensor_tiles.Tile:
        return tensor_tiles.Tile(*map(int, fields), warpgroup=aligned > 0, slices=slices)

    threads = 32 * warp_rows * warp_columns * warp_depth
    store = 4 * fragments * sum(problem.copies) * rates.store
    return _Tiles(
        tiles, rows, columns, warp_depth, threads, 2 * fragments, ring, store, times, make,
        rates.clock,
    )  # fmt: skip


def _fma(problem: fma_tiles.Problem, device: DeviceSpec, slices: int) -> _Tiles:
    tiles = fma_model.all_tiles()
    tiles = tiles[fma_model.fits(problem, device, fma_model.Columns(tiles))]
    fields, rates = fma_model.Columns(tiles), fma_model.RATES

    def make(fields: np.ndarray, slices: int) -> fma_tiles.Tile:
        return fma_tiles.Tile(*map(int, fields), slices=slices)

    return _Tiles(
        tiles, fields.rows, fields.columns, fields.warp_depth, fma_tiles.WARP * fields.warps,
        fields.thread_rows * (fields.thread_columns // fma_tiles.VECTOR),
        fields.stages * fields.stage_bytes(problem),
        fields.thread_rows * fields.thread_columns * rates.store,
        lambda busy: fma_model.microseconds_of(problem, device, fields, rates, busy, slices),
        make, rates.clock,
    )  # fmt: skip
