"""Choosing tiles for gated functions: how much of the output a block writes, and who computes its gates.

The model weighs what a block moves and multiplies against how many blocks there are; it only ranks. Gates are
computed again by every block that needs them, which speaks for few large tiles; a GPU wants many small ones.
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import math
from collections.abc import Sequence

from ..analysis import Access, Block, dtype_bytes
from ..base import Limits

#: The widest load and store of a thread in bytes.
_VECTOR_BYTES = 16

#: Bytes from memory, and products with operands from a cache, that a multiprocessor manages in a cycle.
_BYTES, _PRODUCTS = 16.0, 16.0

#: Cycles of a load from a cache that nothing hides, and of what a block does besides: its start and its barriers.
_LATENCY, _BLOCK = 100.0, 1000.0

#: Threads of a multiprocessor that are resident together.
_RESIDENT = 1024

#: Threads of a block.
_THREADS = (64, 128, 256)

#: Threads whose loads of neighbours are one transaction.
_WARP = 32

#: Partial sums that a block keeps at most, 4 bytes each.
_PARTIAL = 4096

#: Vectors that one thread handles at most.
_VECTORS = 16


@dataclasses.dataclass(frozen=True)
class Gate:
    """A product: the output dimensions its values depend on, its length, and whether one sum reads neighbours."""

    places: frozenset[int]
    length: int
    along: bool


@dataclasses.dataclass(frozen=True)
class GateProblem:
    """What the search knows.

    Parameters
    ----------
    extents : tuple of int
        Dimensions of the output.
    gates : tuple of Gate
        The products.
    vector : int
        Elements of the last dimension that a thread can move at once; divides its extent.
    bytes_per_element : float
        Bytes read and written per element of the output.
    """

    extents: tuple[int, ...]
    gates: tuple[Gate, ...]
    vector: int
    bytes_per_element: float


@dataclasses.dataclass(frozen=True)
class GateTile:
    """A choice: the tile of a block, its threads, elements a thread moves at once, and threads per sum of each gate."""

    sizes: tuple[int, ...]
    threads: int
    vector: int
    lanes: tuple[int, ...]


def vector_width(outputs: Sequence[Block]) -> int:
    """Elements that a thread can move at once in every output: as many as 16 bytes hold, if rows divide."""
    width = _VECTOR_BYTES
    for output in outputs:
        accesses = [a for a in (*output.reads, *output.writes) if is_aligned(output, a)]
        if not output.is_injective or output.writes[0] not in accesses:
            return 1
        if any("bool" in access.dtype for access in accesses):
            return 1
        width = min(width, _VECTOR_BYTES // max(dtype_bytes(a.dtype) for a in accesses))
    return width


def is_aligned(output: Block, access: Access) -> bool:
    """Whether the block accesses a buffer of its own shape at its own place."""
    return access.shape == output.extents and all(
        number == axis or extent == 1
        for axis, (number, extent) in enumerate(zip(access.plain, output.extents, strict=True))
    )


def gate_tiles(problem: GateProblem, bounds: Limits, count: int) -> tuple[GateTile, ...]:
    """Return the best tiles, best first.

    Parameters
    ----------
    problem : GateProblem
        The function.
    bounds : Limits
        Limits of the target.
    count : int
        How many to return at most.
    """
    fixed = set().union(*(gate.places for gate in problem.gates))
    choices = [_sizes(extent, i in fixed) for i, extent in enumerate(problem.extents)]
    scored = []
    smallest = min(math.prod(problem.extents), bounds.warp)
    for threads in _THREADS:
        threads = min(threads, bounds.threads)
        for sizes in itertools.product(*choices):
            vector = problem.vector
            while problem.extents[-1] % vector or sizes[-1] % vector:
                vector //= 2
            vectors = math.prod(sizes) // vector
            if vectors > threads * _VECTORS or vectors < min(threads, smallest):
                continue
            regions = [math.prod(sizes[i] for i in gate.places) for gate in problem.gates]
            lanes = tuple(map(_lanes, problem.gates, regions, itertools.repeat(threads)))
            if sum(map(math.prod, zip(regions, lanes, strict=True))) > _PARTIAL:
                continue
            tile = GateTile(sizes, threads, vector, lanes)
            scored.append((_cost(problem, tile, regions, bounds), -math.prod(sizes), threads, tile))
    return tuple(choice[-1] for choice in heapq.nsmallest(count, scored, key=lambda c: c[:3]))


def _sizes(extent: int, exact: bool) -> list[int]:
    """Tile sizes of one dimension; where gates depend on it without a rest, so that their number is a constant."""
    if exact:
        return [size for size in range(1, min(extent, 256) + 1) if extent % size == 0]
    powers = [1 << i for i in range(13) if 1 << i < extent]
    return [*powers, extent]


def _lanes(gate: Gate, region: int, threads: int) -> int:
    """Threads that share a sum: about a warp where they then read neighbours, else as many as are there for it."""
    # Without a rest: TVM 0.27 loses the condition on one when it moves a partial sum.
    divisors = [d for d in range(1, 129) if gate.length % d == 0]
    most = _WARP if gate.along else max(1, threads // region)
    lanes = max(d for d in divisors if d <= most)
    if gate.along and lanes < _WARP // 4:
        lanes = next((d for d in divisors if d >= _WARP // 4), lanes)
    return lanes


def _cost(problem: GateProblem, tile: GateTile, regions: Sequence[int], bounds: Limits) -> float:
    """Estimated time in cycles."""
    blocks = math.prod(
        -(-extent // size) for extent, size in zip(problem.extents, tile.sizes, strict=True)
    )
    elements = math.prod(tile.sizes)
    # A row shorter than a transaction (32 bytes) wastes the rest of it.
    run = tile.sizes[-1]
    moved = elements * problem.bytes_per_element * (1 + 8 / run) / _BYTES
    latency = _BLOCK + 2 * _LATENCY * -(-elements // (tile.threads * tile.vector))
    for gate, region, lanes in zip(problem.gates, regions, tile.lanes, strict=True):
        # A row of another gate starts another transaction, unless neighbours are gates themselves.
        moved += region * gate.length / _PRODUCTS
        serial = -(-region * lanes // tile.threads) * -(-gate.length // lanes)
        latency += _LATENCY * serial / 4 + 10 * lanes
    share = -(-blocks // bounds.multiprocessors)
    resident = max(1, _RESIDENT // tile.threads)
    return share * moved + -(-share // resident) * latency
