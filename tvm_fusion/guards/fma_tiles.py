"""Tiles of kernels of float32 multiply-adds: what a function is to the search, and what follows from a choice."""

from __future__ import annotations

import dataclasses

from ..devices import DeviceSpec
from .clusters import spread_bytes

#: Lanes of a warp.
WARP = 32

#: Numbers in one load or store of 16 bytes.
VECTOR = 4

#: Accumulators of a thread, so that what is multiplied and addresses fit beside them in 255 registers.
SUMS = 128

#: Registers for addresses and the epilogue: what the compiler uses, and with how few it makes do without spilling.
ADDRESSES, FEW_ADDRESSES = 44, 24

#: Multiply-adds of a thread in one tile of the reduction, all unrolled: twice as many, 128 KiB of instructions, took
#: twice the time on an H200.
UNROLLED = 4096

#: Bytes of shared memory that the driver keeps for itself in each block.
RESERVED = 1024

#: Blocks a multiprocessor from which on it does not matter which one runs them.
_FEW_BLOCKS = 4


@dataclasses.dataclass(frozen=True)
class Side:
    """What the search knows of one operand: its lines (output rows or columns) times the reduction.

    Attributes
    ----------
    count : int
        Lines.
    copies : int
        Lines of the operand for each line of the output.
    width : int
        Neighbouring lines that are copied at once (1, 2 or 4); 0 where the operand is computed.
    transposed : bool
        Whether the reduction is contiguous in the tensor and lines are not.
    taps : int
        Products of which each element is the sum, where the operand is computed from a depthwise convolution.
    """

    count: int
    copies: int = 1
    width: int = VECTOR
    transposed: bool = False
    taps: int = 1


@dataclasses.dataclass(frozen=True)
class Problem:
    """What the search knows of a function: sums of products that meet in elementwise outputs.

    Attributes
    ----------
    rows, columns : Side
        The operands; of several anchors, the worst of each.
    batch : int
        Number of outputs.
    depths : tuple of int
        Length of each anchor's reduction.
    sums : tuple of int
        Sums of each anchor per output element.
    """

    rows: Side
    columns: Side
    batch: int
    depths: tuple[int, ...]
    sums: tuple[int, ...]

    @property
    def sides(self) -> tuple[Side, Side]:
        """Both operands."""
        return self.rows, self.columns


@dataclasses.dataclass(frozen=True, order=True)
class Tile:
    """Sizes of a thread block's work.

    A thread has ``thread_rows`` x ``thread_columns`` outputs, in groups of four neighbours; the groups of the lanes of
    a warp alternate, so that what the lanes load from shared memory together is contiguous.

    Attributes
    ----------
    thread_rows, thread_columns : int
        Outputs of a thread.
    lane_rows : int
        Lanes of a warp along the rows; the others are along the columns.
    warp_rows, warp_columns, warp_depth : int
        Warps that share the rows, the columns and the reduction.
    depth : int
        Elements of the reduction in shared memory at a time.
    stages : int
        Tiles of the reduction that are in shared memory or on the way.
    slices : int
        Blocks of a cluster that share the reduction (`split_tiles`).
    """

    thread_rows: int
    thread_columns: int
    lane_rows: int
    warp_rows: int
    warp_columns: int
    warp_depth: int
    depth: int
    stages: int
    slices: int = 1

    @property
    def lane_columns(self) -> int:
        """Lanes of a warp along the columns."""
        return WARP // self.lane_rows

    @property
    def rows(self) -> int:
        """Rows of a block."""
        return self.warp_rows * self.lane_rows * self.thread_rows

    @property
    def columns(self) -> int:
        """Columns of a block."""
        return self.warp_columns * self.lane_columns * self.thread_columns

    @property
    def row_vector(self) -> int:
        """Neighbouring rows of a thread."""
        return min(VECTOR, self.thread_rows)

    @property
    def column_vector(self) -> int:
        """Neighbouring columns of a thread."""
        return min(VECTOR, self.thread_columns)

    @property
    def slice_threads(self) -> int:
        """Threads that share the outputs of a block."""
        return WARP * self.warp_rows * self.warp_columns

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return self.slice_threads * self.warp_depth

    def blocks(self, problem: Problem) -> int:
        """Thread blocks of a kernel."""
        down, across = (
            -(-side.count // size)
            for side, size in zip(problem.sides, (self.rows, self.columns), strict=True)
        )
        return down * across * problem.batch * self.slices

    def strides(self, problem: Problem) -> tuple[int, int]:
        """Numbers from one element of the reduction to the next in shared memory, of both operands."""
        rows, columns = problem.sides
        return stride_of(rows, self.rows), stride_of(columns, self.columns)

    def stage_bytes(self, problem: Problem) -> int:
        """Shared memory of one tile of the operands, of the anchor with the largest."""
        pairs = zip(problem.sides, self.strides(problem), strict=True)
        return 4 * self.depth * sum(side.copies * stride for side, stride in pairs)

    def ring_bytes(self, problem: Problem) -> int:
        """Shared memory of all tiles of the operands."""
        return self.stages * self.stage_bytes(problem)

    def exchange_bytes(self, problem: Problem) -> int:
        """Shared memory in which warps that share the reduction add their sums; it reuses the tiles'."""
        if self.warp_depth == 1:
            return 0
        return 4 * self.warp_depth * self.rows * self.columns * sum(problem.sums)

    def meeting_bytes(self, problem: Problem) -> int:
        """Shared memory in which the sums of other blocks arrive, while a block still uses its own."""
        if self.slices == 1:
            return 0
        return 4 * self.rows * self.columns * sum(problem.sums)

    def own_bytes(self, problem: Problem) -> int:
        """Shared memory that no other block writes to."""
        return max(self.ring_bytes(problem), self.exchange_bytes(problem))

    def shared_bytes(self, problem: Problem) -> int:
        """Shared memory of a block."""
        return self.own_bytes(problem) + self.meeting_bytes(problem)

    def requested_bytes(self, problem: Problem, device: DeviceSpec) -> int:
        """Shared memory that a block asks for, so that blocks spread evenly (`clusters.spread_bytes`)."""
        needed, blocks = self.shared_bytes(problem), self.blocks(problem)
        return spread_bytes(device, needed, blocks, self.slices, _FEW_BLOCKS)

    def registers(self, problem: Problem) -> int:
        """Estimated registers of a thread: sums, two sets of what is multiplied, addresses."""
        sums = self.thread_rows * self.thread_columns * sum(problem.sums)
        parts = (
            self.thread_rows * problem.rows.copies + self.thread_columns * problem.columns.copies
        )
        return min(255, sums + 2 * parts + ADDRESSES)


def stride_of(side: Side, lines):
    """Length of a row of shared memory.

    Where a tile is transposed on the way, it is an odd number of 16-byte pieces: eight neighbours along the reduction,
    of four neighbouring lines each, then lie in 32 different banks.
    """
    pieces = -(-lines // VECTOR)
    return VECTOR * (pieces + (1 - pieces % 2 if side.transposed else 0))
