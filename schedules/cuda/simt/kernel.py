"""The kernel: a pipeline of asynchronous copies, outer products in registers on what has arrived, then the epilogue.

Tiles of the reduction go round a ring of slots in shared memory. The numbers of the next multiply-adds are loaded into
registers while the last ones are multiplied, across the ends of tiles too: the barrier stands before the last product
of a tile, whose multiply-adds cover the first load of the next.
"""

from __future__ import annotations

import dataclasses
import itertools
import math

from ....compat import IRBuilder, tirx
from ....compat import script_builder as T
from ..tensor_core.evaluate import conjunction, integer
from ..tensor_core.form import Anchor, Iterator, Operand, Products, uses
from ..tensor_core.operand import Lines, decode
from .device_code import common, outer, read_shared
from .epilogue import Epilogue
from .operand import Access, TileCopy, access_of, reduction_order
from .tile import VECTOR, Tile, padded

#: Byte offsets that a thread keeps: of the tile that it multiplies, and of the slot that is free.
_CURRENT, _FREE = 0, 1

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


@dataclasses.dataclass(frozen=True)
class Layout:
    """A tile of both operands in shared memory.

    Attributes
    ----------
    row_stride, column_stride : int
        Numbers from one element of the reduction to the next.
    row_copies, column_copies : int
        Tiles of each operand.
    depth : int
        Elements of the reduction.
    """

    row_stride: int
    column_stride: int
    row_copies: int
    column_copies: int
    depth: int

    @property
    def columns_at(self) -> int:
        """Byte offset of the column operand."""
        return 4 * self.depth * self.row_copies * self.row_stride

    @property
    def nbytes(self) -> int:
        """Size."""
        return self.columns_at + 4 * self.depth * self.column_copies * self.column_stride


def accesses(form: Products, anchor: Anchor) -> tuple[Access, Access]:
    """How both operands of an anchor are read."""
    rows = (*form.batch, *anchor.copies, *form.rows)
    columns = (*form.batch, *anchor.copies, *form.columns)
    return (
        access_of(anchor.rows, rows, anchor.reduced, form.inner),
        access_of(anchor.columns, columns, anchor.reduced, form.inner),
    )


def sides(form: Products, anchor: Anchor) -> tuple[int, int]:
    """Tiles of each operand: the copies, of the operand that has them."""
    if any(uses(anchor.rows.value, copy.var) for copy in anchor.copies):
        return anchor.copy_count, 1
    return 1, anchor.copy_count


