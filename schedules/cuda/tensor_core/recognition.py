"""Reading the form of a function (see ``form``) from its blocks."""

from __future__ import annotations

import math

from ....compat import ir, s_tir, tirx, tvm
from ...analysis import Block, nodes_of, structure
from ...steps import inline_injective, with_simple_indices
from ..contraction_form import Contraction, recognise
from .affine import Substitution, contiguous_iterator, substitute, uses
from .device_code import OPERAND_TYPES
from .form import Anchor, InnerSum, Iterator, Operand, Products, Store
from .groups import RawAnchor, split_groups

#: Longest inner sum: a window of 7x7. Every column tile computes it again.
_INNER = 49


def products(func: tirx.PrimFunc, *, symmetric: bool = False) -> Products | None:
    """Bring a function into this form; None when it has another one.

    Parameters
    ----------
    func : tirx.PrimFunc
        Unscheduled function in block form.
    symmetric : bool
        Whether copies may belong to row operands too, and inner sums to column operands.
    """
    sch = simple_schedule(func)
    if sch is None:
        return None
    form = recognise(sch, nested=True)
    if form is None:
        return None
    inline_injective(sch)
    return _read(sch, form, symmetric)


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
    raw = raw_anchors(sch, form, axes)
    if raw is None:
        return None
    axes, raw, stores = split_groups(axes, raw, stores)
    found = _sorted(axes, raw, symmetric)
    if found is None:
        return None
    anchors, (batch, rows, columns) = found
    inner = _inner_sums(sch, form, anchors, symmetric)
    if inner is None:
        return None
    return Products(
        tuple(sch.mod["main"].params), batch, rows, columns, anchors, tuple(stores), inner
    )


def simple_schedule(func: tirx.PrimFunc) -> s_tir.Schedule | None:
    """A schedule of a function with 32-bit, simplified indices; None where 32 bits do not reach."""
    narrow = with_narrow_indices(func)
    return None if narrow is None else s_tir.Schedule(with_simple_indices(narrow))


def with_narrow_indices(func: tirx.PrimFunc) -> tirx.PrimFunc | None:
    """Let indices have 32 bits; None where the number of an element needs more."""
    for param in filter(tirx.is_buffer_var, func.params):
        if math.prod(int(e) for e in param.shape if isinstance(e, tirx.IntImm)) >= 2**31:
            return None
    narrow = tirx.transform.ForceNarrowIndexToInt32()
    try:
        return narrow(tvm.IRModule({"main": func}))["main"]
    except (tvm.error.InternalError, ValueError):
        return None  # an index needs 64 bits, or a number that is no index (argmax of int32 starts from -2**63)


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
    read = raw_anchors(sch, form, axes)
    return None if read is None else _sorted(axes, read, symmetric)


def raw_anchors(
    sch: s_tir.Schedule, form: Contraction, axes: list[Iterator]
) -> list[RawAnchor] | None:
    """Read the anchors' blocks in terms of the output's axes; None when one is no sum of products."""
    read = [_anchor(sch, form, anchor, axes) for anchor in form.anchors]
    return None if None in read else read


def _sorted(
    axes: list[Iterator], read: list[RawAnchor], symmetric: bool
) -> tuple[tuple[Anchor, ...], tuple] | None:
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


def _anchor(
    sch: s_tir.Schedule, form: Contraction, anchor, axes: list[Iterator]
) -> RawAnchor | None:
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
    return RawAnchor(body.buffer, indices, value, tuple(reduced), tuple(copies))


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


def _roles(axes: list[Iterator], anchors: list[RawAnchor], symmetric: bool):
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
        sides = [any(uses(side, copy.var) for copy in anchor.copies) for side in (row, column)]
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


def _finish(raw: RawAnchor, flip: bool) -> Anchor | None:
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
    return Anchor(raw.buffer, raw.indices, operands[0], operands[1], tuple(order), raw.copies)


def _operand(factor: tirx.PrimExpr) -> Operand | None:
    value = factor
    if isinstance(value, tirx.Cast) and str(value.ty) == "float32":
        value = value.value
    dtype = str(value.ty)
    return Operand(value, dtype) if dtype in OPERAND_TYPES else None
