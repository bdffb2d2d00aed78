"""Choosing disjoint, jointly acyclic groups of least total predicted time.

Regions (proposals connected by common operators) are solved one by one. Within a region the groups
are taken greedily by what they save; then every horizontal proposal is forced in turn and kept if
the region's total falls, so that a wide group never displaces chains that save more together.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

from ..config import STRATEGIES, FusionConfig
from ..devices import DeviceSpec
from ..graph.dataflow import DataflowGraph
from ..guards import Verdict, judge
from ..strategies import Horizontal, Vertical
from ..strategies.base import Proposal, Strategy
from .cost import Cost, fused_cost, unfused_cost

_STRATEGIES: dict[str, Strategy] = {s.name: s for s in (Vertical(), Horizontal())}


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A proposal with its verdict and its costs."""

    proposal: Proposal
    verdict: Verdict
    before: Cost
    after: Cost

    @property
    def saving(self) -> float:
        """Predicted microseconds saved against one kernel per operator."""
        return self.before.microseconds - self.after.microseconds

    @property
    def operators(self) -> tuple[str, ...]:
        """Operators of the proposal."""
        return self.proposal.operators


def evaluate(
    graph: DataflowGraph, proposals: Iterable[Proposal], device: DeviceSpec, config: FusionConfig
) -> list[Candidate]:
    """Judge and cost proposals."""
    out = []
    for proposal in proposals:
        before = unfused_cost(graph, proposal.operators, device)
        candidate = Candidate(
            proposal, judge(proposal, graph, config), before, fused_cost(graph, proposal, device)
        )
        if candidate.verdict.accepted and candidate.saving <= 0:
            numbers = {
                "predicted_us_before": round(before.microseconds, 3),
                "predicted_us_after": round(candidate.after.microseconds, 3),
            }
            verdict = Verdict(
                "unprofitable",
                "slower_predicted",
                numbers,
                "one kernel is predicted no faster than its parts",
            )
            candidate = dataclasses.replace(candidate, verdict=verdict)
        out.append(candidate)
    return out


def solve(
    graph: DataflowGraph,
    device: DeviceSpec,
    config: FusionConfig,
    existing: Mapping[str, Proposal] | None = None,
    excluded: Iterable[tuple[str, ...]] = (),
) -> tuple[list[Candidate], list[Candidate]]:
    """Plan a graph.

    Parameters
    ----------
    graph : DataflowGraph
        The graph.
    device : DeviceSpec
        The device to predict for.
    config : FusionConfig
        Strategies and limits.
    existing : mapping of str to Proposal, optional
        Groups that stand already, by id. A new group may absorb whole ones (its ``parts`` say
        which) and never cuts one.
    excluded : iterable of tuple of str
        Operator sets that must not be taken (they failed to lower, or gave wrong results).

    Returns
    -------
    chosen : list of Candidate
        In topological order of their first operators.
    considered : list of Candidate
        Every candidate, chosen or not.
    """
    existing = existing or {}
    proposals: dict[tuple[str, ...], Proposal] = {p.operators: p for p in existing.values()}
    for name in STRATEGIES:
        if name in config.strategies:
            for proposal in _STRATEGIES[name].propose(graph, config):
                absorbed = _absorbed(proposal, existing)
                if absorbed is not None:
                    proposals.setdefault(
                        proposal.operators, dataclasses.replace(proposal, parts=absorbed)
                    )
    considered = evaluate(graph, proposals.values(), device, config)
    kept = {p.operators for p in existing.values()}
    barred = set(excluded)
    usable = [
        c
        for c in considered
        if (c.verdict.accepted or c.operators in kept) and c.operators not in barred
    ]
    chosen: list[Candidate] = []
    for region in _regions(graph, usable):
        chosen += _solve_region(graph, region, chosen)
    chosen.sort(key=lambda c: graph.index[c.operators[0]])
    return chosen, considered


def _absorbed(proposal: Proposal, existing: Mapping[str, Proposal]) -> tuple[str, ...] | None:
    """Ids of the existing groups inside a proposal; None if it would cut one."""
    inside, found = set(proposal.operators), []
    for group_id, group in existing.items():
        if inside.intersection(group.operators):
            if not inside.issuperset(group.operators):
                return None
            found.append(group_id)
    return tuple(found)


def _regions(graph: DataflowGraph, candidates: Sequence[Candidate]) -> list[list[Candidate]]:
    """Connected components of candidates that share operators, in topological order."""
    parent = list(range(len(candidates)))

    def find(i: int) -> int:
        while parent[i] != i:
            parent[i] = parent[parent[i]]
            i = parent[i]
        return i

    owner: dict[str, int] = {}
    for i, candidate in enumerate(candidates):
        for name in candidate.operators:
            parent[find(i)] = find(owner.setdefault(name, i))
    regions: dict[int, list[Candidate]] = {}
    for i, candidate in enumerate(candidates):
        regions.setdefault(find(i), []).append(candidate)
    return sorted(regions.values(), key=lambda r: min(graph.index[c.operators[0]] for c in r))


def _solve_region(
    graph: DataflowGraph, region: list[Candidate], chosen: Sequence[Candidate]
) -> list[Candidate]:
    ranked = sorted(region, key=lambda c: _rank(graph, c))
    best = _take(graph, ranked, chosen)
    wide = [c for c in ranked if len(c.proposal.members) > 1]
    forced: list[Candidate] = []
    if wide:
        narrow = [c for c in ranked if len(c.proposal.members) <= 1]
        best = _take(graph, narrow, chosen)
    for candidate in wide:
        trial = _take(
            graph,
            [*forced, candidate, *(c for c in ranked if len(c.proposal.members) <= 1)],
            chosen,
        )
        if candidate in trial and _total(trial) > _total(best) + 1e-9:
            best, forced = trial, [*forced, candidate]
    return best


def _rank(graph: DataflowGraph, candidate: Candidate) -> tuple:
    """Most saving first; on a tie the group whose anchor comes first keeps the pointwise operators (epilogue)."""
    anchors = candidate.proposal.anchors
    first = graph.index[anchors[0]] if anchors else len(graph)
    return (-round(candidate.saving, 9), first, len(candidate.operators), candidate.operators)


def _total(chosen: Iterable[Candidate]) -> float:
    return sum(c.saving for c in chosen)


def _take(
    graph: DataflowGraph, ranked: Iterable[Candidate], before: Sequence[Candidate]
) -> list[Candidate]:
    """Take candidates in order where they neither overlap nor close a cycle."""
    taken: list[Candidate] = []
    used: set[str] = set()
    for candidate in ranked:
        if used.intersection(candidate.operators):
            continue
        groups = [c.operators for c in (*before, *taken, candidate)]
        if graph.is_jointly_acyclic(groups):
            taken.append(candidate)
            used.update(candidate.operators)
    return taken
