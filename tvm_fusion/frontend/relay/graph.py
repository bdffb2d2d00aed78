"""A Relay function as a flat, checked graph: no compiler's types, no scopes, no tuples in tuples."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from ...errors import InvalidModelError, UnsupportedOperatorError
from .arrays import DTYPES, MAX_RANK

#: A tensor may have this many elements; more is a damaged file.
MAX_ELEMENTS = 1 << 40


@dataclasses.dataclass(frozen=True)
class TensorType:
    """Shape and dtype of a tensor; an extent that is not fixed is None."""

    shape: tuple[int | None, ...]
    dtype: str

    def __str__(self) -> str:
        return f"{self.dtype}[{', '.join('?' if n is None else str(n) for n in self.shape)}]"

    def check(self, where: str) -> None:
        """Raise InvalidModelError or UnsupportedOperatorError unless TVM can be given such a tensor."""
        if self.dtype not in DTYPES:
            raise UnsupportedOperatorError(
                f"{where} is of dtype {self.dtype}, which cannot be imported: cast it before saving"
            )
        if len(self.shape) > MAX_RANK:
            raise InvalidModelError(
                f"{where} has {len(self.shape)} dimensions (limit {MAX_RANK}): the file is damaged"
            )
        extents = [n for n in self.shape if n is not None]
        if min(extents, default=1) < 1 or math.prod(extents) > MAX_ELEMENTS:
            raise InvalidModelError(
                f"{where} has the shape {self.shape}, which no tensor can have here: every dimension must be "
                f"positive, and the elements at most {MAX_ELEMENTS}"
            )


#: None: not known. A tuple: one type for each field.
Type = TensorType | tuple[Any, ...] | None


@dataclasses.dataclass(frozen=True)
class Input:
    """A parameter of ``main`` that stays one."""

    name: str
    type: TensorType


@dataclasses.dataclass(frozen=True, eq=False)
class Constant:
    """A tensor that the module or its parameters file holds."""

    array: np.ndarray
    where: str


@dataclasses.dataclass(frozen=True)
class Result:
    """What an operator computes: its only result, or one field of its tuple."""

    node: int
    field: int | None = None


#: A tuple stands for itself: its fields are values.
Value = Input | Constant | Result | tuple[Any, ...]


@dataclasses.dataclass(frozen=True)
class Node:
    """One operator call.

    Attributes
    ----------
    name : str
        Unique in the graph: where the call came from if the module says so, else the operator with
        a number.
    op : str
        Relay's name, as ``nn.conv2d``.
    args : tuple of Value
        The operands.
    attrs : mapping of str to object
        Attributes as Python values.
    type : Type
        What Relay's type inference found; None where it did not run.
    group : int or None
        Position of its fusion group in ``RelayGraph.groups``.
    place : str
        Where it stands in the file, in words.
    """

    name: str
    op: str
    args: tuple[Value, ...]
    attrs: Mapping[str, Any]
    type: Type
    group: int | None
    place: str


@dataclasses.dataclass(frozen=True)
class Group:
    """A fusion annotation: a function with ``Composite = "tvm_fusion.<strategy>"``.

    ``attrs`` are its ``tvm_fusion.*`` attributes; ``name`` is that of its global function, or ``""``.
    """

    strategy: str
    attrs: Mapping[str, Any]
    name: str = ""


@dataclasses.dataclass(frozen=True)
class RelayGraph:
    """A function in the order of its computation.

    Attributes
    ----------
    inputs : tuple of Input
        Parameters that no file gives a value.
    nodes : tuple of Node
        Operators, each after those that it reads.
    output : Value
        The result.
    groups : tuple of Group
        Fusion annotations, in the order of their calls.
    """

    inputs: tuple[Input, ...]
    nodes: tuple[Node, ...]
    output: Value
    groups: tuple[Group, ...]
