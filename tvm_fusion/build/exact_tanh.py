"""Hyperbolic tangents of small numbers, right to their own digits on the CPU.

TVM 0.27 computes ``(1 - exp(-2x)) / (1 + exp(-2x))``, of which nothing is right below 1e-7. Attention whose scores are
capped (``c * tanh(x / c)``) multiplies that by a large number. Here small arguments go through the polynomial that
CUDA kernels use (``schedules/cuda/exact_math.py``).
"""

from __future__ import annotations

from ..compat import ir, tirx, tvm
from ..schedules.cuda.exact_math import TANH
from .cpu_calls import rewrite_calls

#: Above it the quotient has all its digits.
_SMALL = 0.6


@tvm.transform.module_pass(opt_level=0, name="tvm_fusion.ExactTanh")
class ExactTanh:
    """Rewrite the float32 hyperbolic tangents of lowered functions for the CPU."""

    def transform_module(self, mod: tvm.IRModule, ctx: tvm.transform.PassContext) -> tvm.IRModule:
        """Rewrite the functions of a module that is about to become machine code."""
        return rewrite_calls(mod, _exact)


def _exact(call: ir.Call) -> tirx.PrimExpr:
    if getattr(call.op, "name", "") != "tirx.tanh":
        return call
    dtype = tvm.DataType(str(call.ty.dtype))
    if str(dtype.with_lanes(1)) != "float32":
        return call

    def number(value: float) -> tirx.PrimExpr:
        scalar = tirx.FloatImm("float32", value)
        return scalar if dtype.lanes == 1 else tirx.Broadcast(scalar, dtype.lanes)

    x = tirx.Var("x", str(dtype))
    square = x * x
    series = number(TANH[-1])
    for coefficient in reversed(TANH[:-1]):
        series = series * square + number(coefficient)
    small = x + x * square * series
    limit = number(_SMALL * _SMALL)
    whole = tirx.call_intrin(str(dtype), "tirx.tanh", x)
    return tirx.Let(x, call.args[0], tirx.Select(square < limit, small, whole))
