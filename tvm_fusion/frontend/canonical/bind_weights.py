"""Turn weights passed as parameters into constants."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from ...compat import ir, relax, tvm
from .constants import is_constant
from .rewrite import BindingRewriter, with_main


@tvm.transform.module_pass(opt_level=0, name="tvm_fusion.BindWeights")
class BindWeights:
    """Bind the parameters after the first ``num_input`` to their values.

    Parameters
    ----------
    params : mapping of name to array, or sequence of arrays, optional
        The values, in the order of the parameters when a sequence. Without it the function's own
        ``params`` attribute is used (TVM's importers put it there when asked to keep parameters as
        inputs).

    Raises
    ------
    ValueError
        If a value is missing, or has another shape or dtype than its parameter.
    """

    def __init__(self, params: Mapping[str, object] | Sequence[object] | None = None) -> None:
        self.params = params

    def transform_module(self, mod: tvm.IRModule, ctx: tvm.transform.PassContext) -> tvm.IRModule:
        func = mod["main"]
        attrs = dict(func.attrs.items()) if func.attrs is not None else {}
        given = self.params if self.params is not None else attrs.get("params")
        count = int(attrs.get("num_input", len(func.params)))
        values: dict[relax.Var, ir.Expr] = {}
        if given is not None and not count < len(func.params):
            raise ValueError(
                "the module has no weight parameters: every parameter of main is an input"
            )
        if given is not None:
            values = _pair(func.params[count:], given)
        mod = _Binder(values).transform(mod)
        func = mod["main"]
        attrs.pop("params", None)
        attrs["num_input"] = len(func.params)
        return with_main(
            mod,
            relax.Function(
                func.params, func.body, func.ret_ty, func.is_pure, ir.DictAttrs(attrs), func.span
            ),
        )


def _pair(
    weights: Sequence[relax.Var], given: Mapping[str, object] | Sequence[object]
) -> dict[relax.Var, ir.Expr]:
    by_name = isinstance(given, Mapping) or hasattr(given, "items")
    if not by_name and len(given) != len(weights):
        raise ValueError(
            f"main has {len(weights)} weight parameters, but {len(given)} values were given"
        )
    values = {}
    for position, var in enumerate(weights):
        if by_name and var.name not in given:
            raise ValueError(f"no value given for the weight parameter {var.name!r}")
        value = given[var.name] if by_name else given[position]
        const = (
            value
            if isinstance(value, ir.Expr) and is_constant(value)
            else relax.const(_tensor(value))
        )
        if const.ty.dtype != var.ty.dtype or not _fits(const, var):
            raise ValueError(
                f"the value of weight parameter {var.name!r} has type {const.ty}, expected {var.ty}"
            )
        values[var] = const
    return values


def _tensor(value: object) -> tvm.runtime.Tensor:
    return value if isinstance(value, tvm.runtime.Tensor) else tvm.runtime.tensor(np.asarray(value))


def _fits(const: ir.GenericConst, var: relax.Var) -> bool:
    shape = getattr(var.ty, "shape", None)
    if not isinstance(shape, relax.ShapeExpr):
        return True
    return [str(d) for d in shape.values] == [str(d) for d in const.ty.shape.values]


class _Binder(BindingRewriter):
    def __init__(self, values: dict[relax.Var, ir.Expr]) -> None:
        super().__init__()
        self._values = values

    def visit_param(self, param: relax.Var) -> ir.Expr:
        return self._values.get(param, param)
