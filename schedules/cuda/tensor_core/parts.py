"""Which columns a store is for, and stores that belong together."""

from __future__ import annotations

import dataclasses

from ....compat import sym, tirx
from .affine import flat_offset
from .form import Store


@dataclasses.dataclass(frozen=True)
class Part:
    """A store for the columns ``begin`` to ``end - 1``."""

    store: Store
    begin: int
    end: int

    def shift(self, first: Part) -> int | None:
        """What is added to the offset in the tensor of ``first``; None when it is not a number."""
        one, other = (
            flat_offset(tirx.BufferLoad(part.store.buffer, part.store.indices))
            for part in (self, first)
        )
        difference = sym.Analyzer().simplify(one - other)
        return int(difference) if isinstance(difference, tirx.IntImm) else None


def part_of(store: Store, columns, share: int) -> Part | None:
    """Read the bounds that a store's conditions set for the column, which are multiples of ``share``."""
    begin, end = 0, columns[-1].extent
    for condition in store.conditions:
        if not is_bound(condition, columns, share):
            return None
        negated = False
        while isinstance(condition, tirx.Not):
            condition, negated = condition.a, not negated
        if negated:
            begin = max(begin, int(condition.b))
        else:
            end = min(end, int(condition.b))
    return Part(store, begin, end)


def follow_each_other(parts: list[Part], columns) -> bool:
    """Whether every column belongs to one part."""
    ordered = sorted(parts, key=lambda part: part.begin)
    ends = [0, *(part.end for part in ordered)]
    return ends[-1] == columns[-1].extent and all(
        part.begin == end for part, end in zip(ordered, ends, strict=False)
    )


def by_condition(stores: tuple[Store, ...]) -> list[tuple[tuple, list[Store]]]:
    """Stores that happen under the same conditions, together."""
    groups: list[tuple[tuple, list[Store]]] = []
    for store in stores:
        for conditions, members in groups:
            same = len(conditions) == len(store.conditions) and all(
                a.same_as(b) for a, b in zip(conditions, store.conditions, strict=True)
            )
            if same:
                members.append(store)
                break
        else:
            groups.append((store.conditions, [store]))
    return groups


def is_bound(condition: tirx.PrimExpr, columns, share: int) -> bool:
    """Whether a condition compares the last column's iterator with a multiple of ``share``."""
    while isinstance(condition, tirx.Not):
        condition = condition.a
    last = columns[-1]
    if any(i.extent > 1 for i in columns[:-1]) or not isinstance(condition, tirx.LT):
        return False
    bound = condition.b
    return (
        is_var(condition.a, last.var) and isinstance(bound, tirx.IntImm) and int(bound) % share == 0
    )


def is_var(expr, var: tirx.Var) -> bool:
    """Whether an expression is a variable."""
    return isinstance(expr, tirx.Var) and expr.same_as(var)
