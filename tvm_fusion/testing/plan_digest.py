"""A plan without the names that its dialect gave: two plans of one model compare equal."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

from ..graph.dataflow import DataflowGraph
from ..planner.plan import Plan


def plan_digest(plan: Plan, graph: DataflowGraph) -> dict[str, Any]:
    """What a plan decided, and why, by what the operators compute instead of their names.

    Parameters
    ----------
    plan : Plan
        The plan.
    graph : DataflowGraph
        The graph that it was made for.

    Returns
    -------
    dict
        Plain values: operators, groups, ungrouped operators and refusals, each sorted, and totals.
    """
    place = _places(graph)

    def places(names: Iterable[str]) -> list[str]:
        return sorted(place[name] for name in names)

    groups = [
        [g.strategy, sorted(g.options.items()), g.depth, sorted(g.operators), places(g.nodes)]
        for g in plan.groups
    ]
    refused = [[r.strategy, r.outcome, r.reason, places(r.nodes)] for r in plan.rejected]
    totals = plan.totals
    return {
        "preset": plan.preset,
        "operators": sorted(f"{o.op} {place[o.name]}" for o in graph.operators if o.does_work),
        "groups": sorted(map(repr, groups)),
        "ungrouped": sorted(repr([u.op, u.reason, place[u.node]]) for u in plan.ungrouped),
        "rejected": sorted(map(repr, refused)),
        "totals": [
            totals.launches_before, totals.launches_after, totals.bytes_before, totals.bytes_after,
            totals.flops_before, totals.flops_after,
        ],
    }  # fmt: skip


def _places(graph: DataflowGraph) -> dict[str, str]:
    """A digest of all that leads to each operator; views, which compute nothing, leave their shape alone."""
    tensors = {name: f"{graph.tensors[name]} {i}" for i, name in enumerate(graph.inputs)}
    out = {}
    for operator in graph.operators:
        read = [tensors.get(t) or str(graph.tensors[t]) for t in operator.inputs]
        made = [str(graph.tensors[t]) for t in operator.outputs]
        text = repr([operator.op, read, made])
        out[operator.name] = hashlib.sha256(text.encode()).hexdigest()[:12]
        for i, tensor in enumerate(operator.outputs):
            tensors[tensor] = f"{out[operator.name]}.{i}"
    return out
