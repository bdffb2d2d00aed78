"""The form of a function that tensor-core kernels compute: matrix products that meet in elementwise outputs.

Every anchor is a product of a *row* operand (activations: output rows times the reduction) and a *column* operand
(weights: output columns times the reduction). The output's axes are rows, columns, or a batch that both operands have.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import tvm_ffi

from ....compat import ir, s_tir, sym, tirx, tvm
from ...analysis import Block, nodes_of, structure
from ...steps import inline_injective, with_simple_indices
from ..contraction_form import Contraction, recognise
from .device_code import OPERAND_TYPES

_IF_THEN_ELSE = ir.Op.get("prim.if_then_else")

#: Longest inner sum: a window of 7x7. Every column tile computes it again.
_INNER = 49

#: Expressions by the variable that they replace.
Substitution = dict


@dataclasses.dataclass(frozen=True)
class Iterator:
    """A variable and the number of values it takes, from 0."""

    var: tirx.Var
    extent: int


@dataclasses.dataclass(frozen=True)
class Operand:
    """One factor of an anchor: its value as an expression of the anchor's iterators, and the type it is kept in."""

    value: tirx.PrimExpr
    dtype: str


@dataclasses.dataclass(frozen=True)
class Anchor:
    """A sum of products.

    Attributes
    ----------
    buffer : Buffer
        What the outputs read the sums from.
    indices : tuple of PrimExpr
        Indices of ``buffer`` at which the sum of the iterators' values stands.
    rows, columns : Operand
        The factors.
    reduced : tuple of Iterator
        The reduction, the iterator that is contiguous in the operands last.
    copies : tuple of Iterator
        Iterators of one operand that no output axis follows: every output reads several of their values.
    """

    buffer: tirx.Buffer
    indices: tuple[tirx.PrimExpr, ...]
    rows: Operand
    columns: Operand
    reduced: tuple[Iterator, ...]
    copies: tuple[Iterator, ...]

    @property
    def depth(self) -> int:
        """Number of products in a sum."""
        return math.prod(i.extent for i in self.reduced)

    @property
    def copy_count(self) -> int:
        """Sums per output element."""
        return math.prod(i.extent for i in self.copies)


@dataclasses.dataclass(frozen=True)
class InnerSum:
    """A short sum that an operand is computed from, such as a depthwise convolution before a pointwise one.

    Attributes
    ----------
    buffer : Buffer
        What the operand reads it from.
    indices : tuple of PrimExpr
        Indices of ``buffer`` at which the sum of the iterators' values stands, each an iterator or a number.
    value : PrimExpr
        What is added.
    reduced : tuple of Iterator
        The reduction.
    """

    buffer: tirx.Buffer
    indices: tuple[tirx.PrimExpr, ...]
    value: tirx.PrimExpr
    reduced: tuple[Iterator, ...]


@dataclasses.dataclass(frozen=True)
class Store:
    """One store of the epilogue, and what must hold of the output's iterators for it to happen."""

    conditions: tuple[tirx.PrimExpr, ...]
    buffer: tirx.Buffer
    indices: tuple[tirx.PrimExpr, ...]
    value: tirx.PrimExpr


@dataclasses.dataclass(frozen=True)
class Products:
    """A function in the form of this file; all expressions are in terms of the iterators below.

    Attributes
    ----------
    params : tuple of Buffer
        Parameters of the function.
    batch, rows, columns : tuple of Iterator
        The output's axes.
    anchors : tuple of Anchor
        The sums, which run one after the other.
    stores : tuple of Store
        What is written for each output element.
    inner : tuple of InnerSum
        Sums that row operands are computed from.
    constants : tuple of Buffer
        Parameters that are the same at every call.
    """

    params: tuple[tirx.Buffer, ...]
    batch: tuple[Iterator, ...]
    rows: tuple[Iterator, ...]
    columns: tuple[Iterator, ...]
    anchors: tuple[Anchor, ...]
    stores: tuple[Store, ...]
    inner: tuple[InnerSum, ...] = ()
    constants: tuple[tirx.Buffer, ...] = ()

    @property
    def row_count(self) -> int:
        """Number of rows of the output."""
        return math.prod(i.extent for i in self.rows)

    @property
    def column_count(self) -> int:
        """Number of columns of the output."""
        return math.prod(i.extent for i in self.columns)

    @property
    def batch_count(self) -> int:
        """Number of outputs."""
        return math.prod(i.extent for i in self.batch)

    @property
    def copies(self) -> int:
        """Accumulators per output element, of all anchors."""
        return sum(anchor.copy_count for anchor in self.anchors)


