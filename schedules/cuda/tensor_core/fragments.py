"""Where fragments lie in a tile in shared memory.

``ldmatrix`` takes the address of row ``lane % 8`` of matrix ``lane // 8``. ``place`` is the thread's
(``kernel.Place``).
"""

from __future__ import annotations

from collections.abc import Callable

from ....compat import tirx
from ....guards.tensor_tiles import COLUMNS, DEPTH, ROWS, Tile
from .evaluate import integer
from .operand import PIECE, Access, swizzle


def interleave(group: int) -> Callable[[tirx.PrimExpr], tirx.PrimExpr]:
    """Which column of a tile stands in which line, so that a lane's columns are neighbours.

    Of a fragment of eight columns, a lane has two. With the columns of ``group`` fragments interleaved, those that a
    lane has of all of them are ``2 * group`` neighbours.
    """

    def place(line: tirx.PrimExpr) -> tirx.PrimExpr:
        if group == 1:
            return line
        within = line % integer(COLUMNS * group)
        fragment, column = within // integer(COLUMNS), within % integer(COLUMNS)
        return (
            line
            - within
            + column // integer(2) * integer(2 * group)
            + fragment * integer(2)
            + column % integer(2)
        )

    return place


def row_base(access: Access, tile: Tile, place, lane) -> tirx.PrimExpr:
    """Where a lane's address for the row operand begins, in bytes from the tile's."""
    matrix, row = lane // integer(8), lane % integer(8)
    first = place.warp_row * integer(tile.rows // tile.warp_rows)
    if access.major == "k":
        line = first + row + matrix % integer(2) * integer(8)
        piece = matrix // integer(2) ^ swizzle(row, 2 * tile.depth)
        return line * integer(2 * tile.depth) + piece * integer(16)
    # The reduction runs down the tile: matrices (rows, k), (rows + 8, k), (rows, k + 8), (rows + 8, k + 8).
    line = row + matrix // integer(2) * integer(8)
    return line * integer(2 * tile.rows)


def row_fragment(access: Access, tile: Tile, base, place, fragment: int, k):
    """A lane's address for one fragment of the row operand at the ``k``-th depth of an instruction."""
    if access.major == "k":
        return (base ^ _times(k, 2 * DEPTH)) + integer(fragment * ROWS * 2 * tile.depth)
    matrix, row = place.lane // integer(8), place.lane % integer(8)
    piece = place.warp_row * integer(tile.rows // tile.warp_rows // PIECE)
    piece = piece + integer(2 * fragment) + matrix % integer(2)
    swapped = piece ^ swizzle(row, 2 * tile.rows)
    return base + _times(k, DEPTH * 2 * tile.rows) + swapped * integer(16)


def column_base(access: Access, tile: Tile, place, lane) -> tirx.PrimExpr:
    """Where a lane's address for the column operand begins, in bytes from the tile's."""
    matrix, row = lane // integer(8), lane % integer(8)
    first = place.warp_column * integer(tile.columns // tile.warp_columns)
    if access.major == "k":
        line = first + row + matrix // integer(2) * integer(8)
        piece = matrix % integer(2) ^ swizzle(row, 2 * tile.depth)
        return line * integer(2 * tile.depth) + piece * integer(16)
    line = row + matrix % integer(2) * integer(8)
    return line * integer(2 * tile.columns)


def column_fragment(access: Access, tile: Tile, base, place, fragment: int, k):
    """A lane's address for two fragments of the column operand at the ``k``-th depth of an instruction."""
    if access.major == "k":
        return (base ^ _times(k, 2 * DEPTH)) + integer(fragment * COLUMNS * 2 * tile.depth)
    matrix, row = place.lane // integer(8), place.lane % integer(8)
    piece = place.warp_column * integer(tile.columns // tile.warp_columns // PIECE)
    piece = piece + integer(fragment) + matrix // integer(2)
    swapped = piece ^ swizzle(row, 2 * tile.columns)
    return base + _times(k, DEPTH * 2 * tile.columns) + swapped * integer(16)


def _times(k, factor: int):
    return integer(k * factor) if isinstance(k, int) else k * integer(factor)
