"""Where fragments lie in a tile in shared memory, and what reads them.

``ldmatrix`` takes the address of row ``lane % 8`` of matrix ``lane // 8``, and gives each lane four bytes of each
matrix: two elements of 16 bits, or one of TF32. It exchanges rows and columns of 16-bit elements alone; where tiles of
32-bit ones would need that, a lane reads its four words one by one. ``place`` is the thread's (``kernel.Place``).
"""

from __future__ import annotations

from collections.abc import Callable

from ....compat import tirx
from ....guards.tensor_tiles import COLUMNS, PIECE_BYTES, ROWS, STEP, Tile
from .access import Access
from .evaluate import integer


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


def reader(access: Access) -> str:
    """Device function that reads a row fragment, or two column fragments: four registers."""
    if access.size == 4:
        return "tvmf_ldmatrix_tf32" if access.major == "k" else "tvmf_load_words_tf32"
    return "tvmf_ldmatrix" if access.major == "k" else "tvmf_ldmatrix_trans"


def row_base(access: Access, tile: Tile, place, lane) -> tirx.PrimExpr:
    """Where a lane's addresses for the row operand begin, in bytes from the tile's."""
    matrix, row = lane // integer(8), lane % integer(8)
    first = place.warp_row * integer(tile.rows // tile.warp_rows)
    if access.major == "k":
        depth = access.size * tile.depth
        line = first + row + matrix % integer(2) * integer(8)
        piece = matrix // integer(2) ^ access.swizzle(row, depth)
        return line * integer(depth) + piece * integer(PIECE_BYTES)
    if access.size == 4:
        return _word_base(lane, tile.rows)
    # The reduction runs down the tile: matrices (rows, k), (rows + 8, k), (rows, k + 8), (rows + 8, k + 8).
    line = row + matrix // integer(2) * integer(8)
    return line * integer(access.size * tile.rows)


def row_fragment(access: Access, tile: Tile, base, place, fragment: int, k) -> list:
    """A lane's addresses for one fragment of the row operand at the ``k``-th depth of an instruction."""
    if access.major == "k":
        skipped = integer(fragment * ROWS * access.size * tile.depth)
        return [(base ^ _times(k, STEP)) + skipped]
    first = place.warp_row * integer(tile.rows // tile.warp_rows // access.piece)
    if access.size == 4:
        first = first + integer(ROWS // access.piece * fragment)
        return [
            _word(access, tile.rows, base, place.lane, first, k, down, across)
            for down, across in ((0, 0), (0, 1), (1, 0), (1, 1))
        ]
    matrix, row = place.lane // integer(8), place.lane % integer(8)
    piece = first + integer(2 * fragment) + matrix % integer(2)
    swapped = piece ^ access.swizzle(row, access.size * tile.rows)
    return [base + _times(k, STEP * tile.rows) + swapped * integer(PIECE_BYTES)]


def column_base(access: Access, tile: Tile, place, lane) -> tirx.PrimExpr:
    """Where a lane's addresses for the column operand begin, in bytes from the tile's."""
    matrix, row = lane // integer(8), lane % integer(8)
    first = place.warp_column * integer(tile.columns // tile.warp_columns)
    if access.major == "k":
        depth = access.size * tile.depth
        line = first + row + matrix // integer(2) * integer(8)
        piece = matrix % integer(2) ^ access.swizzle(row, depth)
        return line * integer(depth) + piece * integer(PIECE_BYTES)
    if access.size == 4:
        return _word_base(lane, tile.columns)
    line = row + matrix % integer(2) * integer(8)
    return line * integer(access.size * tile.columns)


def column_fragment(access: Access, tile: Tile, base, place, fragment: int, k) -> list:
    """A lane's addresses for two fragments of the column operand at the ``k``-th depth of an instruction."""
    if access.major == "k":
        skipped = integer(fragment * COLUMNS * access.size * tile.depth)
        return [(base ^ _times(k, STEP)) + skipped]
    first = place.warp_column * integer(tile.columns // tile.warp_columns // access.piece)
    if access.size == 4:
        first = first + integer(COLUMNS // access.piece * fragment)
        return [
            _word(access, tile.columns, base, place.lane, first, k, down, across)
            for across, down in ((0, 0), (0, 1), (1, 0), (1, 1))
        ]
    matrix, row = place.lane // integer(8), place.lane % integer(8)
    piece = first + integer(fragment) + matrix // integer(2)
    swapped = piece ^ access.swizzle(row, access.size * tile.columns)
    return [base + _times(k, STEP * tile.columns) + swapped * integer(PIECE_BYTES)]


def _word_base(lane, lines: int) -> tirx.PrimExpr:
    """Lane ``4 * line + k`` of a warp has the word of a line and a place of the reduction (which runs down)."""
    within = lane // integer(4) % integer(4)
    return lane % integer(4) * integer(4 * lines) + within * integer(4)


def _word(access: Access, lines: int, base, lane, first, k, down: int, across: int):
    """Address of one of a lane's words: 4 further down the reduction, 8 lines further across, or neither."""
    piece = first + lane // integer(16) + integer(2 * across)
    swapped = piece ^ access.swizzle(lane % integer(4), 4 * lines)
    below = _times(k, STEP * lines) + integer(4 * down * 4 * lines)
    return base + below + swapped * integer(PIECE_BYTES)


def _times(k, factor: int):
    return integer(k * factor) if isinstance(k, int) else k * integer(factor)
