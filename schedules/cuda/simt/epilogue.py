"""From the sums of multiply-adds in registers to the outputs, a vector of neighbouring columns of a row at a time."""

from __future__ import annotations

import math

from ....compat import script_builder as T
from ....compat import tirx
from ....guards.fma_tiles import Tile
from ..tensor_core.affine import substitute, uses
from ..tensor_core.epilogue import Epilogue as _Epilogue
from ..tensor_core.evaluate import Views, conjunction, integer, keep
from ..tensor_core.form import Products, Store
from ..tensor_core.operand import decode
from ..tensor_core.parts import by_condition
from .device_code import common, read_shared, write_shared


class Epilogue(_Epilogue):
    """Emits the stores of a kernel.

    Where warps share the reduction, their sums meet in shared memory, and each warp finishes some of them.

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
    """

    def __init__(
        self, form: Products, tile: Tile, place, sums, shared: tirx.Buffer, views: Views
    ) -> None:
        super().__init__(form, tile, place, sums, shared, views, 1)
        self.width = math.gcd(tile.column_vector, form.columns[-1].extent)
        self.share = self.width
        self.groups = tile.thread_columns // tile.column_vector

    def emit(self) -> None:
        """Emit the epilogue."""
        if self.parts > 1:
            self._exchange()
        family = self._family()
        if family is not None:
            self._all([family[0].store], (), family)
            return
        for conditions, stores in by_condition(self.form.stores):
            self._all(stores, conditions, None)

    def _all(self, stores: list[Store], conditions: tuple, family: list | None) -> None:
        """Emit stores for all of a thread's sums."""
        tile = self.tile
        if self.parts == 1:
            pieces = [self._piece(group, family) for group in range(self.groups)]
            for row in range(tile.thread_rows):
                for group in range(self.groups):
                    known = self._registers(row, group)
                    self._vector(row, pieces[group], stores, conditions, known)
            return
        for turn in range(0, self.count, self.parts):
            number = keep(integer(turn) + self.part)

            def body(number=number) -> None:
                row, group = number // integer(self.groups), number % integer(self.groups)
                known = self._summed(number)
                self._vector(row, self._piece(group, family), stores, conditions, known)

            if turn + self.parts > self.count:
                with T.If(number < integer(self.count)), T.Then():
                    body()
            else:
                body()

    @property
    def count(self) -> int:
        """Vectors of a thread's sums."""
        return self.tile.thread_rows * self.groups

    def _summed(self, number):
        """Sums of a vector that several warps have a part of."""
        return self._met(number)

    def _piece(self, group, family: list | None) -> list:
        """First columns of the parts of a vector that are stored at once, and where they go."""
        tile, place = self.tile, self.place
        group = integer(group) if isinstance(group, int) else group
        first = place.first_column + place.warp_column * integer(tile.columns // tile.warp_columns)
        first = first + group * integer(tile.lane_columns * tile.column_vector)
        first = first + place.lane_column * integer(tile.column_vector)
        found = []
        for part in range(0, tile.column_vector, self.width):
            column = keep(first + integer(part) if part else first)
            found.append((column, None if family is None else self._select(family, column)))
        return found

    def _vector(self, row, piece: list, stores: list[Store], conditions: tuple, known) -> None:
        """Emit the stores of neighbouring columns of one row."""
        form, tile, place = self.form, self.tile, self.place
        row = integer(row) if isinstance(row, int) else row
        vector = integer(tile.row_vector)
        line = place.warp_row * integer(tile.rows // tile.warp_rows) + row % vector
        line = line + row // vector * integer(tile.lane_rows * tile.row_vector)
        line = line + place.lane_row * vector
        number = keep(place.first_row + line)
        names = {**place.batch, **decode(number, form.rows)}
        whole = [c for c in conditions if not any(uses(c, i.var) for i in form.columns)]
        conditions = tuple(c for c in conditions if not any(c is other for other in whole))
        for part, (column, target) in enumerate(piece):
            needed = [substitute(condition, names) for condition in whole]
            if form.row_count % tile.rows:
                needed.append(number < integer(form.row_count))
            if form.column_count % tile.columns:
                needed.append(column < integer(form.column_count))

            def shifted(anchor, copy, at, part=part):
                return known(anchor, copy, part * self.width + at)

            def body(column=column, target=target, shifted=shifted) -> None:
                self._target = target
                for store in stores:
                    self._store(store, names, column, shifted, conditions)

            if needed:
                with T.If(conjunction(needed)), T.Then():
                    body()
            else:
                body()

    def _registers(self, row: int, group: int):
        """Sums of a vector in registers."""
        tile = self.tile

        def value(anchor: int, copy: int, number: int) -> tirx.PrimExpr:
            first = (copy * tile.thread_rows + row) * tile.thread_columns
            return self.sums[anchor][first + group * tile.column_vector + number]

        return value

    # -- warps that share the reduction -----------------------------------------------------------

    def _exchange(self) -> None:
        """Write this warp's sums to shared memory."""
        tile = self.tile
        T.evaluate(common("tvmf_barrier"))
        for anchor, sums in enumerate(self.sums):
            for copy in range(self.form.anchors[anchor].copy_count):
                for number in range(tile.thread_rows * self.groups):
                    offset = self._place(anchor, copy, self.place.warp_depth, number)
                    first = copy * tile.thread_rows * tile.thread_columns
                    first += number * tile.column_vector
                    T.evaluate(
                        write_shared(tile.column_vector, self.shared.data, offset, sums.data, first)
                    )
        T.evaluate(common("tvmf_barrier"))

    def _place(self, anchor: int, copy: int, part, number) -> tirx.PrimExpr:
        """Byte offset of a thread's vector: threads are neighbours, so that a warp's access is contiguous."""
        tile = self.tile
        before = sum(a.copy_count for a in self.form.anchors[:anchor]) + copy
        part = integer(part) if isinstance(part, int) else part
        number = integer(number) if isinstance(number, int) else number
        plane = integer(before * tile.warp_depth) + part
        vector = plane * integer(tile.thread_rows * self.groups) + number
        vector = vector * integer(tile.slice_threads) + self.place.slice_thread
        return vector * integer(4 * tile.column_vector)

    def _met(self, number):
        """Load and add the sums of a vector from shared memory."""
        tile, width = self.tile, self.tile.column_vector
        kept = {}
        for anchor, described in enumerate(self.form.anchors):
            for copy in range(described.copy_count):
                parts = []
                for warp in range(tile.warp_depth):
                    part = T.alloc_buffer((width,), "float32", scope="local")
                    offset = self._place(anchor, copy, warp, number)
                    T.evaluate(read_shared(width, part.data, 0, self.shared.data, offset))
                    parts.append(part)
                total = T.alloc_buffer((width,), "float32", scope="local")
                for at in range(width):
                    value = parts[0][at]
                    for part in parts[1:]:
                        value = value + part[at]
                    T.buffer_store(total, value, [at])
                kept[anchor, copy] = total
        return lambda anchor, copy, at: kept[anchor, copy][at]
