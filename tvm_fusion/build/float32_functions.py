"""Functions of float16 that TVM 0.27 lacks on CPUs, or rounds at every step, computed in float32 and rounded once."""

from __future__ import annotations

import tvm_ffi

from ..compat import ir, tirx, tvm

#: Of most there is no rule for float16: code generation ends in "unknown intrinsic". Tangents and the inverse of one
#: are written out, with a rounding a step. Those of bfloat16 are float32 by then.
_FUNCTIONS = frozenset(
    f"tirx.{name}"
    for name in (
        "acos", "acosh", "asin", "asinh", "atan", "atan2", "atanh", "cosh", "sinh", "tan", "tanh",
    )
)  # fmt: skip


@tvm.transform.module_pass(opt_level=0, name="tvm_fusion.Float32Functions")
class Float32Functions:
    """Rewrite inverse and hyperbolic functions of float16 in functions for the CPU."""

    def transform_module(self, mod: tvm.IRModule, ctx: tvm.transform.PassContext) -> tvm.IRModule:
        """Rewrite the functions of a module that is about to become machine code."""
        for gv, func in mod.functions_items():
            target = func.attrs.get("target") if func.attrs is not None else None
            if not isinstance(func, tirx.PrimFunc) or target is None or target.kind.name != "llvm":
                continue
            body = tvm_ffi.structural_map(func.body, [(ir.Call, _wide)])
            if not body.same_as(func.body):
                mod.update_func(gv, func.with_body(body))
        return mod


def _wide(call: ir.Call) -> tirx.PrimExpr:
    name = getattr(call.op, "name", "")
    if name not in _FUNCTIONS:
        return call
    dtype = tvm.DataType(str(call.ty.dtype))
    if str(dtype.with_lanes(1)) != "float16":
        return call
    wide = str(tvm.DataType("float32").with_lanes(dtype.lanes))
    args = [tirx.Cast(wide, arg) for arg in call.args]
    return tirx.Cast(str(dtype), tirx.call_intrin(wide, name, *args))
