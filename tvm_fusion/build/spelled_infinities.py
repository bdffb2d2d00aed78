"""Infinities of bfloat16, in a form that TVM's CUDA code generator can spell.

It writes a bfloat16 constant as a conversion of C's ``printf`` text, and of an infinity that is ``inff``, which is no
C++. The conversion of a float32 infinity it spells right.
"""

from __future__ import annotations

import math

import tvm_ffi

from ..compat import tirx, tvm


@tvm.transform.module_pass(opt_level=0, name="tvm_fusion.SpelledInfinities")
class SpelledInfinities:
    """Write infinities of bfloat16 as conversions, right before code is generated, so that nothing folds them."""

    def transform_module(self, mod: tvm.IRModule, ctx: tvm.transform.PassContext) -> tvm.IRModule:
        """Change the functions of a device module."""
        for gv, func in mod.functions_items():
            body = tvm_ffi.structural_map(func.body, [(tirx.FloatImm, _spelled)])
            if not body.same_as(func.body):
                mod.update_func(gv, func.with_body(body))
        return mod


def _spelled(number: tirx.FloatImm) -> tirx.PrimExpr:
    if str(number.ty.dtype) != "bfloat16" or not math.isinf(float(number.value)):
        return number
    return tirx.Cast("bfloat16", tirx.FloatImm("float32", float(number.value)))
