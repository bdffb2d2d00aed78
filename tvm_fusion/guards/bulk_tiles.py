"""Tiles of kernels whose operands Hopper's copy engine brings (TMA), and their time as the model predicts it.

Per tile of the output and step of 64 along the reduction: ``2 * 64 * (rows + columns)`` bytes come from the
second-level cache, and ``2 * 64 * rows * columns`` operations are done; at 128x256 that is 85 operations a byte, at
128x128 64. Two warpgroups multiply, and one more warp starts the copies. The two share a tile, or they take *turns*:
each has tiles of its own, and multiplies while the other stores. Sharing allows tiles twice as large, so fewer bytes;
turns hide the epilogue, which matters where the reduction is short.

They are chosen where their predicted time is least; tuning measures them beside the others.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools

from ..devices import DeviceSpec
from .tensor_tiles import Choice, Problem, Tile
from .warpgroup_tiles import ALIGNMENT, ARCH, DEPTH, ROWS, WARPS

#: Warpgroups that multiply, accumulators of a thread at most, and threads of the warpgroup whose first thread starts
#: the copies.
CONSUMERS, SUMS, PRODUCER_THREADS = 2, 128, 128

#: Registers of a thread that multiplies and of one that copies (``setmaxnreg``, multiples of 8): 256 and 128 of them
#: fit a multiprocessor's 65536.
CONSUMER_REGISTERS, PRODUCER_REGISTERS, ENTRY_REGISTERS = 232, 40, 168

#: Bytes of a barrier in shared memory; a stage has two, and a turn one.
BARRIER_BYTES = 8

_COLUMNS, _STAGES, _GROUPS = (64, 96, 128, 192, 256), (3, 4, 5, 6), (1, 4)
#: Rows of a tile and warps that share them, by how many take turns.
_ROWS = (
    (1, ROWS * CONSUMERS, WARPS * CONSUMERS),
    (1, 2 * ROWS * CONSUMERS, WARPS * CONSUMERS),
    (2, ROWS, WARPS),
    (2, 2 * ROWS, WARPS),
)


@dataclasses.dataclass(frozen=True)
class Rates:
    """Constants of the model, in cycles of a multiprocessor.

    Fitted to 68 kernels of 5 products on an H200 (benchmarks/NOTES.md): 7 % off in the mean square. Of the 10 to 15
    tiles that were measured for each, what it puts first was the fastest for four, and 0.6 % slower for the fifth.

    Attributes
    ----------
    products : float
        Multiply-adds a cycle.
    shared, cache : float
        Bytes a cycle that shared memory and the second-level cache give.
    overlap : float
        How sharply the slowest of these decides: copies run beside everything else.
    latency : float
        Cycles from the start of a copy to its use; also of a kernel's start.
    store, narrow : float
        For each accumulator of a thread: what the epilogue takes, and how much longer it takes with stores of four
        bytes (columns that are not interleaved).
    clock : float
        Cycles in a microsecond.
    """

    products: float = 1843.0
    shared: float = 132.0
    cache: float = 59.0
    overlap: float = 8.0
    latency: float = 1785.0
    store: float = 21.0
    narrow: float = 5.0
    clock: float = 1750.0


RATES = Rates()


@dataclasses.dataclass(frozen=True, order=True)
class BulkTile(Tile):
    """A tile whose operands the copy engine brings.

    Attributes
    ----------
    bulk : int
        Column fragments that are interleaved, so that a lane has so many pairs of neighbouring columns: 1 or 4.
    turns : int
        How many groups of ``threads`` a block has, each with tiles of its own: 1 or 2.
    """

    warpgroup: bool = True
    bulk: int = 4
    turns: int = 1

    @property
    def consumers(self) -> int:
        """Threads of a block that multiply."""
        return self.threads * self.turns

    @property
    def block_threads(self) -> int:
        """Threads of a block, with those that copy."""
        return self.consumers + PRODUCER_THREADS

    @property
    def sums(self) -> int:
        """Accumulators of a thread."""
        return self.rows * self.columns // self.threads

    def registers(self, problem: Problem) -> int:
        """Registers of a thread at the start; then those that copy give theirs to those that multiply."""
        del problem
        return ENTRY_REGISTERS

    def ring_bytes(self, problem: Problem) -> int:
        """Shared memory of all tiles of the operands, and of their barriers."""
        return super().ring_bytes(problem) + BARRIER_BYTES * (2 * self.stages + self.turns)

    def grid(self, problem: Problem, device: DeviceSpec) -> int:
        """Thread blocks, each of which takes tiles until none is left."""
        return min(-(-self.blocks(problem) // self.turns), device.multiprocessors)


@functools.cache
def all_tiles() -> tuple[BulkTile, ...]:
    """Every tile that any problem may take."""
    found = (
        BulkTile(rows, columns, DEPTH, warps, 1, 1, stages, bulk=bulk, turns=turns)
        for (turns, rows, warps), columns, stages, bulk in itertools.product(
            _ROWS, _COLUMNS, _STAGES, _GROUPS
        )
    )
    return tuple(tile for tile in found if tile.sums <= SUMS)


@functools.lru_cache(maxsize=4096)
def bulk_choices(problem: Problem, device: DeviceSpec, count: int = 1) -> tuple[Choice, ...]:
    """Return the tiles of least predicted time, best first; none where the instructions or operands do not fit.

    Parameters
    ----------
    problem : Problem
        The function, of one product.
    device : DeviceSpec
        The device.
    count : int
        How many at most.
    """
    if device.arch.rstrip("a") != ARCH or problem.element_bytes != 2 or problem.copies != (1,):
        return ()
    found = [
        Choice(tile, predict(problem, device, tile))
        for tile in all_tiles()
        if fits(problem, device, tile)
    ]
    return tuple(sorted(found, key=_order)[:count])


def _order(choice: Choice) -> tuple[float, bool, int, Tile]:
    """Least time first; of equal times, powers of two of stages, whose slots need no division, then the most stages.

    Of 22 pairs that the model cannot tell apart, 4 stages were faster than 3, 5 or 6 in 21, by 0.5 to 5 %.
    """
    stages = choice.tile.stages
    return choice.microseconds, stages & (stages - 1) != 0, -stages, choice.tile


def fits(problem: Problem, device: DeviceSpec, tile: BulkTile) -> bool:
    """Whether a tile is possible for a problem, and worth a look."""
    if tile.columns >= 2 * max(problem.columns, _COLUMNS[0]) or problem.rows <= ROWS // 2:
        return False
    if tile.rows >= 2 * max(problem.rows, ROWS * CONSUMERS):
        return False
    if tile.shared_bytes(problem) + ALIGNMENT > device.shared_memory_per_block_optin:
        return False
    if tile.bulk > 1 and problem.columns % (8 * tile.bulk):
        return False
    return problem.part % tile.columns == 0 if problem.part else True


def predict(problem: Problem, device: DeviceSpec, tile: BulkTile) -> float:
    """Predicted time of one tile in microseconds, launch included."""
    (depth,) = problem.depths
    steps = -(-depth // tile.depth)
    # So many tiles one after the other, of whichever group.
    share = -(-tile.blocks(problem) // tile.grid(problem, device))
    work = steps * tile.depth * tile.rows * tile.columns
    copied = steps * tile.stage_bytes(problem)
    again = tile.rows // ROWS  # each instruction reads the columns
    read = 2 * steps * tile.depth * (tile.rows + again * tile.columns)
    p = RATES.overlap
    busy = (
        (work / RATES.products) ** p
        + ((read + copied) / RATES.shared) ** p
        + (copied / RATES.cache) ** p
    ) ** (1 / p)
    each = max(busy, steps * RATES.latency / (tile.stages - 1))
    store = tile.sums * RATES.store * (1 if tile.bulk > 1 else RATES.narrow)
    if tile.turns == 1:
        cycles = share * (each + store)
    else:  # one group stores while the other multiplies
        cycles = max(share * each + store, -(-share // tile.turns) * (each + store))
    return (RATES.latency + cycles) / RATES.clock
