"""Joining the partial results of a row: lanes of a warp, warps of a block, blocks of a cluster.

A row is spread over four lanes of each of several warps, of one block or of the blocks of a cluster. Lanes exchange by
shuffles. Then every part is written once to the shared memory of every block, where it has a place of its own; after a
barrier, every thread reads all parts of its rows and joins them in the same order, so that all have the same result.
"""

from __future__ import annotations

import dataclasses

from ....compat import script_builder as T
from ....compat import tirx
from ....guards.tensor_tiles import Tile
from ..row_pieces import tree
from .device_code import call
from .evaluate import integer

#: Parts that a thread reads at once.
_VECTOR = 4


@dataclasses.dataclass(frozen=True)
class RowParts:
    """How many partial results a row has.

    Attributes
    ----------
    rows : int
        Rows of a block.
    warps : int
        Warps of a block that have part of a row.
    blocks : int
        Blocks of a cluster.
    """

    rows: int
    warps: int
    blocks: int

    @property
    def count(self) -> int:
        """Partial results of a row."""
        return self.warps * self.blocks

    @property
    def pitch(self) -> int:
        """Places of a row in shared memory."""
        return -(-self.count // _VECTOR) * _VECTOR

    @property
    def nbytes(self) -> int:
        """Shared memory of one reduction."""
        return 4 * self.rows * self.pitch if self.count > 1 else 0


def row_parts(tile: Tile, blocks: int) -> RowParts:
    """Describe the parts of a row of a tile.

    Parameters
    ----------
    tile : Tile
        Sizes of a block's work.
    blocks : int
        Blocks of a cluster.
    """
    return RowParts(tile.rows, tile.warp_columns * depth_split(tile)[1], blocks)


def depth_split(tile: Tile) -> tuple[int, int]:
    """How warps that shared the reduction of a product divide its results: among rows, and among columns.

    Rows first: no exchange is needed for them.
    """
    halves = 2 * tile.row_fragments
    among_rows = max(n for n in (1, 2, 4, 8) if tile.warp_depth % n == 0 and halves % n == 0)
    return among_rows, tile.warp_depth // among_rows


class RowExchange:
    """Emits the exchange of partial results.

    Parameters
    ----------
    parts : RowParts
        How many there are.
    shared : Buffer
        Shared memory.
    first : int
        Byte offset of the first reduction's places in it.
    part, rank : PrimExpr
        Numbers of this thread's part within its block, and of the block in its cluster.
    lane : PrimExpr
        Number of the thread in its warp.
    """

    def __init__(
        self,
        parts: RowParts,
        shared: tirx.Buffer,
        first: int,
        part: tirx.PrimExpr,
        rank: tirx.PrimExpr,
        lane: tirx.PrimExpr,
    ) -> None:
        self.parts, self.shared, self.first = parts, shared, first
        self.part, self.rank, self.lane = part, rank, lane
        self._number = 0

    def begin(self) -> None:
        """Tell the other blocks that this one runs: its shared memory can be written from now on."""
        if self.parts.blocks > 1:
            T.evaluate(call("tvmf_cluster_begin"))

    def join(
        self, partial: tirx.Buffer, lines: list[tirx.PrimExpr], combine: type
    ) -> list[tirx.PrimExpr]:
        """Emit one exchange.

        Parameters
        ----------
        partial : Buffer
            Registers with this thread's part of each of its rows; changed.
        lines : list of PrimExpr
            Number of each row within the block.
        combine : type
            Class of the expression that joins two parts.

        Returns
        -------
        list of PrimExpr
            The whole result of each row.
        """
        for bits in (1, 2):
            for row in range(len(lines)):
                other = call("tvmf_shuffle_xor", partial[row], bits, result="float32")
                T.buffer_store(partial, combine(partial[row], other), [row])
        parts = self.parts
        if parts.count == 1:
            return [partial[row] for row in range(len(lines))]
        start = self.first + self._number * parts.nbytes
        if parts.blocks > 1 and self._number == 0:
            T.evaluate(call("tvmf_cluster_wait"))
        self._number += 1
        for row, line in enumerate(lines):
            place = self.rank * integer(parts.warps) + self.part
            offset = T.bind((line * integer(parts.pitch) + place) * integer(4) + integer(start))
            self._put(offset, partial[row])
        if parts.blocks > 1:
            T.evaluate(call("tvmf_cluster_arrive"))
            T.evaluate(call("tvmf_cluster_wait"))
        else:
            T.evaluate(call("tvmf_barrier"))
        return self._take(start, lines, combine)

    def _put(self, offset: tirx.PrimExpr, value: tirx.PrimExpr) -> None:
        """Write a part: the four lanes that have it share the blocks."""
        blocks, quarter = self.parts.blocks, self.lane % integer(4)
        if blocks == 1:
            with T.If(quarter.equal(integer(0))), T.Then():
                T.evaluate(call("tvmf_store_shared_4", self.shared.data, offset, value))
            return
        for first in range(0, blocks, 4):
            peer = quarter + integer(first)
            store = call("tvmf_store_cluster_4", self.shared.data, offset, value, peer)
            if first + 4 <= blocks:
                T.evaluate(store)
            else:
                with T.If(peer < integer(blocks)), T.Then():
                    T.evaluate(store)

    def _take(self, start: int, lines: list[tirx.PrimExpr], combine: type) -> list[tirx.PrimExpr]:
        parts = self.parts
        found = T.alloc_buffer((len(lines) * parts.pitch,), "float32", scope="local")
        total = T.alloc_buffer((len(lines),), "float32", scope="local")
        for row, line in enumerate(lines):
            for piece in range(0, parts.pitch, _VECTOR):
                offset = (line * integer(parts.pitch) + integer(piece)) * integer(4)
                T.evaluate(
                    call(
                        "tvmf_load_shared_16", found.data, row * parts.pitch + piece,
                        self.shared.data, offset + integer(start),
                    )
                )  # fmt: skip
        for row in range(len(lines)):
            values = [found[row * parts.pitch + n] for n in range(parts.count)]
            T.buffer_store(total, tree(combine, values), [row])
        return [total[row] for row in range(len(lines))]
