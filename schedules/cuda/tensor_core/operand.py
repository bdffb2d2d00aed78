"""One operand of an anchor on its way from global memory to the registers of a warp.

A tile is copied asynchronously in pieces of 16 bytes into shared memory, where pieces of a row are exchanged
("swizzled") so that the eight rows of an 8x8 matrix that ``ldmatrix`` reads lie in different banks. A tile has the
reduction innermost (``major == "k"``) or the rows or columns (``major == "mn"``), as the tensor has. Elements have two
bytes, or four where float32 is multiplied in TF32.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping, Sequence

from ....compat import ir, tirx
from ....compat import script_builder as T
from ...analysis import nodes_of
from .access import Access
from .affine import substitute
from .device_code import call
from .evaluate import Views, conjunction, evaluate, integer, keep
from .form import InnerSum, Iterator, Operand

#: Pieces of 16 bytes whose elements a thread loads one by one before it stores them: 16 loads under way.
_PIECES_AT_ONCE = 2


def decode(number: tirx.PrimExpr, iterators: Sequence[Iterator]) -> dict:
    """Values of iterators, the last one running fastest, of a position."""
    values = {}
    for place, iterator in reversed(list(enumerate(iterators))):
        if iterator.extent == 1:
            values[iterator.var] = integer(0)
            continue
        outer = any(i.extent > 1 for i in iterators[:place])
        values[iterator.var] = number % integer(iterator.extent) if outer else number
        number = number // integer(iterator.extent)
    return values


def numbered(number: int, iterators: tuple[Iterator, ...]) -> dict:
    """Values of iterators, the last one running fastest, of a number."""
    values = {}
    for iterator in reversed(iterators):
        values[iterator.var] = integer(number % iterator.extent)
        number //= iterator.extent
    return values


@dataclasses.dataclass(frozen=True)
class Lines:
    """The rows (or columns) of a tile.

    Attributes
    ----------
    iterators : tuple of Iterator
        What a position decodes to.
    count : int
        How many there are in the whole tensor.
    tile : int
        How many a tile has.
    first : PrimExpr
        Position of the tile's first.
    place : callable
        From the number of a line in shared memory to its number in the tile.
    """

    iterators: tuple[Iterator, ...]
    count: int
    tile: int
    first: tirx.PrimExpr
    place: Callable[[tirx.PrimExpr], tirx.PrimExpr]


class TileCopy:
    """Copies the tiles of one operand.

    Parameters
    ----------
    operand : Operand
        The operand.
    access : Access
        How it is read.
    lines : Lines
        Its rows or columns.
    fixed : mapping of Var to PrimExpr
        Values of the batch and, for one copy of the columns, of the copy's iterators.
    reduced : tuple of Iterator
        The reduction.
    depth : int
        Elements of the reduction in a tile.
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
        thread: tirx.PrimExpr,
        threads: int,
        shared: tirx.Buffer,
        views: Views,
        inner: Sequence[InnerSum] = (),
        constants: Sequence[tirx.Buffer] = (),
        slices: int = 1,
    ) -> None:
        self.operand, self.access, self.lines = operand, access, lines
        self.fixed, self.reduced, self.depth = dict(fixed), reduced, depth
        self.total = math.prod(i.extent for i in reduced)
        #: Whether some tile is partly or wholly behind the reduction's end.
        self.is_ragged = self.total % (depth * slices) != 0
        self.shared, self.views, self.inner = shared, views, inner
        self.constants = tuple(constants)
        along = depth if access.major == "k" else lines.tile
        self.row_bytes = access.size * along
        pieces = along // access.piece
        self.piece = T.bind(thread % integer(pieces)) if pieces > 1 else integer(0)
        self.row = T.bind(thread // integer(pieces))
        rows = lines.tile if access.major == "k" else depth
        self.rows_at_once = max(1, threads // pieces)
        self.passes = -(-rows // self.rows_at_once)
        self.partial = rows % self.rows_at_once != 0
        self.rows = rows
        #: Whether threads are left over that fill no row.
        self.idle = threads > self.rows_at_once * pieces
        self._prepare()

    @property
    def is_constant(self) -> bool:
        """Whether what is copied is the same at every call."""
        copy = self.access.copy
        return copy is not None and any(copy.buffer.same_as(c) for c in self.constants)

    @property
    def nbytes(self) -> int:
        """Shared memory of one tile."""
        return self.access.size * self.lines.tile * self.depth

    def _prepare(self) -> None:
        """Bind what stays the same for every tile of the reduction."""
        self.targets, self.starts = [], []
        if self.access.major == "k":
            for number in range(self.passes):
                row = self.row + integer(number * self.rows_at_once)
                self.starts.append(self._line(self.lines.place(row)))
        else:
            self.starts.append(self._line(self.piece * integer(self.access.piece)))
        for number in range(self.passes):
            row = self.row + integer(number * self.rows_at_once)
            swapped = self.piece ^ self.access.swizzle(row, self.row_bytes)
            target = row * integer(self.row_bytes) + swapped * integer(16)
            self.targets.append(keep(target, "target"))

    def _line(self, place: tirx.PrimExpr) -> tuple:
        """Offset of a line in the tensor, whether it exists, and its iterators' values."""
        lines = self.lines
        position = T.bind(lines.first + place)
        values = {v: T.bind(e) for v, e in decode(position, lines.iterators).items()}
        exists = None if lines.count % lines.tile == 0 else position < integer(lines.count)
        if exists is not None:
            exists = T.bind(exists)
        offset, copy = None, self.access.copy or self.access.elements
        if copy is not None:
            zero = {i.var: integer(0) for i in self.reduced}
            offset = keep(substitute(copy.offset, {**values, **self.fixed, **zero}), "offset")
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
        if self.access.elements is not None:
            self._read_all(step, slot)
            return
        for number in range(self.passes):
            conditions = self._has_row(number)
            if conditions:
                with T.If(conjunction(conditions)), T.Then():
                    self._pass(number, step, slot)
            else:
                self._pass(number, step, slot)

    def _has_row(self, number: int) -> list[tirx.PrimExpr]:
        """What must hold where not every thread has a row in a pass."""
        conditions = []
        if self.idle:
            conditions.append(self.row < integer(self.rows_at_once))
        if self.partial:
            row = self.row + integer(number * self.rows_at_once)
            conditions.append(row < integer(self.rows))
        return conditions

    def _pass(self, number: int, step, slot) -> None:
        target = self.targets[number] + slot
        if self.access.copy is None:
            self._compute(number, step, target)
            return
        width, size, piece = self.access.width, self.access.size, self.access.piece
        for part in range(piece // width):
            if self.access.major == "k":
                start = self.starts[number]
                k = step * integer(self.depth) + self.piece * integer(piece) + integer(part * width)
            else:
                start = self.starts[0]
                k = step * integer(self.depth) + self.row + integer(number * self.rows_at_once)
            offset, exists, values = start
            names = {**values, **self.fixed, **decode(k, self.reduced)}
            conditions = [] if exists is None else [exists]
            if self.is_ragged:
                conditions.append(k < integer(self.total))
            conditions += [substitute(c, names) for c in self.access.copy.conditions]
            valid = conjunction(conditions) if conditions else tirx.IntImm("bool", 1)
            view = self.views[self.access.copy.buffer.__chandle__()]
            along = self._along(names)
            copied = call(
                f"tvmf_copy_async_{size * width}",
                self.shared.data,
                target + integer(size * part * width),
                view.data,
                offset + along,
                valid,
            )
            T.evaluate(copied)

    def _along(self, names: Mapping) -> tirx.PrimExpr:
        """What the reduction adds to the offset."""
        offset = (self.access.copy or self.access.elements).offset
        still = {
            v: integer(0)
            for v in nodes_of(offset, tirx.Var)
            if not any(v.same_as(i.var) for i in self.reduced)
        }
        moved = substitute(offset, {**names, **still})
        zero = substitute(offset, {**{i.var: integer(0) for i in self.reduced}, **still})
        return moved - zero

    def _read_all(self, step, slot) -> None:
        """Read a tile element by element, as an image of three channels has to be.

        No branch is around a load, and a thread has those of several pieces under way before it stores the first: one
        after the other they would take a trip to memory each.
        """
        for first in range(0, self.passes, _PIECES_AT_ONCE):
            numbers = range(first, min(self.passes, first + _PIECES_AT_ONCE))
            pieces = [self._read(number, step) for number in numbers]
            for number, piece in zip(numbers, pieces, strict=True):
                conditions = self._has_row(number)
                target = self.targets[number] + slot
                store = call("tvmf_store_shared_16", self.shared.data, target, piece.data)
                if conditions:
                    with T.If(conjunction(conditions)), T.Then():
                        T.evaluate(store)
                else:
                    T.evaluate(store)

    def _read(self, number: int, step) -> tirx.Buffer:
        """Emit the loads of a piece."""
        offset, exists, values = self.starts[number]
        piece = T.alloc_buffer((self.access.piece,), "uint16", scope="local")
        view = self.views[self.access.elements.buffer.__chandle__()]
        base = [*self._has_row(number), *([] if exists is None else [exists])]
        for place in range(self.access.piece):
            k = (
                step * integer(self.depth)
                + self.piece * integer(self.access.piece)
                + integer(place)
            )
            names = {**values, **self.fixed, **decode(k, self.reduced)}
            conditions = [*base, *([k < integer(self.total)] if self.is_ragged else [])]
            conditions += [substitute(c, names) for c in self.access.elements.conditions]
            valid = conjunction(conditions) if conditions else tirx.IntImm("bool", 1)
            at = offset + self._along(names)
            value = call("tvmf_read_or_zero_2", view.data, at, valid, result="uint16")
            T.buffer_store(piece, value, [place])
        return piece

    def _compute(self, number: int, step, target) -> None:
        """Compute a piece element by element, or from wide loads where the reduction's last iterator allows."""
        _, exists, values = self.starts[number]
        size = self.access.piece
        first = step * integer(self.depth) + self.piece * integer(size)
        names = {**values, **self.fixed}
        dtype = self.operand.dtype
        piece = T.alloc_buffer((size,), dtype, scope="local")
        conditions = [] if exists is None else [exists]
        last = self.reduced[-1]
        if last.extent % size == 0:
            decoded = {v: T.bind(e) for v, e in decode(first, self.reduced).items()}
            base = decoded.pop(last.var)
            if self.is_ragged:
                conditions.append(first < integer(self.total))
            self._fill(piece, 0, size, last.var, base, {**names, **decoded}, conditions)
        else:
            for place in range(size):
                k = first + integer(place)
                decoded = {v: T.bind(e) for v, e in decode(k, self.reduced).items()}
                base = decoded.pop(last.var)
                more = [k < integer(self.total)] if self.is_ragged else []
                self._fill(piece, place, 1, last.var, base, {**names, **decoded}, conditions + more)
        T.evaluate(call("tvmf_store_shared_16", self.shared.data, target, piece.data))

    def _fill(self, piece, place: int, count: int, var, base, names, conditions) -> None:
        def values() -> None:
            known = self._sums(var, base, count, names)
            found = evaluate(self.operand.value, var, base, count, names, self.views, known)
            for number, value in enumerate(found):
                T.buffer_store(piece, value, [place + number])

        if not conditions:
            values()
            return
        for number in range(count):
            T.buffer_store(piece, tirx.const(0, str(piece.dtype)), [place + number])
        with T.If(conjunction(conditions)), T.Then():
            values()

    def _sums(self, var, base, count: int, names: Mapping):
        """Emit the sums that the operand reads and say what each read of one is."""
        kept = []
        for load in nodes_of(self.operand.value, ir.TensorLoad):
            for inner in self.inner:
                if load.source.same_as(inner.buffer):
                    kept.append((load, self._sum(inner, load, var, base, count, names)))
        if not kept:
            return lambda *_: None
        handles = {load.__chandle__(): total for load, total in kept}

        def known(load: ir.TensorLoad, number: int):
            total = handles.get(load.__chandle__())
            return None if total is None else total[number]

        return known

    def _sum(self, inner: InnerSum, load, var, base, count: int, names: Mapping) -> tirx.Buffer:
        total = T.alloc_buffer((count,), "float32", scope="local")
        for number in range(count):
            T.buffer_store(total, tirx.const(0, "float32"), [number])
        at = {
            own: index
            for own, index in zip(inner.indices, load.indices, strict=True)
            if isinstance(own, tirx.Var)
        }
        ranges = [range(i.extent) for i in inner.reduced]
        for position in itertools.product(*ranges):
            steps = {i.var: integer(p) for i, p in zip(inner.reduced, position, strict=True)}
            added = substitute(inner.value, {**at, **steps})
            values = evaluate(added, var, base, count, names, self.views, lambda *_: None)
            for number, value in enumerate(values):
                T.buffer_store(total, total[number] + value, [number])
        return total
