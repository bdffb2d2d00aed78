"""The kernel: each thread walks the rows of its strip's window, and keeps the sums and what it reads in registers.

All loads of a row are issued before the row in front of it is multiplied. An element is converted once, and multiplied
with every position of the window that it belongs to.
"""

from __future__ import annotations

import dataclasses
import math

from ....compat import IRBuilder, ir, sym, tirx
from ....compat import script_builder as T
from ....guards.strip_model import HELD, UNROLLED, Tile
from ...analysis import nodes_of
from ..tensor_core.affine import substitute, uses
from ..tensor_core.evaluate import Views, conjunction, integer, keep
from ..tensor_core.form import Iterator
from ..tensor_core.kernel import write_function
from ..tensor_core.operand import decode
from .device_code import common, multiply_add
from .epilogue import emit_outputs
from .form import Anchor, Strips, problem_of, steps_of
from .reads import Reads


def kernel(form: Strips, tile: Tile, resident: int = 1) -> tirx.PrimFunc:
    """Write the kernel of a function.

    Parameters
    ----------
    form : Strips
        The function.
    tile : Tile
        Sizes.
    resident : int
        Blocks that have room on a multiprocessor together.

    Returns
    -------
    PrimFunc
        A scheduled function of one kernel with the parameters of the function.
    """
    blocks = tile.blocks(problem_of(form))
    return write_function(
        form,
        blocks,
        tile.threads,
        lambda *names: _Body(form, tile, *names).emit(),
        resident=resident,
    )


