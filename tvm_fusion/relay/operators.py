"""Relay's operators by the names and attributes that the graph has for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .compat import Op, relay

_SAME = (
    "sigmoid tanh exp log sqrt rsqrt negative abs erf clip floor ceil round trunc sign cos tan sin asin acos "
    "atan sinh cosh logical_not bitwise_not isnan isinf isfinite add subtract multiply divide power maximum "
    "minimum floor_divide mod floor_mod equal not_equal less less_equal greater greater_equal logical_and "
    "logical_or logical_xor where split strided_slice broadcast_to tile repeat take stack full zeros ones "
    "full_like zeros_like ones_like reshape expand_dims squeeze sum mean max min prod variance std argmax argmin"
)  # fmt: skip

_IN_NN = (
    "relu prelu pad conv1d conv2d conv3d conv1d_transpose conv2d_transpose conv3d_transpose max_pool1d max_pool2d "
    "max_pool3d avg_pool1d avg_pool2d avg_pool3d adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d "
    "softmax log_softmax layer_norm group_norm instance_norm dropout"
)  # fmt: skip

#: Operator type in the graph of each Relay operator whose operands and results are the same there.
#: Operators that are not here, and have no rule in `rules`, are opaque.
NAME_OF: Mapping[str, str] = {
    **{name: name for name in _SAME.split()},
    **{f"nn.{name}": name for name in _IN_NN.split()},
    "nn.leaky_relu": "leakyrelu",
    "cast": "astype",
    "transpose": "permute_dims",
    "concatenate": "concat",
    "reverse": "flip",
    "gather": "gather_elements",
    "nn.batch_flatten": "reshape",
    "image.resize2d": "resize2d",
    "nn.upsampling": "resize2d",
    "nn.mirror_pad": "pad",
    "broadcast_to_like": "broadcast_to",
    "cast_like": "astype",
    "reshape_like": "reshape",
    "fast_exp": "exp",
    "fast_tanh": "tanh",
    "fast_erf": "erf",
    "nn.fast_softmax": "softmax",
}

#: Operators that can be evaluated at compile time where all operands are constant.
FOLDABLE = frozenset(
    "add subtract multiply divide power maximum minimum equal not_equal less less_equal greater greater_equal "
    "negative abs sqrt rsqrt exp log square floor ceil tanh relu isnan logical_not reshape full zeros ones "
    "broadcast_to permute_dims astype concat stack split strided_slice where take logical_and logical_or bitwise_and "
    "bitwise_or bitwise_xor bitwise_not cos sin sigmoid arange gather_elements".split()
)  # fmt: skip

#: Calls that regroup a tensor's elements.
VIEWS = ("expand_dims", "squeeze", "reshape", "reshape_like", "nn.batch_flatten")

_BINARY = frozenset(
    "add subtract multiply divide power maximum minimum equal not_equal less less_equal greater greater_equal".split()
)


def is_binary(op: str) -> bool:
    """Whether an operator takes two operands that broadcast."""
    return op in _BINARY


def is_view(expr: Any) -> bool:
    """Whether an expression is a call that regroups a tensor's elements."""
    return isinstance(expr, relay.Call) and isinstance(expr.op, Op) and expr.op.name in VIEWS


def graph_attrs(
    relay_op: str, attrs: Mapping[str, Any], shapes: Sequence[Sequence[int | None]]
) -> dict[str, Any]:
    """Attributes of an operator as the graph has them.

    Parameters
    ----------
    relay_op : str
        Name of the Relay operator.
    attrs : mapping
        Its attributes as plain values.
    shapes : sequence of shapes
        Shapes of its operands.
    """
    out = dict(attrs)
    rank = len(shapes[0]) if shapes else 0
    if "exclude" in out:  # reductions
        axes = out["axis"]
        axes = (axes,) if isinstance(axes, int) else axes
        chosen = None if axes is None or axes == () else sorted(a % rank for a in axes)
        if out.pop("exclude") and chosen is not None:
            chosen = [a for a in range(rank) if a not in chosen]
        out["axis"] = None if chosen is None else tuple(chosen)
    elif relay_op == "nn.layer_norm":
        out["axes"] = (out.pop("axis"),)
    elif relay_op == "transpose" and not out.get("axes"):
        out["axes"] = tuple(range(rank))[::-1]
    elif relay_op in ("nn.pad", "nn.mirror_pad"):
        out["pad_width"] = tuple(n for pair in out["pad_width"] for n in pair)
    return out
