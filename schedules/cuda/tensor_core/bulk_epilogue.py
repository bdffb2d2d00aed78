"""The stores of kernels of the copy engine: loads of several units first, since few warps are there to wait for them.

Per output element: its own bytes, and those of what the epilogue reads (a residual: as many again). A multiprocessor
has eight warps that store, and a load takes some 600 cycles: one 16-byte load a lane at a time would be 7 bytes a cycle
of the multiprocessor, when the memory has 20 and the second-level cache more. So the loads of eight units are under way
together, and then those units are stored.
"""

from __future__ import annotations

from ....compat import script_builder as T
from ....compat import tirx
from ....guards.tensor_tiles import COLUMNS
from ....guards.warpgroup_tiles import ROWS, WARPS
from .epilogue import Epilogue, fast_value
from .evaluate import evaluate, integer, keep
from .form import Store
from .operand import decode

#: Units of a lane whose loads are under way together: four registers each.
_TOGETHER = 8


class BulkEpilogue(Epilogue):
    """Emits the stores of a tile."""

    def _unit_place(self, number) -> tuple:
        """Each instruction of a warpgroup has 64 rows, 16 of them in a warp."""
        fragment, half, group = self._where(number)
        fragments = self.tile.rows // self.tile.warp_rows // (ROWS // WARPS)
        warp, place = self.place.warp_row, self.place
        first = warp // integer(WARPS) * integer(ROWS * fragments)
        within = warp % integer(WARPS) * integer(ROWS // WARPS)
        line = first + within + integer(ROWS * fragment + 8 * half)
        return line + place.lane // integer(4), group

    def _units(self, stores: list[Store], conditions: tuple) -> None:
        if conditions or not self._is_wide() or self._target is not None:
            super()._units(stores, conditions)
            return
        form, tile, place = self.form, self.tile, self.place
        inside = []
        if form.row_count % tile.rows:
            inside.append(place.first_row <= integer(form.row_count - tile.rows))
        if form.column_count % tile.columns:
            inside.append(place.first_column <= integer(form.column_count - tile.columns))
        if not inside:
            self._batches(stores)
            return
        with T.If(inside[0] if len(inside) == 1 else inside[0] & inside[1]):
            with T.Then():
                self._batches(stores)
            with T.Else():
                self._batches(stores, clamped=True)

    def _batches(self, stores: list[Store], *, clamped: bool = False) -> None:
        """Emit the stores of a tile; clamped, what lies outside is computed for a place inside, and dropped."""
        # Units of the same columns follow each other: they share what depends on the columns alone.
        order = sorted(range(self.count), key=lambda number: self._where(number)[::-1])
        for first in range(0, self.count, _TOGETHER):
            ready = [
                found
                for number in order[first : first + _TOGETHER]
                for found in self._evaluated(number, stores, clamped=clamped)
            ]
            for held, *found in ready:
                if held is None:
                    self._write(*found)
                else:
                    with T.If(held), T.Then():
                        self._write(*found)

    def _evaluated(self, number: int, stores: list[Store], clamped: bool) -> list[tuple]:
        """Emit the loads of a unit; return, for each store, when it is due and what `_write` needs."""
        form, place = self.form, self.place
        line, group = self._unit_place(number)
        row = keep(place.first_row + line, "row")
        column = place.first_column + integer(group * COLUMNS * self.group)
        column = column + place.lane % integer(4) * integer(self.width)
        # Kept as a multiple of the width: TVM loads a vector at once where it sees that it is aligned.
        column = keep(column // integer(self.width), "column") * integer(self.width)
        names = {**place.batch, **decode(row, form.rows), **decode(column, form.columns)}
        last = form.columns[-1].var
        start = names.pop(last)
        held, read, read_start = None, names, start
        if clamped:
            # A branch around each load would have them wait for each other.
            held = (row < integer(form.row_count)) & (column < integer(form.column_count))
            own = keep(tirx.min(row, integer(form.row_count - 1)), "row")
            most = integer(form.column_count // self.width - 1)
            first = keep(tirx.min(column // integer(self.width), most), "column") * integer(
                self.width
            )
            read = {**place.batch, **decode(own, form.rows), **decode(first, form.columns)}
            read_start = read.pop(last)
        (anchor,) = form.anchors
        known = self._registers(self._where(number))

        def sums(load, place: int):
            return known(0, 0, place) if load.source.same_as(anchor.buffer) else None

        found = []
        for store in stores:
            value = fast_value(store)
            values = evaluate(value, last, read_start, self.width, read, self.views, sums)
            found.append((held, store, names, start, values))
        return found
