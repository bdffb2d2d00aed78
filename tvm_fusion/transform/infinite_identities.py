"""Maxima and minima that start from infinity.

TVM starts a maximum from the least finite number, and pads what a maximum pooling reads with it. Of values that are all
minus infinity (a masked row) the result is then that number. Here both are minus infinity, as in ONNX, PyTorch and
NumPy; a minimum has plus infinity.
"""

from __future__ import annotations

import math

import tvm_ffi

from ..compat import s_tir, tirx, tvm, with_functions
from ..schedules.analysis import nodes_of

_FLOATS = ("float16", "bfloat16", "float32", "float64")


@tvm.transform.module_pass(opt_level=0, name="tvm_fusion.InfiniteIdentities")
class InfiniteIdentities:
    """`infinite_identities` as a pass."""

    def transform_module(self, mod: tvm.IRModule, ctx: tvm.transform.PassContext) -> tvm.IRModule:
        """Change the operators of a module."""
        return infinite_identities(mod)


def infinite_identities(mod: tvm.IRModule) -> tvm.IRModule:
    """Let maxima and minima start from infinity.

    Parameters
    ----------
    mod : IRModule
        Operators as PrimFuncs, as TVM's legalisation leaves them. Functions with other reductions stay as they are: a
        softmax takes away what its maximum starts from, and of a row of minus infinity is NaN either way.
    """
    out = with_functions(mod)
    for gv, func in mod.functions_items():
        if isinstance(func, tirx.PrimFunc):
            body = _with_infinities(func.body)
            if not body.same_as(func.body):
                out.update_func(gv, func.with_body(body))
    return out


def _with_infinities(body: tirx.Stmt) -> tirx.Stmt:
    starts = [_start(b) for b in nodes_of(body, s_tir.SBlock) if b.init is not None]
    if not starts or None in starts:
        return body
    found = {(str(start.ty.dtype), float(start.value)) for start in starts}

    def infinite(number: tirx.FloatImm) -> tirx.FloatImm:
        dtype, value = str(number.ty.dtype), float(number.value)
        if (dtype, value) not in found:
            return number
        return tirx.FloatImm(dtype, math.copysign(math.inf, value))

    return tvm_ffi.structural_map(body, [(tirx.FloatImm, infinite)])


def _start(block: s_tir.SBlock) -> tirx.FloatImm | None:
    """What a maximum or minimum of floating-point numbers starts from; None for any other reduction."""
    init, update = block.init, block.body
    if not isinstance(init, tirx.BufferStore) or not isinstance(update, tirx.BufferStore):
        return None
    start = init.value
    if not isinstance(start, tirx.FloatImm) or str(start.ty.dtype) not in _FLOATS:
        return None
    limit = tirx.min_value if isinstance(update.value, tirx.Max) else tirx.max_value
    if not isinstance(update.value, tirx.Max | tirx.Min):
        return None
    return start if float(start.value) == float(limit(str(start.ty.dtype)).value) else None