def products(func: tirx.PrimFunc, *, symmetric: bool = False) -> Products | None:
    """Bring a function into this form; None when it has another one.

    Parameters
    ----------
    func : tirx.PrimFunc
        Unscheduled function in block form.
    symmetric : bool
        Whether copies may belong to row operands too, and inner sums to column operands.
    """
    narrow = tirx.transform.ForceNarrowIndexToInt32()
    try:
        func = narrow(tvm.IRModule({"main": func}))["main"]
    except tvm.error.InternalError:
        return None  # an index needs 64 bits
    sch = s_tir.Schedule(with_simple_indices(func))
    form = recognise(sch, nested=True)
    if form is None:
        return None
    inline_injective(sch)
    return _read(sch, form, symmetric)


def substitute(expr, replaced: Substitution):
    """Replace variables in an expression or statement."""
    table = {var.__chandle__(): value for var, value in replaced.items()}
    return tvm_ffi.structural_map(
        expr, [(tirx.Var, lambda var: table.get(var.__chandle__(), var))]
    )


def uses(expr: tirx.PrimExpr, var: tirx.Var) -> bool:
    """Whether a variable occurs in an expression."""
    return any(node.same_as(var) for node in nodes_of(expr, tirx.Var))


def _read(sch: s_tir.Schedule, form: Contraction, symmetric: bool) -> Products | None:
    outputs = [sch.get(output.handle) for output in form.outputs]
    axes = [
        Iterator(tirx.Var(f"o{number}", "int32"), extent)
        for number, extent in enumerate(form.outputs[0].extents)
    ]
    stores: list[Store] = []
    for block in outputs:
        names = {i.var: axis.var for i, axis in zip(block.iter_vars, axes, strict=True)}
        found = flat_stores(substitute(block.body, names))
        if found is None:
            return None
        stores += found
    found = anchors_of(sch, form, axes, symmetric)
    if found is None:
        return None
    anchors, (batch, rows, columns) = found
    inner = _inner_sums(sch, form, anchors, symmetric)
    if inner is None:
        return None
    return Products(
        tuple(sch.mod["main"].params), batch, rows, columns, anchors, tuple(stores), inner
    )


def anchors_of(
    sch: s_tir.Schedule, form: Contraction, axes: list[Iterator], symmetric: bool = False
) -> tuple[tuple[Anchor, ...], tuple] | None:
    """Describe anchors and sort the axes that they share.

    Parameters
    ----------
    sch : s_tir.Schedule
        Holds the anchors' blocks.
    form : Contraction
        The anchors, and which of their iterators walks which axis.
    axes : list of Iterator
        The axes.
    symmetric : bool
        Whether copies may belong to row operands too.

    Returns
    -------
    anchors : tuple of Anchor
        The anchors.
    roles : tuple of (batch, rows, columns)
        Each a tuple of Iterator.
    """
    read = []
    for anchor in form.anchors:
        described = _anchor(sch, form, anchor, axes)
        if described is None:
            return None
        read.append(described)
    roles = _roles(axes, read, symmetric)
    if roles is None:
        return None
    *sorted_axes, flipped = roles
    anchors = tuple(_finish(raw, flip) for raw, flip in zip(read, flipped, strict=True))
    return None if None in anchors else (anchors, tuple(sorted_axes))


def _inner_sums(
    sch: s_tir.Schedule, form: Contraction, anchors: tuple[Anchor, ...], symmetric: bool
) -> tuple[InnerSum, ...] | None:
    """The sums that operands read; None when anything else is left beside anchors and outputs."""
    names = {block.name for block in (*form.anchors, *form.outputs)}
    found = []
    for block in structure(sch).blocks:
        if block.name in names:
            continue
        described = _inner_sum(sch, block)
        if described is None:
            return None
        found.append(described)
    read = [anchor.rows.value for anchor in anchors]
    read += [anchor.columns.value for anchor in anchors if symmetric]
    loads = [load.source for value in read for load in nodes_of(value, ir.TensorLoad)]
    if not all(any(inner.buffer.same_as(source) for source in loads) for inner in found):
        return None
    return tuple(found)


def _inner_sum(sch: s_tir.Schedule, block: Block) -> InnerSum | None:
    body = sch.get(block.handle).body
    if not block.is_reduction or not isinstance(body, tirx.BufferStore):
        return None
    if str(body.buffer.dtype) != "float32" or block.extent(block.reduced) > _INNER:
        return None
    names, reduced = {}, []
    for number, iter_var in enumerate(sch.get(block.handle).iter_vars):
        fresh = Iterator(tirx.Var(iter_var.var.name, "int32"), block.extents[number])
        names[iter_var.var] = fresh.var
        if number in block.reduced:
            reduced.append(fresh)
    added = _added(substitute(body.value, names), body.buffer)
    indices = tuple(substitute(index, names) for index in body.indices)
    plain = all(isinstance(index, tirx.Var | tirx.IntImm) for index in indices)
    if added is None or not plain:
        return None
    return InnerSum(body.buffer, indices, added, tuple(reduced))


