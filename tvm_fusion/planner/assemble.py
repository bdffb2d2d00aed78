"""Decisions → plan: counts, refusals and totals."""

from __future__ import annotations

import collections
from collections.abc import Iterable, Mapping, Sequence

from ..config import FusionConfig
from ..devices import DeviceSpec
from ..errors import PlanError
from ..graph.dataflow import DataflowGraph
from ..strategies.base import Proposal
from .cost import Cost, kernel_cost
from .plan import Group, Plan, TargetInfo, Totals
from .planner import Candidate, solve
from .refusals import refusals, ungrouped


def make_plan(
    graph: DataflowGraph,
    device: DeviceSpec,
    target: TargetInfo,
    config: FusionConfig,
    *,
    model: str = "model",
    existing: Mapping[str, Proposal] | None = None,
    excluded: Iterable[tuple[str, ...]] = (),
) -> Plan:
    """Plan a graph and describe the outcome.

    Parameters
    ----------
    graph : DataflowGraph
        The canonical model.
    device : DeviceSpec
        Rates for the predictions.
    target : TargetInfo
        What the plan is for.
    config : FusionConfig
        Strategies and limits.
    model : str
        Name shown in reports.
    existing : mapping of str to Proposal, optional
        Groups that stand already, by id.
    excluded : iterable of tuple of str
        Operator sets that must not be grouped.
    """
    chosen, considered = solve(graph, device, config, existing, excluded)
    counter: collections.Counter[str] = collections.Counter()
    groups = []
    for candidate in chosen:
        strategy = candidate.proposal.strategy
        groups.append(_group(graph, f"fused_{strategy}_{counter[strategy]}", candidate))
        counter[strategy] += 1
    rejected = refusals(graph, chosen, considered)
    return Plan(
        model=model,
        target=target,
        dtype=main_dtype(graph),
        operators=sum(o.does_work for o in graph.operators),
        groups=tuple(groups),
        rejected=rejected,
        ungrouped=ungrouped(graph, chosen, rejected),
        totals=_totals(graph, chosen, device),
    )


def main_dtype(graph: DataflowGraph) -> str:
    """Floating type of most of the model's results (an integer type where none is floating)."""
    counts = collections.Counter(graph.tensors[t].dtype for o in graph.operators for t in o.outputs)
    floating = collections.Counter({d: n for d, n in counts.items() if "float" in d})
    ranked = (floating or counts).most_common(1)
    return ranked[0][0] if ranked else "float32"


def _group(graph: DataflowGraph, name: str, candidate: Candidate) -> Group:
    proposal, before, after = candidate.proposal, candidate.before, candidate.after
    return Group(
        id=name,
        strategy=proposal.strategy,
        operators=tuple(graph.by_name[n].op for n in proposal.operators),
        nodes=proposal.operators,
        depth=proposal.depth,
        members=len(proposal.members),
        anchors=len(proposal.anchors),
        branches=proposal.members,
        options=dict(proposal.options),
        parts=proposal.parts,
        flops_before=before.flops,
        flops_after=after.flops,
        bytes_before=before.nbytes,
        bytes_after=after.nbytes,
        intensity_before=_ratio(before),
        intensity_after=_ratio(after),
        launches_before=before.launches,
        launches_after=after.launches,
        predicted_us_before=round(before.microseconds, 4),
        predicted_us_after=round(after.microseconds, 4),
    )


def _ratio(cost: Cost) -> float:
    return round(cost.flops / cost.nbytes, 4) if cost.nbytes else 0.0


def _totals(graph: DataflowGraph, chosen: Sequence[Candidate], device: DeviceSpec) -> Totals:
    inside = {name for c in chosen for name in c.operators}
    before = after = Cost()
    for operator in graph.operators:
        cost = kernel_cost(graph, (operator.name,), device)
        before += cost
        if operator.name not in inside:
            after += cost
    for candidate in chosen:
        after += candidate.after
    return Totals(
        before.launches, after.launches, before.nbytes, after.nbytes, before.flops, after.flops,
        round(before.microseconds, 4), round(after.microseconds, 4),
    )  # fmt: skip


def proposals_of(plan: Plan, graph: DataflowGraph) -> list[Proposal]:
    """Return the groups of a plan as proposals on a graph.

    Raises
    ------
    PlanError
        If the plan names an operator that the graph lacks, or uses one twice.
    """
    used: set[str] = set()
    out = []
    for group in plan.groups:
        for node in group.nodes:
            if node not in graph.by_name:
                raise PlanError(
                    f"the plan's {group.id} names {node!r}, which the model lacks; plan this model again"
                )
            if node in used:
                raise PlanError(f"the plan puts {node!r} into two groups; plan again")
            used.add(node)
        types = tuple(graph.by_name[n].op for n in group.nodes)
        if types != tuple(group.operators):
            raise PlanError(
                f"the plan's {group.id} lists other operators than the model has; plan this model again"
            )
        anchors = tuple(b[0] for b in group.branches if graph.by_name[b[0]].pattern == "anchor")
        out.append(
            Proposal(
                group.strategy,
                graph.sort(group.nodes),
                anchors,
                group.branches,
                group.depth,
                group.parts,
                tuple(sorted(group.options.items())),
            )
        )
    if not graph.is_jointly_acyclic([p.operators for p in out]):
        raise PlanError("the plan's groups depend on each other in a cycle; plan again")
    return out
