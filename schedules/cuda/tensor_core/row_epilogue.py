"""From the sums in registers through reductions of their rows to the outputs, all in registers.

A thread keeps its sums: some columns of some rows. It walks the function's stages over them; a reduction joins what the
thread has of a row, then what other threads have (``cluster``). Parameters that the stages read are loaded while the
product is still being computed, where registers permit.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import tvm_ffi

from ....compat import ir, structural_equal, tirx
from ....compat import script_builder as T
from ....guards.tensor_tiles import COLUMNS, ROWS, Tile
from ...analysis import buffer_key, dtype_bytes, nodes_of
from ..fast_math import NARROW, dtype_of, fast_math, to_type
from ..row_form import Stage
from ..row_pieces import tree
from .affine import flat_offset, substitute, uses
from .cluster import RowExchange, depth_split
from .epilogue import Epilogue
from .evaluate import Views, conjunction, copy_out, integer, load_elements, step_of
from .form import Store
from .operand import decode
from .row_form import RowProducts

#: Registers that parameters may take while the product is computed, and with the sums once it is.
_EARLY, _HELD = 24, 144

#: What takes the place of a column that does not exist.
_NEUTRAL = {tirx.Add: 0.0, tirx.Max: -math.inf, tirx.Min: math.inf}


@dataclasses.dataclass(frozen=True)
class _Unit:
    """Neighbouring columns of one row that a thread has.

    Attributes
    ----------
    row : int
        Which of the thread's rows.
    number : int
        Number of the unit among the thread's.
    group : int
        Which of the thread's groups of columns.
    known : callable
        Gives the sum of an anchor, a copy and a column.
    """

    row: int
    number: int
    group: int
    known: Callable


class RowEpilogue(Epilogue):
    """Emits the stages and the stores of a kernel.

    Parameters
    ----------
    form : RowProducts
        The function.
    tile : Tile
        Sizes.
    place : RowPlace
        Where the thread works.
    sums : list of Buffer
        Accumulators of each anchor.
    shared : Buffer
        Shared memory.
    views : mapping
        The parameters.
    group : int
        Column fragments that are interleaved.
    """

    def __init__(
        self, form: RowProducts, tile: Tile, place, sums, shared, views: Views, group: int
    ) -> None:
        super().__init__(form, tile, place, sums, shared, views, group)
        self.last = form.columns[-1]
        self.among_rows, self.among_columns = depth_split(tile)
        halves, groups = 2 * tile.row_fragments, tile.column_fragments // group
        self.row_share = halves // self.among_rows
        self.group_share = groups // self.among_columns
        depth = place.warp_depth
        self._row_part = depth % integer(self.among_rows) if self.among_rows > 1 else integer(0)
        self._column_part = depth // integer(self.among_rows)
        self.part = place.warp_column
        if self.among_columns > 1:
            self.part = T.bind(place.warp_column * integer(self.among_columns) + self._column_part)
        self.narrow = all(str(store.buffer.dtype) in NARROW for store in form.stores)
        self._loaded: list[tuple] = []
        self._registers_of: dict[str, tirx.Buffer] = {}
        self._results: dict[str, list[tirx.PrimExpr]] = {}

    # -- where a thread works -----------------------------------------------------------------------

    def begin(self, exchange: RowExchange) -> None:
        """Emit what can happen before there are sums."""
        self.exchange = exchange
        exchange.begin()
        self.lines = [T.bind(self._line(row)) for row in range(self.row_share)]
        self.rows = [T.bind(self.place.first_row + line) for line in self.lines]
        self.columns = [T.bind(self._column(group)) for group in range(self.group_share)]
        if self._param_registers() <= _EARLY:
            self._load_all()

    def _half(self, row: int):
        """Number of one of the thread's rows among those of its lane."""
        if self.among_rows == 1:
            return row
        return integer(row * self.among_rows) + self._row_part

    def _line(self, row: int) -> tirx.PrimExpr:
        tile, place = self.tile, self.place
        half = self._half(row)
        within = half // 2 * ROWS + half % 2 * 8
        if isinstance(half, int):
            within = integer(within)
        first = place.warp_row * integer(tile.rows // tile.warp_rows)
        return first + within + place.lane // integer(4)

    def _group(self, group: int):
        if self.among_columns == 1:
            return group
        return integer(group * self.among_columns) + self._column_part

    def _column(self, group: int) -> tirx.PrimExpr:
        """First column of a group within its row."""
        place, tile = self.place, self.tile
        first = place.rank * integer(tile.columns) + place.warp_column * integer(self.share)
        return (
            first
            + self._group(group) * (COLUMNS * self.group)
            + place.lane % integer(4) * integer(self.width)
        )

    @property
    def _blocks(self) -> int:
        return self.exchange.parts.blocks

    @property
    def _columns_end(self) -> bool:
        """Whether a row may end within the columns of its blocks."""
        return self._blocks * self.tile.columns != self.form.length

    @property
    def _rows_end(self) -> bool:
        return self.form.row_count % self.tile.rows != 0

    def _names(self, row: int) -> dict:
        """Values of the iterators of a row; of the last one where it does not exist."""
        number = self.rows[row]
        if self._rows_end:
            number = tirx.min(number, integer(self.form.row_count - 1))
        segment = self.place.segment
        return {**self.place.batch, **segment, **decode(number, self.form.rows)}

    def _base(self, group: int) -> tirx.PrimExpr:
        column = self.columns[group]
        if self._columns_end:
            column = tirx.min(column, integer(self.form.length - self.width))
        return column

    # -- parameters -----------------------------------------------------------------------------------

    def _params(self) -> list[tuple[ir.TensorLoad, bool]]:
        """Reads of parameters that depend on columns, with whether they depend on rows."""
        params = {param.__chandle__() for param in self.form.params}
        rows = [i.var for i in self.form.rows]
        found: list[tuple[ir.TensorLoad, bool]] = []
        values = [*(s.value for s in self.form.stages), *(s.value for s in self.form.stores)]
        for value in values:
            for load in nodes_of(value, ir.TensorLoad):
                seen = any(structural_equal(load, x, map_free_vars=False) for x, _ in found)
                if load.source.__chandle__() not in params or seen:
                    continue
                offset = flat_offset(load)
                if uses(offset, self.last.var):
                    found.append((load, any(uses(offset, var) for var in rows)))
        return found

    def _param_registers(self) -> int:
        """Registers of all parameters of a thread."""
        total = 0
        for load, of_row in self._params():
            count = self.group_share * (self.row_share if of_row else 1) * self.width
            total += -(-count * dtype_bytes(str(load.ty)) // 4)
        return total

    def _load_all(self) -> None:
        for row in range(self.row_share):
            for group in range(self.group_share):
                for load, _ in self._params():
                    self._param(load, row, group)

    def _param(self, load: ir.TensorLoad, row: int, group: int) -> Callable:
        """Emit the load of a parameter for a unit, or find it; returns what gives its elements."""
        offset = flat_offset(load)
        of_row = any(uses(offset, i.var) for i in self.form.rows)
        of_column = uses(offset, self.last.var)
        key = (row if of_row else None, group if of_column else None)
        for seen, where, get in self._loaded:
            if where == key and structural_equal(seen, load, map_free_vars=False):
                return get
        get = load_elements(
            load, self.last.var, self._base(group), self.width, self._names(row), self.views, False
        )
        self._loaded.append((load, key, get))
        return get

    # -- stages -----------------------------------------------------------------------------------------

    def emit(self) -> None:
        """Emit everything that follows the sums."""
        if self.tile.warp_depth > 1:
            self._exchange()
        self.units = [
            self._make_unit(row, group)
            for row in range(self.row_share)
            for group in range(self.group_share)
        ]
        # Where registers are few, each parameter is loaded where it is used.
        if len(self.units) * self.width + self._param_registers() <= _HELD:
            self._load_all()
        for stage in self.form.stages:
            if stage.kind == "reduction":
                self._reduce(stage)
            else:
                self._stage(stage)
        wide = [s for s in self.form.stores if self._is_wide_store(s)]
        for unit in self.units:
            self._store_unit(wide, unit)
        self._store_rows([s for s in self.form.stores if not self._is_wide_store(s)])

    def _make_unit(self, row: int, group: int) -> _Unit:
        number = row * self.group_share + group
        if self.tile.warp_depth == 1:
            known = self._registers((row // 2, row % 2, group))
        else:
            known = self._met(self.lines[row], self._group(group))
        return _Unit(row, number, group, known)

    def _stage(self, stage: Stage) -> None:
        size = len(self.units) * self.width
        kept = T.alloc_buffer((size,), "float32", scope="local")
        for unit in self.units:
            for number, value in enumerate(self._values(stage.value, unit)):
                T.buffer_store(kept, to_type(value, "float32"), [unit.number * self.width + number])
        self._registers_of[buffer_key(stage.buffer)] = kept

    def _reduce(self, stage: Stage) -> None:
        combine, neutral = stage.combine, tirx.const(_NEUTRAL[stage.combine], "float32")
        partial = T.alloc_buffer((self.row_share,), "float32", scope="local")
        for unit in self.units:
            values = [to_type(v, "float32") for v in self._values(stage.value, unit)]
            if self._columns_end:
                inside = self.columns[unit.group] < integer(self.form.length)
                values = [tirx.Select(inside, value, neutral) for value in values]
            total = tree(combine, values)
            if unit.group:
                total = combine(partial[unit.row], total)
            T.buffer_store(partial, total, [unit.row])
        found = self.exchange.join(partial, self.lines, combine)
        initial = stage.initial
        if not (isinstance(initial, tirx.FloatImm) and initial.value == _NEUTRAL[combine]):
            found = [combine(to_type(initial, "float32"), value) for value in found]
        self._results[buffer_key(stage.buffer)] = found

    def _values(self, value: tirx.PrimExpr, unit: _Unit | None, row: int = 0) -> list:
        """An expression at the columns of a unit, or for a row; of narrow types in float32."""
        row = row if unit is None else unit.row
        names = self._names(row)
        found = []
        for number in range(1 if unit is None else self.width):

            def replace(node, visit, number: int = number):
                del visit
                if not isinstance(node, ir.TensorLoad):
                    return None
                element = self._element(node, unit, row, number)
                return tirx.Cast("float32", element) if dtype_of(element) in NARROW else element

            made = fast_math(
                value,
                narrow=self.narrow,
                replace=replace,
                is_uniform=lambda expr: not uses(expr, self.last.var),
            )
            at = dict(names)
            if unit is not None:
                at[self.last.var] = self._base(unit.group) + integer(number)
            found.append(substitute(made, at))
        return found

    def _element(self, load: ir.TensorLoad, unit: _Unit | None, row: int, number: int):
        key = buffer_key(load.source)
        if key in self._results:
            return self._results[key][row]
        if key in self._registers_of:
            return self._registers_of[key][unit.number * self.width + number]
        for place, anchor in enumerate(self.form.anchors):
            if load.source.same_as(anchor.buffer):
                return unit.known(place, 0, number)
        return self._param(load, row, 0 if unit is None else unit.group)(number)

    # -- stores -----------------------------------------------------------------------------------------

    def _is_wide_store(self, store: Store) -> bool:
        return any(uses(index, self.last.var) for index in store.indices)

    def _store_unit(self, stores: list[Store], unit: _Unit) -> None:
        """Evaluate each value once, and store it where its conditions hold."""
        needed = []
        if self._rows_end:
            needed.append(self.rows[unit.row] < integer(self.form.row_count))
        if self._columns_end:
            needed.append(self.columns[unit.group] < integer(self.form.length))
        names = self._names(unit.row)
        start = self._base(unit.group)
        for group in _same_values(stores):
            dtype = str(group[0].buffer.dtype)
            kept = T.alloc_buffer((self.width,), dtype, scope="local")
            for number, value in enumerate(self._values(group[0].value, unit)):
                T.buffer_store(kept, to_type(value, dtype), [number])
            for store in group:
                conditions = needed + [substitute(c, names) for c in store.conditions]
                with _guarded(conditions):
                    self._write_out(store, names, start, kept)

    def _write_out(
        self, store: Store, names: dict, start: tirx.PrimExpr, kept: tirx.Buffer
    ) -> None:
        view = self.views[store.buffer.__chandle__()]
        offset = flat_offset(tirx.BufferLoad(store.buffer, store.indices))
        at = substitute(offset, {**names, self.last.var: start})
        if step_of(offset, self.last.var, self.width) == 1:
            copy_out(view, at, kept, self.width)
            return
        for number in range(self.width):
            place = substitute(offset, {**names, self.last.var: start + integer(number)})
            T.buffer_store(view, kept[number], [place])

    def _store_rows(self, stores: list[Store]) -> None:
        """Numbers of rows, which one thread of each row stores."""
        if not stores:
            return
        zero = integer(0)
        first = [
            (self.place.lane % integer(4)).equal(zero),
            self.place.rank.equal(zero),
            self.part.equal(zero),
        ]
        for row in range(self.row_share):
            names = self._names(row)
            needed = [self.rows[row] < integer(self.form.row_count)] if self._rows_end else []
            for store in stores:
                conditions = [substitute(c, names) for c in store.conditions]
                with _guarded(first + needed + conditions):
                    offset = flat_offset(tirx.BufferLoad(store.buffer, store.indices))
                    (value,) = self._values(store.value, None, row)
                    view = self.views[store.buffer.__chandle__()]
                    made = to_type(value, str(store.buffer.dtype))
                    T.buffer_store(view, made, [substitute(offset, names)])


class _guarded:
    """A region that runs where conditions hold."""

    def __init__(self, conditions: list[tirx.PrimExpr]) -> None:
        self._frames = []
        if conditions:
            self._frames = [T.If(conjunction(conditions)), T.Then()]

    def __enter__(self) -> None:
        for frame in self._frames:
            frame.__enter__()

    def __exit__(self, *failure) -> None:
        for frame in reversed(self._frames):
            frame.__exit__(*failure)


def _same_values(stores: list[Store]) -> list[list[Store]]:
    """Stores of the same value and type, together."""
    groups: list[list[Store]] = []
    for store in stores:
        for group in groups:
            same = str(group[0].buffer.dtype) == str(store.buffer.dtype)
            if same and tvm_ffi.structural_equal(group[0].value, store.value, map_free_vars=False):
                group.append(store)
                break
        else:
            groups.append([store])
    return groups
