"""Arithmetic of narrow types in float32, in kernels that their template left to the hardware.

From sm_80 on CUDA has instructions for bfloat16, which round every step: a sigmoid would be rounded three times, and
its result again. Templates that write their own arithmetic do it in float32 (`fast_math`); the others are brought to
that where roundings are to be the model's, once an operator (``numerics="strict"``).
"""

from __future__ import annotations

import tvm_ffi

from ...compat import ir, tirx
from ..analysis import nodes_of
from .fast_math import NARROW, dtype_of, fast_math, to_type

_ARITHMETIC = (tirx.Add, tirx.Sub, tirx.Mul, tirx.Div, tirx.Min, tirx.Max, tirx.Mod, ir.Call)


def widened(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """Compute every stored value in float32 where some of its arithmetic is narrow.

    Parameters
    ----------
    func : PrimFunc
        A function for CUDA, scheduled. What it moves, several elements at once, stays as it is.
    """
    body = tvm_ffi.structural_map(func.body, [(tirx.BufferStore, _store)])
    return func if body.same_as(func.body) else func.with_body(body)


def _store(stmt: tirx.BufferStore) -> tirx.BufferStore:
    dtype = dtype_of(stmt.value)
    if not any(dtype_of(n) in NARROW for kind in _ARITHMETIC for n in nodes_of(stmt.value, kind)):
        return stmt
    value = to_type(fast_math(stmt.value, narrow=dtype in NARROW), dtype)
    return tirx.BufferStore(stmt.buffer, value, stmt.indices)
