"""Tiles of convolutions of few channels, whose windows are read from a patch of the image, and their predicted time.

A block has a rectangle of outputs. It reads the part of the image under it once into shared memory, element by element
(of 8x16 outputs of a 7x7 window with stride 2, 2331 elements of three channels, where the matrix of their windows has
18816), and its warps take their fragments from there, one word of two elements a register, at addresses that are known
at compile time but for one number a row. The weights are in shared memory as a whole.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math

from ..devices import DeviceSpec
from .tensor_tiles import FRAGMENTS, RATES, ROWS, Choice, Problem, Tile

#: Elements of 16 bits of the reduction in an instruction, and accumulators of a thread at most.
_DEPTH, _SUMS = 16, 64

#: Instructions that a kernel may have written out: about half of what a multiprocessor's instruction cache holds.
_WRITTEN_OUT = 2048

#: Rectangles of outputs.
_HEIGHTS, _WIDTHS = (1, 2, 4, 8, 16), (8, 16, 32, 64, 128)

#: Bytes of shared memory that the driver keeps for itself in each block, and registers of addresses.
_RESERVED, _ADDRESSES = 1024, 28

#: Instructions of a thread by what they are for, estimated from the machine code of a 7x7 window (sm_90a): an element
#: of the patch, a copy of 16 bytes of weights, two neighbouring outputs with bias and ReLU, and what every block pays.
_ELEMENT, _COPY, _OUTPUTS, _BLOCK = 12.0, 4.0, 12.0, 250.0


@dataclasses.dataclass(frozen=True)
class PatchProblem:
    """What the search knows of a function.

    Attributes
    ----------
    extents : tuple of int
        The output's axes but for the columns, such as images, rows and places of a row.
    steps : tuple of tuple of int
        By dimension of the image, how far each of these axes moves a window; of the last one in elements.
    spans : tuple of int
        By dimension, the extent of a window.
    columns, depth : int
        Columns of the output, and the reduction, filled to pairs and whole instructions.
    """

    extents: tuple[int, ...]
    steps: tuple[tuple[int, ...], ...]
    spans: tuple[int, ...]
    columns: int
    depth: int

    def axes(self) -> tuple[int | None, int]:
        """The axes of the rectangle: the last two that have several places (None: there is but one)."""
        wide = [n for n, extent in enumerate(self.extents) if extent > 1] or [0]
        return (wide[-2] if len(wide) > 1 else None), wide[-1]

    def box(self, height: int, width: int) -> tuple[int, ...]:
        """A rectangle's outputs along each axis."""
        down, across = self.axes()
        return tuple(
            height if n == down else width if n == across else 1 for n in range(len(self.extents))
        )

    def blocks(self, height: int, width: int) -> int:
        """Rectangles that cover the output."""
        box = self.box(height, width)
        return math.prod(-(-e // b) for e, b in zip(self.extents, box, strict=True))

    def patch(self, height: int, width: int) -> tuple[int, ...]:
        """Extents of the patch under a rectangle; of the last dimension in elements."""
        box = self.box(height, width)
        return tuple(
            span + sum(step * (b - 1) for step, b in zip(steps, box, strict=True))
            for steps, span in zip(self.steps, self.spans, strict=True)
        )

    def copies(self) -> int:
        """Copies of the patch: a second one, moved by an element, where windows begin at odd elements too."""
        moved = [self.steps[-1][axis] for axis in self.axes() if axis is not None]
        return 2 if any(step % 2 for step in moved) else 1

    def pitch(self, line: int) -> int:
        """Elements from one line of the patch to the next: even, with room for a line that is moved."""
        line += self.copies() - 1
        return line + line % 2

    def patch_bytes(self, height: int, width: int) -> int:
        """Shared memory of the patch."""
        *outer, line = self.patch(height, width)
        nbytes = 2 * self.copies() * math.prod(outer) * self.pitch(line)
        return -(-nbytes // 16) * 16


@dataclasses.dataclass(frozen=True, order=True)
class PatchTile(Tile):
    """A rectangle of outputs; ``depth`` is the whole reduction.

    Attributes
    ----------
    height, width : int
        Its outputs along the two axes; ``rows`` may be more, of which nothing is stored.
    """

    height: int = 1
    width: int = 16

    def registers(self, problem: Problem) -> int:
        """Registers of a thread, to which its compiler is held."""
        del problem
        return registers(self.row_fragments, self.column_fragments)


def padded_depth(depth: int) -> int:
    """A reduction filled to whole instructions."""
    return -(-depth // _DEPTH) * _DEPTH


def registers(row_fragments: int, column_fragments: int) -> int:
    """Registers that suffice a thread: sums, fragments, an address a row and others.

    Left alone, the compiler takes up to 255; held to these it spilled nothing (7x7 and 3x3 windows, sm_80 and sm_90a).
    """
    sums = 4 * row_fragments * column_fragments
    return sums + 8 * row_fragments + 2 * column_fragments + _ADDRESSES


def line_threads(line: int, threads: int) -> int:
    """Neighbouring threads that read a line of the patch together: so many that few are idle."""
    sizes = [n for n in (8, 16, 32, 64, 128) if n <= threads and threads % n == 0]
    # Of equal shares whole warps, whose accesses are neighbours.
    return min(sizes, key=lambda n: (-(-line // n) * n, abs(n - 32)))


@functools.lru_cache(maxsize=1024)
def patch_choices(problem: PatchProblem, device: DeviceSpec, count: int = 1) -> tuple[Choice, ...]:
    """Return the tiles of least predicted time, best first; none where none fits.

    Parameters
    ----------
    problem : PatchProblem
        The function.
    device : DeviceSpec
        The device.
    count : int
        How many at most.
    """
    found = [
        Choice(tile, predict(problem, device, tile))
        for tile in _tiles(problem)
        if shared_bytes(problem, tile) <= device.shared_memory_per_block_optin
        and tile.threads <= device.max_threads_per_block
    ]
    return tuple(sorted(found, key=lambda c: (round(c.microseconds, 6), c.tile))[:count])


def _tiles(problem: PatchProblem) -> list[PatchTile]:
    down, across = problem.axes()
    most = problem.extents[down] if down is not None else 1
    heights = {min(h, most) for h in _HEIGHTS}
    widths = {min(w, problem.extents[across]) for w in _WIDTHS}
    found = []
    for height, width in itertools.product(heights, widths):
        for warp_rows, warp_columns in itertools.product((1, 2, 4, 8), (1, 2)):
            rows = -(-height * width // (ROWS * warp_rows)) * ROWS * warp_rows
            for columns in (16, 32, 48, 64, 96, 128):
                tile = PatchTile(
                    rows, columns, problem.depth, warp_rows, warp_columns, 1, 1,
                    height=height, width=width,
                )  # fmt: skip
                if columns % (16 * warp_columns) == 0 and _is_possible(problem, tile):
                    found.append(tile)
    return found


def _is_possible(problem: PatchProblem, tile: PatchTile) -> bool:
    rows, columns = tile.row_fragments, tile.column_fragments
    return (
        4 <= tile.threads // 32 <= 8
        and rows >= 2
        and tile.rows < 2 * max(tile.height * tile.width, ROWS)
        and 4 * rows * columns <= _SUMS
        and 4 * rows + 2 * columns <= FRAGMENTS
        and tile.columns < 2 * max(16, problem.columns)
        and problem.depth // _DEPTH * (4 * rows + columns + rows * columns) <= _WRITTEN_OUT
    )


def shared_bytes(problem: PatchProblem, tile: PatchTile) -> int:
    """Shared memory of a block: the weights, then the patch."""
    return 2 * problem.depth * tile.columns + problem.patch_bytes(tile.height, tile.width)


def predict(problem: PatchProblem, device: DeviceSpec, tile: PatchTile) -> float:
    """Predicted time of a tile in microseconds, launch included.

    Instructions are added up (four of a multiprocessor start in a cycle, one of each scheduler), and so are the cycles
    of shared memory (128 bytes each); what a tile waits for, and how these times add up, are the constants of kernels
    with asynchronous copies (`tensor_tiles.RATES`). No kernel of this kind has been measured.
    """
    rates, p = RATES, RATES.overlap
    rows, columns, warps = tile.row_fragments, tile.column_fragments, tile.threads // 32
    steps = problem.depth // _DEPTH
    *outer, line = problem.patch(tile.height, tile.width)
    group = line_threads(line, tile.threads)
    elements = -(-math.prod(outer) // (tile.threads // group)) * -(-line // group)
    copied = -(-problem.depth * tile.columns // 8 // tile.threads)
    stored = 2 * rows * columns
    issued = _BLOCK + elements * (_ELEMENT + problem.copies() - 1) + copied * _COPY
    issued += steps * (4 * rows + columns / 2 + rows * columns) + stored * _OUTPUTS
    shared = elements * problem.copies() + copied * 4 + steps * (4 * rows + columns / 2 * 4)
    blocks = problem.blocks(tile.height, tile.width) * -(-problem.columns // tile.columns)
    share = -(-blocks // device.multiprocessors)
    work = problem.depth * tile.rows * tile.columns
    moved = 2 * (problem.depth * tile.columns + math.prod(outer) * line + tile.rows * tile.columns)
    busy = sum(
        (share * cycles) ** p
        for cycles in (
            work / rates.products,
            warps * issued / _SCHEDULERS,
            warps * shared,
            moved / rates.cache,
        )
    ) ** (1 / p)
    chain = 2 * rates.latency + elements * rates.copy + rates.step
    chain += steps * (rates.fragment + rows * columns * rates.product)
    chain += 4 * rows * columns * rates.store
    waves = -(-share // min(share, resident_blocks(problem, device, tile)))
    cycles = (busy**p + (waves * chain) ** p) ** (1 / p)
    return (rates.start + rates.latency + cycles) / rates.clock


#: Schedulers of a multiprocessor.
_SCHEDULERS = 4


def resident_blocks(problem: PatchProblem, device: DeviceSpec, tile: PatchTile) -> int:
    """Blocks that are on a multiprocessor together."""
    warps, most = tile.threads // 32, device.max_threads_per_multiprocessor // tile.threads
    needed = -(-registers(tile.row_fragments, tile.column_fragments) // 8) * 8
    shared = device.shared_memory_per_multiprocessor // (shared_bytes(problem, tile) + _RESERVED)
    # Each scheduler has a quarter of the registers, and as many warps as another one or one more.
    fit = (
        blocks
        for blocks in range(min(most, shared, device.max_blocks_per_multiprocessor), 1, -1)
        if device.registers_per_multiprocessor // _SCHEDULERS
        >= 32 * needed * -(-blocks * warps // _SCHEDULERS)
    )
    return next(fit, 1)
