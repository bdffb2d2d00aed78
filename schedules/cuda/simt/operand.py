"""One operand of an anchor on its way from global to shared memory, where the reduction runs down and lines across.

Lines (the operand's rows or columns) that are neighbours in the tensor are copied in pieces of up to 16 bytes. Where
the reduction is contiguous instead, single elements are copied: eight neighbours along the reduction for each of four
lines by a warp, which reads whole sectors and writes to different banks. What is no plain read is computed on the way.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence

import tvm_ffi

from ....compat import ir, tirx
from ....compat import script_builder as T
from ...analysis import nodes_of
from ..tensor_core.affine import flat_offset, substitute, uses
from ..tensor_core.evaluate import Views, conjunction, integer, keep, where
from ..tensor_core.form import InnerSum, Iterator, Operand
from ..tensor_core.operand import Lines, decode
from .access import Access
from .device_code import copy_rows, write_shared

#: Neighbours along the reduction that a warp copies of each line when it transposes.
_ALONG = 8


class TileCopy:
    """Copies the tiles of one operand.

    Parameters
    ----------
    operand : Operand
        The operand.
    access : Access
        How it is read.
    lines : Lines
        Its lines, in the order of shared memory.
    fixed : mapping of Var to PrimExpr
        Values of the iterators of the batch, and of the copies.
    reduced : tuple of Iterator
        The reduction, the innermost iterator last.
    depth : int
        Elements of the reduction in a tile.
    stride : int
        Numbers from one row of shared memory to the next.
    thread, threads : PrimExpr and int
        This thread and how many take part.
    shared : Buffer
        Shared memory.
    views : mapping
        The parameters.
    inner : sequence of InnerSum
        Sums that it is computed from.
    constants : sequence of Buffer
        Parameters that are the same at every call.
    slices : int
        Blocks that share the reduction: each copies as many tiles, zeros where none are left.
    """

    def __init__(
        self,
        operand: Operand,
        access: Access,
        lines: Lines,
        fixed: Mapping[tirx.Var, tirx.PrimExpr],
        reduced: tuple[Iterator, ...],
        depth: int,
        stride: int,
        thread: tirx.PrimExpr,
        threads: int,
        shared: tirx.Buffer,
        views: Views,
        inner: Sequence[InnerSum] = (),
        constants: Sequence[tirx.Buffer] = (),
        slices: int = 1,
    ) -> None:
        self.operand, self.access, self.lines, self.fixed = operand, access, lines, dict(fixed)
        self.reduced, self.depth, self.stride = reduced, depth, stride
        self.total = math.prod(i.extent for i in reduced)
        #: Whether some tile is partly or wholly behind the reduction's end.
        self.is_ragged = self.total % (depth * slices) != 0
        self.shared, self.views, self.inner = shared, views, inner
        copy = access.copy
        #: Whether what is copied is the same at every call.
        self.is_constant = copy is not None and any(copy.buffer.same_as(c) for c in constants)
        self.width = math.gcd(access.width, lines.tile)
        self._share(thread, threads)
        self.starts = [self._line(number) for number in range(self.line_passes)]
        place = self.row * integer(stride) + self.line
        self.target = keep(place * integer(4))

    @property
    def nbytes(self) -> int:
        """Shared memory of one tile."""
        return 4 * self.stride * self.depth

    def _share(self, thread: tirx.PrimExpr, threads: int) -> None:
        """Divide a tile among the threads: each takes some rows (of the reduction) of some lines."""
        pieces = self.lines.tile // self.width
        if self.access.transposed:
            self.row_step = min(_ALONG, self.depth)
            at_once = threads // self.row_step
            self.row = keep(thread % integer(self.row_step))
            first = thread // integer(self.row_step)
            used = threads
        else:
            at_once = min(pieces, threads)
            self.row_step = min(threads // at_once, self.depth)
            self.row = keep(thread // integer(at_once)) if self.row_step > 1 else integer(0)
            first = thread % integer(at_once) if self.row_step > 1 else thread
            used = at_once * self.row_step
        self.line = keep(first * integer(self.width))
        self.line_step = at_once * self.width
        self.line_passes = -(-self.lines.tile // self.line_step)
        self.row_passes = -(-self.depth // self.row_step)
        self.active = [thread < integer(used)] if used < threads else []

    def _line(self, number: int) -> tuple:
        """Offset of a line in the tensor, what must hold for it, and its iterators' values."""
        lines = self.lines
        place = self.line + integer(number * self.line_step)
        position = keep(lines.first + lines.place(place))
        values = {v: keep(e) for v, e in decode(position, lines.iterators).items()}
        exists = []
        if lines.count % lines.tile:
            exists.append(keep(position < integer(lines.count)))
        offset = None
        if self.access.copy is not None:
            zero = {i.var: integer(0) for i in self.reduced}
            offset = keep(substitute(self.access.copy.offset, {**values, **self.fixed, **zero}))
        return offset, exists, values

    def issue(self, step: tirx.PrimExpr | int, slot: tirx.PrimExpr | int) -> None:
        """Start copying one tile.

        Parameters
        ----------
        step : PrimExpr or int
            Number of the tile along the reduction.
        slot : PrimExpr or int
            Where the tile goes: byte offset in shared memory.
        """
        place = _Position(self, step)
        target = keep(self.target + slot)

        def passes() -> None:
            for number in range(self.line_passes):
                line = self.line + integer(number * self.line_step)
                partial = (number + 1) * self.line_step > self.lines.tile
                where(
                    [line < integer(self.lines.tile)] if partial else [],
                    lambda number=number: self._rows(number, place, target),
                )

        where(self.active, passes)

    def _rows(self, line: int, place: _Position, target) -> None:
        """All rows of one line (or piece of neighbouring lines)."""
        at = target + integer(4 * line * self.line_step)
        _, exists, values = self.starts[line]
        copy = self.access.copy
        conditions = () if copy is None else copy.conditions
        guard = place.guard(exists, conditions, {**values, **self.fixed})
        whole = self.depth // self.row_step
        together = copy is not None and place.uniform and not guard.changing
        if together and not place.inside(0):
            self._copy(line, 0, place, at, guard, whole)
        elif copy is None and whole > 1:
            with T.serial(0, whole) as number:
                self._compute(number, place, at, guard)
        else:
            for number in range(whole):
                self._one(line, number, place, at, guard)
        if whole < self.row_passes:
            row = self.row + integer(whole * self.row_step)
            with T.If(row < integer(self.depth)), T.Then():
                self._one(line, whole, place, at, guard)

    def _one(self, line: int, number: int, place: _Position, at, guard: _Guard) -> None:
        """One row of one line."""
        if self.access.copy is None:
            self._compute(number, place, at, guard)
        else:
            self._copy(line, number, place, at, guard)

    def _copy(
        self, line: int, number: int, place: _Position, at, guard: _Guard, count: int = 1
    ) -> None:
        """Copy some rows of one line, which exist all or none."""
        copy, below = self.access.copy, number * self.row_step
        conditions = [*guard.same, *place.inside(below)]
        if guard.changing:
            names = {**guard.names, **place.values(below)}
            conditions += [substitute(condition, names) for condition in guard.changing]
        valid = conjunction(conditions) if conditions else tirx.IntImm("bool", 1)
        steps = self.row_step * self.stride, self.row_step * self.access.step(self.reduced[-1])
        T.evaluate(
            copy_rows(
                4 * self.width,
                count,
                *(4 * step if count > 1 else 0 for step in steps),
                self.shared.data,
                at + integer(4 * below * self.stride),
                self.views[copy.buffer.__chandle__()].data,
                self.starts[line][0] + place.offset(below),
                valid,
            )
        )

    # -- operands that are computed ---------------------------------------------------------------

    def _compute(self, number, place: _Position, at, guard: _Guard) -> None:
        below = (
            number * self.row_step if isinstance(number, int) else number * integer(self.row_step)
        )
        names = {**guard.names, **{v: keep(e) for v, e in place.values(below).items()}}
        kept = T.alloc_buffer((1,), "float32", scope="local")
        conditions = [*guard.same, *place.inside(below)]

        def value() -> None:
            T.buffer_store(kept, self._value(names), [0])

        if conditions:
            T.buffer_store(kept, tirx.const(0, "float32"), [0])
        where(conditions, value)
        offset = at + below * integer(4 * self.stride)
        T.evaluate(write_shared(1, self.shared.data, offset, kept.data, 0))

    def _value(self, names: Mapping) -> tirx.PrimExpr:
        """The operand's value; the sums that it reads are computed first."""
        sums = {}
        for load in nodes_of(self.operand.value, ir.TensorLoad):
            for inner in self.inner:
                if load.source.same_as(inner.buffer):
                    sums[load.__chandle__()] = self._sum(inner, load, names)
        return self._inline(self.operand.value, names, sums)

    def _sum(self, inner: InnerSum, load: ir.TensorLoad, names: Mapping) -> tirx.PrimExpr:
        total = T.alloc_buffer((1,), "float32", scope="local")
        T.buffer_store(total, tirx.const(0, "float32"), [0])
        at = {
            own: substitute(index, names)
            for own, index in zip(inner.indices, load.indices, strict=True)
            if isinstance(own, tirx.Var)
        }
        for position in itertools.product(*(range(i.extent) for i in inner.reduced)):
            steps = {i.var: integer(p) for i, p in zip(inner.reduced, position, strict=True)}
            added = self._inline(inner.value, {**at, **steps}, {})
            T.buffer_store(total, total[0] + added, [0])
        return total[0]

    def _inline(self, value: tirx.PrimExpr, names: Mapping, sums: Mapping) -> tirx.PrimExpr:
        def replace(load: ir.TensorLoad):
            known = sums.get(load.__chandle__())
            if known is not None:
                return known
            view = self.views.get(load.source.__chandle__())
            # What is no parameter is a number that the thread keeps, a value of an iterator.
            return load if view is None else view[substitute(flat_offset(load), names)]

        swapped = tvm_ffi.structural_map(value, [(ir.TensorLoad, replace)], order="pre")
        return substitute(swapped, names)


