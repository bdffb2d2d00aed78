"""Tiles of tensor-core kernels, and a model of where a multiprocessor's time goes with each.

The template chooses its tile here, and the planner predicts its time here. The model has five parts: matrix
instructions, shared-memory traffic, traffic from the second-level cache, the chain of dependent steps of one warp, and
what every kernel pays once. Its constants were fitted to kernels measured on an H200.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools

import numpy as np

from ..devices import DeviceSpec
from .clusters import spread_bytes
from .fastest import fastest

#: Rows and columns of one ``mma.sync``, and bytes of each that it multiplies: 16 elements of 16 bits, or 8 of TF32.
ROWS, COLUMNS, STEP = 16, 8, 32

#: Bytes that are copied, exchanged and read together, and of the shortest asynchronous copy.
PIECE_BYTES, WORD_BYTES = 16, 4

#: Accumulators of a thread, so that fragments and addresses fit beside them in 255 registers, and registers of one
#: set of fragments.
SUMS, FRAGMENTS = 128, 48

#: Blocks of a multiprocessor's share up to which their number is kept even, and bytes of shared memory that the driver
#: keeps for itself in each block.
FEW_BLOCKS, _RESERVED = 3, 1024


@dataclasses.dataclass(frozen=True)
class Problem:
    """What the search knows of a function: sums of products that meet in elementwise outputs.

    Attributes
    ----------
    rows, columns, batch : int
        Size of the output.
    depths : tuple of int
        Length of each anchor's reduction.
    copies : tuple of int
        Sums of each anchor per output element.
    part : int
        Columns that a warp's share must divide, where some share does (0: any): an output may end there.
    least_columns : int
        Columns below which a tile computes again what another one computes too (0: none is computed).
    window : int
        Products of each element of the rows, where a block computes them from a depthwise convolution (0: copied).
    reduction_inner : bool
        Whether the reduction is the innermost axis of all operands.
    element_bytes : int
        Size of the operands' elements: 2, or 4 for float32 that is multiplied in TF32.
    gathered : bool
        Whether the row operand is read element by element.
    """

    rows: int
    columns: int
    batch: int
    depths: tuple[int, ...]
    copies: tuple[int, ...]
    part: int = 0
    least_columns: int = 0
    window: int = 0
    reduction_inner: bool = False
    element_bytes: int = 2
    gathered: bool = False

    @property
    def instruction_depth(self) -> int:
        """Elements of the reduction that one instruction multiplies."""
        return STEP // self.element_bytes


@dataclasses.dataclass(frozen=True, order=True)
class Tile:
    """Sizes of a thread block's work.

    Attributes
    ----------
    rows, columns : int
        Output elements of a thread block.
    depth : int
        Elements of the reduction in shared memory at a time.
    warp_rows, warp_columns, warp_depth : int
        Warps that share the rows, the columns and the reduction.
    stages : int
        Tiles of the reduction that are in shared memory or on the way.
    warpgroup : bool
        Whether warpgroups multiply (`warpgroup_tiles`) or warps.
    slices : int
        Blocks of a cluster that share the reduction (`split_tiles`).
    """

    rows: int
    columns: int
    depth: int
    warp_rows: int
    warp_columns: int
    warp_depth: int
    stages: int
    warpgroup: bool = False
    slices: int = 1

    @property
    def threads(self) -> int:
        """Threads of a block, of warps of 32."""
        return 32 * self.warp_rows * self.warp_columns * self.warp_depth

    @property
    def row_fragments(self) -> int:
        """Instructions that a warp's rows take."""
        return self.rows // self.warp_rows // ROWS

    @property
    def column_fragments(self) -> int:
        """Instructions that a warp's columns take."""
        return self.columns // self.warp_columns // COLUMNS

    def blocks(self, problem: Problem) -> int:
        """Thread blocks of a kernel."""
        down, across = -(-problem.rows // self.rows), -(-problem.columns // self.columns)
        return down * across * problem.batch * self.slices

    def stage_bytes(self, problem: Problem) -> int:
        """Shared memory of one tile of the operands, of the anchor with the largest."""
        lines = self.rows + max(problem.copies) * self.columns
        return problem.element_bytes * self.depth * lines

    def instructions(self, problem: Problem) -> int:
        """Instructions that a warp's share of a tile's depth takes."""
        return self.depth // problem.instruction_depth // self.warp_depth

    def ring_bytes(self, problem: Problem) -> int:
        """Shared memory of all tiles of the operands."""
        return self.stages * self.stage_bytes(problem) + (1024 if self.warpgroup else 0)

    def exchange_bytes(self, problem: Problem) -> int:
        """Shared memory in which warps that share the reduction add their sums; it reuses the tiles'."""
        if self.warp_depth == 1:
            return 0
        return 4 * self.warp_depth * self.rows * self.columns * sum(problem.copies)

    def meeting_bytes(self, problem: Problem) -> int:
        """Shared memory in which the sums of other blocks arrive, while a block still uses its own."""
        if self.slices == 1:
            return 0
        return 4 * self.rows * self.columns * sum(problem.copies)

    def own_bytes(self, problem: Problem) -> int:
        """Shared memory that no other block writes to."""
        return max(self.ring_bytes(problem), self.exchange_bytes(problem))

    def shared_bytes(self, problem: Problem) -> int:
        """Shared memory of a block."""
        return self.own_bytes(problem) + self.meeting_bytes(problem)

    def requested_bytes(self, problem: Problem, device: DeviceSpec) -> int:
        """Shared memory that a block asks for, so that blocks spread evenly (`clusters.spread_bytes`)."""
        needed, blocks = self.shared_bytes(problem), self.blocks(problem)
        return spread_bytes(device, needed, blocks, self.slices, FEW_BLOCKS)

    def registers(self, problem: Problem) -> int:
        """Estimated registers of a thread: sums, two sets of fragments, addresses."""
        sums = 4 * self.row_fragments * self.column_fragments * sum(problem.copies)
        fragments = 4 * self.row_fragments + 2 * self.column_fragments * max(problem.copies)
        return min(255, sums + 2 * fragments + _addresses(problem))


def _addresses(problem: Problem) -> int:
    """Registers for addresses and the epilogue; more where elements are read one by one (7x7: 198 in all)."""
    return 134 if problem.gathered else 48


@dataclasses.dataclass(frozen=True)
class Rates:
    """Constants of the model, in cycles of a multiprocessor.

    Fitted to 259 kernels of 20 problems on an H200 that overlap with their predecessor (mean deviation of the time
    10 %, of the chosen tile from the best of 13: 5 %; benchmarks/NOTES.md).

    Attributes
    ----------
    products : float
        Multiply-adds a cycle by ``mma.sync``.
    shared, cache : float
        Bytes a cycle to and from shared memory, and from the second-level cache.
    overlap : float
        Exponent with which times that overlap add up: 1 for none, infinity for a perfect overlap.
    step, copy, fragment, product, tap : float
        One warp's chain: per tile of the reduction, per 16-byte copy of a thread, per depth of one instruction, per
        instruction, and per window position of eight elements that a thread computes instead of copying them.
    latency, start : float
        From a copy's start to its arrival; what a kernel pays once.
    drain : float
        Share of a tile's products that nothing overlaps with.
    store, exchange : float
        Per accumulator of a thread, to store it and to add it up across warps.
    clock : float
        Cycles in a microsecond.
    gathered, element : float
        Of one chain, per eight elements read one by one; instructions for each. Measured: 185 us (the model: 165).
    rounding : float
        Of a scheduler, per register of a fragment that a warp rounds to TF32: two instructions before sm_90, from
        there one that is issued every other cycle. Estimated, not fitted.
    """

    products: float = 936.5
    shared: float = 125.5
    cache: float = 69.8
    overlap: float = 3.07
    step: float = 156.1
    copy: float = 5.5
    fragment: float = 2.4
    product: float = 2.5
    tap: float = 334.0
    latency: float = 530.9
    start: float = 848.7
    drain: float = 0.53
    store: float = 17.8
    exchange: float = 4.9
    clock: float = 1750.0
    gathered: float = 1000.0
    element: float = 30.0
    rounding: float = 2.0


RATES = Rates()

#: Schedulers of a multiprocessor, and bytes of a register of all lanes of a warp.
_SCHEDULERS, _WARP_BYTES = 4, 128


@functools.cache
def all_tiles(element_bytes: int) -> np.ndarray:
    """Every tile that any problem may take, one a row, in the order of the fields of `Tile`."""
    found = []
    for rows, columns in itertools.product((16, 32, 64, 128, 256), (16, 32, 48, 64, 96, 128, 256)):
        for warp_rows, warp_columns, warp_depth in itertools.product(
            (1, 2, 4, 8), (1, 2, 3, 4), (1, 2, 4)
        ):
            warps = warp_rows * warp_columns * warp_depth
            if not 2 <= warps <= 8 or rows % (ROWS * warp_rows) or columns % (16 * warp_columns):
                continue
            for nbytes, stages in itertools.product((64, 128, 256), (2, 3, 4, 6)):
                if (nbytes // STEP) % warp_depth == 0 and nbytes * rows * columns <= 2**21:
                    depth = nbytes // element_bytes
                    found.append(
                        (rows, columns, depth, warp_rows, warp_columns, warp_depth, stages)
                    )
    return np.array(found, dtype=np.int64)


@dataclasses.dataclass(frozen=True)
class Choice:
    """A tile with its predicted time in microseconds, launch included."""

    tile: Tile
    microseconds: float


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
    tiles = all_tiles(problem.element_bytes)
    tiles = tiles[fits(problem, device, tiles.T)]
    if not len(tiles):
        return ()
    times = microseconds_of(problem, device, tiles.T, RATES)
    order = fastest(tiles, times, count)
    return tuple(Choice(Tile(*map(int, tiles[i])), float(times[i])) for i in order)


def fits(problem: Problem, device: DeviceSpec, tiles: np.ndarray) -> np.ndarray:
    """Which tiles are possible for a problem, and worth a look."""
    rows, columns, depth, warp_rows, warp_columns, warp_depth, stages = tiles
    most = max(problem.copies)
    share = columns // warp_columns
    row_fragments, column_fragments = rows // warp_rows // ROWS, share // COLUMNS
    sums = 4 * row_fragments * column_fragments * sum(problem.copies)
    stage = problem.element_bytes * depth * (rows + most * columns)
    exchange = np.where(warp_depth > 1, 4 * warp_depth * rows * columns * sum(problem.copies), 0)
    # A line has 64 bytes at least.
    deepest = max((1 if problem.window else 2) * max(problem.depths), 64 // problem.element_bytes)
    found = (
        (rows <= _covering(problem.rows, ROWS))
        & (columns <= _covering(problem.columns, 16))
        & (columns >= min(problem.least_columns, 256))
        & (sums <= (SUMS // 2 if problem.gathered else SUMS))
        & (4 * row_fragments + 2 * column_fragments * most <= FRAGMENTS)
        & (depth <= deepest)
        & (np.maximum(stages * stage, exchange) <= device.shared_memory_per_block_optin)
        & (32 * warp_rows * warp_columns * warp_depth <= device.max_threads_per_block)
    )
    # Where an output may end inside any warp's share, elements are told apart one by one.
    return found & (problem.part % share == 0) if problem.part and problem.part % 16 == 0 else found


def _covering(extent: int, least: int) -> int:
    """Largest size of which more than half covers something."""
    return max(least, 1 << max(0, (extent - 1).bit_length()))


def microseconds_of(
    problem: Problem,
    device: DeviceSpec,
    tiles: np.ndarray,
    rates: Rates,
    multiprocessors: np.ndarray | int | None = None,
) -> np.ndarray:
    """Predicted time of each tile, on so many of the device's multiprocessors (absent: all)."""
    rows, columns, depth, warp_rows, warp_columns, warp_depth, stages = tiles
    row_fragments = rows // warp_rows // ROWS
    column_fragments = columns // warp_columns // COLUMNS
    most, total = max(problem.copies), sum(problem.copies)
    sums = 4 * row_fragments * column_fragments * total
    each_depth = problem.instruction_depth
    products = rates.products * product_rate(problem, device)
    rounding = rates.rounding if problem.element_bytes == 4 else 0.0
    work = shared = copied = steps = 0
    for length, copies in zip(problem.depths, problem.copies, strict=True):
        count = -(-length // depth)
        steps = steps + count
        work = work + count * depth * copies * rows * columns
        copied = copied + count * problem.element_bytes * depth * (rows + copies * columns)
        read = row_fragments * 512 + column_fragments * 256 * copies
        shared = shared + count * (depth // each_depth) * read * warp_rows * warp_columns
    blocks = -(-problem.rows // rows) * -(-problem.columns // columns) * problem.batch
    available = device.multiprocessors if multiprocessors is None else multiprocessors
    share = -(-blocks // available)
    waves = -(-share // np.minimum(share, resident_blocks(problem, device, tiles)))
    p = rates.overlap
    read = share * steps * rows * depth / 32 * rates.element if problem.gathered else 0.0
    busy = (
        (share * work / products) ** p
        + (read / _SCHEDULERS) ** p
        + (share * (shared + copied) / rates.shared) ** p
        + (share * copied / rates.cache) ** p
        + (share * shared / _WARP_BYTES * rounding / _SCHEDULERS) ** p
    ) ** (1 / p)
    each = rates.fragment + row_fragments * column_fragments * most * rates.product
    each = each + (4 * row_fragments + 2 * column_fragments * most) * rounding
    threads = 32 * warp_rows * warp_columns * warp_depth
    chain = steps * rates.step + copied / 16 / threads * rates.copy
    chain = chain + steps * (depth // each_depth) / warp_depth * each
    chain = np.maximum(chain, steps * rates.latency / (stages - 1))
    if problem.window or problem.gathered:
        each_piece = rates.gathered if problem.gathered else problem.window * rates.tap
        chain = chain + -(-rows * depth // 8 // threads) * steps * each_piece
    drain = rates.drain * rows * columns * most * depth / products
    end = sums * (rates.store + np.where(warp_depth > 1, warp_depth * rates.exchange, 0.0))
    cycles = (busy**p + (waves * chain) ** p) ** (1 / p) + waves * end
    return (rates.start + rates.latency + drain + cycles) / rates.clock


def product_rate(problem: Problem, device: DeviceSpec) -> float:
    """Multiply-adds a cycle, as a share of those of 16-bit operands: half, by the makers' numbers."""
    if problem.element_bytes == 2:
        return 1.0
    return device.peak_flops("tf32") / device.peak_flops("float16")


def resident_blocks(problem: Problem, device: DeviceSpec, tiles: np.ndarray) -> np.ndarray:
    """Blocks of each tile that are on a multiprocessor together."""
    rows, columns, depth, warp_rows, warp_columns, warp_depth, stages = tiles
    threads = 32 * warp_rows * warp_columns * warp_depth
    row_fragments = rows // warp_rows // ROWS
    column_fragments = columns // warp_columns // COLUMNS
    sums = 4 * row_fragments * column_fragments * sum(problem.copies) + _addresses(problem)
    fragments = 4 * row_fragments + 2 * column_fragments * max(problem.copies)
    registers = np.minimum(255, sums + 2 * fragments)
    shared = np.maximum(
        stages * problem.element_bytes * depth * (rows + max(problem.copies) * columns),
        np.where(warp_depth > 1, 4 * warp_depth * rows * columns * sum(problem.copies), 0),
    )
    found = np.minimum(
        device.shared_memory_per_multiprocessor // (shared + _RESERVED),
        device.registers_per_multiprocessor // (-(-registers // 8) * 8 * threads),
    )
    return np.maximum(1, np.minimum(found, device.max_threads_per_multiprocessor // threads))


def predict(problem: Problem, device: DeviceSpec, tile: Tile, rates: Rates = RATES) -> float:
    """Predicted time of one tile in microseconds, launch included."""
    row = np.array([dataclasses.astuple(tile)[:7]], dtype=np.int64).T
    return float(microseconds_of(problem, device, row, rates)[0])