def flat_stores(stmt: tirx.Stmt, conditions: tuple = ()) -> list[Store] | None:
    """Flatten a body of stores under conditions; None when it does anything else."""
    if isinstance(stmt, tirx.BufferStore):
        return [Store(conditions, stmt.buffer, tuple(stmt.indices), stmt.value)]
    if isinstance(stmt, tirx.SeqStmt):
        parts = [flat_stores(part, conditions) for part in stmt.seq]
    elif isinstance(stmt, tirx.IfThenElse):
        parts = [flat_stores(stmt.then_case, (*conditions, stmt.condition))]
        if stmt.else_case is not None:
            parts.append(flat_stores(stmt.else_case, (*conditions, tirx.Not(stmt.condition))))
    else:
        return None
    return None if None in parts else [store for part in parts for store in part]


@dataclasses.dataclass(frozen=True)
class _RawAnchor:
    """An anchor before it is known which factor is which."""

    buffer: tirx.Buffer
    indices: tuple
    factors: tuple[tirx.PrimExpr, tirx.PrimExpr]
    reduced: tuple[Iterator, ...]
    copies: tuple[Iterator, ...]


def _anchor(
    sch: s_tir.Schedule, form: Contraction, anchor, axes: list[Iterator]
) -> _RawAnchor | None:
    block = sch.get(anchor.handle)
    body = block.body
    if not isinstance(body, tirx.BufferStore) or str(body.buffer.dtype) != "float32":
        return None
    follows = {
        numbers[anchor.name]: number
        for number, numbers in enumerate(form.axes)
        if anchor.name in numbers
    }
    names: Substitution = {}
    reduced, copies = [], []
    for number, iter_var in enumerate(block.iter_vars):
        extent = anchor.extents[number]
        if number in follows:
            if extent != axes[follows[number]].extent:
                return None
            names[iter_var.var] = axes[follows[number]].var
            continue
        fresh = Iterator(tirx.Var(iter_var.var.name, "int32"), extent)
        names[iter_var.var] = fresh.var
        if number in anchor.reduced:
            reduced.append(fresh)
        elif extent == 1:
            names[iter_var.var] = tirx.IntImm("int32", 0)
        else:
            copies.append(fresh)
    value = _increment(substitute(body.value, names), body.buffer)
    if value is None:
        return None
    indices = tuple(substitute(index, names) for index in body.indices)
    return _RawAnchor(body.buffer, indices, value, tuple(reduced), tuple(copies))


def _added(value: tirx.PrimExpr, buffer: tirx.Buffer) -> tirx.PrimExpr | None:
    """What is added to a sum; None when the value is no sum with the buffer's own."""
    if not isinstance(value, tirx.Add):
        return None
    for own, added in ((value.a, value.b), (value.b, value.a)):
        if isinstance(own, ir.TensorLoad) and own.source.same_as(buffer):
            return added
    return None


def _increment(value: tirx.PrimExpr, buffer: tirx.Buffer) -> tuple | None:
    """The two factors of what is added to a sum."""
    product = _added(value, buffer)
    return (product.a, product.b) if isinstance(product, tirx.Mul) else None


def _roles(axes: list[Iterator], anchors: list[_RawAnchor], symmetric: bool):
    """Sort the output's axes into batch, rows and columns, and find each anchor's column factor."""
    wide = [axis for axis in axes if axis.extent > 1]
    if not wide:
        return None
    last = wide[-1]
    flipped = []
    kinds: dict[int, set[str]] = {}
    for anchor in anchors:
        used = [uses(factor, last.var) for factor in anchor.factors]
        if used[0] == used[1]:
            return None
        flipped.append(used[0])
        row, column = anchor.factors[::-1] if used[0] else anchor.factors
        sides = [
            any(uses(side, copy.var) for copy in anchor.copies) for side in (row, column)
        ]
        if sides[0] and (sides[1] or not symmetric):
            return None
        for number, axis in enumerate(axes):
            kind = (uses(row, axis.var), uses(column, axis.var))
            if any(kind):
                name = "batch" if all(kind) else ("row" if kind[0] else "column")
                kinds.setdefault(number, set()).add(name)
    if any(len(kind) > 1 for kind in kinds.values()):
        return None
    sorted_axes: dict[str, list[Iterator]] = {"batch": [], "row": [], "column": []}
    for number, axis in enumerate(axes):
        if axis.extent > 1 and number not in kinds:
            return None  # an axis that no anchor has: a broadcast of the sums
        sorted_axes[next(iter(kinds.get(number, {"batch"})))].append(axis)
    parts = (tuple(sorted_axes[k]) for k in ("batch", "row", "column"))
    return (*parts, flipped)


