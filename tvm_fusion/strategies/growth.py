"""Growing a set of operators along its consumers (epilogue) or producers (prologue)."""

from __future__ import annotations

from collections.abc import Callable

from ..graph.dataflow import DataflowGraph, Operator

#: Patterns that can be computed where their operand is: in registers, element by element.
POINTWISE = ("elementwise", "broadcast")

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
    results = graph.external_outputs(seed)
    if len(results) != 1:
        return [seed]
    shape = graph.tensors[results[0]].shape
    current, refused, found = list(seed), set(), [seed]
    while len(current) < max_operators:
        candidate = _next_consumer(graph, current, refused)
        if candidate is None:
            break
        fits = (
            candidate.pattern in POINTWISE
            and len(candidate.outputs) == 1
            and graph.tensors[candidate.outputs[0]].shape == shape
            and (allowed is None or allowed(candidate))
            and graph.is_convex([*current, candidate.name])
        )
        if not fits:
            refused.add(candidate.name)
            continue
        current.append(candidate.name)
        if len(graph.external_outputs(current)) == 1:
            found.append(graph.sort(current))
    return found


def _next_consumer(graph: DataflowGraph, current: list[str], refused: set[str]) -> Operator | None:
    inside = set(current)
    consumers = (
        c
        for name in current
        for tensor in graph.by_name[name].outputs
        for c in graph.consumers[tensor]
        if c.name not in inside and c.name not in refused
    )
    return min(consumers, key=lambda c: graph.index[c.name], default=None)


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
    current: list[str] = []
    found = []
    while len(current) < max_operators:
        inside = {anchor.name, *current}
        reads = [t for name in inside for t in graph.by_name[name].inputs]
        producers = sorted(
            {p.name for t in reads if (p := graph.producer.get(t)) and p.name not in inside},
            key=graph.index.__getitem__,
            reverse=True,
        )
        fitting = (
            name
            for name in producers
            if _is_prologue(graph, graph.by_name[name], inside)
            and (allowed is None or allowed(graph.by_name[name]))
        )
        name = next(fitting, None)
        if name is None:
            break
        current.append(name)
        found.append(graph.sort(current))
    return found


def _is_prologue(graph: DataflowGraph, operator: Operator, inside: set[str]) -> bool:
    if operator.pattern not in POINTWISE or len(operator.outputs) != 1:
        return False
    result = operator.outputs[0]
    if result in graph.outputs or any(c.name not in inside for c in graph.consumers[result]):
        return False
    operands = [graph.tensors[t] for t in operator.inputs if not graph.tensors[t].is_constant]
    largest = max((t.size for t in operands), default=0)
    return graph.tensors[result].size <= largest
