"""What lies between a Relay function and its dataflow graph: operators that remember their expressions."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from ..graph.dataflow import DataflowGraph
from .compat import relay

#: The results of an expression: a value, or a tuple of them, nested as the expression's type.
Structure = Any


@dataclasses.dataclass(eq=False)
class Value:
    """One tensor.

    Attributes
    ----------
    shape : tuple of (int or None)
        Extents; ``None`` where Relay has ``Any`` or a variable.
    dtype : str
        Element type.
    node : Node or None
        The operator that makes it.
    is_constant : bool
        Whether it is known at compile time.
    is_tensor : bool
        Whether it is a tensor at all (a function or an algebraic data type is not).
    data : relay.Constant, numpy.ndarray or None
        The numbers of a constant, where they are at hand.
    """

    shape: tuple[int | None, ...]
    dtype: str
    node: Node | None = None
    is_constant: bool = False
    is_tensor: bool = True
    data: Any = None

    @property
    def is_scalar_constant(self) -> bool:
        """Whether it is a number inside an operator rather than a tensor that is read."""
        return self.is_constant and self.shape == ()

    @property
    def is_static(self) -> bool:
        """Whether every extent is known."""
        return None not in self.shape

    @property
    def size(self) -> int:
        """Number of elements; every extent must be known."""
        return math.prod(n for n in self.shape if n is not None)

    @functools.cached_property
    def array(self) -> np.ndarray | None:
        """The numbers of a constant; None where they are not at hand."""
        if isinstance(self.data, relay.Constant):
            return self.data.data.numpy()
        return self.data

    @property
    def base(self) -> Value:
        """The tensor that it is a reshape of; itself where it is none."""
        value = self
        while value.node is not None and value.node.op == "reshape":
            value = value.node.inputs[0]
        return value

    def same_type(self, other: Value) -> bool:
        """Whether shape and dtype are known to be equal."""
        return self.is_static and self.shape == other.shape and self.dtype == other.dtype


@dataclasses.dataclass(eq=False)
class Node:
    """One operator of the graph and the expression that computes it.

    Attributes
    ----------
    op : str
        Operator type as in ``graph.operators``.
    attrs : dict
        Attributes as plain values.
    inputs : list of Value
        Operands in order.
    root : relay.Expr
        The expression whose value the operator's result is. What stands between it and the
        expressions of ``inputs`` (a reshape of a constant, a dropout, a scale that was folded)
        belongs to the operator.
    structure : Structure
        Its results.
    apart : relay.Expr or None
        The expression that reads the results of ``helpers`` in place of computing them. Relay's
        ``nn.dense`` is a transposition and a product; where only one of them is in a group, the call
        is taken apart.
    helpers : list of Node
        The operators that ``root`` computes as well.
    origin : relay.Expr
        The call of the model that the operator came from.
    is_implied : bool
        Whether it is a reshape that no call of the model is: an operator was moved before it.
    """

    op: str
    attrs: dict[str, Any]
    inputs: list[Value]
    root: Any
    structure: Structure = None
    apart: Any = None
    helpers: list[Node] = dataclasses.field(default_factory=list)
    origin: Any = None
    is_implied: bool = False

    @property
    def outputs(self) -> list[Value]:
        """The results in order."""
        return list(flatten(self.structure))

    @property
    def output(self) -> Value:
        """The only result."""
        return self.structure


def flatten(structure: Structure) -> Iterator[Value]:
    """Values of a structure in order."""
    if isinstance(structure, Value):
        yield structure
    else:
        for field in structure:
            yield from flatten(field)


@dataclasses.dataclass(frozen=True)
class RelayGraph:
    """A dataflow graph and where its operators stand in the Relay function.

    Attributes
    ----------
    graph : DataflowGraph
        The IR-neutral graph.
    nodes : mapping of str to Node
        Operators by name.
    function : relay.Function
        The function that was read, with types.
    values : mapping of relay.Expr to Structure
        Results of the function's expressions.
    bound : mapping of relay.Var to relay.Expr
        What each ``let`` binds.
    closures : tuple of (relay.Var, relay.Function)
        Variables that hold local functions, in the order in which they are bound.
    """

    graph: DataflowGraph
    nodes: Mapping[str, Node]
    function: Any
    values: Mapping[Any, Structure]
    bound: Mapping[Any, Any]
    closures: tuple[tuple[Any, Any], ...]
