"""The kernel of products whose rows are reduced: blocks of a cluster share a row, each with some of its columns."""

from __future__ import annotations

import dataclasses

from ....compat import script_builder as T
from ....compat import tirx
from ....guards.tensor_tiles import Tile
from .cluster import RowExchange, depth_split, row_parts
from .evaluate import integer
from .kernel import Body, Place, write_function
from .operand import decode
from .row_epilogue import RowEpilogue
from .row_form import RowProducts
from .tile import problem_of


@dataclasses.dataclass
class RowPlace(Place):
    """Where a thread works on rows.

    Attributes
    ----------
    rank : PrimExpr
        Number of the block in its cluster.
    segment : dict
        Values of the column axes that are not reduced.
    """

    rank: tirx.PrimExpr
    segment: dict


def blocks_of_row(form: RowProducts, tile: Tile) -> int:
    """Blocks that share a row: the size of a cluster."""
    return -(-form.length // tile.columns)


def row_shared_bytes(form: RowProducts, tile: Tile) -> int:
    """Shared memory of a block: tiles of the operands, then the places of partial results."""
    before = -(-tile.shared_bytes(problem_of(form)) // 16) * 16
    return before + form.reductions * row_parts(tile, blocks_of_row(form, tile)).nbytes


def row_blocks(form: RowProducts, tile: Tile) -> int:
    """Blocks of the grid."""
    down = -(-form.row_count // tile.rows)
    return down * form.segments * form.batch_count * blocks_of_row(form, tile)


def row_kernel(form: RowProducts, tile: Tile, requested: int = 0) -> tirx.PrimFunc:
    """Write the kernel of a function.

    Parameters
    ----------
    form : RowProducts
        The function.
    tile : Tile
        Sizes; where there are several segments, its columns divide a row.
    requested : int
        Bytes of shared memory that a block asks for at least.

    Returns
    -------
    PrimFunc
        A scheduled function of one kernel with the parameters of the function.
    """
    return write_function(
        form,
        row_blocks(form, tile),
        tile.threads,
        lambda *names: RowBody(form, tile, *names, requested).emit(),
        blocks_of_row(form, tile),
    )


class RowBody(Body):
    """Emits what one thread does."""

    @property
    def shared_bytes(self) -> int:
        return max(self.requested, row_shared_bytes(self.form, self.tile))

    def _place(self, block, thread) -> RowPlace:
        form, tile = self.form, self.tile
        cluster = blocks_of_row(form, tile)
        down = -(-form.row_count // tile.rows)
        rank = T.bind(block % integer(cluster)) if cluster > 1 else integer(0)
        number = T.bind(block // integer(cluster)) if cluster > 1 else block
        # Clusters with the same columns are neighbours: they read the weights of each other's cache lines.
        row = T.bind(number % integer(down)) if down > 1 else integer(0)
        rest = T.bind(number // integer(down)) if down > 1 else number
        segment = T.bind(rest % integer(form.segments)) if form.segments > 1 else integer(0)
        outer = rest // integer(form.segments) if form.segments > 1 else rest
        warp = thread // integer(32)
        first = segment * integer(form.length) + rank * integer(tile.columns)
        batch = decode(outer, form.batch)
        segments = decode(segment, form.columns[:-1])
        return RowPlace(
            thread,
            T.bind(thread % integer(32)),
            T.bind(warp % integer(tile.warp_rows)),
            T.bind(warp // integer(tile.warp_rows) % integer(tile.warp_columns)),
            T.bind(warp // integer(tile.warp_rows * tile.warp_columns)),
            T.bind(row * integer(tile.rows)),
            T.bind(first),
            {var: T.bind(value) for var, value in batch.items()},
            rank,
            {var: T.bind(value) for var, value in segments.items()},
        )

    def _group_size(self, wide: bool) -> int:
        # Warps that shared the reduction divide the groups among them.
        most, among = super()._group_size(wide), depth_split(self.tile)[1]
        fragments = self.tile.column_fragments
        return max(g for g in (1, 2, 4) if g <= most and fragments // g % among == 0)

    def begin(self) -> None:
        form, tile, place = self.form, self.tile, self.place
        self.epilogue = RowEpilogue(
            form, tile, place, self.sums, self.shared, self.views, self.group
        )
        first = -(-tile.shared_bytes(problem_of(form)) // 16) * 16
        parts = row_parts(tile, blocks_of_row(form, tile))
        self.epilogue.begin(
            RowExchange(parts, self.shared, first, self.epilogue.part, place.rank, place.lane)
        )

    def finish(self) -> None:
        self.epilogue.emit()