def layout(form: Products, tile: Tile) -> Layout:
    """Place the operands in shared memory, the same for every anchor."""
    transposed = [accesses(form, anchor) for anchor in form.anchors]
    copies = [sides(form, anchor) for anchor in form.anchors]
    strides = [
        padded(lines) if any(pair[side].transposed for pair in transposed) else lines
        for side, lines in enumerate((tile.rows, tile.columns))
    ]
    strides = [-(-stride // VECTOR) * VECTOR for stride in strides]
    return Layout(*strides, *(max(c[side] for c in copies) for side in range(2)), tile.depth)


def shared_bytes(form: Products, tile: Tile) -> int:
    """Shared memory of a block."""
    return max(tile.stages * layout(form, tile).nbytes, tile.exchange_bytes(form))


def kernel(form: Products, tile: Tile) -> tirx.PrimFunc:
    """Write the kernel of a function.

    Parameters
    ----------
    form : Products
        The function.
    tile : Tile
        Sizes.

    Returns
    -------
    PrimFunc
        A scheduled function of one kernel with the parameters of the function.
    """
    with IRBuilder() as builder, T.prim_func(s_tir=True):
        T.func_name("main")
        T.func_attr({"tirx.noalias": True})
        arguments = [
            T.arg(
                param.name or f"argument{number}",
                T.buffer([int(extent) for extent in param.shape], str(param.dtype)),
            )
            for number, param in enumerate(form.params)
        ]
        views = {}
        for param, argument in zip(form.params, arguments, strict=True):
            size = math.prod(int(extent) for extent in param.shape)
            view = T.decl_buffer((size,), str(param.dtype), data=argument.data)
            views[param.__chandle__()] = IRBuilder.name(argument.name, view)
        with T.launch_thread("blockIdx.x", tile.blocks(form)) as block:
            with T.attr(0, "tirx.launch_bounds_min_blocks_per_sm", 1):
                with T.launch_thread("threadIdx.x", tile.threads) as thread:
                    _Body(form, tile, views, block, thread).emit()
    return builder.get()


class _Body:
    """Emits what one thread does."""

    def __init__(self, form: Products, tile: Tile, views, block, thread) -> None:
        self.form, self.tile, self.views = form, tile, views
        self.layout = layout(form, tile)
        self.place = self._place(block, thread)
        shared = T.alloc_buffer((shared_bytes(form, tile),), "uint8", scope="shared.dyn")
        self.shared = IRBuilder.name("shared", shared)
        size = tile.thread_rows * tile.thread_columns
        self.sums = [_local("sums", size * anchor.copy_count) for anchor in form.anchors]
        # Two sets: one is loaded while the other is multiplied.
        rows = self.layout.row_copies * tile.thread_rows
        columns = self.layout.column_copies * tile.thread_columns
        self.row_parts = [_local("rows", rows) for _ in range(2)]
        self.column_parts = [_local("columns", columns) for _ in range(2)]
        self.slots = IRBuilder.name("slots", T.alloc_buffer((2,), "int32", scope="local"))
        place = self.place
        part = place.warp_depth * integer(tile.depth // tile.warp_depth)
        row = place.warp_row * integer(tile.rows // tile.warp_rows)
        row = row + place.lane_row * integer(tile.row_vector)
        column = place.warp_column * integer(tile.columns // tile.warp_columns)
        column = column + place.lane_column * integer(tile.column_vector)
        self.row_base = T.bind((part * integer(self.layout.row_stride) + row) * integer(4))
        self.column_base = T.bind(
            (part * integer(self.layout.column_stride) + column) * integer(4)
            + integer(self.layout.columns_at)
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
        row = T.bind(number * integer(group) + rest % integer(group))
        column = T.bind(rest // integer(group)) if across > 1 else integer(0)
        warp = thread // integer(32)
        lane_row, lane_column = _lane(T.bind(thread % integer(32)), tile)
        return Place(
            thread,
            T.bind(thread % integer(tile.slice_threads)),
            T.bind(lane_row),
            T.bind(lane_column),
            T.bind(warp % integer(tile.warp_rows)),
            T.bind(warp // integer(tile.warp_rows) % integer(tile.warp_columns)),
            T.bind(warp // integer(tile.warp_rows * tile.warp_columns)),
            T.bind(row * integer(tile.rows)),
            T.bind(column * integer(tile.columns)),
            {var: T.bind(value) for var, value in batch.items()},
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
        Epilogue(
            self.form, self.tile, self.place, self.sums, self.shared, self.views
        ).emit()

    # -- the sequence of tiles --------------------------------------------------------------------

    def _pipeline(self, pairs: list[_Pair]) -> None:
        ahead = self.tile.stages - 1
        for number in range(ahead):
            self._issue(pairs, integer(number), (number, number), integer(number * self.layout.nbytes))
            T.evaluate(common("tvmf_commit"))
        self._arrive()
        self._load(pairs[0], 0, integer(0), 0)
        T.buffer_store(self.slots, 0, [_CURRENT])
        T.buffer_store(self.slots, ahead * self.layout.nbytes, [_FREE])
        for pair, following in itertools.zip_longest(pairs, pairs[1:]):
            last = pair.first + pair.steps - 1
            if pair.steps > 1:
                with T.serial(0, pair.steps - 1) as step:
                    number = step + integer(pair.first) if pair.first else step
                    self._step(pair, pair, number, pairs, (pair.first, last - 1))
            self._step(pair, following, integer(last), pairs, (last, last))

    def _issue(self, pairs, number, bounds: tuple[int, int], slot) -> None:
        """Start copying a tile, whose number lies between two numbers, if there is such a tile."""
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
                pair.issue(step, slot)
                continue
            with T.If(conjunction(needed)), T.Then():
                pair.issue(step, slot)

    def _arrive(self) -> None:
        """Wait until the oldest tile is complete, for every thread."""
        T.evaluate(common(f"tvmf_wait_{self.tile.stages - 2}"))
        T.evaluate(common("tvmf_barrier"))

    def _step(self, pair, following, number, pairs, bounds) -> None:
        """Multiply one tile; start copying another one and load the first numbers of the next."""
        tile, nbytes = self.tile, self.layout.nbytes
        ahead = tile.stages - 1
        slot = T.bind(self.slots[_CURRENT])
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
                self._issue(pairs, number + integer(ahead), reached, T.bind(self.slots[_FREE]))
                T.evaluate(common("tvmf_commit"))
                T.buffer_store(self.slots, slot, [_FREE])
            self._multiply(pair, k % 2)

    def _load(self, pair, which: int, slot, k: int) -> None:
        """Load the numbers of one element of the reduction."""
        tile, layout = self.tile, self.layout
        sides = (
            (self.row_parts[which], self.row_base, pair.row_copies, layout.row_stride,
             tile.thread_rows, tile.row_vector, tile.lane_rows),
            (self.column_parts[which], self.column_base, pair.column_copies, layout.column_stride,
             tile.thread_columns, tile.column_vector, tile.lane_columns),
        )  # fmt: skip
        for parts, base, copies, stride, count, vector, lanes in sides:
            for copy in range(copies):
                for first in range(0, count, vector):
                    at = (copy * layout.depth + k) * stride + first * lanes
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

    def __init__(self, body: _Body, anchor: Anchor, first: int) -> None:
        self.body, self.anchor, self.first = body, anchor, first
        form, tile, place = body.form, body.tile, body.place
        self.steps = -(-anchor.depth // tile.depth)
        self.sums = body.sums[body.form.anchors.index(anchor)]
        self.row_copies, self.column_copies = sides(form, anchor)
        row_access, column_access = accesses(form, anchor)
        self.order = reduction_order(anchor.reduced, (row_access, column_access))
        rows = Lines(form.rows, form.row_count, tile.rows, place.first_row, _same)
        columns = Lines(form.columns, form.column_count, tile.columns, place.first_column, _same)
        stride = body.layout.row_stride, body.layout.column_stride
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
                fixed |= _constants(number, self.anchor.copies)
            made.append(
                TileCopy(
                    operand, access, lines, fixed, self.order, body.tile.depth, stride,
                    body.place.thread, body.tile.threads, body.shared, body.views, body.form.inner,
                )
            )  # fmt: skip
        return made

    def issue(self, step, slot) -> None:
        """Start copying one tile of both operands."""
        for copies, offset in ((self.rows, 0), (self.columns, self.body.layout.columns_at)):
            for copy in copies:
                copy.issue(step, slot + integer(offset))
                offset += copy.nbytes


def _local(name: str, size: int) -> tirx.Buffer:
    """Registers of a thread."""
    return IRBuilder.name(name, T.alloc_buffer((size,), "float32", scope="local"))


def _same(line: tirx.PrimExpr) -> tirx.PrimExpr:
    return line


def _constants(number: int, iterators: tuple[Iterator, ...]) -> dict:
    """Values of iterators, the last one running fastest, of a number."""
    values = {}
    for iterator in reversed(iterators):
        values[iterator.var] = integer(number % iterator.extent)
        number //= iterator.extent
    return values


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
