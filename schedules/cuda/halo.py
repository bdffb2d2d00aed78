"""Padding of an intermediate, moved ahead of the sum that makes it.

A window that slides over a padded intermediate reads places that the first sum never makes. Left as it is, the part of
the first sum that a thread needs starts at a place that depends on whether it touches the border, and registers cannot
be addressed so. Computed over the whole padded box, from operands that are padded with zeros instead, the sum's
registers have fixed places; the values outside are thrown away, because the padding block chooses zero there.
"""

from __future__ import annotations

from collections.abc import Sequence

import tvm_ffi

from ...compat import ir, s_tir, tirx, tvm
from ..analysis import Block, buffer_key, nodes_of, root_block


def widen_first(
    sch: s_tir.Schedule,
    first: Block,
    padding: Block,
    places: Sequence[tuple[int | None, int]],
) -> tirx.PrimFunc | None:
    """Let a sum cover everything that a padding block writes.

    Parameters
    ----------
    sch : s_tir.Schedule
        The function; it is left untouched.
    first : Block
        The sum.
    padding : Block
        The injective block that alone reads it.
    places : sequence of (int or None, int)
        For each dimension of what ``padding`` writes, the iterator of ``first`` that walks it, and the number to add to
        a position to get the iterator's value.

    Returns
    -------
    PrimFunc or None
        The function with one more block for each operand that a widened iterator reaches; None when an operand's index
        is not linear in such an iterator.
    """
    body, reader = sch.get(first.handle), sch.get(padding.handle)
    shape = padding.writes[0].shape
    widened = {
        number: (shift, size)
        for (number, shift), size in zip(places, shape, strict=True)
        if number is not None
    }
    variables = [iter_var.var for iter_var in body.iter_vars]
    copies: list[tirx.Stmt] = []
    swapped: dict[tirx.Var, tirx.Var] = {}
    for region in body.reads:
        if buffer_key(region.source) == first.writes[0].buffer:
            continue
        around = _around(region, variables, first, widened)
        if around is None:
            return None
        if any(before or after for before, after in around):
            padded, stmt = _padded(region.source, around)
            swapped[region.source] = padded
            copies.append(stmt)
    old = body.writes[0].source
    of_iterator = {number: size for number, (_, size) in widened.items()}
    extents = [of_iterator.get(i, extent) for i, extent in enumerate(first.extents)]
    sizes = [
        tirx.const(extents[n], "int64") if n is not None else extent
        for n, extent in zip(first.writes[0].plain, old.ty.shape, strict=True)
    ]
    swapped[old] = tirx.decl_buffer(sizes, str(old.ty.dtype), f"{old.name}_wide", layout=None)
    wide = _wider(body, extents, swapped)
    position = {number: dim for dim, (number, _) in enumerate(places) if number is not None}
    index = [
        reader.writes[0].region[position[n]].min if n in position else tirx.const(0, "int64")
        for n in first.writes[0].plain
    ]
    reading = _reading_wide(reader, old, swapped[old], index)
    return _replaced(sch, {body: [*copies, wide], reader: [reading]}, old, list(swapped.values()))


def _around(
    region: ir.TensorRegion,
    variables: list[tirx.Var],
    first: Block,
    widened: dict[int, tuple[int, int]],
) -> list[tuple[int, int]] | None:
    """Elements to add before and after each dimension of an operand."""
    found = []
    for dim in region.region:
        coefficients = [int(c) for c in tvm.sym.detect_linear_equation(dim.min, variables)]
        if not coefficients:
            touched = nodes_of(dim.min, tirx.Var)
            if any(variables[i].same_as(var) for i in widened for var in touched):
                return None
            coefficients = [0] * len(variables)
        before = after = 0
        for i, (shift, size) in widened.items():
            if coefficients[i] < 0:
                return None
            before += coefficients[i] * -shift
            after += coefficients[i] * (size + shift - first.extents[i])
        found.append((before, max(0, after)))
    return found


