"""Decisions → plan: counts, refusals and totals."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Mapping, Sequence

from ..config import FusionConfig
from ..devices import DeviceSpec
from ..errors import PlanError
from ..graph.dataflow import DataflowGraph
from ..guards import Resources, Verdict
from ..guards.footprint import footprint
from ..guards.needs import kind_of
from ..strategies.base import Proposal
from ..strategies.vertical import ANCHORS
from .candidates import Candidate, Measure
from .compare import Kernel
from .cost import Cost, fused_cost, operator_cost
from .plan import Group, Part, Plan, TargetInfo, Totals
from .planner import Compiler, Solution, solve
from .refusals import refusals, ungrouped
from .regions import regions_of


def make_plan(
    graph: DataflowGraph,
    device: DeviceSpec,
    target: TargetInfo,
    config: FusionConfig,
    *,
    model: str = "model",
    existing: Mapping[str, Proposal] | None = None,
    excluded: Mapping[Kernel, Verdict] | None = None,
    offered: Sequence[Proposal] = (),
    compiler: Compiler | None = None,
    measure: Measure | None = None,
    recall: Measure | None = None,
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
    excluded : mapping of (operators, options) to Verdict, optional
        Groups that must not be taken, and why.
    offered : sequence of Proposal, optional
        Further proposals.
    compiler, measure, recall : callable, optional
        What the compiler and the clock say of kernels (see ``planner.solve``).
    """
    solution = solve(
        graph, device, config, existing, excluded, offered=offered, compiler=compiler,
        measure=measure, recall=recall,
    )  # fmt: skip
    plan = describe(graph, device, target, solution, model)
    return dataclasses.replace(plan, numerics=config.numerics)


def describe(
    graph: DataflowGraph, device: DeviceSpec, target: TargetInfo, solution: Solution, model: str
) -> Plan:
    """Turn a solution into a plan: counts, refusals, regions and totals."""
    chosen = solution.chosen
    counter: collections.Counter[str] = collections.Counter()
    order = sorted(range(len(chosen)), key=lambda i: _urgency(graph, chosen[i], solution))
    priority = {index: rank for rank, index in enumerate(order)}
    groups = []
    for index, candidate in enumerate(chosen):
        strategy = candidate.proposal.strategy
        name = f"fused_{strategy}_{counter[strategy]}"
        counter[strategy] += 1
        group = _group(graph, device, name, candidate)
        hot = solution.heat.is_hot(candidate.operators)
        groups.append(dataclasses.replace(group, hot=hot, priority=priority[index]))
    rejected = refusals(graph, chosen, solution.considered, solution.strategies)
    return Plan(
        model=model,
        target=target,
        dtype=main_dtype(graph),
        operators=sum(o.does_work for o in graph.operators),
        groups=tuple(groups),
        regions=regions_of(graph, groups),
        rejected=rejected,
        ungrouped=ungrouped(graph, chosen, rejected),
        totals=_totals(graph, chosen, device),
        preset=solution.preset,
        search=solution.search,
        float32_products="tf32" if device.tf32 else "float32",
    )


def _urgency(
    graph: DataflowGraph, candidate: Candidate, solution: Solution
) -> tuple[bool, float, tuple[int, ...]]:
    """Order of tuning: hot groups first, then by the time that is at stake."""
    hot = solution.heat.is_hot(candidate.operators)
    stake = -round(candidate.before.microseconds, 6)
    return not hot, stake, graph.places(candidate.operators)


def main_dtype(graph: DataflowGraph) -> str:
    """Floating type of most of the model's results (an integer type where none is floating)."""
    counts = collections.Counter(graph.tensors[t].dtype for o in graph.operators for t in o.outputs)
    floating = collections.Counter({d: n for d, n in counts.items() if "float" in d})
    ranked = (floating or counts).most_common(1)
    return ranked[0][0] if ranked else "float32"


def _group(graph: DataflowGraph, device: DeviceSpec, name: str, candidate: Candidate) -> Group:
    proposal, before, after = candidate.proposal, candidate.before, candidate.after
    needs = footprint(graph, proposal, device)
    on_gpu = device.kind == "cuda"
    known = candidate.resources or Resources()
    timed = candidate.measured_after is not None
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
        parts=tuple(_part(graph, device, *part) for part in proposal.parts),
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
        measured_us_before=candidate.measured_before,
        measured_us_after=candidate.measured_after,
        registers=known.registers,
        spill_bytes=known.spill_bytes,
        shared_bytes=known.shared_bytes,
        estimated_registers=needs.registers if on_gpu else None,
        estimated_shared_bytes=needs.shared_bytes if on_gpu else None,
        template=known.template,
        evidence="measured" if timed else "predicted",
    )


def _part(
    graph: DataflowGraph, device: DeviceSpec, strategy: str, operators: tuple[str, ...]
) -> Part:
    """A part with the time that it takes as a kernel of its own."""
    anchors = tuple(n for n in operators if kind_of(graph.by_name[n]) != "pointwise")
    alone = Proposal(strategy, operators, anchors, (operators,))
    return Part(strategy, operators, round(fused_cost(graph, alone, device).microseconds, 4))


def _ratio(cost: Cost) -> float:
    return round(cost.flops / cost.nbytes, 4) if cost.nbytes else 0.0


def _totals(graph: DataflowGraph, chosen: Sequence[Candidate], device: DeviceSpec) -> Totals:
    inside = {name for c in chosen for name in c.operators}
    before = after = Cost()
    for operator in graph.operators:
        cost = operator_cost(graph, operator, device)
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
        nodes = graph.sort(group.nodes)
        anchors = tuple(n for n in nodes if graph.by_name[n].pattern in ANCHORS)
        out.append(
            Proposal(
                group.strategy,
                nodes,
                anchors,
                group.branches,
                group.depth,
                tuple((part.strategy, part.nodes) for part in group.parts),
                tuple(sorted(group.options.items())),
            )
        )
    if not graph.is_jointly_acyclic([p.operators for p in out]):
        raise PlanError("the plan's groups depend on each other in a cycle; plan again")
    return out
