"""Kernels that read each row once: stages are written out over what a thread holds in registers.

A thread has chunks of neighbouring elements, as wide as one load. It walks the stages of the function over them; a
reduction ends with an exchange, after which every thread of the row has the result. What only later stages read is
loaded before the exchange that precedes them, so that it arrives meanwhile. Rows that are too long for registers are
walked in rounds and read again by every stage.

Two ways to lay threads over rows share this: along a row whose elements are neighbours in memory (``row_along``), and
across rows where rows are (``row_across``).
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence

from ...compat import ir, tirx
from ..analysis import buffer_key, nodes_of
from .fast_math import NARROW, dtype_of, fast_math, function_of, to_type
from .row_form import RowFunction, Stage, substitute, uses
from .row_pieces import (
    RowShape,
    integer,
    part_count,
    register_type,
    sequence,
    size_of,
    unrolled,
    vector_at,
)
from .row_places import (
    Access,
    Place,
    accesses_of,
    is_same_in_chunk,
    load_width,
    place_of,
    place_of_output,
)
from .tensor_core.device_code import call


class RowKernel(abc.ABC):
    """Writes the kernel of a function of rows.

    Parameters
    ----------
    form : RowFunction
        The function; without staged rows where ``shape`` has several rounds.
    shape : RowShape
        How threads divide its rows; every contiguous access of a chunk starts at a multiple of what one load moves.
    """

    def __init__(self, form: RowFunction, shape: RowShape) -> None:
        self.form, self.shape = form, shape
        self.block, self.line, self.lane = (
            tirx.Var(name, "int64") for name in ("block", "line", "lane")
        )
        self.views = {
            buffer_key(param): tirx.decl_buffer(
                (size_of(param),), str(param.ty.dtype), name=param.name
            )
            for param in form.params
        }
        self.round: tirx.PrimExpr = integer(0)
        self.buffers: list[tirx.Buffer] = []
        self.loaded: dict[tuple[str, str], tirx.Buffer] = {}
        self.results: dict[str, tuple[Stage, tirx.Buffer]] = {}
        self.body: list[tirx.Stmt] = []

    # What the two ways differ in.

    #: Condition under which the thread's rows exist; None if they always do.
    is_inside: tirx.PrimExpr | None

    @property
    @abc.abstractmethod
    def blocks(self) -> int:
        """Blocks of the grid."""

    @property
    @abc.abstractmethod
    def numbers(self) -> int:
        """Rows of a thread, of each of which it holds the results."""

    @abc.abstractmethod
    def row(self, i: tirx.PrimExpr) -> tirx.PrimExpr:
        """Row of element ``i`` of a chunk."""

    @abc.abstractmethod
    def column(self, chunk: tirx.PrimExpr, i: tirx.PrimExpr) -> tirx.PrimExpr:
        """Column of element ``i`` of a chunk."""

    @abc.abstractmethod
    def number(self, i: tirx.PrimExpr) -> tirx.PrimExpr:
        """Which of the thread's rows element ``i`` of a chunk belongs to."""

    @property
    @abc.abstractmethod
    def along(self) -> tirx.Var:
        """The variable of ``form`` along which chunks lie."""

    @property
    def repeats(self) -> int:
        """How often the chunks of a thread cover the columns."""
        return self.shape.rounds

    @abc.abstractmethod
    def columns_of_chunk(self) -> int:
        """Columns that all threads of a row cover with one chunk."""

    @abc.abstractmethod
    def exchange(self, stage: Stage, parts: tirx.Buffer, count: int) -> tirx.Buffer:
        """Join ``count`` partial results of each row and thread; return the totals of the thread's rows."""

    @abc.abstractmethod
    def output(self, stage: Stage) -> None:
        """Store numbers of rows."""

    # Writing.

    def function(self) -> tirx.PrimFunc:
        """Return the kernel: flat, nothing left to schedule."""
        resident = self.shape.rounds == 1
        segment = 0
        if resident:
            self._loads(0)
        for stage in self.form.stages:
            if stage.kind == "reduction":
                parts, count = self._partial_results(stage)
                segment += 1
                if resident:
                    self._loads(segment)
                total = self.exchange(stage, parts, count)
                self.results[buffer_key(stage.buffer)] = (stage, total)
            elif stage.kind == "staged":
                self._stage(stage)
            elif stage.is_wide:
                self._in_rounds(stage, lambda stage=stage: self._wide_output(stage))
            else:
                self.output(stage)
        # The next kernel may set itself up while this one runs, as this one did before the previous one was complete.
        overlap = [
            tirx.Evaluate(call(name)) for name in ("tvmf_let_next_start", "tvmf_wait_for_previous")
        ]
        buffers = [tirx.AllocBuffer(buffer) for buffer in self.buffers]
        kernel = tirx.SeqStmt([*buffers, *overlap, *self.body])
        views = [tirx.DeclBuffer(self.views[buffer_key(p)], data=p.data) for p in self.form.params]
        func = tirx.PrimFunc(self.form.params, tirx.SeqStmt([*views, self._launch(kernel)]))
        return func.with_attrs({"tirx.noalias": True, "s_tir": True})

    def _launch(self, kernel: tirx.Stmt) -> tirx.Stmt:
        # Without a bound on resident blocks, ptxas limits registers to what many blocks would leave, and spills.
        kernel = tirx.AttrStmt(
            tirx.IntImm("int32", 0),
            "tirx.launch_bounds_min_blocks_per_sm",
            tirx.IntImm("int32", 1),
            kernel,
        )
        launched = (
            (self.lane, self.shape.lanes, "threadIdx.x"),
            (self.line, self.shape.lines, "threadIdx.y"),
            (self.block, self.blocks, "blockIdx.x"),
        )
        for variable, extent, tag in launched:
            axis = tirx.IterVar(
                ir.Range(integer(0), integer(extent)), variable, tirx.IterVar.ThreadIndex, tag
            )
            kernel = tirx.AttrStmt(axis, "thread_extent", integer(extent), kernel)
        return kernel

    # Memory.

    def _loads(self, segment: int) -> None:
        """Load what the stages of a segment (those between two exchanges) are the first to read."""
        number, stages = 0, []
        for stage in self.form.stages:
            if number == segment and stage.is_wide:
                stages.append(stage)
            number += stage.kind == "reduction"
        self._load_for(stages)

    def _load_for(self, stages: Sequence[Stage]) -> None:
        """Load what stages read and no earlier one did, large tensors first: they come from far."""
        found: dict[tuple[str, str], Place] = {}
        for stage in stages:
            for access in accesses_of(stage.value):
                if buffer_key(access.load.source) in self.views:
                    place = self.place(access)
                    if place.is_vector and place.key not in self.loaded:
                        found[place.key] = place
        for key, place in sorted(found.items(), key=lambda item: -size_of(item[1].buffer)):
            self.loaded[key] = self._load(place)

    def _load(self, place: Place) -> tirx.Buffer:
        dtype = str(place.buffer.ty.dtype)
        local = self.local(f"{place.buffer.name}_row", self.shape.elements, dtype)
        view = self.views[buffer_key(place.buffer)]

        def move(chunk, start, width):
            source = tirx.BufferLoad(view, [vector_at(self.at(place.offset, chunk, start), width)])
            target = vector_at(chunk * self.shape.vector + start, width)
            loaded = tirx.BufferStore(local, source, [target])
            if place.condition is None:
                return loaded
            fill = None
            if place.fill is not None:
                value = tirx.Broadcast(place.fill, width) if width > 1 else place.fill
                fill = tirx.BufferStore(local, value, [target])
            return tirx.IfThenElse(self.at(place.condition, chunk, start), loaded, fill)

        self._pieces(load_width(self.shape.vector, dtype), move)
        return local

    def _wide_output(self, stage: Stage) -> None:
        place = place_of_output(self.form, stage, self.along, self.shape.vector)
        dtype, view = str(stage.buffer.ty.dtype), self.views[buffer_key(stage.buffer)]
        if not place.is_vector:

            def store(chunk, i):
                value = to_type(self.value(stage, chunk, i), dtype)
                return tirx.BufferStore(view, value, [self.at(place.offset, chunk, i)])

            self._each(store, self.is_inside)
            return
        local = self.local(f"{stage.buffer.name}_row", self.shape.elements, dtype)

        def compute(chunk, i):
            value = to_type(self.value(stage, chunk, i), dtype)
            return tirx.BufferStore(local, value, [chunk * self.shape.vector + i])

        def move(chunk, start, width):
            source = tirx.BufferLoad(local, [vector_at(chunk * self.shape.vector + start, width)])
            target = vector_at(self.at(place.offset, chunk, start), width)
            return tirx.BufferStore(view, source, [target])

        self._each(compute)
        self._pieces(load_width(self.shape.vector, dtype), move, self.is_inside)

    # Stages.

    def _stage(self, stage: Stage) -> None:
        dtype = register_type(stage.buffer)
        local = self.local(stage.buffer.name, self.shape.elements, dtype)

        def store(chunk, i):
            value = to_type(self.value(stage, chunk, i), dtype)
            return tirx.BufferStore(local, value, [chunk * self.shape.vector + i])

        self._each(store)
        self.results[buffer_key(stage.buffer)] = (stage, local)

    def _partial_results(self, stage: Stage) -> tuple[tirx.Buffer, int]:
        dtype = register_type(stage.buffer)
        count = 1 if self.numbers > 1 else part_count(self.shape.elements, self.shape.vector)
        size = self.numbers * count
        parts = self.local(f"{stage.buffer.name}_part", size, dtype)
        initial = to_type(fast_math(stage.initial, narrow=False), dtype)
        self.body += [tirx.BufferStore(parts, initial, [integer(n)]) for n in range(size)]

        def add(chunk, i):
            place = chunk * self.shape.vector + i if self.shape.vector < count else i
            at = [i if self.numbers > 1 else tirx.floormod(place, count)]
            value = to_type(self.value(stage, chunk, i), dtype)
            return tirx.BufferStore(parts, stage.combine(tirx.BufferLoad(parts, at), value), at)

        self._in_rounds(stage, lambda: self._each(add))
        return parts, count

    def value(self, stage: Stage, chunk: tirx.PrimExpr, i: tirx.PrimExpr) -> tirx.PrimExpr:
        """A stage's element, of what is in registers."""
        accesses: dict[int, Access] = {}
        for access in accesses_of(stage.value):
            accesses[access.node.__chandle__()] = access
            accesses.setdefault(
                access.load.__chandle__(), Access(access.load, access.load, access.condition)
            )

        register = chunk * self.shape.vector + i

        def replace(node: tirx.PrimExpr, visit: Callable) -> tirx.PrimExpr | None:
            access = accesses.get(node.__chandle__())
            if access is None:
                return self._choice(node, visit, chunk)
            key = buffer_key(access.load.source)
            if key in self.results:
                source, local = self.results[key]
                at = self.number(i) if source.kind == "reduction" else register
                return tirx.BufferLoad(local, [at])
            place = self.place(access)
            if place.key in self.loaded:
                found = tirx.BufferLoad(self.loaded[place.key], [register])
            elif place.fill is None:
                # What is the same for a chunk is read at its first element, so that it is read once.
                at = integer(0) if place.is_uniform else i
                found = tirx.BufferLoad(self.views[key], [self.at(place.offset, chunk, at)])
            else:
                return self._choice(node, visit, chunk)
            return tirx.Cast("float32", found) if dtype_of(found) in NARROW else found

        value = fast_math(
            stage.value,
            narrow=self.form.is_narrow,
            replace=replace,
            is_uniform=lambda expr: not uses(expr, self.form.column),
        )
        return self.at(value, chunk, i)

    def _choice(
        self, node: tirx.PrimExpr, visit: Callable, chunk: tirx.PrimExpr
    ) -> tirx.PrimExpr | None:
        """A choice that all elements of a chunk make together, with the condition of the first."""
        if function_of(node) != "if_then_else" or self.shape.vector == 1:
            return None
        test, chosen, other = node.args
        if nodes_of(test, ir.TensorLoad):
            return None
        if not is_same_in_chunk(self.form, test, self.along, self.shape.vector):
            return None
        return tirx.if_then_else(self.at(test, chunk, integer(0)), visit(chosen), visit(other))

    def place(self, access: Access) -> Place:
        """Place of a read."""
        return place_of(self.form, access, self.along, self.shape.vector)

    def at(self, expr: tirx.PrimExpr, chunk: tirx.PrimExpr, i: tirx.PrimExpr) -> tirx.PrimExpr:
        """An expression of row and column at an element."""
        replaced = {
            self.form.row.__chandle__(): self.row(i),
            self.form.column.__chandle__(): self.column(chunk, i),
        }
        return substitute(expr, replaced)

    def local(self, name: str, size: int, dtype: str, scope: str = "local") -> tirx.Buffer:
        """Allocate registers, or shared memory."""
        self.buffers.append(tirx.decl_buffer((size,), dtype, name=name, scope=scope))
        return self.buffers[-1]

    # Loops.

    def _in_rounds(self, stage: Stage, write: Callable[[], None]) -> None:
        """Write a stage once, or as a loop that loads what it needs."""
        if self.shape.rounds == 1:
            write()
            return
        outer, self.body, self.loaded = self.body, [], {}
        self.round = variable = tirx.Var("round", "int64")
        self._load_for([stage])
        write()
        loop = tirx.For(
            variable,
            integer(0),
            integer(self.shape.rounds),
            tirx.ForKind.SERIAL,
            tirx.SeqStmt(self.body),
            annotations={"disable_unroll": True},
        )
        self.body, self.round, self.loaded = [*outer, loop], integer(0), {}

    def _each(self, make: Callable, condition: tirx.PrimExpr | None = None) -> None:
        """Run ``make(chunk, i)`` for every element that a thread holds."""

        def body(chunk):
            i = tirx.Var("i", "int64")
            return unrolled(i, self.shape.vector, make(chunk, i))

        self._chunks(body, condition)

    def _pieces(self, width: int, make: Callable, condition: tirx.PrimExpr | None = None) -> None:
        """Run ``make(chunk, start, width)`` for every access of a chunk."""

        def body(chunk):
            starts = range(0, self.shape.vector, width)
            return sequence([make(chunk, integer(start), width) for start in starts])

        self._chunks(body, condition)

    def _chunks(self, make: Callable, condition: tirx.PrimExpr | None) -> None:
        shape, length = self.shape, self.form.length
        covered = self.columns_of_chunk()
        rest = self.repeats * shape.chunks * covered > length
        # Of one round only the last chunk can be cut off.
        whole = shape.chunks - (rest if self.repeats == 1 else rest * shape.chunks)
        made = []
        if whole:
            chunk = tirx.Var("chunk", "int64")
            made.append(unrolled(chunk, whole, make(chunk)))
        for last in map(integer, range(whole, shape.chunks)):
            inside = self.column(last, integer(0)) < integer(length)
            made.append(tirx.IfThenElse(inside, make(last), None))
        for stmt in made:
            self.body.append(stmt if condition is None else tirx.IfThenElse(condition, stmt, None))
