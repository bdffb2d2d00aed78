"""Tensors of sizes that cannot be, or that kernels cannot count, are refused by the name of what makes them."""

from __future__ import annotations

import math

from ...compat import ir, relax, tirx, tvm
from ...errors import UnsupportedOperatorError
from .rewrite import bindings_of, op_name

#: Elements of one tensor: TVM's kernels count them in 32 bits.
MOST_ELEMENTS = 2**31 - 1


def refuse_huge_tensors(mod: tvm.IRModule) -> None:
    """Raise UnsupportedOperatorError where a size is negative, or a tensor larger than ``MOST_ELEMENTS``.

    Parameters
    ----------
    mod : IRModule
        A module with one canonical function ``main``.
    """
    main = mod["main"]
    values = [(param, f"input {param.name!r}") for param in main.params]
    for binding in bindings_of(main):
        name = op_name(binding.value) or "tuple"
        values.append((binding.var, f"operator {name} (node {binding.var.name!r})"))
    for value, what in values:
        for ty in value.ty.fields if isinstance(value.ty, ir.TupleType) else (value.ty,):
            if not isinstance(ty, relax.TensorType) or not isinstance(ty.shape, relax.ShapeExpr):
                continue
            sizes = [int(n) for n in ty.shape.values if isinstance(n, tirx.IntImm)]
            if any(size < 0 for size in sizes):
                raise UnsupportedOperatorError(
                    f"{what} cannot be imported: a size of {min(sizes)} cannot be"
                )
            count = math.prod(sizes)
            if count > MOST_ELEMENTS:
                raise UnsupportedOperatorError(
                    f"{what} cannot be imported: of its {count} elements kernels can index {MOST_ELEMENTS} at most"
                )
