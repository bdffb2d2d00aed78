"""Parallel branches and the operators that join them.

The same analysis finds horizontal groups in a model and, when a group is lowered, its members in
the group's body.
"""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Sequence

from ..graph.dataflow import DataflowGraph, Operator
from .growth import grow_epilogue

#: Operators that join two branches element by element.
JOINS = ("add", "maximum", "minimum", "multiply")


@dataclasses.dataclass(frozen=True)
class Branch:
    """One member: its first operator, all its operators, and its one result."""

    head: str
    operators: tuple[str, ...]
    result: str


@dataclasses.dataclass(frozen=True)
class Join:
    """Branches and the operators that combine their results.

    Attributes
    ----------
    branches : tuple of Branch
        In the order of their heads.
    kind : str
        ``"apart"`` (no join), ``"concat"``, or one of ``JOINS``; ``"mixed"`` where several of these
        occur.
    operators : tuple of str
        The joining operators, topological order.
    result : str or None
        The joined tensor; None when the branches are returned apart.
    """

    branches: tuple[Branch, ...]
    kind: str
    operators: tuple[str, ...] = ()
    result: str | None = None

    @property
    def all_operators(self) -> tuple[str, ...]:
        """Operators of the branches, then the joining ones."""
        return (*(name for branch in self.branches for name in branch.operators), *self.operators)


def find_branches(
    graph: DataflowGraph,
    heads: Sequence[Operator],
    max_operators: int,
    within: set[str] | None = None,
) -> tuple[Branch, ...]:
    """Follow each head along the pointwise operators that depend on it and on no other head.

    ``within`` bounds the search to some operators of the graph.
    """
    names = [head.name for head in heads]
    branches = []
    for head in heads:
        others = [name for name in names if name != head.name]

        def is_own(candidate: Operator, others: list[str] = others) -> bool:
            if within is not None and candidate.name not in within:
                return False
            return not any(graph.depends(candidate.name, other) for other in others)

        largest = grow_epilogue(graph, (head.name,), max_operators=max_operators, allowed=is_own)[
            -1
        ]
        results = graph.external_outputs(largest)
        branches.append(Branch(head.name, largest, results[0] if results else head.outputs[0]))
    return tuple(branches)


def find_joins(
    graph: DataflowGraph,
    branches: Sequence[Branch],
    max_members: int | None,
    within: set[str] | None = None,
) -> list[Join]:
    """Group branches by the operators that combine them.

    Parameters
    ----------
    graph : DataflowGraph
        The graph.
    branches : sequence of Branch
        Independent branches.
    max_members : int or None
        Most branches in one join; None for no limit. Where two sets of branches meet and together
        exceed it, the joining operator goes with the smaller set and the other's result becomes an
        operand from outside: a chain of seven becomes 6 + 1, of eight 6 + 2.
    within : set of str or None
        Bounds the joining operators to some of the graph's.

    Returns
    -------
    list of Join
        Every branch in exactly one join; branches without a join are one ``"apart"`` join each.
    """
    nodes: dict[str, Join] = {b.result: Join((b,), "apart", (), b.result) for b in branches}
    # Only readers of what the branches make can join them: in topological order, each once.
    todo = [graph.index[c.name] for result in nodes for c in graph.consumers[result]]
    heapq.heapify(todo)
    last = -1
    while todo:
        index = heapq.heappop(todo)
        operator = graph.operators[index]
        if index == last or (within is not None and operator.name not in within):
            continue
        last, before = index, set(nodes)
        if operator.op == "concat":
            _join_concat(graph, operator, nodes, max_members)
        elif operator.op in JOINS and len(operator.inputs) == 2:
            _join_pair(graph, operator, nodes, max_members)
        for result in nodes.keys() - before:
            for consumer in graph.consumers[result]:
                heapq.heappush(todo, graph.index[consumer.name])
    return list(nodes.values())


def _sole_use(graph: DataflowGraph, tensor: str) -> bool:
    return tensor not in graph.outputs and len(graph.consumers[tensor]) == 1


def _join_concat(
    graph: DataflowGraph, operator: Operator, nodes: dict[str, Join], max_members: int | None
) -> None:
    inputs = operator.inputs
    lone = all(t in nodes and not nodes[t].operators and _sole_use(graph, t) for t in inputs)
    if not lone or len(set(inputs)) != len(inputs) or len(inputs) < 2:
        return
    if max_members is not None and len(inputs) > max_members:
        return
    branches = tuple(b for t in inputs for b in nodes.pop(t).branches)
    result = operator.outputs[0]
    nodes[result] = Join(branches, "concat", (operator.name,), result)


def _join_pair(
    graph: DataflowGraph, operator: Operator, nodes: dict[str, Join], max_members: int | None
) -> None:
    left, right = (nodes.get(t) for t in operator.inputs)
    if left is None or right is None or left is right:
        return
    shapes = {graph.tensors[t].shape for t in (*operator.inputs, *operator.outputs)}
    if len(shapes) > 1 or "concat" in (left.kind, right.kind):
        return
    if not all(_sole_use(graph, t) for t in operator.inputs):
        return
    result = operator.outputs[0]
    count = len(left.branches) + len(right.branches)
    kinds = {j.kind for j in (left, right) if j.kind != "apart"} | {operator.op}
    kind = kinds.pop() if len(kinds) == 1 else "mixed"
    if max_members is None or count <= max_members:
        taken, branches = (left, right), left.branches + right.branches
    else:  # the smaller side takes the operator; on a tie the later one, which runs last
        smaller = min((right, left), key=lambda j: len(j.branches))
        taken, branches = (smaller,), smaller.branches
    for join in taken:
        del nodes[join.result]
    operators = graph.sort((*(name for j in taken for name in j.operators), operator.name))
    nodes[result] = Join(_by_head(graph, branches), kind, operators, result)


def _by_head(graph: DataflowGraph, branches: Sequence[Branch]) -> tuple[Branch, ...]:
    return tuple(sorted(branches, key=lambda b: graph.index[b.head]))
