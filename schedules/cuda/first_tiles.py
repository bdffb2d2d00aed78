"""How the threads of a block share a slice of the first of two dependent sums."""

from __future__ import annotations

import dataclasses
import functools
import heapq
import itertools
import math
from collections.abc import Iterator, Sequence

from ..base import Limits
from .pair_form import PairProblem
from .stage_costs import BARRIER, COPY, SHARED_LOAD, splits, spread_of_warp, tile_count

#: Multiply-adds in the time of waiting for a load through the cache, and of the epilogue of an element.
_LATENCY, _EPILOGUE = 2.0, 8.0

#: Products of the first sum that are staged at a time.
_STAGED = 72

#: Sums that a thread keeps; with the operands that it may hold in registers, so that it reads each element once.
_SUMS, _HELD = 40, 64


@dataclasses.dataclass(frozen=True)
class FirstTile:
    """A choice.

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


@functools.lru_cache(maxsize=4096)
def first_tiles(
    problem: PairProblem, threads: int, box: tuple[int, ...], bounds: Limits
) -> tuple[tuple[float, FirstTile], ...]:
    """Return ways of sharing a slice, with the time of a thread for each, best first.

    Parameters
    ----------
    problem : PairProblem
        The sums.
    threads : int
        Threads of the block.
    box : tuple of int
        Extents of the slice, in the dimensions of what lies between the sums.
    bounds : Limits
        Limits of the target.
    """
    found: list[tuple[float, FirstTile]] = []
    share = -(-math.prod(box) // threads)
    wide = [i for i, size in enumerate(box) if size > 1] or [0]
    all_registers = [
        choice
        for choice in itertools.product(*(register_choices(box[i]) for i in wide))
        if math.prod(choice) <= max(1, min(_SUMS, 2 * share))
    ]
    for split in _splits(threads, tuple(box[i] for i in wide)):
        for choice in all_registers:
            shared, kept = [1] * len(box), [1] * len(box)
            for i, t, r in zip(wide, split, choice, strict=True):
                shared[i], kept[i] = t, r
            rounds = tile_count(box, [t * r for t, r in zip(shared, kept, strict=True)])
            if rounds * math.prod(choice) <= 4 * share:
                found += _variants(problem, tuple(shared), tuple(kept), rounds, box, bounds)
    return tuple(heapq.nsmallest(24, found, key=lambda entry: entry[0]))


def _variants(
    problem: PairProblem,
    threads: tuple[int, ...],
    registers: tuple[int, ...],
    rounds: int,
    box: tuple[int, ...],
    bounds: Limits,
) -> Iterator[tuple[float, FirstTile]]:
    """Where the operands of one way of sharing may be read from."""
    first, kept = problem.first, math.prod(registers)
    whole = tuple(first.extents[i] for i in first.reduced)
    single = (1,) * len(whole)
    lanes = _counts(problem, spread_of_warp(threads, bounds.warp), single)
    mine = _counts(problem, registers, single)
    loaded, touched = 0.0, 0
    for operand in first.operands:
        elements = operand.footprint(_counts(problem, registers, whole))
        loaded += elements * (_LATENCY + SHARED_LOAD * operand.lines(lanes, mine))
        touched += elements
    direct = rounds * (first.depth * kept + loaded + _EPILOGUE * kept)
    if not all(operand.is_linear for operand in first.operands):
        yield direct, FirstTile(threads, registers, whole, "global", 0)
        return
    if touched + kept <= _HELD:
        yield direct, FirstTile(threads, registers, whole, "local", 0)
    loads = sum(operand.footprint(mine) for operand in first.operands)
    for steps in _steps(whole):
        sizes = [operand.footprint(_counts(problem, box, steps)) for operand in first.operands]
        nbytes = sum(n * o.nbytes for n, o in zip(sizes, first.operands, strict=True))
        products = math.prod(steps) * (kept + SHARED_LOAD * loads)
        copied = COPY * sum(sizes) / math.prod(threads)
        cost = tile_count(whole, steps) * (products + copied + BARRIER) + _EPILOGUE * kept
        yield rounds * cost, FirstTile(threads, registers, steps, "shared", nbytes)


def _counts(problem: PairProblem, sizes: Sequence[int], steps: Sequence[int]) -> list[int]:
    """Neighbouring values of each iterator of the first sum in a part of the slice."""
    values = [1] * len(problem.first.extents)
    for size, number in zip(sizes, problem.made, strict=True):
        if number >= 0:
            values[number] = size
    for number, step in zip(problem.first.reduced, steps, strict=True):
        values[number] = step
    return values


@functools.lru_cache(maxsize=256)
def _steps(whole: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """Slices of the reduction: of its longest iterator, with whole windows."""
    longest = max(range(len(whole)), key=lambda i: whole[i])
    window = math.prod(whole) // whole[longest]
    sizes = fractions(whole[longest], _STAGED)
    sizes += [s for s in (4, 2, 1) if whole[longest] % s == 0]
    return tuple(
        tuple(size if i == longest else extent for i, extent in enumerate(whole))
        for size in dict.fromkeys(sizes)
        if size * window <= 2 * _STAGED
    )


def fractions(extent: int, most: int) -> list[int]:
    """A few sizes of slices, the largest first: divisors, or round numbers where there are none."""
    divisors = [d for d in range(1, min(extent, most) + 1) if extent % d == 0]
    chosen = [d for d in divisors if d >= min(extent, 8)] or [s for s in (8, 16, 32) if s < extent]
    return sorted({chosen[-1], *(d for d in chosen if d in (8, 16, 32, 64, 128))}, reverse=True)


def register_choices(extent: int) -> list[int]:
    """Elements of a dimension that a thread may keep: powers of two, and small divisors of small extents."""
    odd = [d for d in (3, 5, 7) if extent % d == 0 and extent <= 4 * d]
    return sorted({*(size for size in (1, 2, 4, 8) if size <= extent), *odd})


@functools.lru_cache(maxsize=1024)
def _splits(threads: int, sizes: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """Splits of the threads that leave few idle; all of them where there are no such."""
    every = splits(threads, len(sizes))
    close = tuple(s for s in every if all(t < 2 * n for t, n in zip(s, sizes, strict=True)))
    return close or every
