"""Maxima and minima that start from infinity, made known to TVM.

TVM distributes a reduction among threads only where it knows the combination of operator and first value, and of maxima
and minima it knows those that start from the last finite number (``transform/infinite_identities.py`` says why ours do
not). TVM keeps a list; what is added at import is there for every schedule and lowering of the process.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable

import tvm_ffi

from ..compat import tirx, tvm

_FLOATS = ("float16", "bfloat16", "float32", "float64")


def _kept(function: Callable) -> tvm_ffi.Function:
    """A function for TVM that is never freed: its list outlives the interpreter, without which none can be."""
    made = tvm_ffi.convert(function)
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(made))
    return made


def _register(operator: Callable, infinity: float, finite: Callable) -> None:
    def combine(left: list, right: list) -> list:
        return [operator(left[0], right[0])]

    def first(values: list) -> list:
        dtype = str(values[0].ty.dtype)
        return [tirx.FloatImm(dtype, infinity) if dtype in _FLOATS else finite(dtype)]

    tvm.get_global_func("s_tir.schedule.RegisterReducer")(1, _kept(combine), _kept(first))


_register(tirx.max, -math.inf, tirx.min_value)
_register(tirx.min, math.inf, tirx.max_value)
