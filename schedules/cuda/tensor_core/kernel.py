"""The kernel: a pipeline of asynchronous copies, matrix instructions on what has arrived, then the epilogue.

Tiles of the reduction go round a ring of slots in shared memory. While a warp multiplies one tile, the next ones are
on their way; one barrier a tile is enough, because a slot is refilled only after the barrier behind its last use. The
tiles of all anchors form one sequence, so that the ring never drains between anchors.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable

from ....compat import IRBuilder, tirx
from ....compat import script_builder as T
from ....guards.tensor_tiles import Tile
from .access import Access, access_of
from .device_code import OPERAND_TYPES, call
from .epilogue import Epilogue
from .evaluate import Views, integer, keep
from .form import Anchor, Products
from .fragments import column_base, column_fragment, interleave, reader, row_base, row_fragment
from .operand import Lines, TileCopy, decode, numbered
from .tile import problem_of

#: Matrix instructions of a warp up to which the loop over the reduction is written out.
_UNROLLED = 96

#: Neighbouring rows of blocks that run together, so that they share columns in the second-level cache.
GROUP = 8


@dataclasses.dataclass
class Place:
    """Where a thread works.

    Attributes
    ----------
    thread, lane, warp_row, warp_column, warp_depth : PrimExpr
        Number of the thread, within its warp, and of the warp along each axis.
    first_row, first_column : PrimExpr
        First row and column of the block.
    batch : dict
        Values of the batch's iterators.
    """

    thread: tirx.PrimExpr
    lane: tirx.PrimExpr
    warp_row: tirx.PrimExpr
    warp_column: tirx.PrimExpr
    warp_depth: tirx.PrimExpr
    first_row: tirx.PrimExpr
    first_column: tirx.PrimExpr
    batch: dict


def kernel(form: Products, tile: Tile, requested: int = 0) -> tirx.PrimFunc:
    """Write the kernel of a function.

    Parameters
    ----------
    form : Products
        The function.
    tile : Tile
        Sizes.
    requested : int
        Shared memory to ask for, in bytes, where that is more than the kernel uses.

    Returns
    -------
    PrimFunc
        A scheduled function of one kernel with the parameters of the function.
    """
    blocks = tile.blocks(problem_of(form))
    return write_function(
        form, blocks, tile.threads, lambda *names: Body(form, tile, *names, requested).emit()
    )


def write_function(
    form: Products,
    blocks: int,
    threads: int,
    emit: Callable[[Views, tirx.Var, tirx.Var], None],
    cluster: int = 1,
    resident: int = 1,
    host: Callable[[dict[int, tirx.Buffer]], None] | None = None,
) -> tirx.PrimFunc:
    """Write a function of one kernel with the parameters of another.

    Parameters
    ----------
    form : Products
        Has the parameters.
    blocks, threads : int
        Size of the grid and of a block.
    emit : callable
        Emits the kernel's body, given views of the parameters, the number of the block and that of the thread.
    cluster : int
        Neighbouring blocks that run together and reach each other's shared memory.
    resident : int
        Blocks that have room on a multiprocessor together, whatever registers that leaves to a thread.
    host : callable, optional
        Emits what the host does before the launch, given the parameters by their handle in ``form``.
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
        if host is not None:
            handles = (param.__chandle__() for param in form.params)
            host(dict(zip(handles, arguments, strict=True)))
        with contextlib.ExitStack() as inside:
            block = inside.enter_context(T.launch_thread("blockIdx.x", blocks))
            if cluster > 1:
                inside.enter_context(T.launch_thread("clusterCtaIdx.x", cluster))
            inside.enter_context(T.attr(0, "tirx.launch_bounds_min_blocks_per_sm", resident))
            thread = inside.enter_context(T.launch_thread("threadIdx.x", threads))
            emit(views, block, thread)
    return builder.get()


