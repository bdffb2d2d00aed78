"""Choosing tile sizes for a contraction: a small search with a model of where the time goes.

The model counts instructions of a thread block: multiply-adds, loads from shared memory (32 lanes a cycle against 128
multiply-adds), copies from global to shared memory, and how many multiprocessors have work at all. It only ranks.
"""

from __future__ import annotations

import dataclasses
import functools
import heapq
import itertools
import math
import operator
from collections.abc import Sequence

from ..analysis import dtype_bytes
from ..base import Limits
from .stage_costs import BARRIER, BUSY_THREADS, COPY, SHARED_LOAD

#: Accumulators of a thread, so that operands and addresses fit beside them in 255 (128 at full speed) registers.
ACCUMULATORS = 64

#: Elements of the reduction in a slice: fewer make barriers dominate, more add nothing.
_SLICE = 72


@dataclasses.dataclass(frozen=True)
class Axis:
    """An axis of the output; ``divisors`` are the sizes of its groups where indices divide by it."""

    # A grouped convolution: all output channels of a group read the same input channels.

    extent: int
    divisors: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class Operand:
    """An input of the anchor.

    ``dims`` has for each dimension its size, the output axes in its index, and the positions of the reduction
    iterators in its index.
    """

    dims: tuple[tuple[int, tuple[int, ...], tuple[int, ...]], ...]
    dtype: str


@dataclasses.dataclass(frozen=True)
class Anchor:
    """A sum of products: its reduction extents, operands, and accumulators per element of the output."""

    reduced: tuple[int, ...]
    operands: tuple[Operand, ...]
    copies: int


@dataclasses.dataclass(frozen=True)
class Problem:
    """What the search knows: output axes, the anchors that run one after the other, and where their sums meet.

    ``through_shared`` says that each anchor's sums go through shared memory, so that only one anchor's are registers
    at a time.
    """

    axes: tuple[Axis, ...]
    anchors: tuple[Anchor, ...]
    through_shared: bool = False

    @property
    def accumulators(self) -> int:
        """Accumulators of a thread per element of the output."""
        copies = [anchor.copies for anchor in self.anchors]
        return max(copies) if self.through_shared else sum(copies)

    def exchanged(self, sizes: Sequence[int]) -> int:
        """Bytes of shared memory that hold a tile's sums, which are float32."""
        if not self.through_shared:
            return 0
        return 4 * math.prod(sizes) * sum(anchor.copies for anchor in self.anchors)


@dataclasses.dataclass(frozen=True)
class Tile:
    """A choice.

    Parameters
    ----------
    threads, registers : tuple of int
        Per output axis, the threads that share it and the elements that each thread keeps.
    steps : tuple of tuple of int
        Per anchor and reduction iterator, the part that is staged at a time.
    groups : tuple of int
        Per output axis, the size of the groups within which it is tiled; 0 where it is tiled as a whole.
    """

    threads: tuple[int, ...]
    registers: tuple[int, ...]
    steps: tuple[tuple[int, ...], ...]
    groups: tuple[int, ...]

    @property
    def thread_count(self) -> int:
        """Threads of a block."""
        return math.prod(self.threads)

    @property
    def register_count(self) -> int:
        """Outputs that a thread keeps."""
        return math.prod(self.registers)


