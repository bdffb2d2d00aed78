"""Convert a whole module to another floating dtype."""

from __future__ import annotations

from ...compat import ir, relax, tvm
from .constants import is_constant, to_constant, to_numpy
from .rewrite import BindingRewriter, op_name, with_attrs

#: The floating dtypes that are converted; float64 and float8 are kept as the model says.
CONVERTED: tuple[str, ...] = ("float32", "float16", "bfloat16")

_ANCHORS = ("nn.conv", "matmul", "linear", "einsum")


@tvm.transform.module_pass(opt_level=0, name="tvm_fusion.ConvertDtype")
class ConvertDtype:
    """Convert parameters, constants and operators between float32, float16 and bfloat16.

    Types are deduced anew; casts between these dtypes disappear; integers and booleans stay. An
    operator that TVM has in float32 only (a group norm, for bfloat16) stays there, between casts.
    Constants out of the new range become its largest finite value (a mask of -1e9 must not become
    -inf), and a single number that would become 0 its smallest (an epsilon of 1e-12 keeps a quotient finite).

    Parameters
    ----------
    dtype : {"float32", "float16", "bfloat16", "float64"}
        The dtype of everything floating; float64 is for references.
    """

    def __init__(self, dtype: str) -> None:
        if dtype not in (*CONVERTED, "float64"):
            raise ValueError(
                f"dtype must be one of {', '.join(CONVERTED)} or float64, got {dtype!r}"
            )
        self.dtype = dtype

    def transform_module(self, mod: tvm.IRModule, ctx: tvm.transform.PassContext) -> tvm.IRModule:
        return _Rewriter(self.dtype).transform(mod)


class _Rewriter(BindingRewriter):
    def __init__(self, dtype: str) -> None:
        super().__init__()
        self._dtype = dtype
        self._constants: dict[ir.GenericConst, ir.GenericConst] = {}

    def visit_param(self, param: relax.Var) -> ir.Expr:
        ty = param.ty
        if not isinstance(ty, relax.TensorType) or not self._converts(ty.dtype):
            return param
        if ty.shape is None:
            return relax.Var(param.name, relax.TensorType(None, self._dtype, ndim=ty.ndim))
        return relax.Var(param.name, relax.TensorType(ty.shape, self._dtype))

    def visit_output(self, output: ir.Expr) -> ir.Expr:
        return self._leaf(output)

    def visit(self, name: str, value: ir.Expr) -> ir.Expr:
        if not isinstance(value, ir.Call):
            return value
        args = [self._leaf(arg) for arg in value.args]
        call = value
        if not all(a.same_as(b) for a, b in zip(args, value.args, strict=True)):
            call = ir.Call(value.op, args, value.attrs, value.ty_args, value.span)
        call = self._attributes(call)
        return (
            call if self._dtype != "bfloat16" or self._is_legal(call) else self._wide(name, value)
        )

    def _is_legal(self, call: ir.Expr) -> bool:
        try:
            self.typed(call)
        except TypeError:
            return False
        return True

    def _wide(self, name: str, value: ir.Call) -> ir.Expr:
        """The operator in float32, of operands that were converted already."""
        args = [
            self.emit(name, relax.op.astype(arg, "float32")) if _dtype_is(arg, self._dtype) else arg
            for arg in value.args
        ]
        wide = ir.Call(value.op, args, value.attrs, value.ty_args, value.span)
        return relax.op.astype(self.emit(name, wide), self._dtype)

    def _leaf(self, expr: ir.Expr) -> ir.Expr:
        if isinstance(expr, relax.Tuple):
            fields = [self._leaf(field) for field in expr.fields]
            unchanged = all(a.same_as(b) for a, b in zip(fields, expr.fields, strict=True))
            return expr if unchanged else relax.Tuple(fields)
        if not is_constant(expr) or not self._converts(expr.ty.dtype):
            return expr
        if expr not in self._constants:
            self._constants[expr] = to_constant(to_numpy(expr), self._dtype, saturate=True)
        return self._constants[expr]

    def _attributes(self, call: ir.Call) -> ir.Expr:
        op = op_name(call) or ""
        out_dtype = getattr(call.attrs, "out_dtype", None)
        if out_dtype is not None and self._converts(out_dtype):
            # Convolutions and matmuls deduce their dtype from the operands; resize and the like
            # must be told.
            return with_attrs(call, out_dtype=None if op.startswith(_ANCHORS) else self._dtype)
        dtype = getattr(call.attrs, "dtype", None)
        if op == "astype" and str(dtype) in CONVERTED and _dtype_is(call.args[0], self._dtype):
            return call.args[0]
        return (
            with_attrs(call, dtype=self._dtype)
            if dtype is not None and self._converts(dtype)
            else call
        )

    def _converts(self, dtype: object) -> bool:
        return str(dtype) in CONVERTED and str(dtype) != self._dtype


def _dtype_is(expr: ir.Expr, dtype: str) -> bool:
    return str(getattr(expr.ty, "dtype", "")) == dtype
