"""The form of a function that tensor-core kernels compute: matrix products that meet in elementwise outputs.

Every anchor is a product of a *row* operand (activations: output rows times the reduction) and a *column* operand
(weights: output columns times the reduction). The output's axes are rows, columns, or a batch that both operands have.
"""

from __future__ import annotations

import dataclasses
import math

from ....compat import tirx


@dataclasses.dataclass(frozen=True)
class Iterator:
    """A variable and the number of values it takes, from 0."""

    var: tirx.Var
    extent: int


@dataclasses.dataclass(frozen=True)
class Operand:
    """One factor of an anchor: its value as an expression of the anchor's iterators, and the type it is kept in."""

    value: tirx.PrimExpr
    dtype: str


@dataclasses.dataclass(frozen=True)
class Anchor:
    """A sum of products.

    Attributes
    ----------
    buffer : Buffer
        What the outputs read the sums from.
    indices : tuple of PrimExpr
        Indices of ``buffer`` at which the sum of the iterators' values stands.
    rows, columns : Operand
        The factors.
    reduced : tuple of Iterator
        The reduction, the iterator that is contiguous in the operands last.
    copies : tuple of Iterator
        Iterators of one operand that no output axis follows: every output reads several of their values.
    """

    buffer: tirx.Buffer
    indices: tuple[tirx.PrimExpr, ...]
    rows: Operand
    columns: Operand
    reduced: tuple[Iterator, ...]
    copies: tuple[Iterator, ...]

    @property
    def depth(self) -> int:
        """Number of products in a sum."""
        return math.prod(i.extent for i in self.reduced)

    @property
    def copy_count(self) -> int:
        """Sums per output element."""
        return math.prod(i.extent for i in self.copies)


@dataclasses.dataclass(frozen=True)
class InnerSum:
    """A short sum that an operand is computed from, such as a depthwise convolution before a pointwise one.

    Attributes
    ----------
    buffer : Buffer
        What the operand reads it from.
    indices : tuple of PrimExpr
        Indices of ``buffer`` at which the sum of the iterators' values stands, each an iterator or a number.
    value : PrimExpr
        What is added.
    reduced : tuple of Iterator
        The reduction.
    """

    buffer: tirx.Buffer
    indices: tuple[tirx.PrimExpr, ...]
    value: tirx.PrimExpr
    reduced: tuple[Iterator, ...]


@dataclasses.dataclass(frozen=True)
class Store:
    """One store of the epilogue, and what must hold of the output's iterators for it to happen."""

    conditions: tuple[tirx.PrimExpr, ...]
    buffer: tirx.Buffer
    indices: tuple[tirx.PrimExpr, ...]
    value: tirx.PrimExpr


@dataclasses.dataclass(frozen=True)
class Products:
    """A function in the form of this file; all expressions are in terms of the iterators below.

    Attributes
    ----------
    params : tuple of Buffer
        Parameters of the function.
    batch, rows, columns : tuple of Iterator
        The output's axes.
    anchors : tuple of Anchor
        The sums, which run one after the other.
    stores : tuple of Store
        What is written for each output element.
    inner : tuple of InnerSum
        Sums that row operands are computed from.
    constants : tuple of Buffer
        Parameters that are the same at every call.
    """

    params: tuple[tirx.Buffer, ...]
    batch: tuple[Iterator, ...]
    rows: tuple[Iterator, ...]
    columns: tuple[Iterator, ...]
    anchors: tuple[Anchor, ...]
    stores: tuple[Store, ...]
    inner: tuple[InnerSum, ...] = ()
    constants: tuple[tirx.Buffer, ...] = ()

    @property
    def row_count(self) -> int:
        """Number of rows of the output."""
        return math.prod(i.extent for i in self.rows)

    @property
    def column_count(self) -> int:
        """Number of columns of the output."""
        return math.prod(i.extent for i in self.columns)

    @property
    def batch_count(self) -> int:
        """Number of outputs."""
        return math.prod(i.extent for i in self.batch)

    @property
    def copies(self) -> int:
        """Accumulators per output element, of all anchors."""
        return sum(anchor.copy_count for anchor in self.anchors)
