"""Roundings to float16 and bfloat16 that hold inside a kernel, for ``numerics="strict"``.

TVM computes bfloat16 in float32 and rounds where a value reaches memory; once an operator is inlined into the next,
nothing rounds its result. Kernels from our templates do the same with float16.
"""

from __future__ import annotations

from typing import Any

from ..compat import ir, s_tir, tirx, tvm, with_functions
from ..schedules.analysis import buffer_key, nodes_of
from ..schedules.rounding import ROUNDINGS, rounding
from .legalize import with_fields


def keep_roundings(mod: tvm.IRModule) -> tvm.IRModule:
    """Round the results of every operator of a narrow type by an intrinsic.

    Within an operator (a GELU of several steps) nothing is rounded, as in a kernel of its own.

    Parameters
    ----------
    mod : IRModule
        Operators as PrimFuncs, before they are fused; what writes to memory by itself is rounded anyway.
    """
    out = with_functions(mod)
    for gv, func in mod.functions_items():
        if isinstance(func, tirx.PrimFunc):
            inner = {
                buffer_key(buffer)
                for block in nodes_of(func.body, s_tir.SBlock)
                for buffer in block.alloc_buffers
            }
            out.update_func(gv, with_fields(func, body=_rebuilt(func.body, inner)))
    return out


def _rebuilt(stmt: Any, inner: set[str]) -> Any:
    """Copy loops and blocks down to their stores; what is of another kind stays as it is."""
    if isinstance(stmt, tirx.BufferStore):
        return stmt if buffer_key(stmt.buffer) in inner else _store(stmt)
    if isinstance(stmt, tirx.SeqStmt):
        return tirx.SeqStmt([_rebuilt(part, inner) for part in stmt.seq])
    if isinstance(stmt, tirx.For | s_tir.SBlock):
        return with_fields(stmt, body=_rebuilt(stmt.body, inner))
    if isinstance(stmt, s_tir.SBlockRealize):
        return with_fields(stmt, block=_rebuilt(stmt.block, inner))
    return stmt


def _store(stmt: Any) -> Any:
    value = stmt.value
    if str(value.ty.dtype) not in ROUNDINGS or _moves(value):
        return stmt
    return with_fields(stmt, value=rounding(value))


def _moves(value: Any) -> bool:
    """Whether a value is an element of a buffer (rounded before), a constant, or a choice of such (padding)."""
    if isinstance(value, tirx.Select):
        return _moves(value.true_value) and _moves(value.false_value)
    if isinstance(value, ir.Call) and value.op.name.endswith(".if_then_else"):
        return all(map(_moves, value.args[1:]))
    return isinstance(value, ir.TensorLoad | tirx.FloatImm)
