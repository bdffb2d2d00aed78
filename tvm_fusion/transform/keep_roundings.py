"""Roundings to bfloat16 that hold inside a kernel, for ``numerics="strict"``.

TVM computes bfloat16 in float32 and rounds where a value reaches memory; once an operator is inlined into the next,
nothing rounds its result. float16 needs nothing: its operations round by themselves.
"""

from __future__ import annotations

from typing import Any

from ..compat import ir, s_tir, tirx
from .legalize import with_fields

#: An intrinsic of ours: TVM's own passes, which take a cast there and back for a no-op, do not look into it. It becomes
#: integer operations when code is generated.
_ROUND = "tirx.tvm_fusion_round_bfloat16"


def keep_roundings(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """Round every value that a block stores as bfloat16 by an intrinsic.

    Parameters
    ----------
    func : PrimFunc
        A fused function whose operators are blocks of their own, before scheduling.
    """
    return with_fields(func, body=_rebuilt(func.body))


def _rebuilt(stmt: Any) -> Any:
    """Copy loops and blocks down to their stores; what is of another kind stays as it is."""
    if isinstance(stmt, tirx.BufferStore):
        return _store(stmt)
    if isinstance(stmt, tirx.SeqStmt):
        return tirx.SeqStmt([_rebuilt(part) for part in stmt.seq])
    if isinstance(stmt, tirx.For | s_tir.SBlock):
        return with_fields(stmt, body=_rebuilt(stmt.body))
    if isinstance(stmt, s_tir.SBlockRealize):
        return with_fields(stmt, block=_rebuilt(stmt.block))
    return stmt


def _store(stmt: Any) -> Any:
    value = stmt.value
    if str(value.ty.dtype) != "bfloat16" or hasattr(
        value, "buffer"
    ):  # a copy has been rounded before
        return stmt
    wide = tirx.Cast("float32", value)
    rounded = tirx.call_intrin("float32", _ROUND, wide)
    return with_fields(stmt, value=tirx.Cast("bfloat16", rounded))


def _lower(call: Any) -> Any:
    """The float32 value nearest to the operand whose lower 16 bits are zero, ties to even; NaN stays NaN."""
    wide = tirx.Var("wide", "float32")
    bits = tirx.reinterpret("uint32", wide)

    def number(constant: int) -> Any:
        return tirx.const(constant, "uint32")

    odd = tirx.bitwise_and(tirx.shift_right(bits, number(16)), number(1))
    carried = tirx.bitwise_and(bits + (odd + number(0x7FFF)), number(0xFFFF0000))
    # Quietened NaN by its bits: a comparison of a value with itself would be simplified away.
    magnitude = tirx.bitwise_and(bits, number(0x7FFFFFFF))
    nan = tirx.bitwise_or(bits, number(0x00400000))
    chosen = tirx.Select(magnitude > number(0x7F800000), nan, carried)
    return tirx.Let(wide, call.args[0], tirx.reinterpret("float32", chosen))


def _register() -> None:
    ir.register_op_attr(_ROUND, "TCallEffectKind", tirx.CallEffectKind.Pure.value)
    tirx.op.register_intrin_lowering(_ROUND, "default", f=_lower)


_register()
