"""How each operator is computed on channels-last operands; the rules of ``ConvertLayout``."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from ...compat import ir, relax
from .constants import is_constant, to_constant, to_numpy
from .convert_layout import LayoutRewriter, last_order
from .elementwise import BINARY
from .remove_no_ops import permutation
from .rewrite import dims, op_name, same_dim, static_shape, with_args, with_attrs

Rule = Callable[[LayoutRewriter, str, ir.Expr], ir.Expr | None]


def _convolution(rw: LayoutRewriter, name: str, call: ir.Call) -> ir.Expr | None:
    attrs = call.attrs
    layouts = (str(attrs.data_layout), str(attrs.kernel_layout), str(attrs.out_layout or "NCHW"))
    if layouts != ("NCHW", "OIHW", "NCHW"):
        return None
    data, weight = call.args
    order = [0, 2, 3, 1]
    if is_constant(weight):
        kernel = to_constant(np.transpose(to_numpy(weight), order))
    else:
        kernel = rw.emit(name, relax.op.permute_dims(rw.plain(weight), order))
    converted = with_attrs(call, data_layout="NHWC", kernel_layout="OHWI", out_layout="NHWC")
    return rw.placeholder(name, with_args(converted, rw.last(data, name), kernel))


def _same_layout(rw: LayoutRewriter, name: str, call: ir.Call) -> ir.Expr | None:
    """Elementwise operators of one tensor (further operands are scalars)."""
    data, *rest = call.args
    if not rw.is_last(data) or any(getattr(arg.ty, "ndim", 0) for arg in rest):
        return None
    return rw.placeholder(name, with_args(call, rw.last(data, name), *rest))


def _elementwise(rw: LayoutRewriter, name: str, call: ir.Call) -> ir.Expr | None:
    ranks = [arg.ty.ndim for arg in call.args if rw.is_last(arg)]
    if not ranks:
        return None
    args = []
    for arg in call.args:
        rank = arg.ty.ndim
        if rank == 0:
            args.append(arg)
        elif rank < ranks[0] and static_shape(arg) is not None:
            full = [1] * (ranks[0] - rank) + list(static_shape(arg))
            aligned = (
                to_constant(to_numpy(arg).reshape(full))
                if is_constant(arg)
                else rw.emit(name, relax.op.reshape(arg, full))
            )
            args.append(rw.last(aligned, name))
        elif rank == ranks[0]:
            args.append(rw.last(arg, name))
        else:
            return None
    return rw.placeholder(name, with_args(call, *args))


def _pool(rw: LayoutRewriter, name: str, call: ir.Call) -> ir.Expr | None:
    data = call.args[0]
    layout = {4: "NCHW", 5: "NCDHW"}.get(data.ty.ndim)
    out_layout = getattr(call.attrs, "out_layout", None)
    if (
        not rw.is_last(data)
        or str(call.attrs.layout) != layout
        or str(out_layout or layout) != layout
    ):
        return None
    new = "".join(layout[axis] for axis in last_order(len(layout)))
    changes = {"layout": new} if out_layout is None else {"layout": new, "out_layout": new}
    return rw.placeholder(name, with_args(with_attrs(call, **changes), rw.last(data, name)))


def _concat(rw: LayoutRewriter, name: str, call: ir.Call) -> ir.Expr | None:
    fields = call.args[0].fields if isinstance(call.args[0], relax.Tuple) else []
    if not any(rw.is_last(field) for field in fields) or call.attrs.axis is None:
        return None
    ndim = fields[0].ty.ndim
    axis = last_order(ndim).index(int(call.attrs.axis) % ndim)
    operands = relax.Tuple([rw.last(field, name) for field in fields])
    return rw.placeholder(name, with_args(with_attrs(call, axis=axis), operands))


def _split(rw: LayoutRewriter, name: str, call: ir.Call) -> ir.Expr | None:
    data = call.args[0]
    if not rw.is_last(data):
        return None
    ndim = data.ty.ndim
    axis = last_order(ndim).index(int(call.attrs.axis) % ndim)
    parts = rw.emit(name, with_args(with_attrs(call, axis=axis), rw.last(data, name)))
    return relax.Tuple(
        [rw.placeholder(name, relax.TupleGetItem(parts, i)) for i in range(len(parts.ty.fields))]
    )


def _reduce(rw: LayoutRewriter, name: str, call: ir.Call) -> ir.Expr | None:
    data = call.args[0]
    if not rw.is_last(data):
        return None
    ndim = data.ty.ndim
    order = last_order(ndim)
    axes = (
        range(ndim) if call.attrs.axis is None else [int(axis) % ndim for axis in call.attrs.axis]
    )
    kept = [axis for axis in order if axis not in axes]
    if not call.attrs.keepdims and kept != sorted(kept):
        return None  # the remaining axes would come out in another order
    result = with_args(
        with_attrs(call, axis=sorted(order.index(axis) for axis in axes)), rw.last(data, name)
    )
    return rw.placeholder(name, result) if call.attrs.keepdims else result


def _softmax(rw: LayoutRewriter, name: str, call: ir.Call) -> ir.Expr | None:
    data = call.args[0]
    if not rw.is_last(data):
        return None
    axis = last_order(data.ty.ndim).index(int(call.attrs.axis) % data.ty.ndim)
    return rw.placeholder(name, with_args(with_attrs(call, axis=axis), rw.last(data, name)))


def _pad(rw: LayoutRewriter, name: str, call: ir.Call) -> ir.Expr | None:
    data = call.args[0]
    if not rw.is_last(data):
        return None
    width = [int(n) for n in call.attrs.pad_width]
    if len(width) != 2 * data.ty.ndim:
        return None
    moved = [n for axis in last_order(data.ty.ndim) for n in width[2 * axis : 2 * axis + 2]]
    return rw.placeholder(
        name, with_args(with_attrs(call, pad_width=moved), rw.last(data, name), *call.args[1:])
    )


def _resize(rw: LayoutRewriter, name: str, call: ir.Call) -> ir.Expr | None:
    data = call.args[0]
    if not rw.is_last(data) or str(call.attrs.layout) != "NCHW":
        return None
    return rw.placeholder(
        name, with_args(with_attrs(call, layout="NHWC"), rw.last(data, name), *call.args[1:])
    )


def _reshape(rw: LayoutRewriter, name: str, call: ir.Call) -> ir.Expr | None:
    data = call.args[0]
    before, after = dims(data), dims(rw.typed(call))
    if not rw.is_last(data) or before is None or after is None:
        return None
    physical = rw.last(data, name)
    outer = [(before[0], after[0])]
    if len(after) >= 4 and all(
        same_dim(*pair) for pair in [*outer, *zip(before[-2:], after[-2:], strict=True)]
    ):
        return rw.placeholder(
            name, relax.op.reshape(physical, [after[axis] for axis in last_order(len(after))])
        )
    if _all_ones(before[-2:]) or _all_ones(before[1:-2]):
        return relax.op.reshape(physical, after)  # the elements are in the same order either way
    sizes = before[1:]
    static = all(isinstance(size, int) for size in sizes)
    if static and len(before) == 4 and len(after) == 2 and same_dim(*outer[0]) and _feeds_dense(rw):
        flat = rw.emit(name, relax.op.reshape(physical, after))
        rw.flattened[flat] = tuple(sizes)
        return flat
    return None


def _all_ones(sizes: Sequence[int | ir.Expr]) -> bool:
    return all(isinstance(size, int) and size == 1 for size in sizes)


def _feeds_dense(rw: LayoutRewriter) -> bool:
    """Return whether the current value is only the left operand of matmuls with constant weights."""
    users = rw.consumers.get(rw.visiting, [])
    return bool(users) and all(
        op_name(user) == "matmul"
        and user.args[0].same_as(rw.visiting)
        and is_constant(user.args[1])
        and user.args[1].ty.ndim == 2
        for user in users
    )


def _matmul(rw: LayoutRewriter, name: str, call: ir.Call) -> ir.Expr | None:
    sizes = rw.flattened.get(call.args[0])
    if sizes is None:
        return None
    weight = to_numpy(call.args[1])
    channels_last = np.transpose(weight.reshape(*sizes, -1), (1, 2, 0, 3)).reshape(weight.shape)
    return with_args(call, call.args[0], to_constant(channels_last))


def _permute(rw: LayoutRewriter, name: str, call: ir.Call) -> ir.Expr | None:
    data = call.args[0]
    if not rw.is_last(data):
        return None
    axes, order = permutation(call), last_order(data.ty.ndim)
    ndim = len(axes)
    physical = rw.last(data, name)
    if axes[0] == 0 and axes[-2:] == [ndim - 2, ndim - 1]:  # channels among themselves
        moved = [order.index(axes[axis]) for axis in order]
        return rw.placeholder(name, relax.op.permute_dims(physical, moved))
    moved = [order.index(axis) for axis in axes]
    return physical if moved == list(range(ndim)) else relax.op.permute_dims(physical, moved)


def _slice(rw: LayoutRewriter, name: str, call: ir.Call) -> ir.Expr | None:
    data, axes, begin, end, *strides = call.args
    if not rw.is_last(data) or not isinstance(axes, relax.Tuple):
        return None
    order = last_order(data.ty.ndim)
    moved = [order.index(int(axis) % data.ty.ndim) for axis in axes.fields]
    sliced = relax.op.strided_slice(
        rw.last(data, name),
        moved,
        begin,
        end,
        *strides,
        assume_inbound=bool(call.attrs.assume_inbound),
    )
    return rw.placeholder(name, sliced)


_UNARY = (
    "abs", "astype", "ceil", "clip", "cos", "erf", "exp", "floor", "hardswish", "log", "logical_not", "negative",
    "nn.gelu", "nn.gelu_tanh", "nn.leakyrelu", "nn.relu", "nn.relu6", "nn.selu", "nn.silu", "nn.softplus", "round",
    "rsqrt", "sigmoid", "sign", "sin", "sqrt", "square", "tanh",
)  # fmt: skip

#: Rules by operator (or node class); a rule returns None when the operator is better left as it is.
RULES: dict[str, Rule] = {
    **dict.fromkeys(_UNARY, _same_layout),
    **dict.fromkeys((*BINARY, "where"), _elementwise),
    **dict.fromkeys(
        (
            "nn.max_pool2d",
            "nn.avg_pool2d",
            "nn.adaptive_avg_pool2d",
            "nn.max_pool3d",
            "nn.avg_pool3d",
        ),
        _pool,
    ),
    **dict.fromkeys(("sum", "mean", "max", "min", "prod"), _reduce),
    **dict.fromkeys(("nn.softmax", "nn.log_softmax"), _softmax),
    "concat": _concat,
    "image.resize2d": _resize,
    "matmul": _matmul,
    "nn.conv2d": _convolution,
    "nn.pad": _pad,
    "permute_dims": _permute,
    "reshape": _reshape,
    "split": _split,
    "strided_slice": _slice,
}
