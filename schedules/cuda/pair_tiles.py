"""Tile sizes for two dependent sums in one kernel: a small search with the model of ``tiles``.

A block computes one tile of the second sum. Slice by slice of the second sum's reduction it computes what the tile
needs of the first sum into shared memory, so that each block repeats the first sum for its own tile. The model counts
the instructions of both sums in a block; repeated work shows as work of more blocks.
"""

from __future__ import annotations

import dataclasses
import functools
import heapq
import itertools
import math
from collections.abc import Callable, Iterator, Sequence

from ..base import Limits
from .first_tiles import FirstTile, first_tiles, fractions, register_choices
from .pair_form import PairProblem, Sum
from .stage_costs import BARRIER, COPY, SHARED_LOAD, divides, kernel_time, tile_count

#: Accumulators of a thread for the second sum, and for both.
ACCUMULATORS, BOTH = 64, 80

#: Largest slice of the second sum's reduction.
_SLICE = 128

#: How many tiles of the second sum get an exact search for the first sum's.
_SHORTLIST = 48


@dataclasses.dataclass(frozen=True)
class PairTile:
    """A choice.

    Parameters
    ----------
    threads, registers : tuple of int
        Per output axis, the threads that share it and the elements that each keeps.
    steps, part : tuple of int
        Per reduction iterator of the second sum, the slice for which the first sum is computed, and the part of it
        whose other operand is staged at a time.
    first : FirstTile
        How a slice of the first sum is shared.
    recompute : float
        How often the first sum is computed in all, padding and overlap of tiles included.
    nbytes : int
        Estimated shared memory.
    """

    threads: tuple[int, ...]
    registers: tuple[int, ...]
    steps: tuple[int, ...]
    part: tuple[int, ...]
    first: FirstTile
    recompute: float
    nbytes: int

    @property
    def thread_count(self) -> int:
        """Threads of a block."""
        return math.prod(self.threads)

    @property
    def register_count(self) -> int:
        """Results that a thread keeps."""
        return math.prod(self.registers)


@dataclasses.dataclass(frozen=True)
class _Outline:
    """A tile of the second sum before the first sum's is chosen."""

    threads: tuple[int, ...]
    registers: tuple[int, ...]
    steps: tuple[int, ...]
    part: tuple[int, ...]
    box: tuple[int, ...]
    middle: int
    staged: int
    blocks: int
    slices: int
    work: float

    @property
    def thread_count(self) -> int:
        """Threads of a block."""
        return math.prod(self.threads)

    @property
    def sizes(self) -> list[int]:
        """Extents of the tile."""
        return [t * r for t, r in zip(self.threads, self.registers, strict=True)]


