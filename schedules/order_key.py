"""An intrinsic that numbers floating-point values in their order, NaN at the end, for searches of places.

Its operand may become wider before it is lowered (templates and references do so); its result stays what it is.
"""

from __future__ import annotations

from typing import Any

from ..compat import ir, tirx

#: Names of the intrinsics: NaN above everything, NaN below everything.
ORDER_KEYS = {True: "tirx.tvm_fusion_key_nan_last", False: "tirx.tvm_fusion_key_nan_first"}


def order_key(value: tirx.PrimExpr, nan_last: bool) -> tirx.PrimExpr:
    """Return an integer that is ordered as the value is.

    Parameters
    ----------
    value : PrimExpr
        A floating-point number.
    nan_last : bool
        Whether NaN is greater than all numbers, or less.

    Returns
    -------
    PrimExpr
        int64 for float64, int32 for narrower types. Neither of the integer's limits is a result.
    """
    dtype = str(value.ty.dtype)
    if dtype == "float64":
        return tirx.call_intrin("int64", ORDER_KEYS[nan_last], value)
    wide = value if dtype == "float32" else tirx.Cast("float32", value)
    return tirx.call_intrin("int32", ORDER_KEYS[nan_last], wide)


def _lower(call: Any, nan_last: bool) -> Any:
    """The bits of the number, of a negative one with all but the sign turned; both zeros are 0."""
    kind = str(call.ty.dtype)
    float_type = {"int32": "float32", "int64": "float64"}[kind]
    operand = call.args[0]
    if str(operand.ty.dtype) != float_type:
        operand = tirx.Cast(float_type, operand)
    value = tirx.Var("value", float_type)
    bits = tirx.reinterpret(kind, value)
    zero, one, sign = tirx.const(0, kind), tirx.const(1, kind), tirx.max_value(kind)
    infinity = tirx.const({"int32": 0x7F800000, "int64": 0x7FF0000000000000}[kind], kind)
    magnitude = tirx.bitwise_and(bits, sign)
    turned = tirx.Select(bits < zero, tirx.bitwise_xor(bits, sign), bits)
    ordered = tirx.Select(magnitude == zero, zero, turned)
    nan = sign - one if nan_last else tirx.min_value(kind) + one
    return tirx.Let(value, operand, tirx.Select(magnitude > infinity, nan, ordered))


def _register() -> None:
    for nan_last, name in ORDER_KEYS.items():
        ir.register_op_attr(name, "TCallEffectKind", tirx.CallEffectKind.Pure.value)
        ir.register_op_attr(name, "TScriptPrinterName", name.removeprefix("tirx."))
        tirx.op.register_intrin_lowering(
            name, "default", f=lambda call, nan_last=nan_last: _lower(call, nan_last)
        )


_register()
