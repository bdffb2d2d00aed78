"""Write lookups of constant, neighbouring places as slices."""

from __future__ import annotations

import numpy as np

from ...compat import ir, relax, tvm
from .constants import is_constant, to_numpy
from .rewrite import BindingRewriter, op_name, static_shape


@tvm.transform.module_pass(opt_level=0, name="tvm_fusion.SliceLookups")
class SliceLookups:
    """take(x, 1) -> reshape(x[1:2]), take(x, [2, 3, 4]) -> x[2:5].

    ONNX selects a place with ``Gather``: queries, keys and values of one tensor, or the first token of a sentence. A
    kernel reads through a slice, not through a lookup. Indices must lie within the axis.
    """

    def transform_module(self, mod: tvm.IRModule, ctx: tvm.transform.PassContext) -> tvm.IRModule:
        return _Rewriter().transform(mod)


class _Rewriter(BindingRewriter):
    def visit(self, name: str, value: ir.Expr) -> ir.Expr:
        if op_name(value) != "take" or not is_constant(value.args[1]):
            return value
        data, index = value.args[0], to_numpy(value.args[1])
        shape, wanted = static_shape(data), static_shape(self.typed(value))
        if is_constant(data) or shape is None or wanted is None or value.attrs.axis is None:
            return value
        axis = int(value.attrs.axis) % len(shape)
        if index.ndim > 1 or index.size == 0:
            return value
        places = index.reshape(-1).astype("int64")
        begin, end = int(places[0]), int(places[-1]) + 1
        if (
            begin < 0
            or end > shape[axis]
            or (places != np.arange(begin, begin + len(places))).any()
        ):
            return value
        part = relax.op.strided_slice(data, axes=[axis], begin=[begin], end=[end])
        if index.ndim == 1:
            return part
        return relax.op.reshape(self.emit(name, part), wanted)