class Body:
    """Emits what one thread does."""

    def __init__(
        self, form: Products, tile: Tile, views, block, thread, requested: int = 0
    ) -> None:
        self.form, self.tile, self.views = form, tile, views
        self.requested = requested
        self.place = self._place(block, thread)
        shared = T.alloc_buffer((self.shared_bytes,), "uint8", scope="shared.dyn")
        self.shared = IRBuilder.name("shared", shared)
        #: Column fragments that are interleaved.
        self.group = 1
        size = tile.row_fragments * tile.column_fragments * 4
        self.sums = [_local("sums", size * anchor.copy_count, "float32") for anchor in form.anchors]
        # Two sets of fragments: one is loaded while the other is multiplied.
        columns = max(a.copy_count for a in form.anchors) * tile.column_fragments
        self.row_parts = [_local("rows", tile.row_fragments * 4, "uint32") for _ in range(2)]
        self.column_parts = [_local("columns", columns * 2, "uint32") for _ in range(2)]

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a block."""
        return max(self.requested, self.tile.shared_bytes(problem_of(self.form)))

    def _place(self, block, thread) -> Place:
        form, tile = self.form, self.tile
        down = -(-form.row_count // tile.rows)
        across = -(-form.column_count // tile.columns)
        batch = decode(block // integer(down * across), form.batch) if form.batch else {}
        inside = block % integer(down * across) if form.batch_count > 1 else block
        group = max(g for g in range(1, GROUP + 1) if down % g == 0) if across > 1 else 1
        number = inside // integer(group * across)
        rest = inside % integer(group * across)
        row = T.bind(number * integer(group) + rest % integer(group))
        column = T.bind(rest // integer(group)) if across > 1 else integer(0)
        warp = thread // integer(32)
        return Place(
            thread,
            T.bind(thread % integer(32)),
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
        pairs = [self.pair(anchor) for anchor in self.form.anchors]
        wide = all(pair.permuted for pair in pairs)
        self.group = self._group_size(wide)
        for pair in pairs:
            pair.prepare(self.group)
        self._pipeline(pairs)
        self.finish()

    def pair(self, anchor: Anchor) -> Pair:
        """Return the operands of an anchor."""
        return Pair(self, anchor)

    def slot(self, number):
        """Where the ring's slot of a tile begins in shared memory, in bytes."""
        size = self.tile.stage_bytes(problem_of(self.form))
        if isinstance(number, int):
            return number % self.tile.stages * size
        return T.bind(number % integer(self.tile.stages) * integer(size))

    def begin(self) -> None:
        """Emit what runs while the first tiles arrive."""

    def finish(self) -> None:
        """Emit what follows the sums."""
        self.make_epilogue(Epilogue).emit()

    def make_epilogue(self, kind: type[Epilogue]) -> Epilogue:
        """Return an epilogue of the sums."""
        return kind(
            self.form, self.tile, self.place, self.sums, self.shared, self.views, self.group
        )

    def step(self, pair: Pair, number):
        """The number along the reduction of the ``number``-th tile that a block copies for an anchor."""
        return number

    def _group_size(self, wide: bool) -> int:
        """Column fragments whose columns are interleaved so that a lane has neighbouring ones."""
        if not wide:
            return 1
        last = self.form.columns[-1].extent
        return max(
            g
            for g in (1, 2, 4)
            if self.tile.column_fragments % g == 0 and (g == 1 or last % (2 * g) == 0)
        )

    # -- the sequence of tiles --------------------------------------------------------------------

    def _pipeline(self, pairs: list[Pair]) -> None:
        tile = self.tile
        ahead = tile.stages - 1
        steps = [(pair, k) for pair in pairs for k in range(pair.steps)]
        work = len(steps) * tile.instructions(problem_of(self.form))
        work *= tile.row_fragments * tile.column_fragments

        def start(number: int, part: str = "both") -> None:
            if number < len(steps):
                pair, k = steps[number]
                pair.issue(k, self.slot(number), part)

        def finish(number: int) -> None:
            pair, _ = steps[number]
            self.arrive(ahead)
            start(number + ahead)
            T.evaluate(call("tvmf_commit"))
            pair.multiply(self.slot(number))

        # The next kernel may set itself up while this one runs, as this one does now: until the previous kernel is
        # complete, it reads nothing but constants.
        T.evaluate(call("tvmf_let_next_start"))
        for number in range(ahead):
            start(number, "constant")
        T.evaluate(call("tvmf_wait_for_previous"))
        for number in range(ahead):
            start(number, "other")
            T.evaluate(call("tvmf_commit"))
        self.begin()
        first = 0
        for pair in pairs:
            count = pair.steps
            rolled = 0 if work <= _UNROLLED else max(0, count - ahead)
            if rolled:
                with T.serial(0, rolled) as k:
                    number = k + integer(first)
                    self.arrive(ahead)
                    pair.issue(k + integer(ahead), self.slot(number + integer(ahead)))
                    T.evaluate(call("tvmf_commit"))
                    pair.multiply(self.slot(number))
            for k in range(rolled, count):
                finish(first + k)
            first += count

    def arrive(self, ahead: int) -> None:
        """Wait until the oldest tile is complete, for every thread."""
        T.evaluate(call(f"tvmf_wait_{ahead - 1}"))
        T.evaluate(call("tvmf_barrier"))


