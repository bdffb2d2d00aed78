"""Grouped convolutions: the group as a batch of products, and neighbouring groups as one product.

A grouped convolution reads the input channels ``c // n * m + k`` for the output channel ``c`` (n and m channels a
group). With ``c = g * n + f`` the group ``g`` is an axis that both factors have, a batch, and ``f`` is one of the
weights alone. Several groups are one product of a block-diagonal matrix: more products, most of them with zeros, but
instructions and copies that are filled.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from ....compat import ir, sym, tirx
from ...analysis import nodes_of
from .affine import flat_offset, steps_in, substitute
from .form import Anchor, Iterator, Operand, Products, Store


@dataclasses.dataclass(frozen=True)
class RawAnchor:
    """An anchor before it is known which factor is which; fields as those of `Anchor`."""

    buffer: tirx.Buffer
    indices: tuple
    factors: tuple[tirx.PrimExpr, tirx.PrimExpr]
    reduced: tuple[Iterator, ...]
    copies: tuple[Iterator, ...]


def split_groups(
    axes: list[Iterator], anchors: list[RawAnchor], stores: list[Store]
) -> tuple[list[Iterator], list[RawAnchor], list[Store]]:
    """Split each axis that factors divide by a number into the group and the place within it.

    Parameters
    ----------
    axes : list of Iterator
        The output's axes.
    anchors : list of RawAnchor
        The sums.
    stores : list of Store
        What is written.

    Returns
    -------
    tuple
        The same function of other axes; itself where no axis is divided, or by several numbers.
    """
    made: list[Iterator] = []
    for axis in axes:
        sizes = {
            int(node.b)
            for anchor in anchors
            for factor in anchor.factors
            for node in nodes_of(factor, tirx.FloorDiv)
            if isinstance(node.a, tirx.Var)
            and node.a.same_as(axis.var)
            and isinstance(node.b, tirx.IntImm)
        }
        size = sizes.pop() if len(sizes) == 1 else 1
        if size == 1 or axis.extent % size:
            made.append(axis)
            continue
        group = Iterator(tirx.Var(f"{axis.var.name}_group", "int32"), axis.extent // size)
        place = Iterator(tirx.Var(f"{axis.var.name}_place", "int32"), size)
        made += [group, place]
        value = group.var * tirx.IntImm("int32", size) + place.var
        simple = _Simplifier({axis.var: value}, (group, place))
        anchors = [
            dataclasses.replace(
                anchor,
                indices=tuple(map(simple, anchor.indices)),
                factors=tuple(map(simple, anchor.factors)),
            )
            for anchor in anchors
        ]
        stores = [simple.store(store) for store in stores]
    return made, anchors, stores


class _Simplifier:
    """Replaces variables, and simplifies what comes out by the ranges of others."""

    def __init__(self, replaced: dict, ranges: Sequence[Iterator]) -> None:
        self.replaced = replaced
        self.analyzer = sym.Analyzer()
        for iterator in ranges:
            self.analyzer.bind(
                iterator.var,
                ir.Range(tirx.IntImm("int32", 0), tirx.IntImm("int32", iterator.extent)),
            )

    def __call__(self, value: tirx.PrimExpr) -> tirx.PrimExpr:
        return self.analyzer.simplify(substitute(value, self.replaced))

    def store(self, store: Store) -> Store:
        """A store with its conditions, indices and value."""
        return Store(
            tuple(map(self, store.conditions)),
            store.buffer,
            tuple(map(self, store.indices)),
            self(store.value),
        )


def group_of(form: Products) -> Iterator | None:
    """The batch axis that is the group of a convolution whose neighbouring groups may be joined; None for none.

    The groups' reductions have to follow each other in memory in the rows, and the output's columns be one axis.
    """
    batch = [axis for axis in form.batch if axis.extent > 1]
    columns = [axis for axis in form.columns if axis.extent > 1]
    if len(batch) != 1 or len(columns) != 1 or len(form.anchors) != 1 or form.inner:
        return None
    (anchor,) = form.anchors
    loads = nodes_of(anchor.rows.value, ir.TensorLoad)
    if anchor.copies or len(loads) != 1 or not anchor.reduced:
        return None
    last = anchor.reduced[-1]
    steps = steps_in(flat_offset(loads[0])) or {}
    found = [steps.get(v.__chandle__()) for v in (batch[0].var, last.var)]
    return batch[0] if found == [last.extent, 1] else None


def join_groups(form: Products, count: int) -> Products:
    """Make one product of every so many neighbouring groups.

    Parameters
    ----------
    form : Products
        A function of which `group_of` finds a group.
    count : int
        Groups to join, a divisor of their number.
    """
    group = group_of(form)
    (column,) = (axis for axis in form.columns if axis.extent > 1)
    (anchor,) = form.anchors
    last = anchor.reduced[-1]
    outer = Iterator(tirx.Var(f"{group.var.name}s", "int32"), group.extent // count)
    inner = Iterator(tirx.Var(f"{group.var.name}_in", "int32"), count)
    wide = Iterator(tirx.Var(f"{column.var.name}s", "int32"), count * column.extent)
    number = lambda value: tirx.IntImm("int32", value)  # noqa: E731
    own = wide.var // number(column.extent)
    first = outer.var * number(count)
    ranges = (outer, inner, wide, last)
    output = _Simplifier(
        {group.var: first + own, column.var: wide.var % number(column.extent)}, ranges
    )
    data = _Simplifier({group.var: first + inner.var}, ranges)
    weight = output(anchor.columns.value)
    zero = tirx.const(0, str(weight.ty))
    weight = tirx.if_then_else(tirx.EQ(inner.var, own), weight, zero)
    made = Anchor(
        anchor.buffer,
        tuple(map(output, anchor.indices)),
        Operand(data(anchor.rows.value), anchor.rows.dtype),
        Operand(weight, anchor.columns.dtype),
        (*anchor.reduced[:-1], inner, last),
        (),
    )
    return dataclasses.replace(
        form,
        batch=tuple(outer if axis is group else axis for axis in form.batch),
        columns=tuple(wide if axis is column else axis for axis in form.columns),
        anchors=(made,),
        stores=tuple(map(output.store, form.stores)),
    )
