"""Which loops are worth the thread pool: those whose work takes longer than waking it.

A parallel loop costs what handing it to the pool and waiting for the last thread costs, however little it does. The
templates make every stage parallel; this turns those loops serial that one core finishes sooner. What a loop takes is
estimated from its statements, so a fused kernel is judged by all that was fused into its loop.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import tvm_ffi

from ...compat import Target, ir, s_tir, sym, tirx
from ..analysis import nodes_of
from .vectors import lanes

#: Work of a loop, in estimated nanoseconds of one core, up to which it runs serially. Handing a loop to two threads
#: that are awake takes 3 µs (AMD EPYC; 6 to 25 µs where one is asleep or has other work), and n threads save 1 - 1/n of
#: the work: two break even at 6 µs. With more threads, handing over takes longer and saves at most the work. Measured
#: by ``benchmarks/cpu_threads.py``.
MOST_SERIAL = 6_000.0

#: Nanoseconds of an instruction (a load, a store, an operation), one register wide.
_INSTRUCTION = 0.1
#: float32 lanes beyond which wider registers gain little: Zen 4 halves instructions of 512 bits, caches limit others.
_WIDEST = 8
#: Nanoseconds for one value of a division or a root, and of what is a call: functions, and arithmetic and conversions
#: of 16-bit types.
_DIVISION, _CALL = 0.3, 3.0

#: Calls that are one instruction or two, and those that take as long as a division.
_CHEAP = {
    "prim.if_then_else", "prim.likely", "tirx.fabs", "tirx.reinterpret", "tirx.floor", "tirx.ceil", "tirx.trunc",
    "tirx.round", "tirx.nearbyint",
}  # fmt: skip
_ROOTS = {"tirx.sqrt", "tirx.rsqrt"}
_ARITHMETIC = (
    tirx.Add, tirx.Sub, tirx.Mul, tirx.Div, tirx.Max, tirx.Min, tirx.Select, tirx.Cast, ir.Call,
)  # fmt: skip
_HALF = {"float16", "bfloat16"}


def serial_where_small(func: tirx.PrimFunc, target: Target) -> tirx.PrimFunc:
    """Return a scheduled function whose parallel loops of little work are serial.

    Parameters
    ----------
    func : PrimFunc
        Scheduled for a CPU.
    target : Target
        An ``llvm`` target.
    """
    width = lanes(target)

    def change(loop: tirx.For) -> tirx.For:
        if loop.kind != tirx.ForKind.PARALLEL or nanoseconds(loop, width) > MOST_SERIAL:
            return loop
        return tirx.For(loop.loop_var, loop.min, loop.extent, tirx.ForKind.SERIAL, loop.body)

    return func.with_body(tvm_ffi.structural_map(func.body, (tirx.For, change)))


def nanoseconds(stmt: tirx.Stmt, width: int) -> float:
    """Estimate what a scheduled statement takes on one core.

    Parameters
    ----------
    stmt : Stmt
        A loop nest with or without blocks.
    width : int
        float32 lanes of a vector register.

    Returns
    -------
    float
        Nanoseconds for data in cache, mostly within a factor of three (``benchmarks/cpu_threads.py``);
        infinite where an extent is symbolic or the statement's work cannot be told.
    """
    return _Estimate(min(width, _WIDEST)).of(stmt)


@dataclasses.dataclass(frozen=True)
class _Estimate:
    """Estimates statements inside a vectorised loop, or outside of any.

    Attributes
    ----------
    width : int
        float32 lanes of a vector register.
    loop : Var or None
        Variable of the vectorised loop.
    count : int
        Its iterations.
    values : dict of int to Expr
        What the iterators of blocks stand for, by handle.
    """

    width: int
    loop: tirx.Var | None = None
    count: int = 1
    values: dict[int, tirx.Expr] = dataclasses.field(default_factory=dict)

    def of(self, stmt: tirx.Stmt) -> float:
        """Nanoseconds of a statement; inside a vectorised loop, of all its iterations."""
        if isinstance(stmt, tirx.For):
            if not isinstance(stmt.extent, tirx.IntImm):
                return math.inf
            if stmt.kind == tirx.ForKind.VECTORIZED and self.loop is None:
                vector = dataclasses.replace(self, loop=stmt.loop_var, count=int(stmt.extent))
                return vector.of(stmt.body)
            return int(stmt.extent) * self.of(stmt.body)
        if isinstance(stmt, tirx.SeqStmt):
            return sum(map(self.of, stmt.seq))
        if isinstance(stmt, s_tir.SBlockRealize):
            bound = zip(stmt.block.iter_vars, stmt.iter_values, strict=True)
            values = {axis.var.__chandle__(): self._resolved(value) for axis, value in bound}
            return dataclasses.replace(self, values=self.values | values).of(stmt.block.body)
        if isinstance(stmt, tirx.IfThenElse):
            other = 0.0 if stmt.else_case is None else self.of(stmt.else_case)
            return _INSTRUCTION + max(self.of(stmt.then_case), other)
        return self._of_store(stmt) if isinstance(stmt, tirx.BufferStore) else math.inf

    def _of_store(self, store: tirx.BufferStore) -> float:
        """A store and what it stores.

        A sum stays in registers, operands that it reads again do too, and its products are computed beside it.
        """
        loads: list[ir.TensorLoad] = nodes_of(store.value, ir.TensorLoad)
        adds_up = any(load.source.same_as(store.buffer) for load in loads)
        operations = nodes_of(store.value, _ARITHMETIC)
        if adds_up:
            operations = [node for node in operations if not isinstance(node, tirx.Mul)]
        total = sum(map(self._of_operation, operations))
        accesses = [(store.buffer, store.indices), *((load.source, load.indices) for load in loads)]
        for tensor, indices in accesses:
            if self.loop is not None and self._step(tensor.ty.shape, indices) not in (0, 1):
                total += _INSTRUCTION * self.count
            elif not adds_up:
                total += _INSTRUCTION * self._registers(str(tensor.ty.dtype))
        return total

    def _of_operation(self, node: tirx.Expr) -> float:
        dtype = str(node.ty)
        if isinstance(node, ir.Call):
            name = getattr(node.op, "name", "")
            if name in _ROOTS:
                return _DIVISION * self.count
            cheap = name in _CHEAP
            return _INSTRUCTION * self._registers(dtype) if cheap else _CALL * self.count
        if dtype in _HALF or (isinstance(node, tirx.Cast) and str(node.value.ty) in _HALF):
            return _CALL * self.count
        if not dtype.startswith("float"):
            return 0.0  # indices: hoisted, or on units of their own
        if isinstance(node, tirx.Div):
            return _DIVISION * self.count
        return _INSTRUCTION * self._registers(dtype)

    def _registers(self, dtype: str) -> int:
        """Vector registers that a value of each iteration takes."""
        wide = self.width // 2 if dtype.endswith("64") else self.width
        return math.ceil(self.count / wide)

    def _step(self, shape: Sequence[tirx.Expr], indices: Sequence[tirx.Expr]) -> int | None:
        """How far apart in memory two iterations of the vectorised loop read or write; None where that differs."""
        place: tirx.Expr = tirx.const(0, "int64")
        for extent, index in zip(shape, indices, strict=True):
            place = place * extent + self._resolved(index)
        later = _replaced(place, {self.loop.__chandle__(): self.loop + 1})
        analyzer = sym.Analyzer()
        if self.count > 1:
            analyzer.bind(self.loop, ir.Range(0, self.count - 1))
        step = analyzer.simplify(later - place)
        return int(step) if isinstance(step, tirx.IntImm) else None

    def _resolved(self, expr: tirx.Expr) -> tirx.Expr:
        return _replaced(expr, self.values)


def _replaced(expr: tirx.Expr, values: dict[int, tirx.Expr]) -> tirx.Expr:
    """An expression with other values for some variables, by handle."""
    return tvm_ffi.structural_map(expr, (tirx.Var, lambda var: values.get(var.__chandle__(), var)))
