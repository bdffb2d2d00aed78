"""An intrinsic that rounds to a narrow type and holds inside a kernel, for ``numerics="strict"``.

A cast to float16 or bfloat16 and back is taken for a no-op by TVM's passes where the narrow type is computed in
float32, and by our own templates, which widen what is between a load and a store. None of them looks into this call:
``T(x)`` is the float32 value nearest to x that T holds, ties to even; NaN stays NaN. On CUDA it becomes one of our
device functions, elsewhere integer operations or the casts.
"""

from __future__ import annotations

from typing import Any

from ..compat import cuda_func_call, ir, tirx

#: Names of the intrinsics by type.
ROUNDINGS: dict[str, str] = {
    dtype: f"tirx.tvm_fusion_round_{dtype}" for dtype in ("float16", "bfloat16")
}

#: The same without the namespace, and the type.
_TYPES = {name.removeprefix("tirx."): dtype for dtype, name in ROUNDINGS.items()}

#: PTX of the rounding, from the arch that has it (PTX ISA 9.0, ``cvt``).
_PTX = {
    "bfloat16": "  unsigned short h;\n"
    '  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(h) : "f"(x));\n'
    "  return __uint_as_float((unsigned int)h << 16);\n",
    "float16": "  float y;\n"
    '  asm("{.reg .f16 h;\\n cvt.rn.f16.f32 h, %1;\\n cvt.f32.f16 %0, h;}" : "=f"(y) : "f"(x));\n'
    "  return y;\n",
}

#: The same in C++, where there is no such instruction (and where the code is compiled for a CPU).
_PLAIN = {
    "bfloat16": "  unsigned int bits = __float_as_uint(x);\n"
    "  if ((bits & 0x7fffffffu) > 0x7f800000u) return __uint_as_float(bits | 0x400000u);\n"
    "  return __uint_as_float((bits + 0x7fffu + ((bits >> 16) & 1u)) & 0xffff0000u);\n",
    # 2**-24 is the place of the last bit of the smallest numbers; 65520 and more round to infinity.
    "float16": "  float a = fabsf(x);\n"
    "  if (!(a < 65520.0f)) return a > 65520.0f || a == 65520.0f ? copysignf(__uint_as_float(0x7f800000u), x) : x;\n"
    "  int e = a < 6.103515625e-05f ? -14 : ilogbf(a);\n"
    "  float unit = ldexpf(1.0f, e - 10);\n"
    "  return copysignf(rintf(a / unit) * unit, x);\n",
}
_LEAST_ARCH = {"bfloat16": 800, "float16": 0}

#: CUDA source of ``float tvmf_round_<type>(float x)``.
SOURCES: dict[str, str] = {
    dtype: f"__device__ __forceinline__ float tvmf_round_{dtype}(float x) {{\n"
    "#ifdef __CUDA_ARCH__\n"
    f"#if __CUDA_ARCH__ >= {_LEAST_ARCH[dtype]}\n{_PTX[dtype]}#endif\n"
    f"#if __CUDA_ARCH__ < {_LEAST_ARCH[dtype]}\n{_PLAIN[dtype]}#endif\n"
    f"#else\n{_PLAIN[dtype]}#endif\n}}\n"
    for dtype in ROUNDINGS
}


def rounding(value: tirx.PrimExpr) -> tirx.PrimExpr:
    """Round a value of a narrow type so that it stays rounded.

    Parameters
    ----------
    value : PrimExpr
        float16 or bfloat16.

    Returns
    -------
    PrimExpr
        The same value and type.
    """
    dtype = str(value.ty.dtype)
    wide = tirx.call_intrin("float32", ROUNDINGS[dtype], tirx.Cast("float32", value))
    return tirx.Cast(dtype, wide)


def rounded_type(expr: Any) -> str:
    """The type to which a call of the intrinsic rounds; empty for anything else."""
    name = getattr(expr.op, "name", "") if isinstance(expr, ir.Call) else ""
    return _TYPES.get(name.removeprefix("tirx."), "")


def device_rounding(value: tirx.PrimExpr, dtype: str) -> tirx.PrimExpr:
    """Round a float32 value by our device function; one that it has rounded stays as it is.

    Parameters
    ----------
    value : PrimExpr
        float32.
    dtype : str
        ``"float16"`` or ``"bfloat16"``.
    """
    if _is_rounded(value, dtype):
        return value
    return cuda_func_call(
        f"tvmf_round_{dtype}", value, source_code=SOURCES[dtype], return_type="float32"
    )


def _is_rounded(value: tirx.PrimExpr, dtype: str) -> bool:
    """Whether a value comes from `device_rounding` to a type."""
    if not isinstance(value, ir.Call) or getattr(value.op, "name", "") != "tirx.cuda.func_call":
        return False
    return str(getattr(value.args[0], "value", "")) == f"tvmf_round_{dtype}"


def _bfloat16(call: Any) -> Any:
    """Integer operations: the nearest value whose lower 16 bits are zero."""
    if str(call.args[0].ty.dtype) == "float64":  # a reference in which nothing is rounded
        return call.args[0]
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


def _float16(call: Any) -> Any:
    if str(call.args[0].ty.dtype) == "float64":
        return call.args[0]
    return tirx.Cast("float32", tirx.Cast("float16", call.args[0]))


def _register() -> None:
    for dtype, lower in (("bfloat16", _bfloat16), ("float16", _float16)):
        name = ROUNDINGS[dtype]
        ir.register_op_attr(name, "TCallEffectKind", tirx.CallEffectKind.Pure.value)
        ir.register_op_attr(name, "TScriptPrinterName", name.removeprefix("tirx."))
        tirx.op.register_intrin_lowering(name, "default", f=lower)
        tirx.op.register_intrin_lowering(
            name, "cuda", f=lambda call, dtype=dtype: device_rounding(call.args[0], dtype)
        )


_register()
