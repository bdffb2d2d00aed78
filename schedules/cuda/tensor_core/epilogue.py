"""From the sums in registers to the outputs: the function's own expression, on neighbouring columns at a time."""

from __future__ import annotations

import tvm_ffi

from ....compat import ir, tirx
from ....compat import script_builder as T
from ....guards.tensor_tiles import COLUMNS, ROWS, Tile
from ...analysis import dtype_bytes
from ..fast_math import NARROW, fast_math, to_type
from .affine import flat_offset, substitute
from .device_code import call
from .evaluate import Views, conjunction, copy_out, evaluate, integer, keep, step_of
from .form import Products, Store
from .operand import decode
from .parts import Part, by_condition, follow_each_other, is_bound, is_var, part_of


class Epilogue:
    """Emits the stores of a kernel.

    A lane has, of each 16 rows, two, and of each group of interleaved fragments neighbouring columns: a *unit*. Where
    warps share the reduction, their sums meet in shared memory and each warp finishes some of the units.

    Parameters
    ----------
    form : Products
        The function.
    tile : Tile
        Sizes.
    place : Place
        Where the thread works.
    sums : list of Buffer
        Accumulators of each anchor.
    shared : Buffer
        Shared memory, free to use after a barrier.
    views : mapping
        The parameters.
    group : int
        Column fragments that are interleaved.
    """

    def __init__(
        self, form: Products, tile: Tile, place, sums, shared, views: Views, group: int
    ) -> None:
        self.form, self.tile, self.place, self.sums = form, tile, place, sums
        self.shared, self.views, self.group = shared, views, group
        self.width = 2 * group
        #: Neighbouring columns that are stored in the same way.
        self.share = tile.columns // tile.warp_columns
        self._target: tirx.PrimExpr | None = None
        #: How many finish the units of a warp's sums, and which of them this one is.
        self.parts, self.part = tile.warp_depth, place.warp_depth

    def emit(self) -> None:
        """Emit the epilogue."""
        if self.parts > 1:
            self._exchange()
        family = self._family()
        if family is not None:
            self._target = self._select(family, self._warp_column())
            self._units([family[0].store], ())
            return
        for conditions, stores in by_condition(self.form.stores):
            if conditions and self._uniform(conditions):
                first = self._warp_column()
                names = decode(first, self.form.columns)
                with T.If(conjunction([substitute(c, names) for c in conditions])), T.Then():
                    self._units(stores, ())
            else:
                self._units(stores, conditions)

    # -- parts: the same value, stored into a tensor that depends on the column --------------------

    def _family(self) -> list[Part] | None:
        """The stores as parts of one tensor; None when they are anything else."""
        parts = [part_of(store, self.form.columns, self.share) for store in self.form.stores]
        if len(parts) < 2 or None in parts or not self._is_wide():
            return None
        first = parts[0]
        if not self._is_vector(first.store) or not follow_each_other(parts, self.form.columns):
            return None
        same = all(
            tvm_ffi.structural_equal(p.store.value, first.store.value, map_free_vars=False)
            and str(p.store.buffer.dtype) == str(first.store.buffer.dtype)
            and p.shift(first) is not None
            for p in parts
        )
        return parts if same else None

    def _is_wide(self) -> bool:
        return self.form.columns[-1].extent % self.width == 0

    def _is_vector(self, store: Store) -> bool:
        """Whether a lane's elements are neighbours, aligned, and no more than one instruction stores."""
        offset = flat_offset(tirx.BufferLoad(store.buffer, store.indices))
        nbytes = self.width * dtype_bytes(str(store.buffer.dtype))
        return nbytes <= 16 and step_of(offset, self.form.columns[-1].var, self.width) == 1

    def _select(self, family: list[Part], column: tirx.PrimExpr) -> tirx.PrimExpr:
        """Bind the address at which a column's tensor would begin if it had the offsets of the first one."""
        pointer: tirx.PrimExpr = self.views[family[0].store.buffer.__chandle__()].data
        for part in sorted(family, key=lambda part: -part.end):
            own = self.views[part.store.buffer.__chandle__()].data
            held, shift = column < integer(part.end), part.shift(family[0])
            pointer = T.bind(call("tvmf_select", held, own, shift, pointer, result="handle"))
        return pointer

    def _warp_column(self) -> tirx.PrimExpr:
        return self.place.first_column + self.place.warp_column * integer(self.share)

    def _uniform(self, conditions: tuple) -> bool:
        """Whether conditions are bounds of the last column that a warp's columns never straddle."""
        return all(is_bound(c, self.form.columns, self.share) for c in conditions)

    # -- units ------------------------------------------------------------------------------------

    def _units(self, stores: list[Store], conditions: tuple) -> None:
        if self.parts == 1:
            for number in range(self.count):
                known = self._registers(self._where(number))
                self._unit(*self._unit_place(number), stores, conditions, known)
            return
        for turn in range(0, self.count, self.parts):
            number = T.bind(integer(turn) + self.part)

            def unit(number=number) -> None:
                self._unit(*self._unit_place(number), stores, conditions, self._summed(number))

            if turn + self.parts > self.count:
                with T.If(number < integer(self.count)), T.Then():
                    unit()
            else:
                unit()

    @property
    def count(self) -> int:
        """Units of a warp's sums."""
        return self.tile.row_fragments * 2 * (self.tile.column_fragments // self.group)

    def _where(self, number) -> tuple:
        """Fragment of rows, its half and group of columns of a unit."""
        groups = self.tile.column_fragments // self.group
        if isinstance(number, int):
            return number // (2 * groups), number // groups % 2, number % groups
        row, half = number // integer(2 * groups), number // integer(groups) % integer(2)
        return row, half, number % integer(groups)

    def _unit_place(self, number) -> tuple:
        """A lane's row of a unit within the block, and the unit's group of columns."""
        tile, place = self.tile, self.place
        row, half, group = self._where(number)
        line = place.warp_row * integer(tile.rows // tile.warp_rows) + row * ROWS + half * 8
        return line + place.lane // integer(4), group

    def _summed(self, number):
        """Sums of a unit that several warps have a part of."""
        return self._met(*self._unit_place(number))

    def _unit(self, line, group, stores: list[Store], conditions: tuple, known) -> None:
        form, tile, place = self.form, self.tile, self.place
        names, needed = self._row(line)
        wide = group * (COLUMNS * self.group)
        column = self._warp_column() + wide + place.lane % integer(4) * integer(self.width)
        # Kept as a multiple of the width: TVM loads a vector at once where it sees that it is aligned.
        column = keep(column // integer(self.width), "column") * integer(self.width)
        if form.column_count % tile.columns:
            needed.append(column < integer(form.column_count))

        def body() -> None:
            for store in stores:
                self._store(store, names, column, known, conditions)

        if needed:
            with T.If(conjunction(needed)), T.Then():
                body()
        else:
            body()

    def _row(self, line) -> tuple[dict, list]:
        """Values of the iterators at a row of the block, and what must hold for it to be stored."""
        form = self.form
        number = keep(self.place.first_row + line, "row")
        needed = []
        if form.row_count % self.tile.rows:
            needed.append(number < integer(form.row_count))
        return {**self.place.batch, **decode(number, form.rows)}, needed

    def _registers(self, where):
        """Sums of a unit in registers."""
        row, half, group = where
        tile = self.tile

        def value(anchor: int, copy: int, number: int) -> tirx.PrimExpr:
            column = group * self.group + number // 2
            index = ((copy * tile.row_fragments + row) * tile.column_fragments + column) * 4
            return self.sums[anchor][index + half * 2 + number % 2]

        return value

    def _store(self, store: Store, names, column, known, conditions) -> None:
        form = self.form
        last = form.columns[-1]
        whole = self._is_wide()

        def lookup(load: ir.TensorLoad, number: int):
            for place, anchor in enumerate(form.anchors):
                if load.source.same_as(anchor.buffer):
                    return known(place, self._copy(anchor, load), number)
            return None

        def emit(conditions: tuple, first: int, width: int) -> None:
            # Elements of a unit that is not whole may differ in other iterators than the last one, too.
            shift = integer(first) if first else None
            values = decode(column if whole or not first else column + shift, form.columns)
            start = values.pop(last.var)
            if whole and first:
                start = start + shift
            everything = {**names, **values}
            held = [substitute(c, {**everything, last.var: start}) for c in conditions]
            if not whole:
                held.append(column + integer(first) < integer(form.column_count))

            def write() -> None:
                sums = lambda load, number: lookup(load, number + first)  # noqa: E731
                found = evaluate(
                    fast_value(store), last.var, start, width, everything, self.views, sums
                )
                self._write(store, everything, start, found)

            if held:
                with T.If(conjunction(held)), T.Then():
                    write()
            else:
                write()

        if whole and all(is_bound(c, form.columns, self.width) for c in conditions):
            emit(conditions, 0, self.width)
            return
        for number in range(self.width):
            emit(conditions, number, 1)

    def _write(self, store: Store, names, start, found: list) -> None:
        last = self.form.columns[-1]
        dtype = str(store.buffer.dtype)
        view = self.views[store.buffer.__chandle__()]
        offset = flat_offset(tirx.BufferLoad(store.buffer, store.indices))
        kept = T.alloc_buffer((len(found),), dtype, scope="local")
        for number, value in enumerate(found):
            T.buffer_store(kept, value, [number])
        at = lambda number: substitute(  # noqa: E731
            offset, {**names, last.var: start + integer(number) if number else start}
        )
        if self._target is not None:
            size = len(found) * dtype_bytes(dtype)
            T.evaluate(call(f"tvmf_store_global_{size}", self._target, at(0), kept.data))
            return
        if len(found) > 1 and step_of(offset, last.var, len(found)) == 1:
            copy_out(view, at(0), kept, len(found))
            return
        for number in range(len(found)):
            T.buffer_store(view, kept[number], [at(number)])

    def _copy(self, anchor, load: ir.TensorLoad) -> int:
        """Which copy of an anchor's sums a load reads."""
        number = 0
        for copy in anchor.copies:
            place = next(i for i, e in enumerate(anchor.indices) if is_var(e, copy.var))
            number = number * copy.extent + int(load.indices[place])
        return number

    # -- warps that share the reduction -----------------------------------------------------------

    def _exchange(self) -> None:
        """Write this warp's sums to shared memory, in the order of the matrix instruction."""
        tile = self.tile
        T.evaluate(call("tvmf_barrier"))
        for anchor, sums in enumerate(self.sums):
            for copy in range(self.form.anchors[anchor].copy_count):
                for row in range(tile.row_fragments):
                    for half in range(2):
                        for column in range(tile.column_fragments):
                            self._put(anchor, copy, row, half, column, sums)
        T.evaluate(call("tvmf_barrier"))

    def _put(self, anchor: int, copy: int, row: int, half: int, column: int, sums) -> None:
        tile, place = self.tile, self.place
        index = ((copy * tile.row_fragments + row) * tile.column_fragments + column) * 4 + half * 2
        line = place.warp_row * integer(tile.rows // tile.warp_rows)
        line = line + integer(row * ROWS + 8 * half) + place.lane // integer(4)
        offset = self._met_offset(anchor, copy, place.warp_depth, line, integer(column))
        T.evaluate(call("tvmf_store_shared_8", self.shared.data, offset, sums.data, index))

    def _met_offset(self, anchor: int, copy: int, part, line, fragment) -> tirx.PrimExpr:
        """Byte offset of a lane's two sums of a fragment."""
        tile, place = self.tile, self.place
        before = sum(a.copy_count for a in self.form.anchors[:anchor]) + copy
        plane = part * integer(self.form.copies) + integer(before)
        column = place.warp_column * integer(tile.columns // tile.warp_columns)
        column = column + fragment * integer(COLUMNS) + place.lane % integer(4) * integer(2)
        # Rows four apart would meet in one bank: their halves of 32 bytes are exchanged.
        return ((plane * integer(tile.rows) + line) * integer(tile.columns) + column) * integer(4)

    def _met(self, line, group):
        """Load and add the sums of a unit from shared memory."""
        tile = self.tile
        kept = {}
        for anchor, described in enumerate(self.form.anchors):
            for copy in range(described.copy_count):
                total = T.alloc_buffer((self.width,), "float32", scope="local")
                part = T.alloc_buffer((self.width,), "float32", scope="local")
                for warp in range(tile.warp_depth):
                    into = part if warp else total
                    for fragment in range(self.group):
                        column = group * self.group + fragment
                        offset = self._met_offset(anchor, copy, integer(warp), line, column)
                        T.evaluate(
                            call(
                                "tvmf_load_shared_8", into.data, 2 * fragment, self.shared.data, offset
                            )
                        )  # fmt: skip
                    if warp:
                        for number in range(self.width):
                            T.buffer_store(total, total[number] + part[number], [number])
                kept[anchor, copy] = total
        return lambda anchor, copy, number: kept[anchor, copy][number]


def fast_value(store: Store) -> tirx.PrimExpr:
    """A store's value with its arithmetic in float32, as the sums are."""
    dtype = str(store.buffer.dtype)
    if not dtype.startswith(("float", "bfloat")):
        return store.value
    return to_type(fast_math(store.value, narrow=dtype in NARROW), dtype)
