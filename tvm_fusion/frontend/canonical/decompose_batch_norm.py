"""Write inference batch normalisation as one multiplication and one addition by constants."""

from __future__ import annotations

import numpy as np

from ...compat import ir, relax, tvm
from .constants import is_constant, to_constant, to_numpy, widen
from .rewrite import BindingRewriter, dtype_of


@tvm.transform.module_pass(opt_level=0, name="tvm_fusion.DecomposeBatchNorm")
class DecomposeBatchNorm:
    """batch_norm(x, gamma, beta, mean, var) -> x * (gamma / sqrt(var + eps)) + (beta - mean * scale).

    Needs constant statistics; training mode and computed statistics are left alone. The running
    statistics, which inference returns unchanged, become the constants themselves.
    """

    def transform_module(self, mod: tvm.IRModule, ctx: tvm.transform.PassContext) -> tvm.IRModule:
        return _Rewriter().transform(mod)


class _Rewriter(BindingRewriter):
    def visit(self, name: str, value: ir.Expr) -> ir.Expr:
        if not isinstance(value, relax.TupleGetItem):
            return value
        norm = self.producer(value.tuple_value, "nn.batch_norm")
        if (
            norm is None
            or norm.attrs.training
            or not all(is_constant(arg) for arg in norm.args[1:5])
        ):
            return value
        data, *statistics = norm.args[:5]
        if value.index > 0:
            return statistics[value.index + 1]
        gamma, beta, mean, var = (widen(to_numpy(const)) for const in statistics)
        with np.errstate(all="ignore"):
            scale = 1.0 / np.sqrt(var + float(norm.attrs.epsilon))
        if norm.attrs.scale:
            scale = scale * gamma
        shift = -mean * scale + (beta if norm.attrs.center else 0.0)
        if not (np.isfinite(scale).all() and np.isfinite(shift).all()):
            return value  # a negative variance, or an infinite one: keep what the model says
        shape = [1] * data.ty.ndim
        shape[int(norm.attrs.axis)] = -1
        dtype = dtype_of(data)
        scaled = self.emit(name, relax.op.multiply(data, to_constant(scale.reshape(shape), dtype)))
        return relax.op.add(scaled, to_constant(shift.reshape(shape), dtype))