class _Body:
    """Emits what one thread does."""

    def __init__(self, form: Strips, tile: Tile, views: Views, block, thread) -> None:
        self.form, self.tile, self.views = form, tile, views
        self.problem = problem_of(form)
        self.number = block * integer(tile.threads) + thread
        self.sums = [
            IRBuilder.name("sums", T.alloc_buffer((tile.outputs,), "float32", scope="local"))
            for _ in form.anchors
        ]

    def emit(self) -> None:
        """Emit everything."""
        strips = self.tile.strips(self.problem)
        # The next kernel may set itself up while this one runs, as this one does now: until the previous kernel is
        # complete, it reads nothing but constants.
        T.evaluate(common("tvmf_let_next_start"))
        if strips % self.tile.threads == 0:
            self._strip()
            return
        with T.If(self.number < integer(strips)), T.Then():
            self._strip()

    def sizes(self) -> list[int]:
        """Elements of a strip along each axis."""
        form, tile = self.form, self.tile
        found = []
        for axis in form.axes:
            size = 1
            for other, count in (
                (form.channels, tile.channels),
                (form.rows, tile.rows),
                (form.columns, tile.columns),
            ):
                size = count if axis is other else size
            found.append(size)
        return found

    def _strip(self) -> None:
        form = self.form
        sizes = self.sizes()
        pieces = [
            Iterator(axis.var, -(-axis.extent // size))
            for axis, size in zip(form.axes, sizes, strict=True)
        ]
        starts = {}
        places = decode(self.number, pieces)
        for axis, size in zip(form.axes, sizes, strict=True):
            start = keep(places[axis.var], axis.var.name) * integer(size)
            if axis.extent % size:
                # The last strip covers the end, and some of what the one before it computes, too.
                start = keep(tirx.min(start, integer(axis.extent - size)), axis.var.name)
            starts[axis.var] = start
        for sums in self.sums:
            with T.unroll(0, self.tile.outputs) as number:
                T.buffer_store(sums, tirx.const(0, "float32"), [number])
        windows = [
            _Window(self, anchor, sums, starts)
            for anchor, sums in zip(form.anchors, self.sums, strict=True)
        ]
        for window in windows:
            window.begin()
        T.evaluate(common("tvmf_wait_for_previous"))
        for window in windows:
            window.emit()
        emit_outputs(form, self.tile, starts, self.sums, self.views)


@dataclasses.dataclass(frozen=True)
class _Row:
    """A row of the input that a strip reads.

    Attributes
    ----------
    down : PrimExpr
        Position of the window of its first use.
    output : int
        Row of the strip of its first use.
    uses : tuple of (int, PrimExpr)
        Rows of the strip that use it, and the window's position for each.
    """

    down: tirx.PrimExpr
    output: int
    uses: tuple[tuple[int, tirx.PrimExpr], ...]


class _Window:
    """One anchor's sums over a strip."""

    def __init__(self, body: _Body, anchor: Anchor, sums, starts: dict) -> None:
        self.body, self.anchor, self.sums = body, anchor, sums
        form, tile, last = body.form, body.tile, body.form.channels
        self.form, self.tile = form, tile
        self.height = 1 if anchor.down is None else anchor.down.extent
        self.width = 1 if anchor.across is None else anchor.across.extent
        self.own_data = last is not None and uses(anchor.data, last.var)
        self.own_weights = last is not None and uses(anchor.weight, last.var)
        #: Input channels of a group that are loaded at once, the innermost of the rest.
        self.chunk = self._chunk()
        lane = (last, tile.channels) if self.own_data else (None, 1)
        if self.chunk > 1:
            lane = (anchor.rest[-1], self.chunk)
        fixed = [*anchor.rest, *(i for i in (anchor.down, anchor.across) if i is not None)]
        self.data = Reads(anchor.data, form, starts, fixed, lane, body.views)
        lane = (last, tile.channels) if self.own_weights else (None, 1)
        self.weights = Reads(anchor.weight, form, starts, fixed, lane, body.views)
        self.starts = starts
        self.across = self._shifts(form.columns, anchor.across, tile.columns)
        self._held: dict = {}
        self._valid: dict = {}

    def _chunk(self) -> int:
        problem, rest = self.body.problem, self.anchor.rest
        if not rest or self.own_data or not problem.channels_last:
            return 1
        return math.gcd(problem.chunk, rest[-1].extent)

    def _shifts(self, axis, along, count: int) -> dict[int, list[tuple[int, int]]]:
        """Input positions of a strip along an axis, with the outputs and the window's positions that use each."""
        step = (1, 1) if axis is None or along is None else steps_of(self.anchor, axis, along)
        found: dict[int, list[tuple[int, int]]] = {}
        for output in range(count):
            for position in range(1 if along is None else along.extent):
                shift = step[0] * output + step[1] * position
                found.setdefault(shift, []).append((output, position))
        return dict(sorted(found.items()))

    # -- order ------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Emit loads of weights that are constant and kept."""
        anchor = self.anchor
        if anchor.rest or not self._holds() or not self.weights.is_constant:
            return
        if self.tile.is_rolled(self.body.problem):
            return
        for position in range(self.height):
            for across in range(self.width):
                self._weight(integer(position), across, 0, {})

    def emit(self) -> None:
        """Emit the loops over the reduction."""
        rest = list(self.anchor.rest)
        if self.chunk > 1:
            rest[-1] = Iterator(rest[-1].var, rest[-1].extent // self.chunk)
        steps = math.prod(i.extent for i in rest)
        products = self.tile.outputs * self.height * self.width * self.chunk
        if steps * products <= UNROLLED:
            self._rows([self._values(integer(step), rest) for step in range(steps)], products)
            return
        with T.serial(0, steps) as step:
            self._held.clear()
            self._rows([self._values(step, rest)], products)
            self._held.clear()

    def _values(self, step, rest: list[Iterator]) -> dict:
        """Values of the rest of the reduction at a step."""
        values = {}
        for iterator, value in decode(step, rest).items():
            scaled = self.chunk > 1 and iterator.same_as(self.anchor.rest[-1].var)
            value = value * integer(self.chunk) if scaled else value
            values[iterator] = sym.Analyzer().simplify(value)
        return values

    def _rows(self, rests: list[dict], products: int) -> None:
        down = self.anchor.down
        if products > UNROLLED and self.tile.rows == 1:
            with T.serial(0, self.height) as position:
                row = _Row(position, 0, ((0, position),))
                for rest in rests:
                    self._multiply(row, rest, self._load(row, rest))
            return
        shifts = self._shifts(self.form.rows, down, self.tile.rows)
        rows = []
        for pairs in shifts.values():
            (output, position), *_ = pairs
            rows.append(_Row(integer(position), output, tuple((r, integer(k)) for r, k in pairs)))
        sequence = [(row, rest) for rest in rests for row in rows]
        ahead = self._load(*sequence[0])
        for number, (row, rest) in enumerate(sequence):
            loaded = ahead
            if number + 1 < len(sequence):
                ahead = self._load(*sequence[number + 1])
            self._multiply(row, rest, loaded)

    # -- one row ----------------------------------------------------------------------------------

    def _load(self, row: _Row, rest: dict) -> dict[int, tuple]:
        """Start loading a row; what is on its way and whether it is inside, by shift."""
        return {
            shift: self._position(row, rest, shift, pairs[0])
            for shift, pairs in self.across.items()
        }

    def _position(self, row: _Row, rest: dict, shift: int, use: tuple[int, int]) -> tuple:
        anchor, form = self.anchor, self.form
        moved = {} if form.rows is None else {form.rows.var: row.output}
        if form.columns is not None:
            moved[form.columns.var] = use[0]
        names = dict(rest)
        if anchor.down is not None:
            names[anchor.down.var] = row.down
        if anchor.across is not None:
            names[anchor.across.var] = integer(use[1])
        valid = self._inside(moved, names)
        return self.data.load(moved, names, valid), valid

    def _inside(self, moved: dict, names: dict) -> tirx.PrimExpr:
        """What must hold for a position not to be padding; what is always so is left out."""
        analyzer = sym.Analyzer()
        ranges, starts = {}, {}
        for axis, size in zip(self.form.axes, self.body.sizes(), strict=True):
            var = tirx.Var(axis.var.name, "int32")
            analyzer.bind(var, ir.Range(integer(0), integer(axis.extent - size + 1)))
            shift = moved.get(axis.var, 0)
            ranges[axis.var] = var + integer(shift) if shift else var
            starts[var] = self.starts[axis.var]
        conditions = []
        for condition in self.anchor.conditions:
            replaced = analyzer.simplify(substitute(condition, {**ranges, **names}))
            if isinstance(replaced, tirx.IntImm) and int(replaced):
                continue
            conditions.append(self._known(substitute(replaced, starts), replaced))
        return conjunction(conditions) if conditions else tirx.IntImm("bool", 1)

    def _known(self, condition, replaced) -> tirx.PrimExpr:
        """A condition, kept where it was met before."""
        if nodes_of(condition, tirx.Var):
            return condition  # of a loop's iterator
        text = str(replaced)
        if text not in self._valid:
            self._valid[text] = keep(condition, "inside")
        return self._valid[text]

    def _multiply(self, row: _Row, rest: dict, loaded: dict[int, tuple]) -> None:
        weights = {}
        for output, position in row.uses:
            for across in range(self.width):
                for number in range(self.chunk):
                    raw = self._weight(position, across, number, rest)
                    weights[output, across, number] = self.weights.values(raw, None)
        for shift, pairs in self.across.items():
            raw, valid = loaded[shift]
            data = self.data.values(raw, valid if self.anchor.conditions else None)
            for column, across in pairs:
                for output, _ in row.uses:
                    for number in range(self.chunk):
                        self._add(output, column, data, number, weights[output, across, number])

    def _weight(self, position, across: int, number: int, rest: dict):
        """Weights of one position, of a strip's channels, as float32."""
        anchor = self.anchor
        names = dict(rest)
        if self.chunk > 1:
            last = anchor.rest[-1].var
            names[last] = names[last] + integer(number) if number else names[last]
        if anchor.down is not None:
            names[anchor.down.var] = position
        if anchor.across is not None:
            names[anchor.across.var] = integer(across)
        key = (str(position), across, number, str(rest))
        if key in self._held:
            return self._held[key]
        raw = self.weights.load({}, names, tirx.IntImm("bool", 1))
        if self._holds():
            self._held[key] = raw
        return raw

    def _holds(self) -> bool:
        """Whether weights are few enough to be kept."""
        return self.tile.weight_registers(self.body.problem) <= HELD

    def _add(self, output: int, column: int, data, number: int, weights) -> None:
        count = self.tile.channels
        at = (output * self.tile.columns + column) * count
        first = number if self.chunk > 1 else 0
        T.evaluate(
            multiply_add(
                count, int(self.own_data), int(self.own_weights),
                self.sums.data, at, data.data, first, weights.data, 0,
            )
        )  # fmt: skip
