"""What the package knows of each operator type: its pattern and its FLOPs.

The table is by operator type without a dialect prefix, so that Relax and Relay share it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from .dataflow import Tensor

#: The patterns, from the most to the least fusable.
#:
#: ``elementwise``  one output element per input element of the same index
#: ``broadcast``    elementwise with operands that broadcast
#: ``injective``    each output element reads one input element (transpose, concat, slice)
#: ``view``         no work at all: the same bytes with another shape
#: ``anchor``       convolution or matrix product
#: ``pool``         small-window reduction
#: ``reduction``    sum, mean, max over axes
#: ``row``          normalisation of rows: softmax, layer norm
#: ``opaque``       anything a group must not contain
PATTERNS: tuple[str, ...] = (
    "elementwise", "broadcast", "injective", "view", "anchor", "pool", "reduction", "row", "opaque",
)  # fmt: skip

_BY_PATTERN: Mapping[str, str] = {
    "elementwise": "relu leakyrelu sigmoid tanh exp log sqrt rsqrt square negative abs erf gelu gelu_tanh silu "
    "clip astype floor ceil round trunc sign sin cos tan asin acos atan sinh cosh relu6 softplus "
    "logical_not bitwise_not isnan isinf isfinite hardswish hardsigmoid selu elu",
    "broadcast": "add subtract multiply divide power maximum minimum floor_divide mod floor_mod equal not_equal "
    "less less_equal greater greater_equal logical_and logical_or logical_xor bitwise_and bitwise_or bitwise_xor "
    "where prelu",
    "injective": "permute_dims concat split strided_slice broadcast_to tile repeat flip take pad stack resize2d "
    "gather_elements full zeros ones full_like zeros_like ones_like",
    "view": "reshape expand_dims squeeze flatten",
    "anchor": "conv1d conv2d conv3d conv1d_transpose conv2d_transpose conv3d_transpose matmul",
    "pool": "max_pool1d max_pool2d max_pool3d avg_pool1d avg_pool2d avg_pool3d adaptive_avg_pool2d",
    "reduction": "sum mean max min prod variance std argmax argmin",
    "row": "softmax log_softmax layer_norm rms_norm group_norm instance_norm",
}

#: Pattern of each known operator type.
PATTERN_OF: Mapping[str, str] = {
    op: pattern for pattern, ops in _BY_PATTERN.items() for op in ops.split()
}

#: Arithmetic operations per element of a row normalisation (subtract, square or exp, two sums,
#: scale, shift).
_ROW_FLOPS = {
    "softmax": 4,
    "log_softmax": 5,
    "layer_norm": 8,
    "rms_norm": 5,
    "group_norm": 8,
    "instance_norm": 8,
}


def pattern_of(op: str) -> str:
    """Return the pattern of an operator type; unknown types are ``"opaque"``."""
    return PATTERN_OF.get(op, "opaque")


def flops_of(
    op: str, attrs: Mapping[str, Any], inputs: Sequence[Tensor], outputs: Sequence[Tensor]
) -> int:
    """Count the floating-point operations of one operator.

    Parameters
    ----------
    op : str
        Operator type.
    attrs : mapping
        Its attributes.
    inputs, outputs : sequence of Tensor
        Its operands and results.

    Returns
    -------
    int
        FLOPs; a multiply-add counts two, an elementwise operator one per output element.
    """
    pattern, out = pattern_of(op), outputs[0].size
    if op.startswith("conv") and len(inputs) >= 2:
        return 2 * _conv_macs(op, attrs, inputs[0], inputs[1], outputs[0])
    if op == "matmul":
        return 2 * out * (inputs[0].shape[-1] or 1)
    if pattern == "pool":
        window = attrs.get("pool_size")
        return out * math.prod(window) if window else inputs[0].size
    if pattern == "reduction":
        return inputs[0].size * (3 if op in ("variance", "std") else 1)
    if pattern == "row":
        return inputs[0].size * _ROW_FLOPS[op]
    if pattern in ("elementwise", "broadcast") and op != "astype":
        return out
    return 0


def _conv_macs(op: str, attrs: Mapping[str, Any], data: Tensor, weight: Tensor, out: Tensor) -> int:
    """Multiply-adds of a convolution: every output element reads one filter.

    A transposed convolution scatters instead: every *input* element meets one filter.
    """
    layout = str(attrs.get("kernel_layout", ""))
    in_first = op.endswith("transpose")
    axis = layout.find("I" if in_first else "O")
    per_filter = weight.size // max(weight.shape[axis if axis >= 0 else 0] or 1, 1)
    return (data.size if in_first else out.size) * per_filter
