"""Operators on tensors without elements or of rank 0, and those whose result no input decides.

TVM's converters do not expect them: a reduction over nothing divides by zero, an argmax of a number has no axis.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload

from ..compat import BlockBuilder, ir, relax
from .torch_arguments import Importer, dtype_name, seen_as

#: Results of this size are stored; larger ones, which are seldom made from nothing, are computed.
_MOST_ELEMENTS = 1 << 20

#: Constants that have an operator of their own, or that differ from call to call.
_LEFT = (
    "full",
    "zeros",
    "ones",
    "empty",
    "rand",
    "normal",
    "bernoulli",
    "multinomial",
    "new_",
    "scalar_tensor",
)

#: Operators along an axis that TVM refuses for numbers.
_ALONG_AXIS = frozenset((
    "_log_softmax.default", "_softmax.default", "argmax.default", "argmin.default", "argsort.default",
    "argsort.stable", "max.dim", "mean.default", "mean.dim", "min.dim", "sort.default", "sort.stable",
    "sum.dim_IntList", "topk.default",
))  # fmt: skip


def constant_result(builder: BlockBuilder, node: fx.Node) -> ir.Expr | None:
    """Return the result of a node that depends on no element of any input: of nothing but empty tensors, or empty.

    PyTorch computes it. None where there is an operand with elements, and a result with some.
    """
    fake = node.meta.get("val")
    if not isinstance(node.target, OpOverload) or not isinstance(fake, torch.Tensor):
        return None
    if not _is_static(fake) or (not fake.dtype.is_floating_point and fake.dtype.is_complex):
        return None
    if fake.numel() == 0:
        return builder.emit(relax.op.zeros(list(fake.shape), dtype_name(fake.dtype)))
    operands = [n.meta.get("val") for n in node.all_input_nodes]
    if fake.numel() > _MOST_ELEMENTS or node.target.__name__.startswith(_LEFT):
        return None
    if not all(isinstance(o, torch.Tensor) and _is_static(o) and not o.numel() for o in operands):
        return None

    def empty(operand: fx.Node) -> torch.Tensor:
        seen = operand.meta["val"]
        return torch.empty(seen.shape, dtype=seen.dtype)

    args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), empty)
    with torch.no_grad():
        value = node.target(*args, **kwargs)
    return relax.const(value.contiguous().numpy(), dtype_name(fake.dtype))


def _is_static(fake: torch.Tensor) -> bool:
    return all(isinstance(size, int) for size in fake.shape)


def as_vector(importer: Importer, convert: Callable[[fx.Node], Any], node: fx.Node) -> Any:
    """Convert a node; one along the axis of a tensor of rank 0 as one of a vector of one element."""
    name = getattr(node.target, "__name__", "")
    operand = node.args[0] if node.args else None
    fake = operand.meta.get("val") if isinstance(operand, fx.Node) else None
    if name not in _ALONG_AXIS or not isinstance(fake, torch.Tensor) or fake.ndim:
        return convert(node)
    builder = importer.block_builder
    vector = builder.emit(relax.op.reshape(importer.env[operand], [1]))
    with seen_as(importer, {operand: vector}):
        result = convert(node)
    if isinstance(result, tuple | list):
        return type(result)(builder.emit(relax.op.reshape(item, [])) for item in result)
    if isinstance(getattr(result, "ty", None), ir.TupleType):
        count = len(result.ty.fields)
        fields = [builder.emit(relax.TupleGetItem(result, i)) for i in range(count)]
        return relax.Tuple([builder.emit(relax.op.reshape(field, [])) for field in fields])
    return builder.emit(relax.op.reshape(result, []))
