"""Depth against latency: each chain of a model covered by kernels of limited depth.

A chain is what the deepest kernel considered covers. Its rows are those of the usual table of
fusion depths: unfused, pairs, three or four operators, five and more.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence

from ..graph.dataflow import DataflowGraph
from ..strategies.base import Proposal

#: Least and largest depth of the rows.
CLASSES = ((1, 1), (2, 2), (3, 4), (5, 10**6))

#: Groups inside a chain that are combined, the fastest for their operators first.
_MOST = 48

#: Microseconds of a set of operators as one kernel; infinite where it was not measured right.
Time = Callable[[Proposal], float]


@dataclasses.dataclass(frozen=True)
class Row:
    """The fastest cover of a chain with a kernel of a depth in a class, and none deeper.

    Attributes
    ----------
    least, most : int
        The class.
    groups : tuple of Proposal
        Its kernels of several operators. Where ``microseconds`` is infinite: one that was tried.
    singles : tuple of str
        Operators that stay alone.
    microseconds : float
        Sum of the kernels' times.
    """

    least: int
    most: int
    groups: tuple[Proposal, ...]
    singles: tuple[str, ...]
    microseconds: float


@dataclasses.dataclass(frozen=True)
class Chain:
    """The operators that do work, in topological order, and the rows."""

    operators: tuple[str, ...]
    rows: tuple[Row, ...]


def chains(
    graph: DataflowGraph,
    groups: Sequence[Proposal],
    time: Time,
    alone: Callable[[str], float],
) -> list[Chain]:
    """Divide what was considered into chains that do not overlap, and cover each at several depths.

    Parameters
    ----------
    graph : DataflowGraph
        The model.
    groups : sequence of Proposal
        All groups considered.
    time : callable
        Microseconds of a group.
    alone : callable
        Microseconds of an operator as a kernel of its own.

    Returns
    -------
    list of Chain
        The longest first. A class without a group has no row.
    """
    work = {o.name for o in graph.operators if o.does_work}
    sets = {group: frozenset(group.operators) & work for group in groups}
    deep = [group for group in groups if len(sets[group]) > 1]
    taken: set[str] = set()
    found = []
    for widest in sorted(deep, key=lambda g: (-len(sets[g]), g.operators)):
        whole = sets[widest]
        if not taken.isdisjoint(whole):
            continue
        taken |= whole
        inside = [group for group in deep if sets[group] <= whole]
        names = graph.sort(whole)
        rows = [_row(graph, names, inside, time, alone, *bounds) for bounds in CLASSES]
        found.append(Chain(names, tuple(row for row in rows if row is not None)))
    return found


def _row(
    graph: DataflowGraph, names: tuple[str, ...], inside: Sequence[Proposal], time: Time,
    alone: Callable[[str], float], least: int, most: int,
) -> Row | None:  # fmt: skip
    """The row of one class; None where it has no group, or no legal cover."""
    if most == 1:
        return Row(least, most, (), names, sum(map(alone, names)))
    own = [group for group in inside if least <= group.depth <= most]
    if not own:
        return None
    usable = [group for group in inside if group.depth <= most and math.isfinite(time(group))]
    if not any(group in usable for group in own):
        failed = max(own, key=lambda group: len(group.operators))
        rest = tuple(name for name in names if name not in failed.operators)
        return Row(least, most, (failed,), rest, math.inf)
    microseconds, chosen = _cover(names, usable, time, alone, least)
    if not graph.is_jointly_acyclic([group.operators for group in chosen]):
        return None
    grouped = {name for group in chosen for name in group.operators}
    rest = tuple(name for name in names if name not in grouped)
    return Row(least, most, chosen, rest, microseconds)


def _cover(
    names: tuple[str, ...], usable: Sequence[Proposal], time: Time,
    alone: Callable[[str], float], least: int,
) -> tuple[float, tuple[Proposal, ...]]:  # fmt: skip
    """The cover of least time that has a group of at least a depth.

    Exact: the first operator that is not covered stays alone or is in one of the groups that begin
    with it, so that only sets which such choices leave are looked at.
    """
    bit = {name: 1 << place for place, name in enumerate(names)}
    gain = {g: sum(alone(n) for n in g.operators if n in bit) - time(g) for g in usable}
    ranked = sorted(usable, key=lambda g: (g.depth < least, -gain[g], g.operators))[:_MOST]
    masks = [(sum(bit[n] for n in g.operators if n in bit), g) for g in ranked]

    @functools.cache
    def best(left: int, deep: bool) -> tuple[float, tuple[Proposal, ...]]:
        """Time and groups for what is left; ``deep`` says that a deep group is in the cover."""
        if not left:
            return (0.0 if deep else math.inf), ()
        first = left & -left
        rest, groups = best(left ^ first, deep)
        found = rest + alone(names[first.bit_length() - 1]), groups
        for mask, group in masks:
            if mask & first and mask & left == mask:
                rest, groups = best(left ^ mask, deep or group.depth >= least)
                if rest + time(group) < found[0]:
                    found = rest + time(group), (group, *groups)
        return found

    return best(bit[names[-1]] * 2 - 1, False)
