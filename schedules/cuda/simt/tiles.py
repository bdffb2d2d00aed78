"""Choosing tile sizes: all that fit, ranked by a model of where a multiprocessor's time goes.

The model counts what a warp issues (multiply-adds, loads from shared memory, copies, and what each tile of the reduction
takes besides), shared-memory and second-level-cache traffic, and the chain of dependent steps of one warp. Its
constants were fitted to kernels measured on an H200; it only ranks.
"""

from __future__ import annotations

import dataclasses
import functools
import heapq
import itertools
import math
from collections.abc import Iterator

from ...base import Limits
from ..tensor_core.form import Products
from .kernel import accesses, sides
from .tile import VECTOR, WARP, Tile, padded

#: Accumulators of a thread, so that fragments and addresses fit beside them in 255 registers.
_SUMS = 128


@dataclasses.dataclass(frozen=True)
class Side:
    """What the search knows of one operand.

    Attributes
    ----------
    count : int
        Lines.
    copies : int
        Tiles of it.
    width : int
        Neighbouring lines that are copied at once; 0 where it is computed.
    transposed : bool
        Whether the reduction is contiguous.
    """

    count: int
    copies: int
    width: int
    transposed: bool


@dataclasses.dataclass(frozen=True)
class Problem:
    """What the search knows of a function.

    Attributes
    ----------
    rows, columns : Side
        The operands; of several anchors, the worst.
    batch : int
        Number of outputs.
    depths : tuple of int
        Length of each anchor's reduction.
    inner : tuple of int
        Length of each anchor's innermost iterator.
    sums : tuple of int
        Sums of each anchor per output element.
    """

    rows: Side
    columns: Side
    batch: int
    depths: tuple[int, ...]
    inner: tuple[int, ...]
    sums: tuple[int, ...]


def problem_of(form: Products) -> Problem:
    """Describe a function to the search."""
    reads = [accesses(form, anchor) for anchor in form.anchors]
    copies = [sides(form, anchor) for anchor in form.anchors]
    described = []
    for side, count in enumerate((form.row_count, form.column_count)):
        own = [pair[side] for pair in reads]
        width = min(0 if access.copy is None else access.width for access in own)
        most = max(pair[side] for pair in copies)
        described.append(Side(count, most, width, any(access.transposed for access in own)))
    return Problem(
        *described,
        form.batch_count,
        tuple(anchor.depth for anchor in form.anchors),
        tuple(max(i.extent for i in anchor.reduced) for anchor in form.anchors),
        tuple(anchor.copy_count for anchor in form.anchors),
    )


