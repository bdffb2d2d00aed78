"""From the sums of a strip to the outputs: the function's own expression, on neighbouring elements at a time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ....compat import ir, tirx
from ....compat import script_builder as T
from ....guards.strip_model import Tile
from ..tensor_core.affine import flat_offset, substitute, uses
from ..tensor_core.epilogue import by_condition, fast_value
from ..tensor_core.evaluate import Views, copy_out, evaluate, integer, step_of, where
from ..tensor_core.form import Iterator, Store
from .form import Strips


def emit_outputs(
    form: Strips,
    tile: Tile,
    starts: Mapping[tirx.Var, tirx.PrimExpr],
    sums: Sequence[tirx.Buffer],
    views: Views,
) -> None:
    """Emit the stores of a strip.

    Parameters
    ----------
    form : Strips
        The function.
    tile : Tile
        Sizes.
    starts : mapping of Var to PrimExpr
        Where the strip begins along each axis.
    sums : sequence of Buffer
        Sums of each anchor, channels innermost, then columns.
    views : mapping
        The parameters.
    """
    lane, width = (form.channels, tile.channels) if form.channels else (form.columns, tile.columns)
    along = 1 if lane is form.columns else tile.columns
    for conditions, stores in by_condition(form.stores):
        for row in range(tile.rows):
            for column in range(along):
                place = {axis.var: start for axis, start in _moved(form, starts, row, column, lane)}
                first = (row * tile.columns + column) * tile.channels
                base = place.pop(lane.var)
                # Under conditions of the lanes, each is stored by itself.
                apart = any(uses(condition, lane.var) for condition in conditions)
                for part in range(width if apart else 1):
                    start = base + integer(part) if part else base
                    names = {**place, lane.var: start}
                    held = [substitute(condition, names) for condition in conditions]
                    emit = _Stores(form, stores, place, lane, 1 if apart else width, views)
                    where(held, lambda e=emit, s=start, f=first + part: e.emit(s, sums, f))


def _moved(form: Strips, starts, row: int, column: int, lane: Iterator):
    for axis in form.axes:
        shift = row if axis is form.rows else column if axis is form.columns else 0
        shift = 0 if axis is lane else shift
        start = starts[axis.var]
        yield axis, start + integer(shift) if shift else start


class _Stores:
    """Stores of neighbouring elements under the same conditions."""

    def __init__(self, form: Strips, stores: list[Store], names, lane: Iterator, width: int, views):
        self.form, self.stores, self.names = form, stores, names
        self.lane, self.width, self.views = lane, width, views

    def emit(self, start: tirx.PrimExpr, sums: Sequence[tirx.Buffer], first: int) -> None:
        """Emit them for the elements from ``start``, whose sums begin at ``first``."""

        def known(load: ir.TensorLoad, number: int):
            for anchor, own in zip(self.form.anchors, sums, strict=True):
                if load.source.same_as(anchor.buffer):
                    return own[first + number]
            return None

        for store in self.stores:
            value = fast_value(store)
            found = evaluate(value, self.lane.var, start, self.width, self.names, self.views, known)
            self._write(store, start, found)

    def _write(self, store: Store, start, found: list) -> None:
        view = self.views[store.buffer.__chandle__()]
        offset = flat_offset(tirx.BufferLoad(store.buffer, store.indices))
        kept = T.alloc_buffer((len(found),), str(store.buffer.dtype), scope="local")
        for number, value in enumerate(found):
            T.buffer_store(kept, value, [number])

        def at(number: int) -> tirx.PrimExpr:
            place = start + integer(number) if number else start
            return substitute(offset, {**self.names, self.lane.var: place})

        if len(found) > 1 and step_of(offset, self.lane.var, len(found)) == 1:
            copy_out(view, at(0), kept, len(found))
            return
        for number in range(len(found)):
            T.buffer_store(view, kept[number], [at(number)])
