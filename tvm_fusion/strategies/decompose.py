"""The members of a group, read from its operators alone.

An annotation says how many members a group has, not which; this finds them again, in a group's body
or in the model.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from ..graph.dataflow import DataflowGraph
from .branches import Branch, Join, find_branches, find_joins
from .growth import POINTWISE


@dataclasses.dataclass(frozen=True)
class Decomposition:
    """A group's anchors, branches, join, and the operators that follow the join."""

    anchors: tuple[str, ...]
    branches: tuple[Branch, ...]
    join: Join | None
    tail: tuple[str, ...]


def decompose(graph: DataflowGraph, operators: Sequence[str]) -> Decomposition:
    """Split a group into branches, join and tail.

    Parameters
    ----------
    graph : DataflowGraph
        The graph that holds the operators.
    operators : sequence of str
        The group.

    Returns
    -------
    Decomposition
        Branches headed by the anchors, or, without any, by the pointwise operators that read no
        other operator of the group. ``join`` is None unless one join takes all branches.
    """
    inside = graph.sort(operators)
    members = [graph.by_name[name] for name in inside]
    anchors = [o for o in members if o.pattern == "anchor"]
    heads = anchors or [
        o
        for o in members
        if o.pattern in POINTWISE and not any(p.name in inside for p in graph.predecessors(o))
    ]
    branches = find_branches(graph, heads, len(inside), within=set(inside))
    joins = find_joins(graph, branches, None, within=set(inside))
    join = joins[0] if len(joins) == 1 and len(branches) > 1 else None
    used = {name for b in branches for name in b.operators} | set(join.operators if join else ())
    tail = tuple(name for name in inside if name not in used)
    return Decomposition(tuple(a.name for a in anchors), branches, join, tail)
