"""From sums in registers to the output: rows are divided by their weights' sums; warps that share the keys add up."""

from __future__ import annotations

import tvm_ffi

from ....compat import ir, sym, tirx
from ....compat import script_builder as T
from ....guards.attention_tiles import PADDING
from ....guards.tensor_tiles import ROWS
from ...analysis import nodes_of
from ..fast_math import to_type
from ..tensor_core.affine import flat_offset, substitute
from ..tensor_core.evaluate import conjunction, copy_out, integer, load_elements
from .device_code import call
from .form import Source, is_row_wise
from .hidden_rows import visible

#: Columns that a thread stores at once.
_PIECE = 8


class Ending:
    """Emits what follows the last tile.

    Parameters
    ----------
    body : Body
        The kernel.
    """

    def __init__(self, body) -> None:
        self.body, self.form, self.tile = body, body.form, body.tile
        self.softmax = body.softmax
        self.rows = self.softmax.rows
        self.columns = 2 * body.value_parts
        #: Floats from one row of partial results to the next.
        self.length = 8 * self.columns + PADDING
        source = Source(
            self.form.output, self.form.output_offset, self.form.row, self.form.values.width
        )
        self.is_row_wise = is_row_wise(source)

    def emit(self) -> None:
        """Emit everything."""
        totals = self.softmax.totals
        for half in range(len(self.rows)):
            for bits in (1, 2):
                other = call("tvmf_shuffle_xor", totals[half], integer(bits), result="float32")
                T.buffer_store(totals, totals[half] + other, [half])
        if self.tile.warp_keys > 1:
            self._meet()
        else:
            self._sink()
            found = [totals[half] for half in range(len(self.rows))]
            self._scale(self._inverses(found), self._defined(found, self.rows))
            self._finish()
            self._store()

    def _sink(self) -> None:
        """Count the sink of each row: what was added up is scaled down where it is larger than all scores."""
        softmax, totals = self.softmax, self.softmax.totals
        if self.form.sink is None and not self.form.share:
            return
        for half, row in enumerate(self.rows):
            total, shrink = self._beside_sink(row, totals[half], softmax.most[half])
            T.buffer_store(totals, total, [half])
            if shrink is None:
                continue
            for column in range(self.columns):
                for number in range(2):
                    at = self._register(half, column, number)
                    T.buffer_store(self.body.sums, self.body.sums[at] * shrink, [at])

    def _beside_sink(self, row, total, most) -> tuple[tirx.PrimExpr, tirx.PrimExpr | None]:
        """A row's sum with its sink, and what else was added up is multiplied by for it (None: by 1)."""
        form, softmax = self.form, self.softmax
        if form.share:
            share = tirx.const(form.share, "float32")
            return T.bind(total + self._where_seen(total, share)), None
        if form.sink is None:
            return total, None
        if form.row.extent % self.tile.rows:
            row = tirx.min(row, integer(form.row.extent - 1))
        sink = evaluate(self.body, form.sink, {form.row.var: row})
        if softmax.is_plain and form.scale != 1.0:  # in units of what registers hold
            sink = sink * tirx.const(1 / form.scale, "float32")
        sink = T.bind(sink)
        largest = T.bind(tirx.Max(most, sink))
        shrink = T.bind(softmax.power(most, largest))
        own = softmax.power(sink, largest)
        if not form.sink_counts:
            own = self._where_seen(total, own)
        return T.bind(total * shrink + own), shrink

    def _where_seen(self, total, value) -> tirx.PrimExpr:
        """What is added to the sum of a row: nothing where it has no key, so that it is NaN."""
        zero = tirx.const(0, "float32")
        return tirx.Select(total > zero, value, zero)

    def _inverses(self, totals: list) -> list:
        """What each row is multiplied by."""
        scale, zero = tirx.const(self.form.value_scale, "float32"), tirx.const(0, "float32")
        found = []
        for total in totals:
            inverse = scale / total
            if self.form.zeroed in ("masked", "undefined"):
                inverse = tirx.Select(total.equal(zero), zero, inverse)
            found.append(T.bind(inverse))
        return found

    def _defined(self, totals: list, rows: list) -> list:
        """Conditions that rows keep what was added up; None where all do."""
        if self.form.zeroed == "hidden":
            pairs = zip(rows, totals, strict=True)
            return [visible(self.body, row, total) for row, total in pairs]
        if self.form.zeroed != "undefined":
            return [None] * len(totals)
        # A comparison with NaN is false. Of rows of minus infinities, products of values with 0 were added up.
        return [T.bind(total >= tirx.const(0, "float32")) for total in totals]

    def _register(self, half: int, column: int, number: int = 0) -> int:
        return 4 * (half // 2 * self.columns + column) + 2 * (half % 2) + number

    def _scale(self, factors: list, defined: list) -> None:
        sums, zero = self.body.sums, tirx.const(0, "float32")
        for half, (factor, is_defined) in enumerate(zip(factors, defined, strict=True)):
            for column in range(self.columns):
                for number in range(2):
                    at = self._register(half, column, number)
                    value = sums[at] * factor
                    if is_defined is not None:
                        value = tirx.Select(is_defined, value, zero)
                    T.buffer_store(sums, value, [at])

    def _finish(self) -> None:
        """Evaluate what is stored instead of the sums."""
        if self.form.ending is None:
            return
        sums, width = self.body.sums, self.form.values.width
        for half, row in enumerate(self.rows):
            if self.form.row.extent % self.tile.rows:
                row = tirx.min(row, integer(self.form.row.extent - 1))
            for column in range(self.columns):
                if 8 * column >= width.extent:
                    continue
                first = integer(8 * column) + self.body.lane % integer(4) * integer(2)
                at = self._register(half, column)
                made = self._ended(row, first, [sums[at], sums[at + 1]])
                for number, value in enumerate(made):
                    T.buffer_store(sums, value, [at + number])

    def _ended(self, row, first, values: list) -> list:
        """What is stored of neighbouring sums of a row."""
        form, body = self.form, self.body
        names, var = {form.row.var: row, **body.batch}, form.values.width.var
        loads = {
            load.__chandle__(): load_elements(load, var, first, len(values), names, body.views)
            for load in nodes_of(form.ending, ir.TensorLoad)
        }
        found = []
        for number, value in enumerate(values):
            made = tvm_ffi.structural_map(
                form.ending,
                [(ir.TensorLoad, lambda x, number=number: loads[x.__chandle__()](number))],
                order="pre",
            )
            places = {**names, var: first + integer(number), form.mixed: value}
            found.append(T.bind(to_type(substitute(made, places), "float32")))
        return found

    # -- one warp has all keys ---------------------------------------------------------------------------

    def _store(self) -> None:
        body, form = self.body, self.form
        packed = T.alloc_buffer((1,), "uint32", scope="local")
        view = body.views[form.output.__chandle__()]
        for half, row in enumerate(self.rows):
            conditions = []
            if form.row.extent % self.tile.rows:
                conditions.append(row < integer(form.row.extent))
            for column in range(self.columns):
                if 8 * column >= form.values.width.extent:
                    continue
                first = integer(8 * column) + body.lane % integer(4) * integer(2)
                with _where(conditions):
                    at = self._register(half, column)
                    if self.is_row_wise:
                        name = f"tvmf_pack_{body.type}"
                        T.evaluate(call(name, packed.data, 0, body.sums.data, at))
                        place = self._offset(row, first)
                        T.evaluate(call("tvmf_store_packed", view.data, place, packed.data, 0))
                        continue
                    for number in range(2):
                        value = to_type(body.sums[at + number], form.dtype)
                        T.buffer_store(view, value, [self._offset(row, first + integer(number))])

    def _offset(self, row, column) -> tirx.PrimExpr:
        names = {self.form.row.var: row, self.form.values.width.var: column, **self.body.batch}
        return sym.Analyzer().simplify(substitute(self.form.output_offset, names))

    # -- warps share the keys ----------------------------------------------------------------------------

    def _meet(self) -> None:
        """Add up what warps have of a row."""
        body, tile, softmax = self.body, self.tile, self.softmax
        rows, shared = tile.rows, body.shared.data
        places = 4 * tile.warp_keys * rows * self.length
        T.evaluate(call("tvmf_wait_0"))
        T.evaluate(call("tvmf_barrier"))
        own = T.alloc_buffer((2,), "float32", scope="local")
        lines = [
            T.bind(
                body.warp_row * integer(ROWS * tile.fragments)
                + integer(8 * half)
                + body.lane // integer(4)
            )
            for half in range(len(self.rows))
        ]
        for half, line in enumerate(lines):
            T.buffer_store(own, softmax.most[half], [0])
            T.buffer_store(own, softmax.totals[half], [1])
            with _where([(body.lane % integer(4)).equal(integer(0))]):
                place = integer(places) + (body.warp_key * integer(rows) + line) * integer(8)
                T.evaluate(call("tvmf_store_shared_8", shared, place, own.data, 0))
        T.evaluate(call("tvmf_barrier"))
        shares = [self._share(half, line, places) for half, line in enumerate(lines)]
        self._scale([factor for factor, _ in shares], [is_defined for _, is_defined in shares])
        for half, line in enumerate(lines):
            for column in range(self.columns):
                place = (body.warp_key * integer(rows) + line) * integer(4 * self.length)
                place = place + integer(32 * column) + body.lane % integer(4) * integer(8)
                at = self._register(half, column)
                T.evaluate(call("tvmf_store_shared_8", shared, place, body.sums.data, at))
        T.evaluate(call("tvmf_barrier"))
        self._store_together()

    def _share(self, half: int, line, places: int) -> tuple[tirx.PrimExpr, tirx.PrimExpr | None]:
        """What a warp's sums of a row are multiplied by, and a condition that they are kept."""
        tile, softmax, shared = self.tile, self.softmax, self.body.shared.data
        parts = T.alloc_buffer((2 * tile.warp_keys,), "float32", scope="local")
        for warp in range(tile.warp_keys):
            place = integer(places + 8 * warp * tile.rows) + line * integer(8)
            T.evaluate(call("tvmf_load_shared_8", parts.data, 2 * warp, shared, place))
        largest = parts[0]
        for warp in range(1, tile.warp_keys):
            largest = tirx.Max(largest, parts[2 * warp])
        largest = T.bind(largest)
        total = None
        for warp in range(tile.warp_keys):
            part = parts[2 * warp + 1] * softmax.power(parts[2 * warp], largest)
            total = part if total is None else total + part
        total, shrink = self._beside_sink(self.rows[half], T.bind(total), largest)
        (inverse,) = self._inverses([total])
        (is_defined,) = self._defined([total], [self.rows[half]])
        factor = softmax.power(softmax.most[half], largest) * inverse
        return T.bind(factor if shrink is None else factor * shrink), is_defined

    def _store_together(self) -> None:
        """Every thread adds up and stores neighbouring columns of some rows."""
        body, tile, form = self.body, self.tile, self.form
        pieces = self.columns * 8 // _PIECE
        kept = T.alloc_buffer((_PIECE,), form.dtype, scope="local")
        total = T.alloc_buffer((_PIECE,), "float32", scope="local")
        part = T.alloc_buffer((4,), "float32", scope="local")
        view = body.views[form.output.__chandle__()]
        count = tile.rows * pieces
        for number in range(-(-count // tile.threads)):
            place = body.thread + integer(number * tile.threads)
            line, piece = T.bind(place // integer(pieces)), T.bind(place % integer(pieces))
            row = T.bind(body.first_row + line)
            conditions = []
            if count % tile.threads:
                conditions.append(place < integer(count))
            if form.row.extent % tile.rows:
                conditions.append(row < integer(form.row.extent))
            if form.values.width.extent % (pieces * _PIECE):
                conditions.append(piece * integer(_PIECE) < integer(form.values.width.extent))
            with _where(conditions):
                for warp in range(tile.warp_keys):
                    for quarter in range(_PIECE // 4):
                        at = (integer(warp * tile.rows) + line) * integer(4 * self.length)
                        at = at + piece * integer(4 * _PIECE) + integer(16 * quarter)
                        T.evaluate(call("tvmf_load_shared_16", part.data, 0, body.shared.data, at))
                        for i in range(4):
                            value = part[i] if warp == 0 else total[4 * quarter + i] + part[i]
                            T.buffer_store(total, value, [4 * quarter + i])
                first = piece * integer(_PIECE)
                values = [total[i] for i in range(_PIECE)]
                if form.ending is not None:
                    values = self._ended(row, first, values)
                for i in range(_PIECE):
                    T.buffer_store(kept, to_type(values[i], form.dtype), [i])
                if self.is_row_wise:
                    copy_out(view, self._offset(row, first), kept, _PIECE)
                    continue
                for i in range(_PIECE):
                    T.buffer_store(view, kept[i], [self._offset(row, first + integer(i))])


def evaluate(body, expr: tirx.PrimExpr, names: dict) -> tirx.PrimExpr:
    """An expression of parameters at a place, in float32."""
    names = {**names, **body.batch}

    def load(found: ir.TensorLoad) -> tirx.PrimExpr:
        view = body.views[found.source.__chandle__()]
        return view[sym.Analyzer().simplify(substitute(flat_offset(found), names))]

    made = tvm_ffi.structural_map(expr, [(ir.TensorLoad, load)], order="pre")
    return to_type(substitute(made, names), "float32")


class _where:
    """A region that runs where conditions hold."""

    def __init__(self, conditions: list[tirx.PrimExpr]) -> None:
        self._frames = [T.If(conjunction(conditions)), T.Then()] if conditions else []

    def __enter__(self) -> None:
        for frame in self._frames:
            frame.__enter__()

    def __exit__(self, *failure) -> None:
        for frame in reversed(self._frames):
            frame.__exit__(*failure)
