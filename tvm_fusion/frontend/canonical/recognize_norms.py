"""Write RMS norms and layer norms that a model spells out as one operator."""

from __future__ import annotations

from ...compat import ir, relax, tvm
from .constants import is_constant, to_numpy
from .rewrite import BindingRewriter, dtype_of, op_name, static_shape

_NARROW = ("float16", "bfloat16")


@tvm.transform.module_pass(opt_level=0, name="tvm_fusion.RecognizeNorms")
class RecognizeNorms:
    """x · rsqrt(mean(x²) + eps) · w -> rms_norm; of x = y - mean(y), with an addition behind it, layer_norm(y).

    Over the last axis. This is how LLaMA's norm (Zhang and Sennrich, *Root mean square layer normalization*, 2019)
    leaves PyTorch, and layer norm an ONNX file before opset 17. Casts to float32 and back, as Hugging Face's models
    write them around the norm, are part of it: the operator computes in float32 by itself. A value of the chain that
    something else reads, too, keeps the chain.
    """

    def transform_module(self, mod: tvm.IRModule, ctx: tvm.transform.PassContext) -> tvm.IRModule:
        return _Rewriter().transform(mod)


class _Rewriter(BindingRewriter):
    def visit(self, name: str, value: ir.Expr) -> ir.Expr:
        op = op_name(value)
        if op not in ("multiply", "add"):
            return value
        match = self._rms_norm if op == "multiply" else self._layer_norm
        for data, row in (value.args, value.args[::-1]):
            shape, width = static_shape(data), static_shape(row)
            if not shape or width != shape[-1:] or dtype_of(data) != dtype_of(row):
                continue
            found = match(data, row)
            if found is not None:
                return found
        return value

    def _rms_norm(self, normed: ir.Expr, scale: ir.Expr) -> ir.Expr | None:
        if not self.single_use(normed):
            return None
        cast = self.producer(normed, "astype")
        core = self.producer(normed if cast is None else cast.args[0])
        data, squares = self._over_root(core)
        if data is None or (cast is not None and not self.single_use(cast.args[0])):
            return None
        epsilon = self._mean_of_squares(squares, data)
        if epsilon is None:
            return None
        if cast is not None:
            widened = self.producer(data, "astype")
            dtype = dtype_of(normed)
            if widened is None or dtype not in _NARROW or dtype_of(widened.args[0]) != dtype:
                return None
            data = widened.args[0]
        return relax.op.nn.rms_norm(data, scale, axes=[-1], epsilon=epsilon)

    def _over_root(self, core: ir.Expr | None) -> tuple[ir.Expr | None, ir.Expr | None]:
        """``x`` and ``v`` of x · rsqrt(v), x · (1 / sqrt(v)) or x / sqrt(v); None where it is none of them."""
        op = op_name(core)
        if op == "divide":
            root = self.producer(core.args[1], "sqrt")
            return (None, None) if root is None else (core.args[0], root.args[0])
        for data, factor in (core.args, core.args[::-1]) if op == "multiply" else ():
            inverse = self.producer(factor)
            if op_name(inverse) == "rsqrt":
                return data, inverse.args[0]
            if op_name(inverse) == "divide" and _number(inverse.args[0]) == 1:
                root = self.producer(inverse.args[1], "sqrt")
                if root is not None:
                    return data, root.args[0]
        return None, None

    def _mean_of_squares(self, expr: ir.Expr, data: ir.Expr) -> float | None:
        """``eps`` of mean(data²) + eps over the last axis; None if ``expr`` is something else."""
        total = self.producer(expr, "add")
        for mean, number in (total.args, total.args[::-1]) if total is not None else ():
            epsilon, squares = _number(number), self._mean(mean)
            if epsilon is None or squares is None:
                continue
            product = self.producer(squares)
            if op_name(product) in ("square", "multiply"):
                return epsilon if all(arg.same_as(data) for arg in product.args) else None
        return None

    def _mean(self, expr: ir.Expr) -> ir.Expr | None:
        """What ``expr`` is the mean of, over the last axis, which is kept."""
        mean = self.producer(expr, "mean")
        if mean is None or not mean.attrs.keepdims or mean.attrs.axis is None:
            return None
        ndim = mean.args[0].ty.ndim
        return mean.args[0] if [int(a) % ndim for a in mean.attrs.axis] == [ndim - 1] else None

    def _layer_norm(self, normed: ir.Expr, shift: ir.Expr) -> ir.Expr | None:
        norm = self.producer(normed, "nn.rms_norm")
        centred = None if norm is None else self.producer(norm.args[0], "subtract")
        if centred is None or not self.single_use(normed):
            return None
        data, mean = centred.args
        source = self._mean(mean)
        if source is None or not source.same_as(data):
            return None
        epsilon = float(norm.attrs.epsilon)
        return relax.op.nn.layer_norm(data, norm.args[1], shift, axes=[-1], epsilon=epsilon)


def _number(expr: ir.Expr) -> float | None:
    """The value of a constant of one element."""
    if not is_constant(expr):
        return None
    array = to_numpy(expr)
    return float(array.reshape(-1)[0]) if array.size == 1 else None
