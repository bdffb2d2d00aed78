"""Vertical groups that move elements, too: a result with all that only it needs, slices, lookups and concatenations.

Chains grow from their first operator along results of one shape. What a rotary embedding does (two slices, one of them
negated, concatenated, scaled and added: Su et al., *RoFormer*, 2021), or an embedding before its layer norm, has many
shapes, and is found from its end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from ..config import FusionConfig
from ..graph.dataflow import DataflowGraph, Operator
from .base import Proposal, depth_of
from .growth import POINTWISE


def pointwise_cones(graph: DataflowGraph, config: FusionConfig) -> Iterator[Proposal]:
    """Each pointwise operator or concatenation with the operators that only it needs, if one of them moves elements."""
    for operator in graph.operators:
        if operator.pattern in POINTWISE or operator.op == "concat":
            names = _cone(graph, operator, config, _is_cheap)
            if _is_new(graph, names):
                yield Proposal("vertical", names, (), (names,), depth_of(graph, names))


def row_cones(
    graph: DataflowGraph, config: FusionConfig, row: Operator, after: list[tuple[str, ...]]
) -> Iterator[Proposal]:
    """A row operator with the lookups, and what is computed of them, that only it needs.

    Parameters
    ----------
    graph : DataflowGraph
        The graph.
    config : FusionConfig
        Limits.
    row : Operator
        A row operator or reduction over the last axis.
    after : list of tuple of str
        The sets that it makes with its epilogue, smallest first.
    """
    before = _cone(graph, row, config, _keeps_rows)
    if not _is_new(graph, before):
        return
    for epilogue in after:
        names = graph.sort((*before, *epilogue))
        if len(names) <= config.max_operators:
            yield Proposal("vertical", names, (row.name,), (names,), depth_of(graph, names))


def _is_new(graph: DataflowGraph, names: tuple[str, ...]) -> bool:
    """Whether a set has work before its last operator that chains cannot have."""
    inside = [graph.by_name[name] for name in names[:-1]]
    return any(o.pattern == "injective" for o in inside)


def _is_cheap(graph: DataflowGraph, operator: Operator) -> bool:
    return operator.pattern in (*POINTWISE, "injective", "view")


def _keeps_rows(graph: DataflowGraph, operator: Operator) -> bool:
    """Whether elements that are neighbours along the last axis come from neighbours."""
    if operator.op == "take":
        ranks = [len(graph.tensors[name].shape) for name in operator.inputs]
        return len(ranks) == 2 and operator.attrs.get("axis") == 0 and ranks[0] >= 2
    return operator.pattern in POINTWISE


def _cone(
    graph: DataflowGraph,
    root: Operator,
    config: FusionConfig,
    allowed: Callable[[DataflowGraph, Operator], bool],
) -> tuple[str, ...]:
    """The root and, from the last to the first, its producers whose results nothing outside reads.

    Left out are producers that would be computed too often, for all the elements that read one of
    theirs (they are broadcast, or stand before a lookup), and views that nothing stands before.
    """
    served = {root.name: graph.tensors[root.outputs[0]].size}  # elements that need each result
    waiting = {p.name for p in graph.predecessors(root)}
    while waiting and len(served) < config.max_operators:
        name = max(waiting, key=graph.index.__getitem__)
        waiting.discard(name)
        operator = graph.by_name[name]
        if len(operator.outputs) != 1 or operator.outputs[0] in graph.outputs:
            continue
        readers = [reader.name for reader in graph.consumers[operator.outputs[0]]]
        if not allowed(graph, operator) or any(reader not in served for reader in readers):
            continue
        size = graph.tensors[operator.outputs[0]].size
        needed = max(size, *(served[reader] for reader in readers))
        computes = operator.pattern in POINTWISE and operator.flops > 0
        if computes and needed > size * config.max_recompute:
            continue
        served[name] = needed
        waiting.update(p.name for p in graph.predecessors(operator) if p.name not in served)
    return _without_first_views(graph, graph.sort(served))


def _without_first_views(graph: DataflowGraph, names: tuple[str, ...]) -> tuple[str, ...]:
    kept: list[str] = []
    for name in names:
        operator = graph.by_name[name]
        if operator.pattern != "view" or any(p.name in kept for p in graph.predecessors(operator)):
            kept.append(name)
    return tuple(kept)
