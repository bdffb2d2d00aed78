"""What tile searches of dependent stages assume of a GPU: costs in multiply-adds, and how blocks fill the chip.

A multiprocessor does 128 multiply-adds in a cycle. The numbers only rank tiles; the sources are NVIDIA's programming
guides (rates of shared memory: 32 lanes a cycle) and published measurements of the second-level cache.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from ..base import Limits

#: A load from shared memory (or one cache line), copying an element into it, and the barriers of a slice.
SHARED_LOAD, COPY, BARRIER = 2.0, 12.0, 40.0

#: Threads of a multiprocessor that hide each other's latency; more add little.
BUSY_THREADS = 512

#: Multiply-adds of a multiprocessor in a cycle.
LANES = 128


def resident_blocks(threads: int, nbytes: int, bounds: Limits) -> int:
    """Blocks that a multiprocessor holds at a time, from their threads and shared memory in bytes."""
    room = bounds.resident_shared_bytes // max(nbytes, 1)
    return max(1, min(BUSY_THREADS // whole_warps(threads, bounds), room))


def whole_warps(threads: int, bounds: Limits) -> int:
    """Threads with those that fill up the last warp."""
    return -(-threads // bounds.warp) * bounds.warp


def kernel_time(
    per_thread: float, blocks: int, threads: int, nbytes: int, bounds: Limits, per_block: float = 0
) -> float:
    """Estimate the time of a kernel in multiply-adds of a multiprocessor.

    Parameters
    ----------
    per_thread : float
        Work of a thread.
    blocks, threads, nbytes : int
        Blocks of the grid, threads of a block, and its shared memory in bytes.
    bounds : Limits
        Limits of the target.
    per_block : float
        Cycles that a block cannot do without, such as those that its data needs to arrive.
    """
    resident = resident_blocks(threads, nbytes, bounds)
    waves = -(-blocks // (bounds.multiprocessors * resident))
    together = -(-min(blocks, bounds.multiprocessors * resident) // bounds.multiprocessors)
    busy = min(BUSY_THREADS, together * whole_warps(threads, bounds))
    return waves * max(per_thread * max(busy, LANES), LANES * together * per_block)


def spread_of_warp(threads: Sequence[int], warp: int) -> list[int]:
    """Lanes of a warp along each of several dimensions, of which the last one varies fastest."""
    lanes, left = [], warp
    for size in reversed(threads):
        lanes.append(min(size, left))
        left = max(1, left // size)
    return lanes[::-1]


def splits(number: int, rank: int) -> tuple[tuple[int, ...], ...]:
    """Every way to write a number as an ordered product of so many."""
    if rank == 1:
        return ((number,),)
    return tuple(
        (d, *rest)
        for d in range(1, number + 1)
        if number % d == 0
        for rest in splits(number // d, rank - 1)
    )


def divides(extents: Sequence[int], sizes: Sequence[int]) -> bool:
    """Whether tiles of some sizes leave no rest."""
    return all(extent % size == 0 for extent, size in zip(extents, sizes, strict=True))


def tile_count(extents: Sequence[int], sizes: Sequence[int]) -> int:
    """Number of tiles that cover some extents."""
    return math.prod(-(-extent // size) for extent, size in zip(extents, sizes, strict=True))