class Pair:
    """The two operands of one anchor."""

    def __init__(self, body: Body, anchor: Anchor) -> None:
        self.body, self.anchor = body, anchor
        form = body.form
        rows = (*form.batch, *form.rows)
        self.row_access = access_of(anchor.rows, rows, anchor.reduced, form.inner)
        across = (*form.batch, *anchor.copies, *form.columns)
        self.column_access = access_of(anchor.columns, across, anchor.reduced)
        self.steps = -(-anchor.depth // (body.tile.depth * body.tile.slices))
        self.sums = body.sums[body.form.anchors.index(anchor)]

    @property
    def permuted(self) -> bool:
        """Whether columns can be placed in any order."""
        return self.column_access.major == "k"

    def prepare(self, group: int) -> None:
        """Bind addresses; ``group`` column fragments are interleaved."""
        form, tile, place = self.body.form, self.body.tile, self.body.place
        rows = Lines(form.rows, form.row_count, tile.rows, place.first_row, lambda line: line)
        self.row_copy = self._copy(self.anchor.rows, self.row_access, rows, place.batch)
        columns = Lines(
            form.columns, form.column_count, tile.columns, place.first_column,
            interleave(group) if self.permuted else lambda line: line,
        )  # fmt: skip
        self.column_copies = []
        for copy in range(self.anchor.copy_count):
            fixed = {**place.batch, **numbered(copy, self.anchor.copies)}
            self.column_copies.append(
                self._copy(self.anchor.columns, self.column_access, columns, fixed)
            )
        lane = place.lane
        self.row_base = keep(row_base(self.row_access, tile, place, lane), "row_base")
        self.column_base = keep(column_base(self.column_access, tile, place, lane), "column_base")

    def _copy(self, operand, access: Access, lines: Lines, fixed) -> TileCopy:
        body = self.body
        return TileCopy(
            operand, access, lines, fixed, self.anchor.reduced, body.tile.depth,
            body.place.thread, body.tile.threads, body.shared, body.views, body.form.inner,
            body.form.constants, body.tile.slices,
        )  # fmt: skip

    def issue(self, step, slot, part: str = "both") -> None:
        """Start copying one tile of both operands, or of the ``"constant"`` or ``"other"`` ones."""
        offset, step = slot, self.body.step(self, step)
        for copy in (self.row_copy, *self.column_copies):
            if part == "both" or (part == "constant") == copy.is_constant:
                copy.issue(step, offset)
            offset = offset + copy.nbytes

    def multiply(self, slot) -> None:
        """Multiply one tile, this warp's part of the reduction."""
        tile = self.body.tile
        count = tile.instructions(problem_of(self.body.form))
        self._load(0, 0, slot)
        for number in range(count):
            if number + 1 < count:
                self._load(number + 1, (number + 1) % 2, slot)
            self._multiply(number % 2)

    def _load(self, number: int, which: int, slot) -> None:
        tile, place, body = self.body.tile, self.body.place, self.body
        part = tile.instructions(problem_of(body.form))
        k = place.warp_depth * integer(part) + integer(number) if tile.warp_depth > 1 else number
        rows = body.row_parts[which]
        for fragment in range(tile.row_fragments):
            offsets = row_fragment(self.row_access, tile, self.row_base, place, fragment, k)
            self._read(self.row_access, rows, 4 * fragment, slot, offsets)
        columns = body.column_parts[which]
        base = self.row_copy.nbytes
        for copy in range(self.anchor.copy_count):
            for fragment in range(0, tile.column_fragments, 2):
                offsets = column_fragment(
                    self.column_access, tile, self.column_base, place, fragment, k
                )
                offsets = [offset + base for offset in offsets]
                target = 2 * (copy * tile.column_fragments + fragment)
                self._read(self.column_access, columns, target, slot, offsets)
            base += self.column_copies[copy].nbytes

    def _read(self, access: Access, fragments, target: int, slot, offsets: list) -> None:
        places = [slot + offset for offset in offsets]
        T.evaluate(call(reader(access), fragments.data, target, self.body.shared.data, *places))

    def _multiply(self, which: int) -> None:
        tile, body = self.body.tile, self.body
        name = f"tvmf_mma_{OPERAND_TYPES[self.anchor.rows.dtype][0]}"
        rows, columns = body.row_parts[which], body.column_parts[which]
        for copy in range(self.anchor.copy_count):
            for row in range(tile.row_fragments):
                for column in range(tile.column_fragments):
                    target = (copy * tile.row_fragments + row) * tile.column_fragments + column
                    T.evaluate(
                        call(
                            name,
                            self.sums.data,
                            4 * target,
                            rows.data,
                            4 * row,
                            columns.data,
                            2 * (copy * tile.column_fragments + column),
                        )
                    )


def _local(name: str, size: int, dtype: str) -> tirx.Buffer:
    """Registers of a thread."""
    return IRBuilder.name(name, T.alloc_buffer((size,), dtype, scope="local"))
