"""Give every bias one form: an addition whose right operand is a constant in the output's own layout."""

from __future__ import annotations

from ...compat import ir, relax, tvm
from .constants import is_constant, to_constant, to_numpy
from .rewrite import BindingRewriter, dims, op_name, same_type, static_shape, with_args

_ANCHORS = {
    "nn.conv1d", "nn.conv2d", "nn.conv3d", "nn.conv1d_transpose", "nn.conv2d_transpose", "nn.conv3d_transpose",
}  # fmt: skip


@tvm.transform.module_pass(opt_level=0, name="tvm_fusion.SimplifyBias")
class SimplifyBias:
    """Bias behind a convolution -> constant [1, C, 1, 1] on the right; behind a matmul -> constant [N].

    A scalar becomes one number per channel; a rank below the output's is filled with ones.
    Constants that vary along another axis stay as they are.
    """

    def transform_module(self, mod: tvm.IRModule, ctx: tvm.transform.PassContext) -> tvm.IRModule:
        return _Rewriter().transform(mod)


class _Rewriter(BindingRewriter):
    def visit(self, name: str, value: ir.Expr) -> ir.Expr:
        if op_name(value) != "add":
            return value
        data, bias = value.args
        if is_constant(data) and not is_constant(bias):
            data, bias = bias, data
        anchor = self.producer(data)
        op, shape = op_name(anchor), dims(data)
        if not is_constant(bias) or shape is None or not same_type(self.typed(value), data):
            return value
        if op in _ANCHORS:
            axis = str(anchor.attrs.out_layout or anchor.attrs.data_layout).index("C")
            wanted = tuple(n if i == axis else 1 for i, n in enumerate(shape))
        elif op == "matmul":
            axis, wanted = len(shape) - 1, tuple(shape[-1:])
        else:
            return value
        if not isinstance(shape[axis], int):
            return value
        given = static_shape(bias)
        aligned = (1,) * (len(shape) - len(given)) + given
        if any(n != 1 for i, n in enumerate(aligned) if i != axis):
            return value
        if given != wanted:
            array = to_numpy(bias).reshape(-1)
            if array.size == 1 and shape[axis] != 1:
                array = array.repeat(shape[axis])
            bias = to_constant(array.reshape(wanted))
        elif data is value.args[0]:
            return value
        return with_args(value, data, bias) if isinstance(data, relax.Var) else value
