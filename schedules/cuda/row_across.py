"""Kernels of rows that are neighbours in memory: means over positions of channels-last maps, softmax over channels.

A thread has chunks of neighbouring rows, and the threads of a block that are behind each other share the columns of a
row. Their partial results meet in shared memory.
"""

from __future__ import annotations

from ...compat import ir, tirx
from ..analysis import buffer_key, nodes_of
from .fast_math import to_type
from .row_form import RowFunction, Stage
from .row_pieces import RowShape, integer, register_type, tree
from .row_places import load_width, place_of_output
from .row_registers import RowKernel


class AcrossRows(RowKernel):
    """Lanes hold neighbouring rows, lines different columns."""

    def __init__(self, form: RowFunction, shape: RowShape) -> None:
        super().__init__(form, shape)
        self._start = (self.block * shape.lanes + self.lane) * shape.vector
        is_whole = form.count % self.rows == 0
        self.is_inside = None if is_whole else self._start < integer(form.count)
        # Lanes without rows do the last ones again and store nothing: barriers may not stand under a condition.
        last = integer(form.count - shape.vector)
        self._first = self._start if is_whole else tirx.min(self._start, last)
        self._is_finishing = False

    @property
    def rows(self) -> int:
        """Rows of a block."""
        return self.shape.lanes * self.shape.vector

    @property
    def _linear(self) -> tirx.PrimExpr:
        return self.line * self.shape.lanes + self.lane

    @property
    def _ends_by_row(self) -> bool:
        """Whether nothing wide follows the reductions, so that each row needs one thread from there on."""
        reductions = {buffer_key(s.buffer) for s in self.form.stages if s.kind == "reduction"}
        for stage in self.form.stages:
            reads = {buffer_key(load.source) for load in nodes_of(stage.value, ir.TensorLoad)}
            if stage.is_wide and (stage.kind == "output" or reads & reductions):
                return False
        return self.shape.lines > 1 and self.rows <= self.shape.lanes * self.shape.lines

    @property
    def blocks(self) -> int:
        return -(-self.form.count // self.rows)

    @property
    def numbers(self) -> int:
        return self.shape.vector

    def row(self, i: tirx.PrimExpr) -> tirx.PrimExpr:
        if self._is_finishing:
            return self.block * self.rows + self._linear
        return self._first + i

    def column(self, chunk: tirx.PrimExpr, i: tirx.PrimExpr) -> tirx.PrimExpr:
        return (self.round * self.shape.chunks + chunk) * self.shape.lines + self.line

    def number(self, i: tirx.PrimExpr) -> tirx.PrimExpr:
        return integer(0) if self._is_finishing else i

    @property
    def along(self) -> tirx.Var:
        return self.form.row

    def columns_of_chunk(self) -> int:
        return self.shape.lines

    def exchange(self, stage: Stage, parts: tirx.Buffer, count: int) -> tirx.Buffer:
        shape, dtype = self.shape, register_type(stage.buffer)
        if count > 1:
            own = self.local(f"{stage.buffer.name}_own", 1, dtype)
            values = [tirx.BufferLoad(parts, [integer(n)]) for n in range(count)]
            self.body.append(tirx.BufferStore(own, tree(stage.combine, values), [integer(0)]))
            parts = own
        if shape.lines == 1:
            return parts
        shared = self.local(f"{stage.buffer.name}_shared", shape.lines * self.rows, dtype, "shared")
        first = self.line * self.rows + self.lane * shape.vector
        width = load_width(shape.vector, dtype)
        for start in range(0, shape.vector, width):
            source, target = (
                tirx.Ramp(place, integer(1), width) if width > 1 else place
                for place in (integer(start), first + start)
            )
            self.body.append(tirx.BufferStore(shared, tirx.BufferLoad(parts, [source]), [target]))

        def total(place):
            found = [
                tirx.BufferLoad(shared, [place + line * self.rows]) for line in range(shape.lines)
            ]
            return tree(stage.combine, found)

        if self._ends_by_row:
            result = self.local(stage.buffer.name, 1, dtype)
            # Threads beyond the rows read some row's results and store nothing.
            place = tirx.min(self._linear, integer(self.rows - 1))
            self.body.append(tirx.BufferStore(result, total(place), [integer(0)]))
            return result
        result = self.local(stage.buffer.name, shape.vector, dtype)
        for i in map(integer, range(shape.vector)):
            self.body.append(tirx.BufferStore(result, total(self.lane * shape.vector + i), [i]))
        return result

    def output(self, stage: Stage) -> None:
        place = place_of_output(self.form, stage, self.along, self.shape.vector)
        view, dtype = self.views[buffer_key(stage.buffer)], str(stage.buffer.ty.dtype)
        zero = integer(0)
        self._is_finishing = self._ends_by_row
        conditions = []
        if self._is_finishing:
            if self.rows < self.shape.lanes * self.shape.lines:
                conditions.append(self._linear < integer(self.rows))
            if self.is_inside is not None:
                conditions.append(self.row(zero) < integer(self.form.count))
            numbers = [zero]
        else:
            conditions += [self.line == zero] if self.shape.lines > 1 else []
            conditions += [self.is_inside] if self.is_inside is not None else []
            numbers = [integer(i) for i in range(self.shape.vector)]
        width = load_width(self.shape.vector, dtype) if place.is_vector and numbers[1:] else 1
        if width > 1:
            local = self.local(f"{stage.buffer.name}_out", self.shape.vector, dtype)
            self.body += [
                tirx.BufferStore(local, to_type(self.value(stage, zero, i), dtype), [i])
                for i in numbers
            ]
            stores = []
            for start in numbers[::width]:
                source, target = (
                    tirx.Ramp(at, integer(1), width)
                    for at in (start, self.at(place.offset, zero, start))
                )
                value = tirx.BufferLoad(local, [source])
                stores.append(tirx.BufferStore(view, value, [target]))
        else:
            stores = [
                tirx.BufferStore(
                    view,
                    to_type(self.value(stage, zero, i), dtype),
                    [self.at(place.offset, zero, i)],
                )
                for i in numbers
            ]
        self._is_finishing = False
        made = stores[0] if len(stores) == 1 else tirx.SeqStmt(stores)
        for condition in conditions:
            made = tirx.IfThenElse(condition, made, None)
        self.body.append(made)
