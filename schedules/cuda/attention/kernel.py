"""The kernel: queries in registers, tiles of keys and values through a ring in shared memory, online softmax.

As in FlashAttention-2 (Dao, 2023): a warp has 16 or 32 queries. It multiplies them with a tile of keys, turns the
scores in its registers into weights, which are the next product's row operand as they lie there, and adds the weighted
values to its output. Of each row it keeps the largest score and the sum of weights so far; where a larger score turns
up, what was added before is scaled down. Weights are rounded to the operands' type; sums and the softmax are float32.
"""

from __future__ import annotations

import contextlib

from ....compat import IRBuilder, tirx
from ....compat import script_builder as T
from ....guards.attention_tiles import AttentionProblem, AttentionTile
from ....guards.tensor_tiles import PIECE_BYTES, ROWS
from ..tensor_core.access import Access, swizzle
from ..tensor_core.affine import Copy
from ..tensor_core.device_code import OPERAND_TYPES
from ..tensor_core.evaluate import conjunction, integer, keep
from ..tensor_core.form import Operand
from ..tensor_core.kernel import write_function
from ..tensor_core.operand import Lines, TileCopy, decode
from .device_code import call
from .ending import Ending
from .form import Attention, Source
from .softmax import Softmax

#: Fragments that are loaded ahead of the instruction that multiplies them.
_AHEAD = 2


def problem_of(form: Attention) -> AttentionProblem:
    """Describe a function to the search for a tile."""
    return AttentionProblem(
        form.heads,
        form.row.extent,
        form.key.extent,
        form.query.width.extent,
        form.values.width.extent,
        form.limit is not None,
        form.score is not None,
        0 if form.limit is None else form.limit.shift,
    )


def attention_kernel(form: Attention, tile: AttentionTile) -> tirx.PrimFunc:
    """Write the kernel of a function.

    Parameters
    ----------
    form : Attention
        The function.
    tile : AttentionTile
        Sizes.

    Returns
    -------
    PrimFunc
        A scheduled function of one kernel with the parameters of the function.
    """
    blocks = tile.blocks(problem_of(form))
    return write_function(
        form, blocks, tile.threads, lambda *names: Body(form, tile, *names).emit()
    )


def local(name: str, size: int, dtype: str) -> tirx.Buffer:
    """Registers of a thread."""
    return IRBuilder.name(name, T.alloc_buffer((size,), dtype, scope="local"))


@contextlib.contextmanager
def where(*conditions: tirx.PrimExpr | None):
    """Emit what follows where conditions hold (None: they do)."""
    needed = [c for c in conditions if c is not None]
    with contextlib.ExitStack() as inside:
        if needed:
            inside.enter_context(T.If(conjunction(needed)))
            inside.enter_context(T.Then())
        yield


