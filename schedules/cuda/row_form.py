"""Functions of rows without blocks: a list of stages, each an element expression of a row and a column."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import tvm_ffi

from ...compat import ir, s_tir, structural_equal, sym, tirx
from ..analysis import Block, buffer_key, nodes_of
from .fast_math import NARROW


@dataclasses.dataclass(frozen=True)
class Stage:
    """What one block computes.

    Parameters
    ----------
    kind : str
        ``"staged"``, a row that later stages read, ``"reduction"``, a number of a row, or ``"output"``.
    buffer : Buffer
        What it writes.
    indices : tuple of PrimExpr
        Where, by row and column.
    value : PrimExpr
        The element, or what a reduction adds, by row and column.
    is_wide : bool
        Whether it walks the columns; always for a reduction.
    combine : type or None
        Class of the expression that joins two partial results of a reduction.
    initial : PrimExpr or None
        What a reduction starts with.
    """

    kind: str
    buffer: tirx.Buffer
    indices: tuple
    value: tirx.PrimExpr
    is_wide: bool
    combine: type | None = None
    initial: tirx.PrimExpr | None = None


@dataclasses.dataclass(frozen=True)
class RowFunction:
    """A function of rows.

    Parameters
    ----------
    params : tuple of Var
        Parameters of the function.
    stages : tuple of Stage
        In the order in which they run.
    row, column : Var
        Variables of the stages' expressions.
    count, length : int
        Rows, and columns of each.
    """

    params: tuple
    stages: tuple[Stage, ...]
    row: tirx.Var
    column: tirx.Var
    count: int
    length: int

    @property
    def is_narrow(self) -> bool:
        """Whether every output is rounded to float16 or bfloat16."""
        return all(str(s.buffer.ty.dtype) in NARROW for s in self.stages if s.kind == "output")

    @property
    def reductions(self) -> int:
        """Number of reductions."""
        return sum(stage.kind == "reduction" for stage in self.stages)

    @property
    def wide_outputs(self) -> int:
        """Number of outputs that have all columns."""
        return sum(stage.kind == "output" and stage.is_wide for stage in self.stages)


def stages_of_block(
    block: s_tir.SBlock, described: Block, replaced: dict[int, tirx.PrimExpr], wide: bool
) -> list[Stage] | None:
    """Return what a block computes: one stage, or one for each of several sums over the same elements.

    Parameters
    ----------
    block : SBlock
        The block.
    described : Block
        The same.
    replaced : dict of int to PrimExpr
        Each of its iterators, by handle, by row and column.
    wide : bool
        Whether it walks columns.

    Returns
    -------
    list of Stage or None
        None where the body is more than stores, or results depend on each other.
    """
    if not described.is_reduction:
        store = block.body
        if not isinstance(store, tirx.BufferStore):
            return None
        kind = "output" if described.is_output else "staged"
        indices = tuple(substitute(index, replaced) for index in store.indices)
        return [Stage(kind, store.buffer, indices, substitute(store.value, replaced), wide)]
    updates = _updates(block)
    if updates is None:
        return None
    stages = []
    for store, (combine, added), initial in updates:
        indices = tuple(substitute(index, replaced) for index in store.indices)
        value = substitute(added, replaced)
        stages.append(Stage("reduction", store.buffer, indices, value, True, combine, initial))
    return stages


def _updates(block: s_tir.SBlock) -> list | None:
    """Stores of a reduction with how each joins its element and what, and its initial value.

    None where a result depends on another one, as in a search for the place of the largest element.
    """
    bound: dict[int, tirx.PrimExpr] = {}
    stores = []
    for stmt in tirx.stmt_list(block.body):
        if isinstance(stmt, tirx.Bind):
            bound[stmt.var.__chandle__()] = substitute(stmt.value, bound)
        elif isinstance(stmt, tirx.BufferStore):
            stores.append(stmt)
        else:
            return None
    first = tirx.stmt_list(block.init) if block.init is not None else []
    initials = {
        buffer_key(stmt.buffer): stmt.value
        for stmt in first
        if isinstance(stmt, tirx.BufferStore)
        and isinstance(stmt.value, tirx.FloatImm | tirx.IntImm)
    }
    own = {buffer_key(store.buffer) for store in stores}
    found = []
    for store in stores:
        update = _update(store, substitute(store.value, bound))
        initial = initials.get(buffer_key(store.buffer))
        if update is None or initial is None:
            return None
        if own & {buffer_key(load.source) for load in nodes_of(update[1], ir.TensorLoad)}:
            return None
        found.append((store, update, initial))
    return found


def _update(store: tirx.BufferStore, value: tirx.PrimExpr) -> tuple[type, tirx.PrimExpr] | None:
    """How a reduction joins its buffer's element and what else."""
    if not isinstance(value, tirx.Add | tirx.Max | tirx.Min):
        return None
    for own, added in ((value.a, value.b), (value.b, value.a)):
        if isinstance(own, ir.TensorLoad) and own.source.same_as(store.buffer):
            places = zip(own.indices, store.indices, strict=True)
            if all(structural_equal(x, y, map_free_vars=False) for x, y in places):
                return type(value), added
    return None


def is_supported(form: RowFunction) -> bool:
    """Whether what stages hand on is read where it was written, and no index depends on what is read."""
    written = {buffer_key(stage.buffer): stage for stage in form.stages}
    analyzer = sym.Analyzer()
    for stage in form.stages:
        for load in nodes_of(stage.value, ir.TensorLoad):
            if any(nodes_of(index, ir.TensorLoad) for index in load.indices):
                return False
            source = written.get(buffer_key(load.source))
            if source is None:
                continue
            places = zip(load.indices, source.indices, strict=True)
            if source.kind == "output" or not all(analyzer.can_prove_equal(*p) for p in places):
                return False
    return True


def digit(value: tirx.Var, extents: Sequence[int], place: int) -> tirx.PrimExpr:
    """Return the digit at a place of a number written with digits of the given extents."""
    below = math.prod(extents[place + 1 :])
    digit = tirx.floordiv(value, below) if below > 1 else value
    return tirx.floormod(digit, extents[place]) if place else digit


def substitute(expr: tirx.PrimExpr, replaced: dict[int, tirx.PrimExpr]) -> tirx.PrimExpr:
    """Replace variables, by handle, in an expression."""
    return tvm_ffi.structural_map(
        expr, (tirx.Var, lambda var: replaced.get(var.__chandle__(), var))
    )


def uses(expr: tirx.PrimExpr, var: tirx.Var) -> bool:
    """Whether a variable occurs in an expression."""
    return any(found.same_as(var) for found in nodes_of(expr, tirx.Var))