def _padded(source: tirx.Var, around: Sequence[tuple[int, int]]) -> tuple[tirx.Var, tirx.Stmt]:
    """A copy of a buffer with zeros around it, and the loops that make it."""
    sizes = [
        int(extent) + before + after
        for extent, (before, after) in zip(source.ty.shape, around, strict=True)
    ]
    dtype = str(source.ty.dtype)
    target = tirx.decl_buffer(
        [tirx.const(size, "int64") for size in sizes], dtype, f"{source.name}_padded", layout=None
    )
    index = [tirx.Var(f"v_p{k}", "int64") for k in range(len(sizes))]
    inside: tirx.PrimExpr | None = None
    place = []
    for var, extent, (before, after) in zip(index, source.ty.shape, around, strict=True):
        place.append(var - before if before else var)
        for needed, condition in (
            (before, var >= before),
            (after, var < before + int(extent)),
        ):
            if needed:
                inside = condition if inside is None else tirx.And(inside, condition)
    value = tirx.if_then_else(inside, source[tuple(place)], tirx.const(0, dtype))
    store = tirx.BufferStore(target, value, index)
    kinds = [tirx.IterVar.DataPar] * len(sizes)
    block = s_tir.SBlock(
        [_axis(var, size, kind) for var, size, kind in zip(index, sizes, kinds, strict=True)],
        [tirx.BufferRegion(source, _points(place))],
        [tirx.BufferRegion(target, _points(index))],
        target.name,
        store,
    )
    return target, _nest(block, sizes)


def _wider(block: s_tir.SBlock, extents: Sequence[int], swapped: dict) -> tirx.Stmt:
    """The loops of a sum over larger extents, on other buffers."""
    renamed = tvm_ffi.structural_map(block, [(tirx.Var, lambda var: swapped.get(var, var))])
    axes = [
        _axis(old.var, extent, old.iter_type)
        for old, extent in zip(renamed.iter_vars, extents, strict=True)
    ]
    wide = s_tir.SBlock(
        axes, renamed.reads, renamed.writes, renamed.name_hint, renamed.body, renamed.init,
        renamed.alloc_buffers, renamed.match_buffers, renamed.annotations,
    )  # fmt: skip
    return _nest(wide, extents)


def _reading_wide(
    block: s_tir.SBlock, old: tirx.Var, wide: tirx.Var, index: Sequence[tirx.PrimExpr]
) -> tirx.Stmt:
    """The loops of the padding block, which reads the wide sum in place of the old one."""
    value = tirx.Var("value", str(wide.ty.dtype))

    def load(node: ir.TensorLoad) -> tirx.PrimExpr:
        return value if node.source.same_as(old) else node

    # Read ahead of the choice between value and padding: under its condition, TVM would see a smaller box of the sum,
    # whose start depends on the border again.
    inside = tvm_ffi.structural_map(block.body.value, [(ir.TensorLoad, load)])
    store = tirx.BufferStore(
        block.body.buffer, tirx.Let(value, wide[tuple(index)], inside), block.body.indices
    )
    reads = [
        tirx.BufferRegion(wide, _points(index)) if region.source.same_as(old) else region
        for region in block.reads
    ]
    changed = s_tir.SBlock(
        block.iter_vars, reads, block.writes, block.name_hint, store, block.init,
        block.alloc_buffers, block.match_buffers, block.annotations,
    )  # fmt: skip
    return _nest(changed, [int(iter_var.dom.extent) for iter_var in block.iter_vars])


def _replaced(
    sch: s_tir.Schedule,
    stmts: dict[s_tir.SBlock, list[tirx.Stmt]],
    old: tirx.Var,
    buffers: list[tirx.Var],
) -> tirx.PrimFunc:
    """The function with other statements for some blocks, and other buffers for one."""
    func = sch.mod["main"]
    root = root_block(func)
    out = []
    for stmt in tirx.stmt_list(root.body):
        found = nodes_of(stmt, s_tir.SBlock)
        out += next((new for block, new in stmts.items() if block.same_as(found[-1])), [stmt])
    kept = [buffer for buffer in root.alloc_buffers if not buffer.same_as(old)]
    whole = s_tir.SBlock(
        [], [], [], root.name_hint, tirx.SeqStmt(out),
        alloc_buffers=[*kept, *buffers], annotations=root.annotations,
    )  # fmt: skip
    return func.with_body(s_tir.SBlockRealize([], True, whole))


def _axis(var: tirx.Var, extent: int, kind: int) -> tirx.IterVar:
    return tirx.IterVar(ir.Range(tirx.const(0, "int64"), tirx.const(extent, "int64")), var, kind)


def _points(index: Sequence[tirx.PrimExpr]) -> list[ir.Range]:
    return [ir.Range.from_min_extent(place, tirx.const(1, "int64")) for place in index]


def _nest(block: s_tir.SBlock, extents: Sequence[int]) -> tirx.Stmt:
    """Plain loops around a block, one for each iterator."""
    loops = [tirx.Var(f"i{k}", "int64") for k in range(len(extents))]
    nest: tirx.Stmt = s_tir.SBlockRealize(loops, True, block)
    for loop, extent in zip(reversed(loops), reversed(extents), strict=True):
        low, size = tirx.const(0, "int64"), tirx.const(extent, "int64")
        nest = tirx.For(loop, low, size, tirx.ForKind.SERIAL, nest)
    return nest