class Rows:
    """A lane's addresses in a tile whose rows are those of a sequence: 8x8 matrices of 16 rows and 16 places.

    Parameters
    ----------
    lane : PrimExpr
        Number of the lane.
    first : PrimExpr
        First row of the warp, a multiple of 16.
    width : int
        Places of a row.
    across : bool
        Whether the second matrix lies beside the first and the third below, or the other way round.
    """

    def __init__(self, lane, first, width: int, across: bool) -> None:
        self.row_bytes = 2 * width
        pieces = self.row_bytes // PIECE_BYTES
        # Pieces are exchanged within groups of this size (``access.swizzle``).
        self.group = min(8, pieces & -pieces)
        eighth, row = lane // integer(8), lane % integer(8)
        below, beside = (eighth // integer(2), eighth % integer(2)) if across else (
            eighth % integer(2), eighth // integer(2)
        )  # fmt: skip
        row = row + below * integer(8)
        start = (first + row) * integer(self.row_bytes)
        swapped = swizzle(row, self.row_bytes)
        self.bases = [
            keep(start + ((integer(low) + beside) ^ swapped) * integer(PIECE_BYTES), "place")
            for low in range(0, self.group, 2)
        ]

    def at(self, row: int, part: int):
        """Address, from the tile's, of the matrices that begin at a row (of 16) and the ``part``-th 16 places."""
        piece = 2 * part
        within = piece % self.group
        rest = row * self.row_bytes + (piece - within) * PIECE_BYTES
        return self.bases[within // 2] + integer(rest)


class Body:
    """Emits what one thread does."""

    def __init__(self, form: Attention, tile: AttentionTile, views, block, thread) -> None:
        self.form, self.tile, self.views, self.thread = form, tile, views, thread
        self.problem = problem_of(form)
        self.query_parts, self.value_parts = (width // 16 for width in self.problem.padded)
        self.type = OPERAND_TYPES[form.dtype][0]
        self._place(block, thread)
        size = self.tile.shared_bytes(self.problem)
        self.shared = IRBuilder.name("shared", T.alloc_buffer((size,), "uint8", scope="shared.dyn"))
        count = tile.fragments
        if tile.holds_queries(self.problem):
            self.queries = local("queries", count * self.query_parts * 4, "uint32")
        self.scores = local("scores", count * tile.own_keys // 2, "float32")
        self.sums = local("sums", count * self.value_parts * 8, "float32")
        self.weights = local("weights", count * tile.own_keys // 4, "uint32")
        self.loaded = [local("loaded", 4, "uint32") for _ in range(_AHEAD + 1)]
        ahead = 1 + -(-_AHEAD // (tile.own_keys // 16))
        self.row_loaded = [local("row_loaded", 4 * count, "uint32") for _ in range(ahead)]
        self.softmax = Softmax(self)

    def _place(self, block, thread) -> None:
        form, tile = self.form, self.tile
        down = -(-form.row.extent // tile.rows)
        if form.limit is not None:
            # Blocks with most keys first, so that the last ones are short.
            number = integer(down - 1) - block // integer(form.heads)
            head = block % integer(form.heads)
        else:
            number, head = block % integer(down), block // integer(down)
        self.row_block = T.bind(number) if down > 1 else integer(0)
        self.batch = {var: T.bind(e) for var, e in decode(head, form.batch).items()}
        self.lane = T.bind(thread % integer(32))
        warp = thread // integer(32)
        self.warp_row = T.bind(warp % integer(tile.warp_rows)) if tile.warp_rows > 1 else integer(0)
        self.warp_key = (
            T.bind(warp // integer(tile.warp_rows)) if tile.warp_keys > 1 else integer(0)
        )
        self.first_row = T.bind(self.row_block * integer(tile.rows))

    # -- copies ------------------------------------------------------------------------------------------

    def _copy(self, source: Source, width: int, depth: int) -> TileCopy:
        lines = Lines((source.width,), source.width.extent, width, integer(0), lambda line: line)
        access = Access(Copy(source.buffer, source.offset, ()), "mn", PIECE_BYTES // 2)
        operand = Operand(
            tirx.BufferLoad(source.buffer, [integer(0)] * len(source.buffer.shape)), self.form.dtype
        )
        return TileCopy(
            operand, access, lines, self.batch, (source.sequence,), depth,
            self.thread, self.tile.threads, self.shared, self.views,
        )  # fmt: skip

    def _slot(self, step):
        size, stages = self.tile.stage_bytes(self.problem), self.tile.stages
        if isinstance(step, int):
            return integer(step % stages * size)
        return T.bind(step % integer(stages) * integer(size))

    def _issue(self, step, slot) -> None:
        self.key_copy.issue(step, slot)
        self.value_copy.issue(step, slot + integer(self.key_copy.nbytes))

    # -- the whole ---------------------------------------------------------------------------------------

    def emit(self) -> None:
        """Emit everything."""
        tile, form = self.tile, self.form
        query_width, value_width = self.problem.padded
        query_copy = self._copy(form.query, query_width, tile.rows)
        self.key_copy = self._copy(form.keys, query_width, tile.keys)
        self.value_copy = self._copy(form.values, value_width, tile.keys)
        own = self.warp_key * integer(tile.own_keys)
        first = self.warp_row * integer(ROWS * tile.fragments)
        self.query_rows = Rows(self.lane, first, query_width, across=False)
        self.key_rows = Rows(self.lane, own, query_width, across=True)
        self.value_rows = Rows(self.lane, own, value_width, across=False)
        full, count = self._steps()
        T.evaluate(call("tvmf_let_next_start"))
        T.evaluate(call("tvmf_wait_for_previous"))
        query_copy.issue(self.row_block, integer(tile.query_place(self.problem)))
        T.evaluate(call("tvmf_commit"))
        for step in range(tile.stages - 1):
            self._start(step, count)
        for buffer in (self.sums, self.softmax.totals):
            with T.unroll(0, int(buffer.shape[0])) as number:
                T.buffer_store(buffer, tirx.const(0, "float32"), [number])
        self.softmax.begin()
        if tile.holds_queries(self.problem):
            T.evaluate(call(f"tvmf_wait_{tile.stages - 1}"))
            T.evaluate(call("tvmf_barrier"))
            for part in range(self.query_parts):
                self._load_queries(part, self.queries, part * 4 * tile.fragments)
        self._loop(0, full, count, edge=False)
        self._loop(full, count, count, edge=True)
        Ending(self).emit()

    def _steps(self) -> tuple:
        """Tiles of keys that no mask and no end touches, and all that the block needs."""
        form, keys = self.form, self.tile.keys
        full, count = form.key.extent // keys, -(-form.key.extent // keys)
        if form.limit is None:
            return full, count
        shift = integer(form.limit.shift)
        last = tirx.min(
            self.first_row + integer(self.tile.rows), integer(form.row.extent)
        ) - integer(1)
        seen = tirx.max(self.first_row + shift + integer(1), integer(0)) // integer(keys)
        needed = tirx.max(last + shift + integer(keys), integer(0)) // integer(keys)
        return (
            T.bind(tirx.min(seen, integer(full))),
            T.bind(tirx.min(needed, integer(count))),
        )

    def _start(self, step, count) -> None:
        """Start the copies of a tile, if there is one."""
        if isinstance(step, int) and isinstance(count, int):
            if step < count:
                self._issue(step, self._slot(step))
        else:
            with where(step < count if not isinstance(step, int) else integer(step) < count):
                self._issue(step, self._slot(step))
        T.evaluate(call("tvmf_commit"))

    def _loop(self, begin, end, count, edge: bool) -> None:
        if isinstance(begin, int) and isinstance(end, int):
            if end - begin <= 1:
                if end > begin:
                    self._step(begin, count, edge)
                return
        with T.serial(_expr(begin), _expr(end)) as step:
            self._step(step, _expr(count), edge)

    def _step(self, step, count, edge: bool) -> None:
        tile = self.tile
        T.evaluate(call(f"tvmf_wait_{tile.stages - 2}"))
        T.evaluate(call("tvmf_barrier"))
        ahead = tile.stages - 1
        self._start(step + ahead if isinstance(step, int) else step + integer(ahead), count)
        slot = self._slot(step)
        self._multiply_keys(slot)
        self.softmax.compare(step, edge)
        self._multiply_values(slot + integer(self.key_copy.nbytes))

    # -- products ----------------------------------------------------------------------------------------

    def _load_queries(self, part: int, target: tirx.Buffer, at: int) -> None:
        place = integer(self.tile.query_place(self.problem))
        for fragment in range(self.tile.fragments):
            offset = place + self.query_rows.at(ROWS * fragment, part)
            T.evaluate(
                call("tvmf_ldmatrix", target.data, at + 4 * fragment, self.shared.data, offset)
            )

    def _multiply_keys(self, slot) -> None:
        """Scores of the warp's queries and its keys of a tile."""
        tile, held = self.tile, self.tile.holds_queries(self.problem)
        with T.unroll(0, int(self.scores.shape[0])) as number:
            T.buffer_store(self.scores, tirx.const(0, "float32"), [number])
        groups = tile.own_keys // 16
        units = [(part, group) for part in range(self.query_parts) for group in range(groups)]

        def load(number: int) -> None:
            part, group = units[number]
            if group == 0 and not held:
                self._load_queries(part, self.row_loaded[part % len(self.row_loaded)], 0)
            offset = slot + self.key_rows.at(16 * group, part)
            target = self.loaded[number % len(self.loaded)]
            T.evaluate(call("tvmf_ldmatrix", target.data, 0, self.shared.data, offset))

        def multiply(number: int) -> None:
            part, group = units[number]
            for fragment in range(tile.fragments):
                rows = self.queries if held else self.row_loaded[part % len(self.row_loaded)]
                row = 4 * ((part * tile.fragments if held else 0) + fragment)
                for half in range(2):
                    at = 4 * (fragment * tile.own_keys // 8 + 2 * group + half)
                    self._mma(
                        self.scores, at, rows, row, self.loaded[number % len(self.loaded)], half
                    )

        _ahead(len(units), load, multiply)

    def _multiply_values(self, slot) -> None:
        """Add the weighted values of a tile to the output."""
        tile = self.tile
        groups = tile.own_keys // 16
        units = [(group, part) for group in range(groups) for part in range(self.value_parts)]

        def load(number: int) -> None:
            group, part = units[number]
            offset = slot + self.value_rows.at(16 * group, part)
            target = self.loaded[number % len(self.loaded)]
            T.evaluate(call("tvmf_ldmatrix_trans", target.data, 0, self.shared.data, offset))

        def multiply(number: int) -> None:
            group, part = units[number]
            if part == 0 and group + 1 < groups:
                # While these are multiplied, the next ones become weights.
                self.softmax.weigh(group + 1)
            for fragment in range(tile.fragments):
                row = 4 * (fragment * groups + group)
                for half in range(2):
                    at = 4 * (fragment * 2 * self.value_parts + 2 * part + half)
                    self._mma(
                        self.sums,
                        at,
                        self.weights,
                        row,
                        self.loaded[number % len(self.loaded)],
                        half,
                    )

        self.softmax.weigh(0)
        _ahead(len(units), load, multiply)

    def _mma(self, sums, at: int, rows, row: int, columns, half: int) -> None:
        T.evaluate(
            call(f"tvmf_mma_{self.type}", sums.data, at, rows.data, row, columns.data, 2 * half)
        )


def _ahead(count: int, load, use) -> None:
    """Emit loads a few units before what uses them."""
    for number in range(min(_AHEAD, count)):
        load(number)
    for number in range(count):
        if number + _AHEAD < count:
            load(number + _AHEAD)
        use(number)


def _expr(value):
    return integer(value) if isinstance(value, int) else value
