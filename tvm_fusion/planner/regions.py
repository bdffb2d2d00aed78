"""Regions: parts of a model between a split and its join, and the groups that serve them.

A region is what lies between a tensor that several paths leave and the operator where they meet
again: a residual block, an Inception module. The attention half of a transformer block and the
feed-forward half after it are one region. Several kernels of different strategies that serve one
region are a *parallel* compound; one compound kernel is a *serial* one.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..graph.dataflow import DataflowGraph, Operator
from .plan import Group, Region

#: The producer of everything that comes from outside: the root of the dominator tree.
_ENTRY = -1


def regions_of(graph: DataflowGraph, groups: Sequence[Group]) -> tuple[Region, ...]:
    """Find the regions that groups of two or more strategies serve, and the compound kernels.

    Parameters
    ----------
    graph : DataflowGraph
        The graph.
    groups : sequence of Group
        The plan's groups.

    Returns
    -------
    tuple of Region
        Outermost splits and joins that no other such region contains, in topological order, then
        one serial region per compound group.
    """
    owner = {node: group for group in groups for node in group.nodes}
    out = []
    for inside in _with_feed_forward(graph, _outermost(graph, _split_and_joined(graph))):
        serving = list(dict.fromkeys(owner[n].id for n in inside if n in owner))
        strategies = {owner[n].strategy for n in inside if n in owner}
        if len(strategies) > 1:
            out.append(Region("parallel", tuple(serving), _name(inside), inside))
    for group in groups:
        if group.strategy == "compound":
            out.append(Region("serial", (group.id,), _name(group.nodes), group.nodes))
    return tuple(out)


def _name(nodes: Sequence[str]) -> str:
    return nodes[0] if len(nodes) == 1 else f"{nodes[0]} … {nodes[-1]}"


def _split_and_joined(graph: DataflowGraph) -> list[tuple[str, ...]]:
    """For each operator where paths meet: the operators between the split and it, itself included."""
    dominator = immediate_dominators(graph)
    out = []
    for index, operator in enumerate(graph.operators):
        sources = _sources(graph, operator)
        if len(sources) < 2 or all(source == dominator[index] for source in sources):
            continue
        split = dominator[index]
        inside, todo = {index}, [s for s in sources if s != split]
        while todo:
            current = todo.pop()
            if current not in inside and current != split:
                inside.add(current)
                todo += [s for s in _sources(graph, graph.operators[current]) if s != split]
        if _ENTRY not in inside:
            out.append(tuple(graph.operators[i].name for i in sorted(inside)))
    return out


def _outermost(graph: DataflowGraph, regions: Sequence[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Drop regions that lie inside another one; the rest in topological order."""
    ranked = sorted(regions, key=lambda r: (graph.index[r[0]], -graph.index[r[-1]], -len(r)))
    kept: list[tuple[str, ...]] = []
    holding: list[tuple[int, set[str]]] = []
    for region in ranked:
        # What ends before this one starts holds neither this one nor a later one.
        start, end = graph.index[region[0]], graph.index[region[-1]]
        holding = [held for held in holding if held[0] >= start]
        if not any(last >= end and inside.issuperset(region) for last, inside in holding):
            kept.append(region)
            holding.append((end, set(region)))
    return kept


def _with_feed_forward(
    graph: DataflowGraph, regions: Sequence[tuple[str, ...]]
) -> list[tuple[str, ...]]:
    """Join attention regions with the feed-forward region that reads their result.

    Attention is a region with a softmax between matrix products, feed-forward one with matrix
    products alone.
    """
    out: list[tuple[str, ...]] = []
    attention = False
    for region in regions:
        ops = {graph.by_name[name].op for name in region}
        first = region[0]
        feeds = attention and "matmul" in ops and "softmax" not in ops
        if feeds and graph.depends(first, out[-1][-1]):
            start, end = graph.index[out[-1][0]], graph.index[region[-1]]
            between = [
                o.name
                for o in graph.operators[start : end + 1]
                if o.name not in out[-1]
                and graph.depends(o.name, out[-1][-1])
                and (o.name in region or graph.depends(region[-1], o.name))
            ]
            out[-1] = graph.sort((*out[-1], *between))
            attention = False
            continue
        out.append(region)
        attention = {"matmul", "softmax"} <= ops
    return out


def _sources(graph: DataflowGraph, operator: Operator) -> list[int]:
    """Positions of the operators that an operator reads; the entry for inputs, nothing for constants."""
    out: list[int] = []
    for tensor in operator.inputs:
        if graph.tensors[tensor].is_constant:
            continue
        producer = graph.producer.get(tensor)
        out.append(_ENTRY if producer is None else graph.index[producer.name])
    return list(dict.fromkeys(out))


def immediate_dominators(graph: DataflowGraph) -> list[int]:
    """For each operator the last one that every path from the inputs to it passes, or -1 for none.

    Cooper, Harvey and Kennedy, "A Simple, Fast Dominance Algorithm" (2001); a topological order
    needs one pass.
    """
    dominator: list[int] = []
    depth: list[int] = []
    for operator in graph.operators:
        sources = _sources(graph, operator) or [_ENTRY]
        meet = sources[0]
        for other in sources[1:]:
            meet = _meet(dominator, depth, meet, other)
        dominator.append(meet)
        depth.append(0 if meet == _ENTRY else depth[meet] + 1)
    return dominator


def _meet(dominator: list[int], depth: list[int], left: int, right: int) -> int:
    while left != right:
        if left == _ENTRY or right == _ENTRY:
            return _ENTRY
        if depth[left] >= depth[right]:
            left = dominator[left]
        else:
            right = dominator[right]
    return left
