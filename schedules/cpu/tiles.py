"""Sizes of the register tile of a contraction."""

from __future__ import annotations

import dataclasses
import itertools

from .vectors import divisor, row_tile, vector_tile

#: Rows of one vector each that still fit into the 16 registers of a common processor, with one to broadcast.
_MOST_ROWS = 14


@dataclasses.dataclass(frozen=True)
class Tiles:
    """Sizes of the register tile and of the axes it cuts.

    Attributes
    ----------
    vector, row : int
        Elements of the vector axis and rows that one tile holds.
    lanes_extent, rows : int
        Extents of the two axes.
    """

    vector: int
    row: int
    lanes_extent: int
    rows: int

    @property
    def padded(self) -> bool:
        """Whether the vector axis is no multiple of its tile."""
        return self.lanes_extent % self.vector != 0

    @property
    def sizes(self) -> tuple[int, int]:
        """What is chosen: elements and rows of a tile."""
        return self.vector, self.row

    @classmethod
    def ranked(
        cls, lanes_extent: int, rows: int, width: int, can_pad: bool, count: int
    ) -> list[Tiles]:
        """The tile of `choose`, then the others whose accumulators fill registers, the largest first."""
        first = cls.choose(lanes_extent, rows, width, can_pad)
        found = [first]
        if count == 1:
            return found
        vectors = {min(lanes_extent, n * width) for n in (1, 2, 3, 4)}
        options = itertools.product(vectors, range(1, min(rows, _MOST_ROWS) + 1))
        for vector, row in sorted(options, key=lambda o: (-o[0] * o[1], o)):
            fits = -(-vector // width) * row <= 2 * _MOST_ROWS
            divides = lanes_extent % vector == 0 and rows % row == 0
            if fits and (can_pad or divides) and (vector, row) != first.sizes:
                found.append(cls(vector, row, lanes_extent, rows))
        return found[:count]

    @classmethod
    def choose(cls, lanes_extent: int, rows: int, width: int, can_pad: bool) -> Tiles:
        """Choose tiles that fill the registers of the target and waste little at the ends of the axes.

        Parameters
        ----------
        lanes_extent, rows : int
            Extents of the vector axis and of the rows; 1 for a product with a vector.
        width : int
            float32 lanes of a vector register.
        can_pad : bool
            Whether the axes may be rounded up to whole tiles. TVM cannot where an operand is read through a window (an
            NHWC convolution, or any with a stride); the tiles then divide the axes.
        """
        if rows == 1:
            # A product with a vector reads the matrix once: long contiguous runs matter, not reuse.
            wide = divisor(lanes_extent, 8 * width)
            vector = wide if wide >= width else vector_tile(lanes_extent, width)
            return cls(vector, 1, lanes_extent, rows)
        vector, row = vector_tile(lanes_extent, width), row_tile(rows)
        if can_pad:
            return cls(vector, row, lanes_extent, rows)
        if rows % row:
            row = divisor(rows, _MOST_ROWS)
            vector = min(vector, width) if row > row_tile(rows) else vector
        if lanes_extent % vector:
            vector = divisor(lanes_extent, vector)
        return cls(vector, row, lanes_extent, rows)