def candidates(problem: Problem, bounds: Limits) -> Iterator[Tile]:
    """Every tile that fits.

    Parameters
    ----------
    problem : Problem
        The function.
    bounds : Limits
        Limits of the target.
    """
    sums = sum(problem.sums)
    for rows, columns, lanes in itertools.product((1, 2, 4, 8, 16), (2, 4, 8, 12, 16), (1, 2, 4, 8, 16)):
        if rows * columns * sums > _SUMS or rows * columns < 4:
            continue
        # Lanes form a rectangle whose sides in numbers are alike, so that a warp loads little.
        if not 1 / 4 <= lanes * rows / (WARP // lanes * columns) <= 4 and rows > 2:
            continue
        for down, across, slices in itertools.product((1, 2, 4, 8), (1, 2, 4, 8), (1, 2, 4, 8, 16)):
            tile = Tile(rows, columns, lanes, down, across, slices, 8, 2)
            if not 2 <= tile.threads // WARP <= min(16, bounds.threads // WARP):
                continue
            if not (_covers(tile.rows, problem.rows.count) and _covers(tile.columns, problem.columns.count)):
                continue
            for depth, stages in itertools.product((8, 16, 32, 64), (2, 3, 4, 6)):
                if depth // slices < 2 or (depth > 8 and depth > 2 * max(problem.depths)):
                    continue
                found = dataclasses.replace(tile, depth=depth, stages=stages)
                if _shared(problem, found) <= bounds.dynamic_shared_bytes:
                    yield found


def _covers(size: int, extent: int) -> bool:
    """Whether a tile is not mostly outside of what it tiles."""
    return size <= max(VECTOR, 2 ** math.ceil(math.log2(extent)))


def _stage(problem: Problem, tile: Tile) -> int:
    """Shared memory of one tile of both operands, in bytes."""
    total = 0
    for side, lines in ((problem.rows, tile.rows), (problem.columns, tile.columns)):
        total += 4 * tile.depth * side.copies * (padded(lines) if side.transposed else lines)
    return total


def _shared(problem: Problem, tile: Tile) -> int:
    """Shared memory of a block, in bytes."""
    exchange = 4 * tile.warp_depth * tile.rows * tile.columns * sum(problem.sums)
    return max(tile.stages * _stage(problem, tile), exchange if tile.warp_depth > 1 else 0)


@dataclasses.dataclass(frozen=True)
class Rates:
    """Constants of the model, in cycles of a multiprocessor.

    Attributes
    ----------
    issue : float
        Instructions of a warp that are issued a cycle.
    copy, computed : float
        Instructions of one asynchronous copy, and of one computed element.
    step : float
        Instructions of a warp for a tile of the reduction.
    load : float
        Cycles of a 16-byte load of a warp.
    cache : float
        Bytes a cycle from the second-level cache.
    overlap : float
        Exponent with which times that overlap add up: 1 for none, infinity for a perfect overlap.
    chain, wait : float
        One warp's chain: cycles per instruction, and per tile.
    latency, start : float
        From a copy's start to its arrival; what a kernel pays once.
    store, exchange : float
        Per accumulator of a thread, to store it and to add it up across warps.
    """

    issue: float = 3.6
    copy: float = 4.0
    computed: float = 60.0
    step: float = 60.0
    load: float = 2.5
    cache: float = 64.0
    overlap: float = 3.0
    chain: float = 1.3
    wait: float = 60.0
    latency: float = 800.0
    start: float = 1800.0
    store: float = 2.0
    exchange: float = 8.0


#: Cycles of a multiprocessor in a microsecond, to state a cost in microseconds.
_CYCLES = 1750.0


def cost(problem: Problem, tile: Tile, bounds: Limits, rates: Rates = Rates()) -> float:  # noqa: B008
    """Estimate a kernel's time in microseconds.

    Parameters
    ----------
    problem : Problem
        The function.
    tile : Tile
        Sizes.
    bounds : Limits
        Limits of the target.
    rates : Rates
        Constants of the model.
    """
    warps = tile.threads // WARP
    copied = _copy_instructions(problem, tile, rates)
    issued = loaded = traffic = chain = 0.0
    steps = 0
    for depth, copies in zip(problem.depths, problem.sums, strict=True):
        count = math.ceil(depth / tile.depth)
        steps += count
        part = tile.depth // tile.warp_depth
        products = tile.thread_rows * tile.thread_columns * copies
        loads = tile.thread_rows / tile.row_vector * (copies if problem.rows.copies > 1 else 1)
        loads += tile.thread_columns / tile.column_vector * (copies if problem.columns.copies > 1 else 1)
        each = part * (products + loads) + copied + rates.step
        issued += count * warps * each
        loaded += count * warps * part * loads * rates.load
        chain += count * (each * rates.chain + rates.wait)
        traffic += count * _stage(problem, tile)
    blocks = math.ceil(problem.rows.count / tile.rows) * math.ceil(problem.columns.count / tile.columns)
    share = math.ceil(blocks * problem.batch / bounds.multiprocessors)
    waves = math.ceil(share / min(share, _resident(problem, tile, bounds)))
    p = rates.overlap
    chain = max(chain, steps * rates.latency / (tile.stages - 1))
    busy = (share * issued / rates.issue) ** p + (share * loaded) ** p
    busy += (share * traffic / rates.cache) ** p + (waves * chain) ** p
    sums = tile.thread_rows * tile.thread_columns * sum(problem.sums)
    end = sums * rates.store
    if tile.warp_depth > 1:
        end += sums * rates.exchange
    return (rates.start + rates.latency + busy ** (1 / p) + waves * end) / _CYCLES


def _copy_instructions(problem: Problem, tile: Tile, rates: Rates) -> float:
    """Instructions of a thread to copy one tile of both operands."""
    total = 0.0
    for side, lines in ((problem.rows, tile.rows), (problem.columns, tile.columns)):
        elements = lines * tile.depth * side.copies / tile.threads
        if side.width == 0:
            total += elements * rates.computed
        else:
            total += elements / math.gcd(side.width, lines) * rates.copy
    return total


def _resident(problem: Problem, tile: Tile, bounds: Limits) -> int:
    """Blocks that are on a multiprocessor together."""
    # Two sets of numbers to multiply, and about 40 registers for addresses.
    parts = tile.thread_rows * problem.rows.copies + tile.thread_columns * problem.columns.copies
    registers = tile.thread_rows * tile.thread_columns * sum(problem.sums) + 2 * parts + 40
    registers = math.ceil(min(255, registers) / 8) * 8
    limits = (
        bounds.resident_shared_bytes // (_shared(problem, tile) + 1024),
        bounds.registers // (registers * tile.threads),
        bounds.resident_threads // tile.threads,
    )
    return max(1, min(limits))


@functools.lru_cache(maxsize=512)
def best(problem: Problem, bounds: Limits, count: int = 4) -> tuple[Tile, ...]:
    """Return the tiles of least cost, best first.

    Parameters
    ----------
    problem : Problem
        The function.
    bounds : Limits
        Limits of the target.
    count : int
        How many at most.
    """
    found = candidates(problem, bounds)
    return tuple(heapq.nsmallest(count, found, key=lambda tile: (cost(problem, tile, bounds), tile)))
