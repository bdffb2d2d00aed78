"""The kernel: a pipeline of asynchronous copies, outer products in registers on what has arrived, then the epilogue.

Tiles of the reduction go round a ring of slots in shared memory. The numbers of the next multiply-adds are loaded into
registers while the last ones are multiplied, across the ends of tiles too: the barrier stands before the last product
of a tile, whose multiply-adds cover the first load of the next.
"""

from __future__ import annotations

import dataclasses
import itertools

from ....compat import IRBuilder, tirx
from ....compat import script_builder as T
from ....guards.fma_tiles import WARP, Tile
from ..tensor_core.evaluate import conjunction, integer, keep
from ..tensor_core.form import Anchor, Operand, Products
from ..tensor_core.kernel import write_function
from ..tensor_core.operand import Lines, decode, numbered
from .access import Access, reduction_order
from .device_code import common, finish, outer, read_shared
from .epilogue import Epilogue
from .operand import TileCopy
from .problem import accesses, problem_of, sides

#: Byte offsets that a thread keeps: of the tile that it multiplies, and of the slot that is free.
_CURRENT, _FREE = 0, 1

#: Parts of a tile: operands that are the same at every call, and the others.
_CONSTANT, _OTHER = "constant", "other"

#: Neighbouring rows of blocks that run together, so that they share columns in the second-level cache.
_GROUP = 8


@dataclasses.dataclass
class Place:
    """Where a thread works.

    Attributes
    ----------
    thread, slice_thread : PrimExpr
        Number of the thread, and among those that share the outputs.
    lane_row, lane_column : PrimExpr
        Place within the warp.
    warp_row, warp_column, warp_depth : PrimExpr
        Place of the warp along each axis.
    first_row, first_column : PrimExpr
        First row and column of the block.
    batch : dict
        Values of the batch's iterators.
    """

    thread: tirx.PrimExpr
    slice_thread: tirx.PrimExpr
    lane_row: tirx.PrimExpr
    lane_column: tirx.PrimExpr
    warp_row: tirx.PrimExpr
    warp_column: tirx.PrimExpr
    warp_depth: tirx.PrimExpr
    first_row: tirx.PrimExpr
    first_column: tirx.PrimExpr
    batch: dict


def kernel(form: Products, tile: Tile, shared_bytes: int = 0) -> tirx.PrimFunc:
    """Write the kernel of a function.

    Parameters
    ----------
    form : Products
        The function.
    tile : Tile
        Sizes.
    shared_bytes : int
        Shared memory to ask for, where it is more than the tiles take.

    Returns
    -------
    PrimFunc
        A scheduled function of one kernel with the parameters of the function.
    """
    return write_function(
        form,
        tile.blocks(problem_of(form)),
        tile.threads,
        lambda *names: Body(form, tile, shared_bytes, *names).emit(),
    )


