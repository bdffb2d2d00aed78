"""Tiles of kernels with Hopper's warpgroup instructions, their time, and the choice between them and ``mma.sync``."""

from __future__ import annotations

import dataclasses
import functools
import itertools

import numpy as np

from ..devices import DeviceSpec
from .fastest import fastest
from .tensor_tiles import RATES as MMA_RATES
from .tensor_tiles import Choice, Problem, Tile, best_tiles

#: The arch that has them: neither earlier nor later ones do.
ARCH = "sm_90"

#: Rows of an instruction and its warps, elements of the reduction of a tile, and what shared memory is aligned to.
ROWS, WARPS, DEPTH, ALIGNMENT = 64, 4, 64, 1024

#: Most accumulators of a thread, and least columns of a warpgroup where several share a tile's rows: each reads the
#: rows again.
_SUMS, _LEAST_COLUMNS = 128, 64

#: Registers for addresses and the epilogue.
_ADDRESSES = 48


@dataclasses.dataclass(frozen=True)
class Rates:
    """Constants of the model, in cycles of a multiprocessor; see `tensor_tiles.Rates`.

    Fitted to 56 kernels of 11 problems on an H200 that overlap with their predecessor (mean deviation 6 %).

    Attributes
    ----------
    together : float
        What is added to ``overlap`` where two or more blocks share a multiprocessor: one copies while another
        multiplies.
    """

    products: float = 1648.0
    shared: float = 138.7
    cache: float = 76.9
    overlap: float = 2.13
    together: float = 1.45
    step: float = 176.7
    copy: float = 4.4
    product: float = 0.16
    latency: float = 625.0
    start: float = 828.0
    drain: float = 0.34
    store: float = 8.6
    clock: float = 1750.0


RATES = Rates()


@functools.cache
def all_tiles() -> np.ndarray:
    """Every tile that any problem may take, one a row, in the order of the fields of `Tile`."""
    found = []
    for groups, columns, warp_columns, stages in itertools.product(
        (1, 2), (16, 32, 48, 64, 96, 128, 192, 256), (1, 2), (3, 4, 6)
    ):
        share = columns // warp_columns
        if columns % (8 * warp_columns) or (warp_columns > 1 and share < _LEAST_COLUMNS):
            continue
        found.append((ROWS * groups, columns, DEPTH, WARPS * groups, warp_columns, 1, stages))
    return np.array(found, dtype=np.int64)


def is_possible(problem: Problem, device: DeviceSpec) -> bool:
    """Whether a chip has the instructions, and they take a problem's operands."""
    if problem.element_bytes != 2:  # it would read operands that nothing has rounded
        return False
    rows_suffice = problem.rows > ROWS // 4
    return device.arch.rstrip("a") == ARCH and problem.reduction_inner and rows_suffice


def warpgroup_tiles(problem: Problem, device: DeviceSpec, count: int = 1) -> tuple[Choice, ...]:
    """Return the warpgroup tiles of least predicted time, best first; none where the instructions do not fit."""
    if not is_possible(problem, device):
        return ()
    tiles = all_tiles()
    tiles = tiles[fits(problem, device, tiles.T)]
    if not len(tiles):
        return ()
    times = microseconds_of(problem, device, tiles.T, RATES)
    order = fastest(tiles, times, count)
    return tuple(Choice(Tile(*map(int, tiles[i]), warpgroup=True), float(times[i])) for i in order)


@functools.lru_cache(maxsize=4096)
def best_choices(problem: Problem, device: DeviceSpec, count: int = 1) -> tuple[Choice, ...]:
    """Return the tiles of least predicted time, whichever instruction multiplies them, best first.

    Parameters
    ----------
    problem : Problem
        The function.
    device : DeviceSpec
        The device.
    count : int
        How many at most.
    """
    found = [*best_tiles(problem, device, count), *warpgroup_tiles(problem, device, count)]
    return tuple(sorted(found, key=lambda choice: (choice.microseconds, choice.tile))[:count])


def fits(problem: Problem, device: DeviceSpec, tiles: np.ndarray) -> np.ndarray:
    """Which tiles are possible for a problem, and worth a look."""
    rows, columns, depth, warp_rows, warp_columns, _, stages = tiles
    most, total = max(problem.copies), sum(problem.copies)
    share = columns // warp_columns
    found = (
        (rows < 2 * max(problem.rows, ROWS))
        & (columns < 2 * max(problem.columns, 16))
        & (columns >= min(problem.least_columns, 256))
        & (share // 2 * total <= _SUMS)
        & (stages * 2 * depth * (rows + most * columns) + ALIGNMENT
           <= device.shared_memory_per_block_optin)
        & (32 * warp_rows * warp_columns <= device.max_threads_per_block)
    )  # fmt: skip
    return found & (problem.part % share == 0) if problem.part else found


def microseconds_of(
    problem: Problem,
    device: DeviceSpec,
    tiles: np.ndarray,
    rates: Rates,
    multiprocessors: np.ndarray | int | None = None,
) -> np.ndarray:
    """Predicted time of each tile, on so many of the device's multiprocessors (absent: all)."""
    rows, columns, depth, warp_rows, warp_columns, _, stages = tiles
    threads = 32 * warp_rows * warp_columns
    most, total = max(problem.copies), sum(problem.copies)
    sums = columns // warp_columns // 2 * total
    work = copied = read = steps = 0
    for length, copies in zip(problem.depths, problem.copies, strict=True):
        count = -(-length // depth)
        steps = steps + count
        work = work + count * depth * copies * rows * columns
        copied = copied + count * 2 * depth * (rows + copies * columns)
        again = rows * warp_columns * copies + columns * copies * (warp_rows // WARPS)
        read = read + count * 2 * depth * again
    blocks = -(-problem.rows // rows) * -(-problem.columns // columns) * problem.batch
    available = device.multiprocessors if multiprocessors is None else multiprocessors
    share = -(-blocks // available)
    shared = stages * 2 * depth * (rows + most * columns) + 2 * ALIGNMENT
    registers = -(-np.minimum(255, sums + _ADDRESSES) // 8) * 8
    resident = np.minimum(
        device.shared_memory_per_multiprocessor // shared,
        device.registers_per_multiprocessor // (registers * threads),
    )
    beside = np.maximum(1, np.minimum(share, resident))
    waves = -(-share // beside)
    p = rates.overlap + np.where(beside > 1, rates.together, 0.0)
    busy = (
        (share * work / rates.products) ** p
        + (share * (read + copied) / rates.shared) ** p
        + (share * copied / rates.cache) ** p
    ) ** (1 / p)
    chain = steps * rates.step + copied / 16 / threads * rates.copy
    chain = chain + steps * columns // warp_columns * most * rates.product
    chain = np.maximum(chain, steps * rates.latency / (stages - 1))
    if problem.window:
        pieces = -(-rows * depth // 8 // threads) * steps
        chain = chain + pieces * problem.window * MMA_RATES.tap
    drain = rates.drain * rows * columns * most * depth / rates.products
    cycles = (busy**p + (waves * chain) ** p) ** (1 / p) + waves * sums * rates.store
    return (rates.start + rates.latency + drain + cycles) / rates.clock
