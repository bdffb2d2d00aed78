"""Functions whose fast forms are too far off, or wrong, in float32.

TVM compiles CUDA code with ``--use_fast_math``. Then ``powf`` is NaN for every negative base (its logarithm is), the
error of ``tanhf`` is 2**-11 of the result, and ``sinf`` and ``cosf`` lose the digits that an argument of many turns
has (CUDA C++ Programming Guide, intrinsic functions; PTX ISA 9.0, ``tanh.approx``, ``sin.approx``). The forms here
hold what float32 promises. ``tests/schedules/test_cuda_fast_math.py`` measures them; the emulator has the errors of
the fast forms.
"""

from __future__ import annotations

import tvm_ffi

from ...compat import cuda_func_call, ir, tirx
from .fast_math import NARROW, dtype_of, function_of, horner, to_type

#: ``(tanh(x) / x - 1) / x**2`` in powers of ``x**2`` up to x = 0.6: least largest relative error of tanh, 3e-9, by
#: Lawson's iteration (1961) on 4001 Chebyshev points.
TANH = (-0.33333298, 0.133319241, -0.0537838303, 0.0207959718, -0.0058951582)

#: One turn as a sum of two float32, and what one radian is of it.
_TURN = (6.28318548, -1.74845553e-07)
_RADIAN = 0.159154943

_TO_ONE_TURN = (
    f"  float k = rintf(x * {_RADIAN:.9g}f);\n"
    f"  float y = fmaf(-k, {_TURN[1]:.9g}f, fmaf(-k, {_TURN[0]:.9g}f, x));\n"
)

#: Bodies of the device functions ``float tvmf_exact_<name>(float x)``; ``pow`` has another argument ``y``.
_BODIES = {
    "tanh": (
        "  float a = fabsf(x), s = x * x;\n"
        "  float large = copysignf(1.0f - 2.0f / (expf(a + a) + 1.0f), x);\n"
        f"  float y = fmaf(x * s, {horner(TANH[1:], 's', TANH[0])}, x);\n"
        "  return a >= 0.6f ? large : y;\n"
    ),
    "sin": _TO_ONE_TURN + "  return sinf(y);\n",
    "cos": _TO_ONE_TURN + "  return cosf(y);\n",
    "tan": _TO_ONE_TURN + "  return tanf(y);\n",
    # |x| = m 2**e with m near 1, so that the logarithm of m has a small absolute error; whole powers of 2 are exact.
    "pow": (
        "  float a = fabsf(x), middle = truncf(y * 0.5f), result = exp2f(y * log2f(a));\n"
        "  if (a >= 1.17549435e-38f && a <= 3.40282347e38f && fabsf(y * log2f(a)) <= 250.0f) {\n"
        "    int bits = __float_as_int(a), e = (bits - 0x3f3504f3) >> 23;\n"
        "    float whole = rintf(y * (float)e), rest = fmaf(y, (float)e, -whole);\n"
        "    int first = (int)whole / 2, second = (int)whole - first;\n"
        "    float power = exp2f(fmaf(y, log2f(__int_as_float(bits - (e << 23))), rest));\n"
        "    result = power * __int_as_float((first + 127) << 23) * __int_as_float((second + 127) << 23);\n"
        "  }\n"
        "  if (y == 0.0f || x == 1.0f) result = 1.0f;\n"
        "  if (x < 0.0f) {\n"
        "    if (y != truncf(y)) result = __int_as_float(0x7fffffff);\n"
        "    else if (y != middle + middle) result = -result;\n"
        "  }\n"
        "  return result;\n"
    ),
}

#: CUDA source of each device function.
SOURCES = {
    name: f"__device__ __forceinline__ float tvmf_exact_{name}"
    f"(float x{', float y' if name == 'pow' else ''}) {{\n{body}}}\n"
    for name, body in _BODIES.items()
}


def exact_functions(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """Replace what the fast forms of CUDA get wrong.

    Parameters
    ----------
    func : PrimFunc
        A function for CUDA, scheduled.

    Returns
    -------
    PrimFunc
        The same function with calls of our device functions; narrow powers are computed in float32. Other
        functions that a template left in a narrow type stay: they round less than their types.
    """
    body = tvm_ffi.structural_map(func.body, [(ir.Call, _exact)])
    return func if body.same_as(func.body) else func.with_body(body)


def _exact(call: ir.Call) -> tirx.PrimExpr:
    name = function_of(call)
    if name not in SOURCES or not str(getattr(call.op, "name", "")).startswith("tirx."):
        return call
    dtype = dtype_of(call)
    if dtype != "float32" and not (name == "pow" and dtype in NARROW):
        return call
    args = [to_type(arg, "float32") for arg in call.args]
    made = cuda_func_call(
        f"tvmf_exact_{name}", *args, source_code=SOURCES[name], return_type="float32"
    )
    return to_type(made, dtype)
