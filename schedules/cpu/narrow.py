"""Widen float16 and bfloat16 operands once, ahead of the products that read them many times.

Without hardware for it, a conversion is a call; in the inner loop of a convolution there would be two for each product.
"""

from __future__ import annotations

import tvm_ffi

from ...compat import ir, s_tir, tirx
from ..analysis import nodes_of


def widen_operands(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """Return the function with every operand that a reduction casts to float32 copied to float32 first.

    Parameters
    ----------
    func : PrimFunc
        Unscheduled, in block form; any other function is returned as it is.
    """
    if not isinstance(func.body, s_tir.SBlockRealize):
        return func
    root = func.body.block
    copies: dict[tirx.Var, tirx.Var] = {}
    stmts: list[tirx.Stmt] = []
    for stmt in tirx.stmt_list(root.body):
        casts = _casts_in_reduction(stmt)
        for buffer in casts:
            if buffer not in copies:
                copies[buffer] = tirx.decl_buffer(
                    buffer.ty.shape, "float32", f"{buffer.name}_float32", layout=None
                )
                stmts.append(_copy(buffer, copies[buffer]))
        stmts.append(
            _read_copies(stmt, {buffer: copies[buffer] for buffer in casts}) if casts else stmt
        )
    if not copies:
        return func
    block = s_tir.SBlock(
        [], [], [], root.name_hint, tirx.SeqStmt(stmts),
        alloc_buffers=[*root.alloc_buffers, *copies.values()], annotations=root.annotations,
    )  # fmt: skip
    return func.with_body(s_tir.SBlockRealize([], True, block))


def widens(stmt: tirx.Stmt) -> bool:
    """Whether a statement casts a float16 or bfloat16 element to float32."""
    return any(_is_widening(cast) for cast in nodes_of(stmt, tirx.Cast))


def _is_widening(cast: tirx.Cast) -> bool:
    narrow = str(cast.value.ty) in ("float16", "bfloat16")
    return narrow and str(cast.ty) == "float32" and isinstance(cast.value, ir.TensorLoad)


def _casts_in_reduction(stmt: tirx.Stmt) -> list[tirx.Var]:
    """Return the buffers that a reduction below ``stmt`` reads only to widen them."""
    found: list[tirx.Var] = []

    def visit(block: s_tir.SBlock) -> None:
        if block.init is not None:
            tvm_ffi.structural_walk(
                block.body,
                (
                    tirx.Cast,
                    lambda cast: found.append(cast.value.source) if _is_widening(cast) else None,
                ),
            )

    tvm_ffi.structural_walk(stmt, (s_tir.SBlock, visit))
    return list(dict.fromkeys(found))


def _read_copies(stmt: tirx.Stmt, copies: dict) -> tirx.Stmt:
    def read(cast: tirx.Cast) -> tirx.Expr:
        if _is_widening(cast) and cast.value.source in copies:
            return copies[cast.value.source][tuple(cast.value.indices)]
        return cast

    def reads(block: s_tir.SBlock) -> s_tir.SBlock:
        regions = [
            tirx.BufferRegion(copies[region.source], region.region)
            if region.source in copies
            else region
            for region in block.reads
        ]
        return s_tir.SBlock(
            block.iter_vars, regions, block.writes, block.name_hint, block.body, block.init,
            block.alloc_buffers, block.match_buffers, block.annotations,
        )  # fmt: skip

    return tvm_ffi.structural_map(stmt, [(tirx.Cast, read), (s_tir.SBlock, reads)])


def _copy(source: tirx.Var, target: tirx.Var) -> tirx.Stmt:
    shape = list(source.ty.shape)
    loops = [tirx.Var(f"i{k}", extent.ty) for k, extent in enumerate(shape)]
    index = [tirx.Var(f"v_i{k}", extent.ty) for k, extent in enumerate(shape)]
    zero = [tirx.const(0, str(extent.ty)) for extent in shape]
    axes = [
        tirx.IterVar(ir.Range(low, extent), var, tirx.IterVar.DataPar)
        for low, extent, var in zip(zero, shape, index, strict=True)
    ]
    point = [ir.Range.from_min_extent(var, tirx.const(1, str(var.ty))) for var in index]
    store = tirx.BufferStore(target, tirx.Cast("float32", source[tuple(index)]), index)
    block = s_tir.SBlock(
        axes,
        [tirx.BufferRegion(source, point)],
        [tirx.BufferRegion(target, point)],
        target.name,
        store,
    )
    nest: tirx.Stmt = s_tir.SBlockRealize(loops, True, block)
    for loop, low, extent in reversed(list(zip(loops, zero, shape, strict=True))):
        nest = tirx.For(loop, low, extent, tirx.ForKind.SERIAL, nest)
    return nest
