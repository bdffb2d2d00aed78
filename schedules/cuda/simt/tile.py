"""A choice of tile sizes for a multiply-add kernel, and what follows from it."""

from __future__ import annotations

import dataclasses
import math

from ..tensor_core.form import Products

#: Lanes of a warp.
WARP = 32

#: Numbers in one load or store of 16 bytes.
VECTOR = 4


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
    """

    thread_rows: int
    thread_columns: int
    lane_rows: int
    warp_rows: int
    warp_columns: int
    warp_depth: int
    depth: int
    stages: int

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

    def blocks(self, form: Products) -> int:
        """Thread blocks of a kernel."""
        across = math.ceil(form.row_count / self.rows) * math.ceil(form.column_count / self.columns)
        return across * form.batch_count

    def exchange_bytes(self, form: Products) -> int:
        """Shared memory through which warps that share the reduction add their sums; it reuses the tiles'."""
        if self.warp_depth == 1:
            return 0
        return 4 * self.warp_depth * self.rows * self.columns * form.copies


def padded(lines: int) -> int:
    """Length of a row of shared memory into which a tile is transposed: an odd number of 16-byte pieces.

    Eight neighbours along the reduction, of four neighbouring lines each, then lie in 32 different banks.
    """
    pieces = math.ceil(lines / VECTOR)
    return VECTOR * (pieces + 1 - pieces % 2)