class _Position:
    """Where along the reduction a thread's rows of one tile are; ``below`` counts rows from its first one."""

    def __init__(self, copy: TileCopy, step: tirx.PrimExpr | int) -> None:
        self.tile_copy = copy
        *outer, self.last = copy.reduced
        step = integer(step) if isinstance(step, int) else step
        count = math.prod(i.extent for i in outer)
        self.exact = self.last.extent % copy.depth == 0
        #: Whether all but the innermost iterator are the same for the whole tile.
        self.uniform = self.exact or count == 1
        self.first = keep(step * integer(copy.depth) + copy.row)
        if not self.uniform:
            return
        each = self.last.extent // copy.depth
        self.outer = {i.var: integer(0) for i in outer}
        inside = step
        if count > 1:
            self.outer = {v: keep(e) for v, e in decode(step // integer(each), outer).items()}
            inside = step % integer(each)
        self.inner = keep(inside * integer(copy.depth) + copy.row)
        self.start = self._along({**self.outer, self.last.var: self.inner})

    def _along(self, values: Mapping) -> tirx.PrimExpr:
        """What the reduction adds to the offset."""
        total: tirx.PrimExpr = integer(0)
        for iterator in self.tile_copy.reduced:
            step = self.tile_copy.access.step(iterator)
            if step:
                total = total + values[iterator.var] * integer(step)
        return keep(total)

    def inside(self, below) -> list:
        """What must hold of a row to be part of the reduction."""
        copy = self.tile_copy
        return [self.first + below < integer(copy.total)] if copy.is_ragged else []

    def values(self, below) -> dict:
        """Values of the reduction's iterators."""
        if self.uniform:
            return {**self.outer, self.last.var: self.inner + below}
        return decode(self.first + below, self.tile_copy.reduced)

    def offset(self, below: int) -> tirx.PrimExpr:
        """What a row adds to the offset."""
        if self.uniform:
            return self.start + integer(below * self.tile_copy.access.step(self.last))
        return self._along(self.values(below))

    def guard(self, exists: list, conditions: Sequence, names: Mapping) -> _Guard:
        """Conditions of a line, those that hold for all of its rows bound."""
        changing = [c for c in conditions if not self.uniform or uses(c, self.last.var)]
        same = [c for c in conditions if not any(c is other for other in changing)]
        found = list(exists)
        if same:
            found += [substitute(c, {**names, **self.outer}) for c in same]
            found = [keep(conjunction(found))]
        return _Guard(tuple(found), tuple(changing), dict(names))


@dataclasses.dataclass(frozen=True)
class _Guard:
    """What must hold for a line: for all its rows, for each of them, and values of its iterators."""

    same: tuple[tirx.PrimExpr, ...]
    changing: tuple[tirx.PrimExpr, ...]
    names: dict
