"""Compute running sums, sums by scattering, and sums of squares and what follows from them, in float32."""

from __future__ import annotations

from ...compat import ir, relax, tvm
from .constants import is_constant, to_constant, to_numpy
from .rewrite import BindingRewriter, dtype_of, op_name, with_args, with_attrs

_NARROW = ("float16", "bfloat16")
_SCANS = ("cumsum", "cumprod")
_SCATTERS = ("index_put", "scatter_elements", "scatter_nd")
_PRODUCTS = ("multiply", "square")
_SUMS = ("mean", "sum")
#: What a norm does with a sum before it meets the tensor again.
_OF_SUMS = ("add", "divide", "maximum", "multiply", "rsqrt", "sqrt", "subtract")


@tvm.transform.module_pass(opt_level=0, name="tvm_fusion.WidenSums")
class WidenSums:
    """cumsum(x) of float16 -> astype(cumsum(astype(x))); likewise rsqrt(mean(x * x) + 1e-5), up to its result.

    Legalisation accumulates every sum in float32, but a square of a float16 value over 255 is
    infinite before it is added, and so may the mean be, whose root is not. Running sums have
    library kernels, and scattering kernels add in memory, in the type that they are given. Sums of
    anything else are left alone, and so are products that something else reads, too.
    """

    def transform_module(self, mod: tvm.IRModule, ctx: tvm.transform.PassContext) -> tvm.IRModule:
        return _Rewriter().transform(mod)


class _Rewriter(BindingRewriter):
    def __init__(self) -> None:
        super().__init__()
        self._sums: set[relax.Var] = set()  # float32 values that are, or follow from, a sum

    def visit(self, name: str, value: ir.Expr) -> ir.Expr:
        op = op_name(value)
        if op in _SCANS and dtype_of(value.args[0]) in _NARROW:
            dtype = dtype_of(self.typed(value))
            if dtype not in _NARROW:
                return value
            wide = with_attrs(with_args(value, self._wide(name, value.args[0])), dtype="float32")
            return relax.op.astype(self.emit(name, wide), dtype)
        if op in _SCATTERS and dtype_of(value.args[0]) in _NARROW and _accumulates(value):
            data, places, updates = value.args
            wide = with_args(value, self._wide(name, data), places, self._wide(name, updates))
            return relax.op.astype(self.emit(name, wide), dtype_of(data))
        if op in _SUMS and dtype_of(value.args[0]) in _NARROW:
            return self._of_products(name, value)
        if op in _OF_SUMS and any(self._sum(arg) is not None for arg in value.args):
            return self._of_sums(name, value)
        return value

    def _of_products(self, name: str, value: ir.Call) -> ir.Expr:
        product = self.producer(value.args[0])
        if op_name(product) not in _PRODUCTS or not self.single_use(value.args[0]):
            return value
        first, *others = product.args
        factors = [self._wide(name, first)]
        factors += [factors[0] if o.same_as(first) else self._wide(name, o) for o in others]
        wide = self.emit(name, with_args(product, *factors))
        return self._narrow(name, with_args(value, wide), dtype_of(value.args[0]))

    def _of_sums(self, name: str, value: ir.Call) -> ir.Expr:
        operands = []
        for arg in value.args:
            source = self._sum(arg)
            if source is None and is_constant(arg):
                source = to_constant(to_numpy(arg), "float32")
            if source is None:
                return value  # here the sum meets a tensor: it is rounded before
            operands.append(source)
        return self._narrow(name, with_args(value, *operands), dtype_of(value.args[0]))

    def _narrow(self, name: str, wide: ir.Expr, dtype: str) -> ir.Expr:
        result = self.emit(name, wide)
        self._sums.add(result)
        return relax.op.astype(result, dtype)

    def _sum(self, arg: ir.Expr) -> ir.Expr | None:
        """The float32 value that a sum, or what follows from one, was rounded from."""
        cast = self.producer(arg, "astype")
        source = None if cast is None else cast.args[0]
        return source if source in self._sums else None

    def _wide(self, name: str, arg: ir.Expr) -> ir.Expr:
        if is_constant(arg):
            return to_constant(to_numpy(arg), "float32")
        return self.emit(name, relax.op.astype(arg, "float32"))


def _accumulates(call: ir.Call) -> bool:
    """Whether a scatter adds or multiplies; replacing, and taking the larger, rounds nothing."""
    attrs = call.attrs
    return bool(getattr(attrs, "accumulate", False)) or (
        str(getattr(attrs, "reduction", "update")) in ("add", "mul")
    )
