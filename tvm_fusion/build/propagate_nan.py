"""Maxima and minima that are NaN where an operand is, as ONNX, PyTorch and NumPy define them.

TensorIR leaves it open. LLVM's code generator writes ``a > b ? a : b``, which loses a NaN in the first operand, and
CUDA's writes ``fmaxf``, which loses either. So a ReLU, a bound or a maximum pooling would turn the NaN of a model that
has gone wrong into a plausible number. Code is changed at the end of lowering: there are no blocks left whose form a
schedule or a pass has to recognise, and no simplifier that takes a comparison of a value with itself for false, or
that looks at nested names once per level.

The costs: on CUDA one instruction instead of one (``max.NaN`` and ``min.NaN``, sm_80 and later; two more before); on a
CPU nothing where an operand is a constant (it comes first), and else a comparison and a blend.
"""

from __future__ import annotations

import math

import tvm_ffi

from ..compat import cuda_func_call, ir, tirx, tvm

_NAMES = {tirx.Max: "max", tirx.Min: "min"}
_FLOATS = ("float16", "bfloat16", "float32", "float64")


def _source(name: str, dtype: str) -> str:
    """Source of ``tvmf_<name>_nan`` (float) or ``tvmf_<name>_nan_double``."""
    sign = ">" if name == "max" else "<"
    plain = f"  return a {sign} b || a != a ? a : b;\n"
    if dtype == "float64":
        head = f"__device__ __forceinline__ double tvmf_{name}_nan_double(double a, double b)"
        return f"{head} {{\n{plain}}}\n"
    return (
        f"__device__ __forceinline__ float tvmf_{name}_nan(float a, float b) {{\n"
        "#ifdef __CUDA_ARCH__\n"
        "#if __CUDA_ARCH__ >= 800\n"
        "  float y;\n"
        f'  asm("{name}.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));\n'
        "  return y;\n"
        "#endif\n"
        "#if __CUDA_ARCH__ < 800\n"
        f"{plain}"
        "#endif\n"
        "#else\n"
        f"{plain}"
        "#endif\n"
        "}\n"
    )


#: CUDA source by name and type.
SOURCES = {(n, t): _source(n, t) for n in _NAMES.values() for t in ("float32", "float64")}


@tvm.transform.module_pass(opt_level=0, name="tvm_fusion.PropagateNaN")
class PropagateNaN:
    """Rewrite floating-point maxima and minima of lowered functions, each for its target."""

    def transform_module(self, mod: tvm.IRModule, ctx: tvm.transform.PassContext) -> tvm.IRModule:
        """Rewrite the functions of a module that is about to become machine code."""
        for gv, func in mod.functions_items():
            target = func.attrs.get("target") if func.attrs is not None else None
            if not isinstance(func, tirx.PrimFunc) or target is None:
                continue
            rewrite = _for_cuda if target.kind.name == "cuda" else _for_cpu
            body = tvm_ffi.structural_map(func.body, [(kind, rewrite) for kind in _NAMES])
            if not body.same_as(func.body):
                mod.update_func(gv, func.with_body(body))
        return mod


def _type_of(expr: tirx.PrimExpr) -> tuple[str, int]:
    """Type of an element, and number of lanes."""
    dtype = tvm.DataType(str(expr.ty.dtype))
    return str(dtype.with_lanes(1)), dtype.lanes


def _for_cuda(expr: tirx.PrimExpr) -> tirx.PrimExpr:
    dtype, lanes = _type_of(expr)
    if dtype not in _FLOATS:
        return expr
    name = _NAMES[type(expr)]
    wide = "float64" if dtype == "float64" else "float32"
    full = wide if lanes == 1 else f"{wide}x{lanes}"
    a, b = (e if dtype == wide else tirx.Cast(full, e) for e in (expr.a, expr.b))
    suffix = "_nan_double" if wide == "float64" else "_nan"
    made = cuda_func_call(
        f"tvmf_{name}{suffix}", a, b, source_code=SOURCES[name, wide], return_type=full
    )
    return made if dtype == wide else tirx.Cast(str(expr.ty.dtype), made)


def _for_cpu(expr: tirx.PrimExpr) -> tirx.PrimExpr:
    """LLVM's ``a > b ? a : b`` keeps a NaN in the second operand; one in the first is put back.

    The first is the operand that can be named twice without growing. Of two that cannot, LLVM's own function is
    called, which orders zeros, too; a name for one would be looked into once per level by TVM's code generator.
    """
    if _type_of(expr)[0] not in _FLOATS or _is_number(expr.a):
        return expr
    if _is_number(expr.b) or isinstance(expr.b, tirx.Var | ir.TensorLoad):
        expr = type(expr)(expr.b, expr.a)
        if _is_number(expr.a):
            return expr
    if isinstance(expr.a, tirx.Var | ir.TensorLoad):
        return tirx.Select(_is_nan(expr.a), expr.a, expr)
    dtype, name = str(expr.ty.dtype), f"llvm.{_NAMES[type(expr)]}imum"
    return tirx.call_llvm_pure_intrin(dtype, name, expr.a, expr.b)


def _is_nan(expr: tirx.PrimExpr) -> tirx.PrimExpr:
    # LLVM's code for a != a is false of NaN; that for equality is right.
    return tirx.Not(tirx.EQ(expr, expr))


def _is_number(expr: tirx.PrimExpr) -> bool:
    if isinstance(expr, tirx.Broadcast | tirx.Cast):
        return _is_number(expr.value)
    return isinstance(expr, tirx.FloatImm) and not math.isnan(expr.value)
