"""What converters of ATen nodes share: arguments by their schema's names, and the types that PyTorch computes in."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import torch
from torch import fx

from ..compat import BlockBuilder, ir, relax

#: PyTorch's types that Relax knows, by name.
_NAMES: dict[torch.dtype, str] = {
    torch.float64: "float64", torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16",
    torch.int64: "int64", torch.int32: "int32", torch.int16: "int16", torch.int8: "int8", torch.uint8: "uint8",
    torch.bool: "bool",
}  # fmt: skip


def dtype_name(dtype: torch.dtype) -> str:
    """Return Relax's name of a PyTorch type.

    Raises
    ------
    NotImplementedError
        If Relax has no such type (complex numbers, quantised ones).
    """
    if dtype not in _NAMES:
        raise NotImplementedError(f"tensors of {dtype} are not supported")
    return _NAMES[dtype]


class Refusal(NotImplementedError):
    """An operator that no decomposition could help: it draws random numbers, or belongs to training."""


class Arguments:
    """What a node was called with: ``arguments["dim"]`` is the value, converted, or the schema's default.

    Parameters
    ----------
    env : dict
        The converted values by node.
    node : fx.Node
        A call of an ATen operator.
    """

    def __init__(self, env: dict[fx.Node, Any], node: fx.Node) -> None:
        self._env = env
        self._given: dict[str, Any] = {}
        for position, argument in enumerate(node.target._schema.arguments):
            if position < len(node.args):
                self._given[argument.name] = node.args[position]
            elif argument.name in node.kwargs:
                self._given[argument.name] = node.kwargs[argument.name]
            else:
                self._given[argument.name] = argument.default_value

    def __contains__(self, name: str) -> bool:
        return name in self._given

    def __getitem__(self, name: str) -> Any:
        return fx.node.map_arg(self._given[name], lambda node: self._env[node])

    def fake(self, name: str) -> Any:
        """The argument as PyTorch's tracer saw it: fake tensors instead of expressions."""
        return fx.node.map_arg(self._given[name], lambda node: node.meta.get("val"))


def static_dims(fake: torch.Tensor) -> list[int]:
    """Return the sizes of a traced tensor.

    Raises
    ------
    NotImplementedError
        If one is symbolic: what asks for sizes cannot be imported without them.
    """
    if not all(isinstance(size, int) for size in fake.shape):
        raise NotImplementedError(
            f"it needs fixed sizes, and has {tuple(fake.shape)}; give them with shape (--shape)"
        )
    return list(fake.shape)


def in_dtype(builder: BlockBuilder, value: Any, dtype: str) -> ir.Expr:
    """Return an operand in a type: a number as a constant, a tensor cast where it has another."""
    if not isinstance(value, ir.Expr) or not isinstance(value.ty, relax.TensorType):
        return relax.const(value, dtype)
    if str(value.ty.dtype) == dtype:
        return value
    return builder.emit(relax.op.astype(value, dtype))


def result_dtype(node: fx.Node) -> str:
    """Return the type of a node's result."""
    return dtype_name(node.meta["val"].dtype)


def axes_of(dim: Any, ndim: int) -> list[int]:
    """Return the axes that a ``dim`` argument names; all for None and for an empty list."""
    if dim is None or dim == []:
        return list(range(ndim))
    return [axis % max(ndim, 1) for axis in ([dim] if isinstance(dim, int) else dim)][
        : max(ndim, 0)
    ]


class Importer(Protocol):
    """What converters need of the importer."""

    block_builder: BlockBuilder
    env: dict[fx.Node, Any]
    #: TVM's own converters.
    stock: dict[str, Callable[[fx.Node], Any]]


Converter = Callable[[Importer, fx.Node], Any]


@contextlib.contextmanager
def seen_as(importer: Importer, values: Mapping[fx.Node, Any]) -> Iterator[None]:
    """Let TVM's own converters see other operands than the nodes' values."""
    kept = {node: importer.env[node] for node in values}
    importer.env.update(values)
    try:
        yield
    finally:
        importer.env.update(kept)
