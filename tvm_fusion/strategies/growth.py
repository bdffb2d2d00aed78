"""Growing a set of operators along its consumers (epilogue) or producers (prologue).

The native core does it (``csrc/dataflow.cc``); this translates names.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable

from ..graph.dataflow import POINTWISE, DataflowGraph, Operator

__all__ = ["POINTWISE", "Allowed", "grow_epilogue", "grow_prologue"]

Allowed = Callable[[Operator], bool]


def grow_epilogue(
    graph: DataflowGraph,
    seed: tuple[str, ...],
    *,
    max_operators: int,
    allowed: Allowed | None = None,
) -> list[tuple[str, ...]]:
    """Extend a set by the pointwise operators that follow it.

    An operator joins when it has the seed's output shape and its other operands do not depend on
    the set through operators outside it. A value that several of the joined operators read (``x *
    sigmoid(x)``) is fine: only sets with one result are returned.

    Parameters
    ----------
    graph : DataflowGraph
        The graph.
    seed : tuple of str
        Operators to start from; they must have one result.
    max_operators : int
        Size at which growth stops.
    allowed : callable, optional
        Extra condition on an operator that would join.

    Returns
    -------
    list of tuple of str
        The seed and each larger set with one result, smallest first.
    """
    start = [graph.index[name] for name in seed]
    steps = graph.core.grow_epilogue(start, max_operators, _by_index(graph, allowed))
    members = sorted(set(start))
    names = [graph.names[i] for i in members]
    found = [seed]
    for step in steps:
        _insert(graph, members, names, step >> 1)
        if step & 1:
            found.append(tuple(names))
    return found


def _by_index(graph: DataflowGraph, allowed: Allowed | None) -> Callable[[int], bool] | None:
    if allowed is None:
        return None
    operators = graph.operators
    return lambda i: bool(allowed(operators[i]))


def _insert(graph: DataflowGraph, members: list[int], names: list[str], joining: int) -> None:
    """Add an operator to positions and names, both in topological order."""
    place = bisect.bisect(members, joining)
    members.insert(place, joining)
    names.insert(place, graph.names[joining])


def grow_prologue(
    graph: DataflowGraph, anchor: Operator, *, max_operators: int, allowed: Allowed | None = None
) -> list[tuple[str, ...]]:
    """Extend an anchor by the pointwise operators that only it reads.

    A producer joins when its result is read inside the set alone and is no larger than its own
    largest operand: pulling it over a broadcast would recompute it for every element it is
    broadcast to.

    Returns
    -------
    list of tuple of str
        Each set of producers (without the anchor), smallest first; empty if none joins.
    """
    start = graph.index[anchor.name]
    members: list[int] = []
    names: list[str] = []
    found = []
    for joining in graph.core.grow_prologue(start, max_operators, _by_index(graph, allowed)):
        _insert(graph, members, names, joining)
        found.append(tuple(names))
    return found
