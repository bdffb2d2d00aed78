"""Tile sizes for two dependent sums in one kernel: a small search with the model of ``tiles``.

A block computes one tile of the second sum. Slice by slice of the second sum's reduction it computes what the tile needs
of the first sum into shared memory, so that each block repeats the first sum for its own tile. The model counts the
instructions of both sums in a block; repeated work shows as work of more blocks.
"""

from __future__ import annotations

import dataclasses
import functools
import heapq
import itertools
import math
from collections.abc import Iterator, Sequence

from ..base import Limits
from .pair_form import PairProblem, Sum

#: Accumulators of a thread for the second sum, and for both.
ACCUMULATORS, BOTH = 64, 80

#: Multiply-adds in the time of a load from shared memory (or of one cache line), of waiting for a load through the
#: cache, of copying an element into shared memory, of the epilogue of an element, and of the barriers of a slice.
_SHARED_LOAD, _LATENCY, _COPY, _EPILOGUE, _BARRIER = 2.0, 2.0, 12.0, 8.0, 40.0

#: Threads of a multiprocessor that hide each other's latency; more add little.
_BUSY_THREADS = 512

#: Largest slices: of the second sum's reduction, and products of the first sum that are staged at a time.
_SLICE, _STAGED = 64, 72

#: Operands and sums of the first sum that a thread may hold in registers, so that it reads each element once.
_HELD = 64

#: How many tiles of the second sum get an exact search for the first sum's.
_SHORTLIST = 48


@dataclasses.dataclass(frozen=True)
class FirstTile:
    """How the threads of a block share a slice of the first sum.

    Parameters
    ----------
    threads, registers : tuple of int
        Per dimension of the slice, the threads that share it (their product is the block's) and the elements that each
        keeps.
    steps : tuple of int
        Per reduction iterator, the part that is staged at a time.
    scope : str
        Where a thread reads the operands from: ``"shared"``, staged there by the block; ``"local"``, its own registers,
        filled before the sum; ``"global"``, as they are.
    nbytes : int
        Shared memory of the operands.
    """

    threads: tuple[int, ...]
    registers: tuple[int, ...]
    steps: tuple[int, ...]
    scope: str
    nbytes: int

    @property
    def register_count(self) -> int:
        """Sums that a thread keeps."""
        return math.prod(self.registers)


