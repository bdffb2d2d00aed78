"""Kernels of rows whose elements are neighbours in memory: softmax, layer norm, means over a map's positions."""

from __future__ import annotations

from ...compat import tirx
from ..analysis import buffer_key
from .fast_math import to_type
from .row_form import RowFunction, Stage
from .row_pieces import RowShape, integer, register_type, tree
from .row_places import place_of_output
from .row_registers import RowKernel


class AlongRows(RowKernel):
    """Threads lie along the row: neighbouring lanes hold neighbouring columns."""

    numbers = 1

    def __init__(self, form: RowFunction, shape: RowShape) -> None:
        super().__init__(form, shape)
        row = self.block * shape.lines + self.line
        self.is_inside = row < integer(form.count) if form.count % shape.lines else None
        # Lines without a row do the last one again and store nothing: barriers may not stand under a condition.
        self._row = tirx.min(row, integer(form.count - 1)) if form.count % shape.lines else row

    @property
    def blocks(self) -> int:
        return -(-self.form.count // self.shape.lines)

    def row(self, i: tirx.PrimExpr) -> tirx.PrimExpr:
        return self._row

    def column(self, chunk: tirx.PrimExpr, i: tirx.PrimExpr) -> tirx.PrimExpr:
        chunk = self.round * self.shape.chunks + chunk
        return (chunk * self.shape.lanes + self.lane) * self.shape.vector + i

    def number(self, i: tirx.PrimExpr) -> tirx.PrimExpr:
        return integer(0)

    @property
    def along(self) -> tirx.Var:
        return self.form.column

    def columns_of_chunk(self) -> int:
        return self.shape.lanes * self.shape.vector

    def output(self, stage: Stage) -> None:
        place = place_of_output(self.form, stage, self.along, self.shape.vector)
        view, zero = self.views[buffer_key(stage.buffer)], integer(0)
        value = to_type(self.value(stage, zero, zero), str(stage.buffer.ty.dtype))
        store = tirx.BufferStore(view, value, [self.at(place.offset, zero, zero)])
        condition = self.lane == zero
        if self.is_inside is not None:
            condition = tirx.And(condition, self.is_inside)
        self.body.append(tirx.IfThenElse(condition, store, None))

    def exchange(self, stage: Stage, parts: tirx.Buffer, count: int) -> tirx.Buffer:
        dtype, zero = register_type(stage.buffer), integer(0)
        total = self.local(stage.buffer.name, 1, dtype)
        here = tirx.BufferLoad(total, [zero])

        def keep(value):
            self.body.append(tirx.BufferStore(total, value, [zero]))

        keep(tree(stage.combine, [tirx.BufferLoad(parts, [integer(n)]) for n in range(count)]))
        step = min(self.shape.lanes, 32) // 2
        while step:
            mask = tirx.IntImm("uint32", 0xFFFFFFFF)
            other = tirx.call_intrin(dtype, "tirx.cuda.__shfl_xor_sync", mask, here, step, 32)
            keep(stage.combine(here, other))
            step //= 2
        warps = self.shape.lanes // 32
        if warps > 1:
            shared = self.local(
                f"{stage.buffer.name}_shared", self.shape.lines * warps, dtype, "shared"
            )
            first = self.line * warps
            store = tirx.BufferStore(shared, here, [first + tirx.floordiv(self.lane, 32)])
            self.body.append(tirx.IfThenElse(tirx.floormod(self.lane, 32) == 0, store, None))
            found = [tirx.BufferLoad(shared, [first + n]) for n in range(warps)]
            keep(tree(stage.combine, found))
        return total