def _finish(raw: _RawAnchor, flip: bool) -> Anchor | None:
    row, column = raw.factors[::-1] if flip else raw.factors
    operands = [_operand(factor) for factor in (row, column)]
    if None in operands or operands[0].dtype != operands[1].dtype:
        return None
    order = list(raw.reduced)
    contiguous = contiguous_iterator(operands[0].value, order) or contiguous_iterator(
        operands[1].value, order
    )
    if contiguous is not None:
        order.remove(contiguous)
        order.append(contiguous)
    return Anchor(
        raw.buffer, raw.indices, operands[0], operands[1], tuple(order), raw.copies
    )


def _operand(factor: tirx.PrimExpr) -> Operand | None:
    value = factor
    if isinstance(value, tirx.Cast) and str(value.ty) == "float32":
        value = value.value
    dtype = str(value.ty)
    return Operand(value, dtype) if dtype in OPERAND_TYPES else None


def is_conditional(value: tirx.PrimExpr) -> bool:
    """Whether an expression is ``condition ? a : b``, of which only one side is evaluated."""
    return isinstance(value, ir.Call) and value.op.same_as(_IF_THEN_ELSE)


@dataclasses.dataclass(frozen=True)
class Copy:
    """A value that is read from a buffer where some conditions hold and zero elsewhere.

    Attributes
    ----------
    buffer : Buffer
        A parameter.
    offset : PrimExpr
        Element number in the buffer.
    conditions : tuple of PrimExpr
        What must hold.
    """

    buffer: tirx.Buffer
    offset: tirx.PrimExpr
    conditions: tuple[tirx.PrimExpr, ...]


def as_copy(value: tirx.PrimExpr, inner: Sequence[InnerSum] = ()) -> Copy | None:
    """Describe a value as a guarded read of a parameter; None when it is anything else."""
    conditions: list[tirx.PrimExpr] = []
    while is_conditional(value):
        condition, value, other = value.args
        if not (isinstance(other, tirx.FloatImm) and float(other.value) == 0.0):
            return None
        conditions += _conjuncts(condition)
    if not isinstance(value, ir.TensorLoad) or any(
        value.source.same_as(sum_.buffer) for sum_ in inner
    ):
        return None
    return Copy(value.source, flat_offset(value), tuple(conditions))


def _conjuncts(condition: tirx.PrimExpr) -> list[tirx.PrimExpr]:
    if isinstance(condition, tirx.And):
        return [*_conjuncts(condition.a), *_conjuncts(condition.b)]
    return [condition]


def flat_offset(load: ir.TensorLoad) -> tirx.PrimExpr:
    """Element number of a load in a compact row-major buffer."""
    offset: tirx.PrimExpr = tirx.IntImm("int32", 0)
    for extent, index in zip(load.source.shape, load.indices, strict=True):
        offset = offset * tirx.IntImm("int32", int(extent)) + index
    return sym.Analyzer().simplify(offset)


def coefficients(offset: tirx.PrimExpr, variables: list[tirx.Var]) -> list[int] | None:
    """Coefficients of variables in an affine expression; None when it is not affine with numbers.

    Parameters
    ----------
    offset : PrimExpr
        The expression.
    variables : list of Var
        The variables.

    Returns
    -------
    list of int or None
        One number a variable, and the rest, where that is a number too.
    """
    found = sym.detect_linear_equation(offset, variables)
    numbers = [sym.Analyzer().simplify(f) for f in found]
    if not numbers or not all(isinstance(n, tirx.IntImm) for n in numbers):
        return None
    return [int(n) for n in numbers]


def contiguous_iterator(value: tirx.PrimExpr, candidates: list[Iterator]) -> Iterator | None:
    """The iterator along which a guarded read touches neighbouring elements."""
    copy = as_copy(value)
    if copy is None:
        return None
    variables = list({v.__chandle__(): v for v in nodes_of(copy.offset, tirx.Var)}.values())
    numbers = coefficients(copy.offset, variables) if variables else None
    if numbers is None:
        return None
    for candidate in candidates:
        for var, number in zip(variables, numbers, strict=False):
            if number == 1 and var.same_as(candidate.var) and candidate.extent > 1:
                return candidate
    return None
