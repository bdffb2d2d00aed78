"""Functions of float16 that TVM 0.27 lacks on CPUs, or rounds at every step, computed in float32 and rounded once."""

from __future__ import annotations

from ..compat import ir, tirx, tvm
from .cpu_calls import rewrite_calls

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
        return rewrite_calls(mod, _wide)


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
