"""Write a product whose columns are split as one product for each part."""

from __future__ import annotations

import itertools

import numpy as np

from ...compat import ir, relax, tvm
from .constants import is_constant, to_constant, to_numpy
from .rewrite import BindingRewriter, op_name, static_shape


@tvm.transform.module_pass(opt_level=0, name="tvm_fusion.SplitProducts")
class SplitProducts:
    """split(x · W + b) along the columns -> x · W1 + b1, x · W2 + b2, ...

    A projection that is merged by hand (GPT-2's of queries, keys and values) becomes the separate ones that horizontal
    fusion knows how to merge, with an output for each, and nothing is left to copy. The weight and the bias must be
    constants, and nothing else may read the product.
    """

    def transform_module(self, mod: tvm.IRModule, ctx: tvm.transform.PassContext) -> tvm.IRModule:
        return _Rewriter().transform(mod)


class _Rewriter(BindingRewriter):
    def __init__(self) -> None:
        super().__init__()
        self._parts: dict[relax.Var, list[ir.Expr]] = {}

    def visit(self, name: str, value: ir.Expr) -> ir.Expr:
        if op_name(value) == "split":
            found = self._product(value)
            if found is None:
                return value
            whole = self.emit(name, value)  # dead, unless something reads all parts as one tuple
            self._parts[whole] = self._split(name, value, *found)
            return whole
        if isinstance(value, relax.TupleGetItem):
            parts = self._parts.get(value.tuple_value)
            return value if parts is None else parts[value.index]
        return value

    def _product(self, split: ir.Call) -> tuple[ir.Call, ir.Expr | None] | None:
        """The product that is split along its last axis, and its bias; None if it is none."""
        shape = static_shape(split.args[0])
        if shape is None or int(split.attrs.axis) % len(shape) != len(shape) - 1:
            return None
        if not self.single_use(split.args[0]):
            return None
        value, bias = self.producer(split.args[0]), None
        if op_name(value) == "add":
            data, bias = value.args if is_constant(value.args[1]) else value.args[::-1]
            if not is_constant(bias) or static_shape(bias) != shape[-1:]:
                return None
            if not self.single_use(data):
                return None
            value = self.producer(data)
        if op_name(value) != "matmul" or not is_constant(value.args[1]):
            return None
        return (value, bias) if len(static_shape(value.args[1])) == 2 else None

    def _split(
        self, name: str, split: ir.Call, product: ir.Call, bias: ir.Expr | None
    ) -> list[ir.Expr]:
        widths = [static_shape(field)[-1] for field in _fields(self.typed(split))]
        ends = list(itertools.accumulate(widths))
        weight = to_numpy(product.args[1])
        parts = []
        for begin, end in zip([0, *ends], ends, strict=False):
            columns = to_constant(np.ascontiguousarray(weight[:, begin:end]))
            dtype = product.attrs.out_dtype
            part = self.emit(name, relax.op.matmul(product.args[0], columns, out_dtype=dtype))
            if bias is not None:
                part = self.emit(
                    name, relax.op.add(part, to_constant(to_numpy(bias)[begin:end].copy()))
                )
            parts.append(part)
        return parts


def _fields(split: ir.Call) -> list[ir.Expr]:
    """Variables of the types of what a split makes."""
    return [relax.Var("part", field) for field in split.ty.fields]