@functools.lru_cache(maxsize=256)
def pair_tiles(problem: PairProblem, bounds: Limits, count: int = 8) -> tuple[PairTile, ...]:
    """Return the best tiles whose estimated shared memory fits, best first.

    Parameters
    ----------
    problem : PairProblem
        The sums.
    bounds : Limits
        Limits of the target.
    count : int
        How many to return at most.
    """
    guesses = []
    for number, outline in enumerate(_outlines(problem, bounds)):
        share = math.prod(outline.box) / outline.thread_count
        first = max(1.0, share) * problem.first.depth * (1 + SHARED_LOAD)
        guesses.append((_total(outline, first, 0, bounds), number, outline))
    scored = []
    for _, number, outline in heapq.nsmallest(_SHORTLIST, guesses, key=lambda guess: guess[:2]):
        # The two sums stage their operands in turn, and TVM lets them share space.
        left = bounds.shared_bytes - outline.middle
        room = BOTH - math.prod(outline.registers)
        for cost, first in first_tiles(problem, outline.thread_count, outline.box, bounds):
            if first.nbytes <= left and first.register_count <= room:
                scored.append((_total(outline, cost, first.nbytes, bounds), number, outline, first))
                break
    # Where TVM cannot tell how much of a partial tile is used, tiles without a rest still work: keep some of both.
    exact = [choice for choice in scored if divides(problem.axes, choice[2].sizes)]
    best = heapq.nsmallest(count - count // 2, scored, key=lambda choice: choice[:2])
    best += heapq.nsmallest(
        count // 2, (c for c in exact if c not in best), key=lambda choice: choice[:2]
    )
    return tuple(_tile(problem, outline, first) for _, _, outline, first in best)


def _tile(problem: PairProblem, outline: _Outline, first: FirstTile) -> PairTile:
    made = outline.blocks * outline.slices * math.prod(outline.box)
    return PairTile(
        outline.threads,
        outline.registers,
        outline.steps,
        outline.part,
        first,
        made / problem.first.count,
        outline.middle + max(outline.staged, first.nbytes),
    )


def _total(outline: _Outline, first: float, staged: int, bounds: Limits) -> float:
    """Estimated time, from a thread's time and staged bytes for a slice of the first sum."""
    per_thread = outline.slices * (outline.work + first + BARRIER)
    nbytes = outline.middle + max(outline.staged, staged)
    return kernel_time(per_thread, outline.blocks, outline.thread_count, nbytes, bounds)


def _outlines(problem: PairProblem, bounds: Limits) -> Iterator[_Outline]:
    """Tiles of the second sum, each with the slices of the reduction that leave room for the first sum."""
    axes = problem.axes
    # Only the three largest axes are tiled; the others (a batch) go to the grid, one element a block.
    order = sorted(range(len(axes)), key=lambda i: -axes[i])[:3]
    least, most = min(2 * bounds.warp, math.prod(axes)), min(bounds.threads, 256)
    all_registers = list(_combinations(axes, order, register_choices, 1, ACCUMULATORS))
    for threads in _combinations(axes, order, _thread_choices, least, most):
        for registers in all_registers:
            sizes = tuple(t * r for t, r in zip(threads, registers, strict=True))
            blocks = tile_count(axes, sizes)
            # Neither small tiles of a large output nor large ones of a small output are worth a closer look.
            small = blocks > 16 * bounds.multiprocessors and math.prod(registers) < 16
            large = 8 * blocks < bounds.multiprocessors and math.prod(registers) > 4
            if not (small or large) and all(s < 2 * e for s, e in zip(sizes, axes, strict=True)):
                yield from _sliced(problem, threads, registers, sizes, blocks, bounds)


def _sliced(
    problem: PairProblem,
    threads: tuple[int, ...],
    registers: tuple[int, ...],
    sizes: tuple[int, ...],
    blocks: int,
    bounds: Limits,
) -> Iterator[_Outline]:
    second = problem.second
    other = second.operands[1 - problem.middle]
    kept = sum(
        operand.footprint(_counts(problem, registers, [1] * len(second.reduced)))
        for operand in second.operands
    )
    count = math.prod(threads)
    for steps in _slices(second):
        box = second.operands[problem.middle].sizes(_counts(problem, sizes, steps))
        middle = math.prod(box) * second.operands[problem.middle].nbytes
        part, staged = steps, 0
        for part in _parts(steps):
            staged = other.footprint(_counts(problem, sizes, part))
            if middle + staged * other.nbytes <= bounds.shared_bytes * 3 // 4:
                break
        staged_bytes = staged * other.nbytes
        if middle + staged_bytes > bounds.shared_bytes:
            continue
        products = math.prod(steps)
        work = products * (math.prod(registers) + SHARED_LOAD * kept)
        work += tile_count(steps, part) * (COPY * staged / count + BARRIER)
        slices = tile_count([second.extents[i] for i in second.reduced], steps)
        yield _Outline(
            threads, registers, steps, part, box, middle, staged_bytes, blocks, slices, work
        )


def _counts(problem: PairProblem, sizes: Sequence[int], steps: Sequence[int]) -> list[int]:
    """Neighbouring values of each iterator of the second sum in a tile."""
    counts = [1] * len(problem.second.extents)
    for axis, number in enumerate(problem.walked):
        if number >= 0:
            counts[number] = sizes[axis]
    for number, step in zip(problem.second.reduced, steps, strict=True):
        counts[number] = step
    return counts


@functools.lru_cache(maxsize=256)
def _slices(second: Sum) -> tuple[tuple[int, ...], ...]:
    """Slices of the second sum's reduction: whole windows, and a few sizes of the longest iterator."""
    extents = [second.extents[i] for i in second.reduced]
    longest = max(range(len(extents)), key=lambda i: extents[i])
    # An iterator that the window shares with an output axis is a window, which is read whole.
    alone = all(
        sum(i == second.reduced[longest] for i, _ in terms) == len(terms)
        for operand in second.operands
        for _, terms in operand.dims
        if any(i == second.reduced[longest] for i, _ in terms)
    )
    if not alone:
        return (tuple(extents),)
    return tuple(
        tuple(step if i == longest else extent for i, extent in enumerate(extents))
        for step in fractions(extents[longest], _SLICE)
    )


def _parts(steps: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """The whole slice, then smaller parts of its longest iterator."""
    yield steps
    longest = max(range(len(steps)), key=lambda i: steps[i])
    for size in (32, 16, 8, 4):
        if size < steps[longest] and steps[longest] % size == 0:
            yield tuple(size if i == longest else step for i, step in enumerate(steps))


def _combinations(
    axes: Sequence[int],
    order: Sequence[int],
    choices: Callable[[int], list[int]],
    least: int,
    most: int,
) -> list[tuple[int, ...]]:
    """Sizes for some axes, 1 for the others, whose product lies between two numbers."""
    found = set()
    for combination in itertools.product(*(choices(axes[i]) for i in order)):
        if least <= math.prod(combination) <= most:
            sizes = [1] * len(axes)
            for axis, size in zip(order, combination, strict=True):
                sizes[axis] = size
            found.add(tuple(sizes))
    return sorted(found)


def _thread_choices(extent: int) -> list[int]:
    """Powers of two, and the largest divisors, which leave no thread idle."""
    divisors = [d for d in range(2, 65) if extent % d == 0]
    return sorted(size for size in {1, 2, 4, 8, 16, 32, 64, *divisors[-3:]} if size < 2 * extent)