@dataclasses.dataclass(frozen=True)
class PairTile:
    """A choice.

    Parameters
    ----------
    threads, registers : tuple of int
        Per output axis, the threads that share it and the elements that each keeps.
    steps, part : tuple of int
        Per reduction iterator of the second sum, the slice for which the first sum is computed, and the part of it whose
        other operand is staged at a time.
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
        share = math.prod(outline.box) / math.prod(outline.threads)
        first = max(1.0, share) * problem.first.depth * (1 + _SHARED_LOAD)
        guesses.append((_total(outline, first, 0, bounds), number, outline))
    scored = []
    for _, number, outline in heapq.nsmallest(_SHORTLIST, guesses, key=lambda guess: guess[:2]):
        # The two sums stage their operands in turn, and TVM lets them share space.
        left = bounds.shared_bytes - outline.middle
        room = BOTH - math.prod(outline.registers)
        for cost, first in _first_tiles(problem, math.prod(outline.threads), outline.box):
            if first.nbytes <= left and first.register_count <= room:
                scored.append((_total(outline, cost, first.nbytes, bounds), number, outline, first))
                break
    # Where TVM cannot tell how much of a partial tile is used, tiles without a rest still work: keep some of both.
    exact = [choice for choice in scored if _divides(problem, choice[2])]
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


def _divides(problem: PairProblem, outline: _Outline) -> bool:
    sizes = map(math.prod, zip(outline.threads, outline.registers, strict=True))
    return all(extent % size == 0 for extent, size in zip(problem.axes, sizes, strict=True))


def _total(outline: _Outline, first: float, staged: int, bounds: Limits) -> float:
    """Estimated time in arbitrary units, from a thread's time and staged bytes for a slice of the first sum."""
    threads = -(-math.prod(outline.threads) // bounds.warp) * bounds.warp
    per_thread = outline.slices * (outline.work + first + _BARRIER)
    # Multiprocessors have about twice the shared memory that a block gets without asking for more.
    room = 2 * bounds.shared_bytes // (outline.middle + max(outline.staged, staged))
    resident = max(1, min(_BUSY_THREADS // threads, room))
    waves = -(-outline.blocks // (bounds.multiprocessors * resident))
    last = min(outline.blocks, bounds.multiprocessors * resident)
    busy = min(_BUSY_THREADS, -(-last // bounds.multiprocessors) * threads)
    return waves * per_thread * max(busy, 4 * bounds.warp)


def _outlines(problem: PairProblem, bounds: Limits) -> Iterator[_Outline]:
    """Tiles of the second sum, each with the slices of the reduction that leave room for the first sum."""
    axes = problem.axes
    # Only the three largest axes are tiled; the others (a batch) go to the grid, one element a block.
    order = sorted(range(len(axes)), key=lambda i: -axes[i])[:3]
    least, most = min(2 * bounds.warp, math.prod(axes)), min(bounds.threads, 256)
    all_registers = list(_combinations(axes, order, _register_choices, 1, ACCUMULATORS))
    for threads in _combinations(axes, order, _thread_choices, least, most):
        for registers in all_registers:
            sizes = tuple(t * r for t, r in zip(threads, registers, strict=True))
            blocks = math.prod(-(-e // size) for e, size in zip(axes, sizes, strict=True))
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
        for part in _parts(second, steps):
            staged = other.footprint(_counts(problem, sizes, part))
            if middle + staged * other.nbytes <= bounds.shared_bytes * 3 // 4:
                break
        staged_bytes = staged * other.nbytes
        if middle + staged_bytes > bounds.shared_bytes:
            continue
        products = math.prod(steps)
        parts = math.prod(-(-s // p) for s, p in zip(steps, part, strict=True))
        work = products * (math.prod(registers) + _SHARED_LOAD * kept)
        work += parts * (_COPY * staged / count + _BARRIER)
        slices = math.prod(
            -(-second.extents[i] // step) for i, step in zip(second.reduced, steps, strict=True)
        )
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
        for step in _fractions(extents[longest], _SLICE)
    )


def _fractions(extent: int, most: int) -> list[int]:
    """A few sizes of slices, the largest first: divisors, or round numbers where there are none."""
    divisors = [d for d in range(1, min(extent, most) + 1) if extent % d == 0]
    chosen = [d for d in divisors if d >= min(extent, 8)] or [s for s in (8, 16, 32) if s < extent]
    return sorted({chosen[-1], *(d for d in chosen if d in (8, 16, 32, 64))}, reverse=True)


def _parts(second: Sum, steps: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """The whole slice, then smaller parts of its longest iterator."""
    yield steps
    longest = max(range(len(steps)), key=lambda i: steps[i])
    for size in (32, 16, 8, 4):
        if size < steps[longest] and steps[longest] % size == 0:
            yield tuple(size if i == longest else step for i, step in enumerate(steps))


@functools.lru_cache(maxsize=4096)
def _first_tiles(
    problem: PairProblem, threads: int, box: tuple[int, ...]
) -> tuple[tuple[float, FirstTile], ...]:
    """Ways of sharing a slice of the first sum among threads, with the time that each takes, best first."""
    first = problem.first
    found = []
    share = -(-math.prod(box) // threads)
    wide = [i for i, size in enumerate(box) if size > 1] or [0]
    per_dim = [_register_choices(box[i]) for i in wide]
    all_registers = [
        choice
        for choice in itertools.product(*per_dim)
        if math.prod(choice) <= max(1, min(BOTH // 2, 2 * share))
    ]
    for split in _factorisations(threads, [box[i] for i in wide]):
        for choice in all_registers:
            shared = [1] * len(box)
            kept = [1] * len(box)
            for i, t, r in zip(wide, split, choice, strict=True):
                shared[i], kept[i] = t, r
            rounds = math.prod(
                -(-size // (t * r)) for size, t, r in zip(box, shared, kept, strict=True)
            )
            if rounds * math.prod(choice) <= 4 * share:
                found += _first_costs(problem, first, tuple(shared), tuple(kept), rounds, box)
    return tuple(heapq.nsmallest(24, found, key=lambda entry: entry[0]))


def _first_costs(problem, first: Sum, threads, registers, rounds, box):
    """Direct and staged variants of one way of sharing."""
    count = math.prod(threads)
    kept = math.prod(registers)
    whole = [first.extents[i] for i in first.reduced]

    def counts(sizes: Sequence[int], steps: Sequence[int]) -> list[int]:
        values = [1] * len(first.extents)
        for size, number in zip(sizes, problem.made, strict=True):
            if number >= 0:
                values[number] = size
        for number, step in zip(first.reduced, steps, strict=True):
            values[number] = step
        return values

    lanes = _lanes(threads)
    loaded, touched = 0.0, 0
    for operand in first.operands:
        lines = operand.lines(counts(lanes, [1] * len(whole)), counts(registers, [1] * len(whole)))
        elements = operand.footprint(counts(registers, whole))
        loaded += elements * (_LATENCY + _SHARED_LOAD * lines)
        touched += elements
    direct = rounds * (first.depth * kept + loaded + _EPILOGUE * kept)
    if not all(operand.is_linear for operand in first.operands):
        yield direct, FirstTile(threads, registers, tuple(whole), "global", 0)
        return
    if touched + kept <= _HELD:
        yield direct, FirstTile(threads, registers, tuple(whole), "local", 0)
    loads = sum(operand.footprint(counts(registers, [1] * len(whole))) for operand in first.operands)
    for steps in _first_steps(tuple(whole)):
        boxes = [operand.footprint(counts(box, steps)) for operand in first.operands]
        nbytes = sum(n * o.nbytes for n, o in zip(boxes, first.operands, strict=True))
        slices = math.prod(-(-extent // step) for extent, step in zip(whole, steps, strict=True))
        products = math.prod(steps) * (kept + _SHARED_LOAD * loads)
        cost = slices * (products + _COPY * sum(boxes) / count + _BARRIER) + _EPILOGUE * kept
        yield rounds * cost, FirstTile(threads, registers, steps, "shared", nbytes)


def _lanes(threads: Sequence[int]) -> list[int]:
    """How a warp is spread over dimensions whose last one varies fastest."""
    lanes, left = [], 32
    for size in reversed(threads):
        lanes.append(min(size, left))
        left = max(1, left // size)
    return lanes[::-1]


@functools.lru_cache(maxsize=256)
def _first_steps(whole: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """Slices of the first sum's reduction: of its longest iterator, with whole windows."""
    longest = max(range(len(whole)), key=lambda i: whole[i])
    window = math.prod(whole) // whole[longest]
    sizes = [s for s in _fractions(whole[longest], _STAGED) if s * window <= 2 * _STAGED]
    sizes += [s for s in (4, 2, 1) if whole[longest] % s == 0 and s * window <= 2 * _STAGED]
    return tuple(
        tuple(size if i == longest else extent for i, extent in enumerate(whole))
        for size in dict.fromkeys(sizes)
    )


@functools.lru_cache(maxsize=1024)
def _factorise(number: int, rank: int) -> tuple[tuple[int, ...], ...]:
    """Every way to write a number as an ordered product."""
    if rank == 1:
        return ((number,),)
    return tuple(
        (d, *rest)
        for d in range(1, number + 1)
        if number % d == 0
        for rest in _factorise(number // d, rank - 1)
    )


def _factorisations(threads: int, sizes: Sequence[int]) -> list[tuple[int, ...]]:
    """Splits of the threads that leave few idle; all of them where there are no such."""
    splits = _factorise(threads, len(sizes))
    close = [
        split for split in splits if all(t < 2 * size for t, size in zip(split, sizes, strict=True))
    ]
    return close or list(splits)


def _combinations(axes, order, choices, least: int, most: int) -> list[tuple[int, ...]]:
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


def _register_choices(extent: int) -> list[int]:
    odd = [d for d in (3, 5, 7) if extent % d == 0 and extent <= 4 * d]
    return sorted({*(size for size in (1, 2, 4, 8) if size <= extent), *odd})