class Body:
    """Emits what one thread does."""

    def __init__(self, form: Products, tile: Tile, shared_bytes: int, views, block, thread) -> None:
        self.form, self.tile, self.views = form, tile, views
        self.problem = problem_of(form)
        self.strides, self.stage_bytes = tile.strides(self.problem), tile.stage_bytes(self.problem)
        #: Where the column operand begins in a tile: byte offset.
        self.columns_at = 4 * tile.depth * self.problem.rows.copies * self.strides[0]
        self.place = self._place(block, thread)
        size = max(tile.shared_bytes(self.problem), shared_bytes)
        shared = T.alloc_buffer((size,), "uint8", scope="shared.dyn")
        self.shared = IRBuilder.name("shared", shared)
        size = tile.thread_rows * tile.thread_columns
        self.sums = [_local("sums", size * anchor.copy_count) for anchor in form.anchors]
        # Two sets: one is loaded while the other is multiplied.
        rows = self.problem.rows.copies * tile.thread_rows
        columns = self.problem.columns.copies * tile.thread_columns
        self.row_parts = [_local("rows", rows) for _ in range(2)]
        self.column_parts = [_local("columns", columns) for _ in range(2)]
        self.slots = IRBuilder.name("slots", T.alloc_buffer((2,), "int32", scope="local"))
        place = self.place
        part = place.warp_depth * integer(tile.depth // tile.warp_depth)
        row = place.warp_row * integer(tile.rows // tile.warp_rows)
        row = row + place.lane_row * integer(tile.row_vector)
        column = place.warp_column * integer(tile.columns // tile.warp_columns)
        column = column + place.lane_column * integer(tile.column_vector)
        self.row_base = keep((part * integer(self.strides[0]) + row) * integer(4))
        self.column_base = keep(
            (part * integer(self.strides[1]) + column) * integer(4) + integer(self.columns_at)
        )

    def _place(self, block, thread) -> Place:
        form, tile = self.form, self.tile
        down = -(-form.row_count // tile.rows)
        across = -(-form.column_count // tile.columns)
        batch = decode(block // integer(down * across), form.batch) if form.batch else {}
        inside = block % integer(down * across) if form.batch_count > 1 else block
        group = max(g for g in range(1, _GROUP + 1) if down % g == 0) if across > 1 else 1
        number = inside // integer(group * across)
        rest = inside % integer(group * across)
        row = keep(number * integer(group) + rest % integer(group))
        column = keep(rest // integer(group)) if across > 1 else integer(0)
        warp = thread // integer(WARP)
        lane_row, lane_column = _lane(keep(thread % integer(WARP)), tile)
        return Place(
            thread,
            keep(thread % integer(tile.slice_threads)),
            keep(lane_row),
            keep(lane_column),
            keep(warp % integer(tile.warp_rows)),
            keep(warp // integer(tile.warp_rows) % integer(tile.warp_columns)),
            keep(warp // integer(tile.warp_rows * tile.warp_columns)),
            keep(row * integer(tile.rows)),
            keep(column * integer(tile.columns)),
            {var: keep(value) for var, value in batch.items()},
        )

    def emit(self) -> None:
        """Emit everything."""
        for sums in self.sums:
            with T.unroll(0, int(sums.shape[0])) as number:
                T.buffer_store(sums, tirx.const(0, "float32"), [number])
        pairs: list[_Pair] = []
        for anchor in self.form.anchors:
            pairs.append(_Pair(self, anchor, sum(pair.steps for pair in pairs)))
        self._pipeline(pairs)
        if self._ends_under_conditions():
            some = next(iter(self.views.values()))
            for sums in self.sums:
                T.evaluate(finish(int(sums.shape[0]), sums.data, self.shared.data, some.data))
        self.make_epilogue(Epilogue).emit()

    def begin(self) -> None:
        """Emit what runs while the first tiles arrive."""

    def make_epilogue(self, kind: type[Epilogue]) -> Epilogue:
        """Return an epilogue of the sums."""
        return kind(self.form, self.tile, self.place, self.sums, self.shared, self.views)

    def step(self, pair: _Pair, number):
        """The number along the reduction of the ``number``-th tile that a block copies for an anchor."""
        return number

    def _ends_under_conditions(self) -> bool:
        """Whether the epilogue uses sums under conditions only: not where warps exchange them first."""
        form, tile = self.form, self.tile
        if tile.warp_depth * tile.slices > 1:
            return False
        partial = form.row_count % tile.rows or form.column_count % tile.columns
        return bool(partial) or any(store.conditions for store in form.stores)

    # -- the sequence of tiles --------------------------------------------------------------------

    def _pipeline(self, pairs: list[_Pair]) -> None:
        ahead = self.tile.stages - 1
        # The next kernel may set itself up while this one runs, as this one does now: until the previous kernel is
        # complete, it reads nothing but constants.
        T.evaluate(common("tvmf_let_next_start"))
        for part in (_CONSTANT, _OTHER):
            for number in range(ahead):
                slot = integer(number * self.stage_bytes)
                self._issue(pairs, integer(number), (number, number), slot, part)
                if part == _OTHER:
                    T.evaluate(common("tvmf_commit"))
            if part == _CONSTANT:
                T.evaluate(common("tvmf_wait_for_previous"))
        self.begin()
        self._arrive()
        self._load(pairs[0], 0, integer(0), 0)
        T.buffer_store(self.slots, 0, [_CURRENT])
        T.buffer_store(self.slots, ahead * self.stage_bytes, [_FREE])
        for pair, following in itertools.zip_longest(pairs, pairs[1:]):
            last = pair.first + pair.steps - 1
            if pair.steps > 1:
                with T.serial(0, pair.steps - 1) as step:
                    number = step + integer(pair.first) if pair.first else step
                    self._step(pair, pair, number, pairs, (pair.first, last - 1))
            self._step(pair, following, integer(last), pairs, (last, last))

    def _issue(self, pairs, number, bounds: tuple[int, int], slot, part: str = "") -> None:
        """Start copying a tile (or part of it) whose number lies between two numbers, if there is such a tile."""
        least, most = bounds
        for pair in pairs:
            end = pair.first + pair.steps
            if end <= least or pair.first > most:
                continue
            needed = []
            if pair.first > least:
                needed.append(integer(pair.first) <= number)
            if end <= most:
                needed.append(number < integer(end))
            step = number - integer(pair.first) if pair.first else number
            if not needed:
                pair.issue(step, slot, part)
                continue
            with T.If(conjunction(needed)), T.Then():
                pair.issue(step, slot, part)

    def _arrive(self) -> None:
        """Wait until the oldest tile is complete, for every thread."""
        T.evaluate(common(f"tvmf_wait_{self.tile.stages - 2}"))
        T.evaluate(common("tvmf_barrier"))

    def _step(self, pair, following, number, pairs, bounds) -> None:
        """Multiply one tile; start copying another one and load the first numbers of the next."""
        tile, nbytes = self.tile, self.stage_bytes
        ahead = tile.stages - 1
        slot = keep(self.slots[_CURRENT])
        count = tile.depth // tile.warp_depth
        for k in range(count):
            if k + 1 < count:
                self._load(pair, (k + 1) % 2, slot, k + 1)
            elif following is not None:
                after = slot + integer(nbytes)
                after = tirx.Select(after == integer(tile.stages * nbytes), integer(0), after)
                T.buffer_store(self.slots, after, [_CURRENT])
                self._arrive()
                self._load(following, 0, self.slots[_CURRENT], 0)
            if k == 0:
                reached = tuple(bound + ahead for bound in bounds)
                self._issue(pairs, number + integer(ahead), reached, keep(self.slots[_FREE]))
                T.evaluate(common("tvmf_commit"))
                T.buffer_store(self.slots, slot, [_FREE])
            self._multiply(pair, k % 2)

    def _load(self, pair, which: int, slot, k: int) -> None:
        """Load the numbers of one element of the reduction."""
        tile = self.tile
        operands = (
            (self.row_parts[which], self.row_base, pair.row_copies, self.strides[0],
             tile.thread_rows, tile.row_vector, tile.lane_rows),
            (self.column_parts[which], self.column_base, pair.column_copies, self.strides[1],
             tile.thread_columns, tile.column_vector, tile.lane_columns),
        )  # fmt: skip
        for parts, base, copies, stride, count, vector, lanes in operands:
            for copy in range(copies):
                for first in range(0, count, vector):
                    at = (copy * tile.depth + k) * stride + first * lanes
                    T.evaluate(
                        read_shared(
                            vector, parts.data, copy * count + first,
                            self.shared.data, slot + base + integer(4 * at),
                        )
                    )  # fmt: skip

    def _multiply(self, pair, which: int) -> None:
        tile = self.tile
        rows, columns = self.row_parts[which], self.column_parts[which]
        size = tile.thread_rows * tile.thread_columns
        for copy in range(pair.anchor.copy_count):
            row = copy * tile.thread_rows if pair.row_copies > 1 else 0
            column = copy * tile.thread_columns if pair.column_copies > 1 else 0
            T.evaluate(
                outer(
                    tile.thread_rows, tile.thread_columns,
                    pair.sums.data, copy * size, rows.data, row, columns.data, column,
                )
            )  # fmt: skip


class _Pair:
    """The two operands of one anchor, whose tiles are numbered from ``first`` on."""

    def __init__(self, body: Body, anchor: Anchor, first: int) -> None:
        self.body, self.anchor, self.first = body, anchor, first
        form, tile, place = body.form, body.tile, body.place
        self.steps = -(-anchor.depth // (tile.depth * tile.slices))
        self.sums = body.sums[body.form.anchors.index(anchor)]
        self.row_copies, self.column_copies = sides(anchor)
        row_access, column_access = accesses(form, anchor)
        self.order = reduction_order(anchor.reduced, (row_access, column_access))
        rows = Lines(form.rows, form.row_count, tile.rows, place.first_row, _same)
        columns = Lines(form.columns, form.column_count, tile.columns, place.first_column, _same)
        stride = body.strides
        self.rows = self._copies(anchor.rows, row_access, rows, self.row_copies, stride[0])
        self.columns = self._copies(
            anchor.columns, column_access, columns, self.column_copies, stride[1]
        )

    def _copies(
        self, operand: Operand, access: Access, lines: Lines, count: int, stride: int
    ) -> list[TileCopy]:
        body = self.body
        made = []
        for number in range(count):
            fixed = dict(body.place.batch)
            if count > 1:
                fixed |= numbered(number, self.anchor.copies)
            made.append(
                TileCopy(
                    operand, access, lines, fixed, self.order, body.tile.depth, stride,
                    body.place.thread, body.tile.threads, body.shared, body.views, body.form.inner,
                    body.form.constants, body.tile.slices,
                )
            )  # fmt: skip
        return made

    def issue(self, step, slot, part: str = "") -> None:
        """Start copying one tile of both operands, or of the constant or the other ones."""
        step = self.body.step(self, step)
        for copies, offset in ((self.rows, 0), (self.columns, self.body.columns_at)):
            for copy in copies:
                if not part or (part == _CONSTANT) == copy.is_constant:
                    copy.issue(step, slot + integer(offset))
                offset += copy.nbytes


def _local(name: str, size: int) -> tirx.Buffer:
    """Registers of a thread."""
    return IRBuilder.name(name, T.alloc_buffer((size,), "float32", scope="local"))


def _same(line: tirx.PrimExpr) -> tirx.PrimExpr:
    return line


def _lane(lane: tirx.PrimExpr, tile: Tile) -> tuple[tirx.PrimExpr, tirx.PrimExpr]:
    """Row and column of a lane.

    Neighbouring lanes differ in the column, the next ones in the row: then both operands' 16-byte loads have lanes
    with one address next to each other, of which the hardware serves sixteen at once instead of eight.
    """
    if tile.lane_rows == 1 or tile.lane_columns == 1:
        return (integer(0), lane) if tile.lane_rows == 1 else (lane, integer(0))
    half = tile.lane_columns // 2
    column, row = lane % integer(2), lane // integer(2) % integer(2)
    if half > 1:
        column = column + lane // integer(4) % integer(half) * integer(2)
    if tile.lane_rows > 2:
        row = row + lane // integer(4 * half) * integer(2)
    return row, column
