"""Fold multiplications by constants around a convolution or matmul into its constant weight."""

from __future__ import annotations

import numpy as np

from ...compat import ir, tvm
from .constants import cast, is_constant, to_constant, to_numpy, widen
from .rewrite import BindingRewriter, dtype_of, op_name, same_type, with_args

_CONVOLUTIONS = {"nn.conv1d", "nn.conv2d", "nn.conv3d"}
_TRANSPOSED = {"nn.conv1d_transpose", "nn.conv2d_transpose", "nn.conv3d_transpose"}


@tvm.transform.module_pass(opt_level=0, name="tvm_fusion.FoldScaleIntoWeights")
class FoldScaleIntoWeights:
    """conv(x, w) * s -> conv(x, w * s), and conv(x * s, w) -> conv(x, s * w); the same for matmul.

    ``s`` must hold one number per output (input) channel, or one number; the weight must be
    constant, and nothing else may read the value between the two. Zero padding commutes with a
    scale of the input, so padded convolutions qualify. Grouped, depthwise and transposed
    convolutions are scaled along their own output axis.
    """

    def transform_module(self, mod: tvm.IRModule, ctx: tvm.transform.PassContext) -> tvm.IRModule:
        return _Rewriter().transform(mod)


class _Rewriter(BindingRewriter):
    def visit(self, name: str, value: ir.Expr) -> ir.Expr:
        op = op_name(value)
        if op == "multiply" and is_constant(value.args[1]) and self.single_use(value.args[0]):
            anchor = self.producer(value.args[0])
            weight = _scaled_outputs(anchor, value.args[1])
            if weight is not None:
                folded = with_args(anchor, anchor.args[0], weight)
                if same_type(self.typed(folded), self.typed(value)):
                    return self.emit(value.args[0].name, folded)
        elif op in _CONVOLUTIONS or op == "matmul":
            product = self.producer(value.args[0], "multiply")
            if (
                product is not None
                and is_constant(product.args[1])
                and self.single_use(value.args[0])
            ):
                weight = _scaled_inputs(self.typed(value), product.args[1])
                if weight is not None:
                    folded = with_args(value, product.args[0], weight)
                    if same_type(self.typed(folded), self.typed(value)):
                        return folded
        return value


def _scaled_outputs(anchor: ir.Call | None, scale: ir.GenericConst) -> ir.GenericConst | None:
    """Return the weight of ``anchor`` with output channel o times scale[o], or None when that is not the same."""
    op = op_name(anchor)
    if op not in _CONVOLUTIONS | _TRANSPOSED | {"matmul"} or not is_constant(anchor.args[1]):
        return None
    ndim = anchor.ty.ndim
    weight = widen(to_numpy(anchor.args[1]))
    if op == "matmul":
        if ndim < 1 or weight.ndim < 2:
            return None
        vector = _per_channel(scale, ndim, ndim - 1)
        return None if vector is None else _round(weight * vector, anchor.args[1], scale)
    attrs = anchor.attrs
    layout = str(attrs.kernel_layout)
    out_layout = str(attrs.out_layout or attrs.data_layout)
    if len(layout) != weight.ndim or len(out_layout) != ndim:
        return None
    vector = _per_channel(scale, ndim, out_layout.index("C"))
    if vector is None:
        return None
    axis = layout.index("O")
    groups = int(attrs.groups)
    if op in _TRANSPOSED and groups > 1 and vector.size > 1:
        # The weight is [I, O / groups, ...]: block g of the input channels makes block g of the
        # output channels.
        inputs = layout.index("I")
        moved = np.moveaxis(weight, (inputs, axis), (0, 1))
        blocks = moved.reshape(groups, -1, *moved.shape[1:])
        factors = vector.reshape(groups, 1, -1, *[1] * (weight.ndim - 2))
        scaled = np.moveaxis((blocks * factors).reshape(moved.shape), (0, 1), (inputs, axis))
    else:
        scaled = weight * _along(vector, axis, weight.ndim)
    return _round(scaled, anchor.args[1], scale)


def _scaled_inputs(anchor: ir.Call, scale: ir.GenericConst) -> ir.GenericConst | None:
    """Return the weight of ``anchor`` with input channel i times scale[i], or None when that is not the same."""
    if not is_constant(anchor.args[1]):
        return None
    ndim = anchor.args[0].ty.ndim
    weight = widen(to_numpy(anchor.args[1]))
    if op_name(anchor) == "matmul":
        if ndim < 1 or weight.ndim < 2:
            return None
        vector = _per_channel(scale, ndim, ndim - 1)
        return None if vector is None else _round(weight * vector[:, None], anchor.args[1], scale)
    layout, data_layout = str(anchor.attrs.kernel_layout), str(anchor.attrs.data_layout)
    if len(layout) != weight.ndim or len(data_layout) != ndim:
        return None
    vector = _per_channel(scale, ndim, data_layout.index("C"))
    if vector is None or (vector.size > 1 and int(anchor.attrs.groups) > 1):
        return None
    return _round(weight * _along(vector, layout.index("I"), weight.ndim), anchor.args[1], scale)


def _per_channel(scale: ir.GenericConst, ndim: int, axis: int) -> np.ndarray | None:
    """Return ``scale``, an operand of a tensor of rank ``ndim``, as a vector, or None when it varies off ``axis``."""
    array = widen(to_numpy(scale))
    full = (1,) * (ndim - array.ndim) + array.shape
    if len(full) != ndim or any(n != 1 for i, n in enumerate(full) if i != axis):
        return None
    return array.reshape(-1)


def _along(vector: np.ndarray, axis: int, ndim: int) -> np.ndarray:
    return vector.reshape([-1 if i == axis else 1 for i in range(ndim)])


def _round(
    array: np.ndarray, weight: ir.GenericConst, scale: ir.GenericConst
) -> ir.GenericConst | None:
    dtype = dtype_of(weight)
    if dtype != dtype_of(scale) or not np.isfinite(cast(array, dtype)).all():
        return None
    return to_constant(array, dtype)
