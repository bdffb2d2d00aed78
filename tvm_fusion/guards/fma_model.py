"""A model of where a multiprocessor's time goes in a kernel of float32 multiply-adds, and the tile that it prefers.

The template chooses its tile here, and the planner predicts its time here. The model has four parts: what warps issue
(multiply-adds, loads from shared memory, copies, and what each tile of the reduction takes besides), shared-memory
loads, traffic from the second-level cache, and the chain of dependent steps of one warp.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools

import numpy as np

from ..devices import DeviceSpec
from .fastest import fastest
from .fma_tiles import (
    ADDRESSES,
    FEW_ADDRESSES,
    RESERVED,
    SUMS,
    UNROLLED,
    VECTOR,
    WARP,
    Problem,
    Tile,
    stride_of,
)


@dataclasses.dataclass(frozen=True)
class Rates:
    """Constants of the model, in cycles of a multiprocessor.

    Fitted to 178 kernels of 11 problems on an H200 that overlap with their predecessor: mean deviation of the time 6 %,
    of the best of 13 to 17 tiles from the one that the model prefers 1.4 % (at most 8 %, a depthwise convolution before
    a product). Kernels that spill, or that have more instructions than `UNROLLED` admits, were left out.

    Attributes
    ----------
    issue : float
        Instructions of warps that are issued a cycle.
    copy, computed, tap : float
        Instructions of one asynchronous copy, of one computed element, and of each product that it is a sum of.
    step : float
        Instructions of a warp for a tile of the reduction.
    load : float
        Cycles of a load of a warp from shared memory.
    cache : float
        Bytes a cycle from the second-level cache.
    overlap : float
        Exponent with which times that overlap add up: 1 for none, infinity for a perfect overlap.
    chain, wait, first, fetch : float
        One warp's chain: cycles an instruction, a tile, the first computed element of a tile, and a multiply-add of a
        tile beyond what the instruction cache holds.
    cached : float
        Multiply-adds that the instruction cache holds.
    latency, start : float
        From a copy's start to its arrival; what a kernel pays once.
    store, exchange : float
        Per output of a thread, to store it, and per accumulator, to add it up across warps.
    write : float
        Bytes of outputs a cycle; nothing hides those of the last blocks (`strip_model.Rates`, for which it was fitted).
        ``tap`` has them in it: the kernels that it was fitted to write much for their work.
    clock : float
        Cycles in a microsecond.
    """

    issue: float = 3.99
    copy: float = 12.5
    computed: float = 5.63
    tap: float = 19.3
    step: float = 23.4
    load: float = 1.95
    cache: float = 88.3
    overlap: float = 3.36
    chain: float = 0.777
    wait: float = 80.0
    first: float = 584.0
    fetch: float = 2.57
    cached: float = 2050.0
    latency: float = 524.0
    start: float = 1240.0
    store: float = 21.0
    exchange: float = 4.3
    write: float = 15.3
    clock: float = 1750.0


RATES = Rates()

#: Bytes of an output.
_OUTPUT_BYTES = 4

#: FLOP/s of a multiprocessor for which multiply-adds are one instruction each.
_FITTED_FLOPS = 67e12 / 132


@dataclasses.dataclass(frozen=True)
class Choice:
    """A tile with its predicted time in microseconds, launch included."""

    tile: Tile
    microseconds: float


@functools.cache
def all_tiles() -> np.ndarray:
    """Every tile that any problem may take, one a row, in the order of the fields of `Tile`."""
    found = []
    for rows, columns, lanes in itertools.product((2, 4, 8, 16), (4, 8, 12, 16), (1, 2, 4, 8, 16)):
        # What the lanes of a warp load is little where their outputs form a rectangle with sides alike.
        if rows * columns > SUMS or not 1 / 4 <= lanes * rows / (WARP // lanes * columns) <= 4:
            continue
        for down, across, slices in itertools.product((1, 2, 4), (1, 2, 4), (1, 2, 4, 8)):
            if not 2 <= down * across * slices <= 16:
                continue
            for depth, stages in itertools.product((8, 16, 32, 64), (2, 3, 4)):
                if depth // slices >= 2:
                    found.append((rows, columns, lanes, down, across, slices, depth, stages))
    return np.array(found, dtype=np.int64)


@functools.lru_cache(maxsize=4096)
def best_tiles(problem: Problem, device: DeviceSpec, count: int = 1) -> tuple[Choice, ...]:
    """Return the tiles of least predicted time, best first.

    Parameters
    ----------
    problem : Problem
        The function.
    device : DeviceSpec
        The device.
    count : int
        How many at most.
    """
    tiles = all_tiles()
    tiles = tiles[fits(problem, device, Columns(tiles))]
    if not len(tiles):
        return ()
    times = microseconds_of(problem, device, Columns(tiles), RATES)
    order = fastest(tiles, times, count)
    return tuple(Choice(Tile(*map(int, tiles[i])), float(times[i])) for i in order)


class Columns:
    """Fields of many tiles, each an array."""

    def __init__(self, tiles: np.ndarray) -> None:
        names = [field.name for field in dataclasses.fields(Tile)][: tiles.shape[1]]
        for name, values in zip(names, tiles.T, strict=True):
            setattr(self, name, values)
        self.rows = self.warp_rows * self.lane_rows * self.thread_rows
        self.columns = self.warp_columns * (WARP // self.lane_rows) * self.thread_columns
        self.warps = self.warp_rows * self.warp_columns * self.warp_depth

    def stage_bytes(self, problem: Problem) -> np.ndarray:
        total = 0
        for side, lines in zip(problem.sides, (self.rows, self.columns), strict=True):
            total = total + side.copies * stride_of(side, lines)
        return 4 * self.depth * total

    def shared_bytes(self, problem: Problem) -> np.ndarray:
        exchange = 4 * self.warp_depth * self.rows * self.columns * sum(problem.sums)
        exchange = np.where(self.warp_depth > 1, exchange, 0)
        return np.maximum(self.stages * self.stage_bytes(problem), exchange)

    def resident(self, problem: Problem, device: DeviceSpec) -> np.ndarray:
        """Blocks that are on a multiprocessor together."""
        sums = self.thread_rows * self.thread_columns * sum(problem.sums)
        registers = np.minimum(255, sums + 2 * _parts(problem, self) + ADDRESSES)
        threads = WARP * self.warps
        found = np.minimum(
            device.shared_memory_per_multiprocessor // (self.shared_bytes(problem) + RESERVED),
            device.registers_per_multiprocessor // (-(-registers // 8) * 8 * threads),
        )
        return np.maximum(1, np.minimum(found, device.max_threads_per_multiprocessor // threads))


def _parts(problem: Problem, tiles: Columns) -> np.ndarray:
    """Numbers that a thread multiplies at once."""
    return tiles.thread_rows * problem.rows.copies + tiles.thread_columns * problem.columns.copies


def fits(problem: Problem, device: DeviceSpec, tiles: Columns) -> np.ndarray:
    """Which tiles are possible for a problem, and worth a look."""
    sums = tiles.thread_rows * tiles.thread_columns * sum(problem.sums)
    unrolled = tiles.thread_rows * tiles.thread_columns * max(problem.sums)
    unrolled = unrolled * (tiles.depth // tiles.warp_depth)
    needed = sums + 2 * _parts(problem, tiles) + FEW_ADDRESSES
    return (
        (tiles.rows <= _covering(problem.rows.count))
        & (tiles.columns <= _covering(problem.columns.count))
        & (sums <= SUMS)
        & (unrolled <= UNROLLED)
        & (needed * WARP * tiles.warps <= device.registers_per_multiprocessor)
        & ((tiles.depth == 8) | (tiles.depth <= 2 * max(problem.depths)))
        & (tiles.shared_bytes(problem) <= device.shared_memory_per_block_optin)
        & (WARP * tiles.warps <= device.max_threads_per_block)
    )


def _covering(extent: int) -> int:
    """Largest size of which more than half covers something, and one below which no tile needs to go."""
    return max(32, 1 << max(0, (extent - 1).bit_length()))


def microseconds_of(
    problem: Problem,
    device: DeviceSpec,
    tiles: Columns,
    rates: Rates,
    multiprocessors: np.ndarray | int | None = None,
    slices: int = 1,
) -> np.ndarray:
    """Predicted time of each tile, on so many of the device's multiprocessors (absent: all).

    So many blocks share the outputs of a tile, each of which is counted as one of the problem's batch.
    """
    part = tiles.depth // tiles.warp_depth
    slowness = _FITTED_FLOPS * device.multiprocessors / device.peak_flops("float32")
    copied = _copy_instructions(problem, tiles, rates)
    row_loads = -(-tiles.thread_rows // VECTOR)
    column_loads = -(-tiles.thread_columns // VECTOR)
    wait = rates.wait + (rates.first if any(not side.width for side in problem.sides) else 0.0)
    issued = loaded = traffic = chain = steps = 0
    for length, sums in zip(problem.depths, problem.sums, strict=True):
        count = -(-length // tiles.depth)
        steps = steps + count
        loads = row_loads * (sums if problem.rows.copies > 1 else 1)
        loads = loads + column_loads * (sums if problem.columns.copies > 1 else 1)
        products = part * tiles.thread_rows * tiles.thread_columns * sums
        each = products * slowness + part * loads + copied + rates.step
        issued = issued + count * tiles.warps * each
        loaded = loaded + count * tiles.warps * part * loads * rates.load
        missed = np.maximum(0.0, products - rates.cached) * rates.fetch
        chain = chain + count * (each * rates.chain + missed + wait)
        traffic = traffic + count * tiles.stage_bytes(problem)
    blocks = -(-problem.rows.count // tiles.rows) * -(-problem.columns.count // tiles.columns)
    available = device.multiprocessors if multiprocessors is None else multiprocessors
    share = -(-blocks * problem.batch // available)
    waves = -(-share // np.minimum(share, tiles.resident(problem, device)))
    p = rates.overlap
    chain = (chain**p + (steps * rates.latency / (tiles.stages - 1)) ** p) ** (1 / p)
    busy = (share * issued / rates.issue) ** p + (share * loaded) ** p
    busy = busy + (share * traffic / rates.cache) ** p + (waves * chain) ** p
    outputs = tiles.thread_rows * tiles.thread_columns
    exchange = np.where(tiles.warp_depth > 1, rates.exchange, 0.0)
    end = outputs * (rates.store + sum(problem.sums) * exchange)
    last = end
    if all(side.taps == 1 for side in problem.sides):
        written = _OUTPUT_BYTES * tiles.rows * tiles.columns / slices
        last = blocks * problem.batch / available / waves * written / rates.write
    end = (waves - 1) * end + np.maximum(end, last)
    return (rates.start + rates.latency + busy ** (1 / p) + end) / rates.clock


def _copy_instructions(problem: Problem, tiles: Columns, rates: Rates) -> np.ndarray:
    """Instructions of a thread to copy one tile of both operands."""
    total = 0
    for side, lines in zip(problem.sides, (tiles.rows, tiles.columns), strict=True):
        elements = lines * tiles.depth * side.copies / (WARP * tiles.warps)
        each = rates.computed + side.taps * rates.tap
        if side.width:
            each = rates.copy / side.width
        total = total + elements * each
    return total


def predict(problem: Problem, device: DeviceSpec, tile: Tile, rates: Rates = RATES) -> float:
    """Predicted time of one tile in microseconds, launch included."""
    row = Columns(np.array([dataclasses.astuple(tile)[:8]], dtype=np.int64))
    return float(microseconds_of(problem, device, row, rates)[0])