@functools.lru_cache(maxsize=512)
def tiles(problem: Problem, bounds: Limits, count: int = 12) -> tuple[Tile, ...]:
    """Return the best tiles whose estimated shared memory fits, best first.

    Parameters
    ----------
    problem : Problem
        The contraction.
    bounds : Limits
        Limits of the target.
    count : int
        How many to return at most.
    """
    # Only the three largest axes are tiled; the others (a batch) go to the grid, one element a block.
    order = sorted(range(len(problem.axes)), key=lambda i: -problem.axes[i].extent)[:3]
    most = max(1, ACCUMULATORS // problem.accumulators)
    registers_of = _products(problem, order, _register_choices, 1, most)
    scored = []
    # Only tiles without a rest go through shared memory, of which there may be none with many threads.
    least = bounds.warp if problem.through_shared else 2 * bounds.warp
    for threads in _products(problem, order, _thread_choices, least, min(bounds.threads, 256)):
        for registers in registers_of:
            sizes = tuple(t * r for t, r in zip(threads, registers, strict=True))
            if not all(map(_fits, problem.axes, sizes)):
                continue
            exact = all(
                _extent(axis, size) % size == 0
                for axis, size in zip(problem.axes, sizes, strict=True)
            )
            if problem.through_shared and not exact:
                continue
            slices = _slices(problem, sizes, math.prod(threads), bounds)
            if slices is not None:
                steps, crowding = slices
                cost = crowding * _cost(problem, threads, registers, steps, bounds)
                scored.append((cost, not exact, threads, registers, steps))
    # Where TVM cannot tell how much of a partial tile is used, tiles without a rest still work: keep some of both.
    best = heapq.nsmallest(count // 2, scored)
    best += heapq.nsmallest(
        count // 2, (choice for choice in scored if not choice[1] and choice not in best)
    )
    return tuple(
        Tile(*choice[2:], tuple(map(_group, problem.axes, map(operator.mul, choice[2], choice[3]))))
        for choice in best
    )


def _group(axis: Axis, size: int) -> int:
    """Size of the groups to tile within, 0 for none."""
    group = math.gcd(*(divisor for divisor in axis.divisors if size <= divisor))
    return group if group < axis.extent else 0


def _extent(axis: Axis, size: int) -> int:
    """How far the tiles of one axis run."""
    return _group(axis, size) or axis.extent


def _fits(axis: Axis, size: int) -> bool:
    """A tile is no larger than what it tiles, and does not straddle groups."""
    group = math.gcd(*(divisor for divisor in axis.divisors if size <= divisor))
    return (
        size <= axis.extent
        and (not group or size <= group)
        and all(
            size <= divisor or size % divisor == 0 == group % divisor for divisor in axis.divisors
        )
    )


def _products(problem, order, choices, least, most):
    rank = len(problem.axes)
    found = set()
    for combination in itertools.product(*(choices(problem.axes[i].extent) for i in order)):
        if least <= math.prod(combination) <= max(most, 1):
            sizes = [1] * rank
            for axis, size in zip(order, combination, strict=True):
                sizes[axis] = size
            found.add(tuple(sizes))
    if not found:
        # A small output has fewer elements than a warp has lanes.
        sizes = [1] * rank
        for axis in order:
            sizes[axis] = min(problem.axes[axis].extent, max(1, most // math.prod(sizes)))
        found.add(tuple(sizes))
    return sorted(found)


def _thread_choices(extent: int) -> list[int]:
    """Powers of two, and the largest divisors, which leave no thread idle."""
    divisors = [d for d in range(2, 65) if extent % d == 0]
    return sorted(size for size in {1, 2, 4, 8, 16, 32, *divisors[-3:]} if size <= extent)


def _register_choices(extent: int) -> list[int]:
    return [7, 1] if extent == 7 else [size for size in (1, 2, 4, 8) if size <= extent]


def _footprint(
    problem: Problem, operand: Operand, sizes: Sequence[int], steps: Sequence[int]
) -> tuple[int, int]:
    """Elements of an operand under a tile, and how many of them are contiguous."""
    total = run = 1
    for size, spatial, reduced in operand.dims:
        run = 1
        for i in spatial:
            run *= sizes[i]
        window = 1
        for i in reduced:
            window *= steps[i]
        if spatial and reduced:
            # A sliding window: as much of the dimension as of the output, and the rest of one window.
            whole = math.prod(problem.axes[i].extent for i in spatial)
            run = -(-size * run // whole) + window
        else:
            run *= window
        run = min(size, run)
        total *= run
    return total, run


def _slices(
    problem: Problem, sizes: Sequence[int], threads: int, bounds: Limits
) -> tuple[tuple[tuple[int, ...], ...], float] | None:
    """Steps of every anchor, and the factor by which what they take in shared memory keeps other blocks out."""
    # As many blocks as hide each other's latency get equal shares.
    fair = bounds.resident_shared_bytes * threads // BUSY_THREADS
    exchanged = problem.exchanged(sizes)
    for room in (min(fair, bounds.shared_bytes), bounds.shared_bytes):
        # Anchors run one after the other, and TVM lets their slices share space.
        steps = tuple(_steps(problem, a, sizes, room - exchanged) for a in problem.anchors)
        if None not in steps:
            taken = exchanged + max(
                _slice_bytes(problem, anchor, sizes, step)
                for anchor, step in zip(problem.anchors, steps, strict=True)
            )
            return steps, max(1.0, taken / fair)
    return None


def _steps(
    problem: Problem, anchor: Anchor, sizes: Sequence[int], budget: int
) -> tuple[int, ...] | None:
    """Largest slice that fits: whole windows before many channels, single rows when a window is too large."""
    for candidates in _step_candidates(anchor.reduced):
        for steps in candidates:
            if _slice_bytes(problem, anchor, sizes, steps) <= budget:
                return steps
    return None


def _slice_bytes(
    problem: Problem, anchor: Anchor, sizes: Sequence[int], steps: Sequence[int]
) -> int:
    """Shared memory of a slice."""
    return sum(
        _footprint(problem, operand, sizes, steps)[0] * dtype_bytes(operand.dtype)
        for operand in anchor.operands
    )


@functools.lru_cache(maxsize=512)
def _step_candidates(reduced: tuple[int, ...]) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """Slices to try, the largest first: of whole windows, then of single elements of the window."""
    channel = max(range(len(reduced)), key=lambda i: reduced[i])
    extent = reduced[channel]
    divisors = [d for d in range(1, min(extent, _SLICE) + 1) if extent % d == 0]
    if divisors == [1] and extent > 1:
        divisors = [s for s in (1, 4, 8, 16) if s < extent]
    found = []
    for whole in (True, False):
        steps = [
            tuple(
                step if i == channel else (size if whole else 1) for i, size in enumerate(reduced)
            )
            for step in reversed(divisors)
        ]
        small = [choice for choice in steps if math.prod(choice) <= _SLICE]
        found.append(tuple(small or steps[-1:]))
    return tuple(found)


def _cost(
    problem: Problem,
    tile_threads: Sequence[int],
    registers: Sequence[int],
    steps: Sequence[Sequence[int]],
    bounds: Limits,
) -> float:
    """Estimated time in arbitrary units."""
    sizes = [t * r for t, r in zip(tile_threads, registers, strict=True)]
    blocks = 1
    for axis, size in zip(problem.axes, sizes, strict=True):
        extent = _extent(axis, size)
        blocks *= -(-extent // size) * (axis.extent // extent)
    threads = -(-math.prod(tile_threads) // bounds.warp) * bounds.warp
    per_thread = sum(
        _anchor_cost(problem, anchor, sizes, registers, step, threads)
        for anchor, step in zip(problem.anchors, steps, strict=True)
    )
    # A multiprocessor works at full rate from BUSY_THREADS on, below that in proportion.
    resident = max(1, BUSY_THREADS // threads)
    waves = -(-blocks // (bounds.multiprocessors * resident))
    last = min(blocks, bounds.multiprocessors * resident)
    busy = min(BUSY_THREADS, -(-last // bounds.multiprocessors) * threads)
    return waves * per_thread * max(busy, 4 * bounds.warp)


def _anchor_cost(
    problem: Problem,
    anchor: Anchor,
    sizes: Sequence[int],
    registers: Sequence[int],
    steps: Sequence[int],
    threads: int,
) -> float:
    """Estimated time of one anchor in a thread."""
    loads = copied = 0
    for operand in anchor.operands:
        kept = 1
        for _, spatial, _ in operand.dims:
            for i in spatial:
                kept *= registers[i]
        loads += kept
        elements, run = _footprint(problem, operand, sizes, steps)
        copied += elements * (1 + 8 / run)
    work = math.prod(steps) * (math.prod(registers) + SHARED_LOAD * loads)
    slices = math.prod(
        -(-extent // step) for extent, step in zip(anchor.reduced, steps, strict=True)
    )
    return slices * (work + COPY * copied / threads + BARRIER)
