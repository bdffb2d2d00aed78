"""Tiles of attention kernels, and a model of their time.

A warp has 16 or 32 queries and walks over the keys; warps of a block share the tiles of keys and values in shared
memory. Where queries are few, warps share the keys of a tile too, and add up at the end. The template chooses its tile
here, and the planner predicts its time here. The model is a roofline of four units of a multiprocessor (matrix
instructions, exponentials, other arithmetic, shared memory) and of one warp's chain; its rates are those of products
(`tensor_tiles.RATES`) and the hardware's. Five constants were fitted to 99 measurements of four problems on an H200
(``benchmarks/attention_times.py`` and the trials of two BERT blocks): 4 to 10 % off by problem, root mean square,
and the tile that it chooses 0 to 12 % slower than the fastest.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools

import numpy as np

from ..devices import DeviceSpec
from .fastest import fastest
from .tensor_tiles import RATES, ROWS

#: Registers of fragments that are on their way, and of addresses and the softmax.
_FRAGMENTS, _ADDRESSES = 16, 44

#: Registers of a warp's queries up to which they stay there.
_HELD_QUERIES = 32

#: Most registers by the estimate, from 224 of which the compiler made 214 to 250, and those of an expression's loads.
_MOST_REGISTERS, _SCORE_REGISTERS = 224, 12

#: Those of a fragment's queries that are not held, where a score is an expression: by ptxas, two fragments of 80 or 112
#: places take more than there are.
_ROW_REGISTERS = 5

#: Bytes of shared memory that the driver keeps for itself in each block.
_RESERVED = 1024

#: Exponentials and other operations of a multiprocessor in a cycle (CUDA C++ Programming Guide 13.0, table of
#: arithmetic throughput: 16 and 128 from sm_80 on, but 64 multiply-adds on sm_80, which issues other ones beside them).
_EXPONENTIALS, _OPERATIONS = 16, 128

#: Other operations of an element of a tile of scores: scale, subtract, largest, sum, half a conversion (fitted).
_EACH = 3.9

#: More of them where a score is an expression: its arithmetic and loads.
_EACH_SCORE = 4.0

#: Exponent with which times of different units add up, and cycles of one tile's barrier for each warp (fitted).
_OVERLAP, _BARRIER = 2.2, 92.0

#: Cycles of a block's beginning and end, and of the sum of what warps have of different keys (fitted).
_ENDS, _SUM = 433.0, 600.0

#: Floats between rows of partial results, beside their own length, so that rows lie in different banks.
PADDING = 8


@dataclasses.dataclass(frozen=True)
class AttentionProblem:
    """What the search knows of a function.

    Attributes
    ----------
    heads, rows, keys : int
        Elements of the batch, queries and keys of each.
    width, value_width : int
        Places of a query and of a value.
    causal : bool
        Whether keys behind a row's position are hidden.
    scored : bool
        Whether the score is more than a scaled sum.
    shift : int
        How much further than its own position a row sees under a causal mask.
    """

    heads: int
    rows: int
    keys: int
    width: int
    value_width: int
    causal: bool = False
    scored: bool = False
    shift: int = 0

    @property
    def padded(self) -> tuple[int, int]:
        """Places of a query and of a value in shared memory: whole instructions."""
        return -(-self.width // 16) * 16, -(-self.value_width // 16) * 16


@dataclasses.dataclass(frozen=True, order=True)
class AttentionTile:
    """Sizes of a thread block's work.

    Attributes
    ----------
    keys : int
        Keys of a tile.
    fragments : int
        Instructions that a warp's queries take, 16 each.
    warp_rows, warp_keys : int
        Warps that share the queries and the keys of a tile.
    stages : int
        Tiles of keys and values that are in shared memory or on the way.
    """

    keys: int
    fragments: int
    warp_rows: int
    warp_keys: int
    stages: int

    @property
    def rows(self) -> int:
        """Queries of a block."""
        return ROWS * self.fragments * self.warp_rows

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return 32 * self.warp_rows * self.warp_keys

    @property
    def own_keys(self) -> int:
        """Keys of a tile that a warp has."""
        return self.keys // self.warp_keys

    def holds_queries(self, problem: AttentionProblem) -> bool:
        """Whether a warp's queries stay in registers."""
        return self.fragments * problem.padded[0] // 4 <= _HELD_QUERIES

    def stage_bytes(self, problem: AttentionProblem) -> int:
        """Shared memory of a tile of keys and values."""
        return 2 * self.keys * sum(problem.padded)

    def query_bytes(self, problem: AttentionProblem) -> int:
        """Shared memory of a block's queries."""
        return 2 * self.rows * problem.padded[0]

    def query_place(self, problem: AttentionProblem) -> int:
        """Where the queries lie: in the last stage, which is filled after they were read, or behind the stages."""
        return (self.stages - int(self.holds_queries(problem))) * self.stage_bytes(problem)

    def exchange_bytes(self, problem: AttentionProblem) -> int:
        """Shared memory in which warps that share the keys add up; it reuses the stages'."""
        if self.warp_keys == 1:
            return 0
        each = 4 * (problem.padded[1] + PADDING) + 8
        return self.warp_keys * self.rows * each

    def shared_bytes(self, problem: AttentionProblem) -> int:
        """Shared memory of a block."""
        stages = self.stages * self.stage_bytes(problem)
        queries = self.query_place(problem) + self.query_bytes(problem)
        return max(stages, queries, self.exchange_bytes(problem))

    def registers(self, problem: AttentionProblem) -> int:
        """Estimated registers of a thread: scores, output, queries, fragments, addresses."""
        query, value = problem.padded
        held = self.fragments * query // 4 if self.holds_queries(problem) else 0
        sums = self.fragments * (self.own_keys + value) // 2
        loads = _SCORE_REGISTERS if problem.scored else 0
        if problem.scored and not held:
            loads += _ROW_REGISTERS * self.fragments
        if problem.scored and problem.keys % self.keys:
            loads += self.own_keys // 16  # every place has a condition of its own
        return sums + held + _FRAGMENTS + _ADDRESSES + loads

    def blocks(self, problem: AttentionProblem) -> int:
        """Thread blocks of a kernel."""
        return problem.heads * -(-problem.rows // self.rows)


@dataclasses.dataclass(frozen=True)
class AttentionChoice:
    """A tile with its predicted time in microseconds, launch included."""

    tile: AttentionTile
    microseconds: float


@functools.cache
def _all_tiles() -> tuple[AttentionTile, ...]:
    found = []
    for keys, fragments, stages in itertools.product((32, 64, 128), (1, 2), (2, 3)):
        for warp_rows, warp_keys in itertools.product((1, 2, 4, 8), (1, 2, 4)):
            if not 2 <= warp_rows * warp_keys <= 8 or keys // warp_keys < 16:
                continue
            found.append(AttentionTile(keys, fragments, warp_rows, warp_keys, stages))
    return tuple(found)


@functools.lru_cache(maxsize=1024)
def best_attention_tiles(
    problem: AttentionProblem, device: DeviceSpec, count: int = 1
) -> tuple[AttentionChoice, ...]:
    """Return the tiles of least predicted time, best first; none where nothing fits.

    Parameters
    ----------
    problem : AttentionProblem
        The function.
    device : DeviceSpec
        The device.
    count : int
        How many at most.
    """
    tiles = [tile for tile in _all_tiles() if _fits(problem, device, tile)]
    if not tiles:
        return ()
    times = np.array([predict_attention(problem, device, tile) for tile in tiles])
    rows = np.array([dataclasses.astuple(tile) for tile in tiles], dtype=np.int64)
    order = fastest(rows, times, count)
    return tuple(AttentionChoice(tiles[i], float(times[i])) for i in order)


def _fits(problem: AttentionProblem, device: DeviceSpec, tile: AttentionTile) -> bool:
    """Whether a tile is possible for a problem, and worth a look."""
    covering_rows = max(ROWS, 1 << max(0, (problem.rows - 1).bit_length()))
    covering_keys = max(32, 1 << max(0, (problem.keys - 1).bit_length()))
    return (
        tile.rows <= covering_rows * 2
        and tile.keys <= covering_keys
        # No more stages than there are tiles.
        and (tile.stages == 2 or tile.stages <= -(-problem.keys // tile.keys))
        and tile.registers(problem) <= _MOST_REGISTERS
        and tile.shared_bytes(problem) <= device.shared_memory_per_block_optin
        and tile.threads <= device.max_threads_per_block
    )


def predict_attention(problem: AttentionProblem, device: DeviceSpec, tile: AttentionTile) -> float:
    """Predicted time of one tile in microseconds, launch included."""
    query, value = problem.padded
    warps = tile.threads // 32
    steps = _steps(problem, tile)
    scores = tile.rows * tile.keys
    work = scores * (query + value)
    each = _EACH + (_EACH_SCORE if problem.scored else 0.0)
    copied = tile.stage_bytes(problem)
    operations = scores * each + tile.rows * value
    # Every warp reads the keys and values that it has, and what was copied is written once.
    read = tile.own_keys * 2 * (query + value) * warps + copied
    if not tile.holds_queries(problem):
        read += warps * tile.fragments * ROWS * 2 * query
    units = (
        work / RATES.products,
        scores / _EXPONENTIALS,
        operations / _OPERATIONS,
        read / RATES.shared,
        copied / RATES.cache,
    )
    blocks = tile.blocks(problem)
    share = -(-blocks // device.multiprocessors)
    waves = -(-share // min(share, _resident(problem, device, tile)))
    busy = share * steps * sum(unit**_OVERLAP for unit in units) ** (1 / _OVERLAP)
    # A warp alone: its instructions one after the other, on one of four schedulers.
    alone = (
        work / warps / RATES.products * 2
        + scores / warps / _EXPONENTIALS * 4
        + operations / warps / _OPERATIONS * 4
        + _BARRIER * warps
    )
    chain = waves * steps * max(alone, RATES.latency / (tile.stages - 1))
    end = waves * (_ENDS + (_SUM if tile.warp_keys > 1 else 0.0))
    cycles = (busy**_OVERLAP + chain**_OVERLAP) ** (1 / _OVERLAP) + end
    return (RATES.start + 2 * RATES.latency + cycles) / RATES.clock


def _steps(problem: AttentionProblem, tile: AttentionTile) -> float:
    """Tiles of keys that a block walks over, on average."""
    count = -(-problem.keys // tile.keys)
    if not problem.causal:
        return count
    last = np.minimum(np.arange(tile.rows, problem.rows + tile.rows, tile.rows), problem.rows) - 1
    seen = -(-(last + problem.shift + 1) // tile.keys)
    return float(np.clip(seen, 1, count).mean())


def _resident(problem: AttentionProblem, device: DeviceSpec, tile: AttentionTile) -> int:
    """Blocks that are on a multiprocessor together."""
    registers = -(-tile.registers(problem) // 8) * 8 * tile.threads
    return max(
        1,
        min(
            device.shared_memory_per_multiprocessor // (tile.shared_bytes(problem) + _RESERVED),
            device.registers_per_multiprocessor // registers,
            device.max_threads_per_multiprocessor // tile.threads,
        ),
    )
