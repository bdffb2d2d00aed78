"""Proposals with their verdicts and costs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence

from ..config import FusionConfig
from ..devices import DeviceSpec
from ..graph.dataflow import DataflowGraph
from ..guards import Resources, Verdict, judge
from ..strategies import Compound, Cross, Horizontal, Vertical
from ..strategies.base import Proposal, Strategy
from .cost import Cost, fused_cost, unfused_cost

#: Strategies that read the graph alone.
_SIMPLE: Mapping[str, Strategy] = {s.name: s for s in (Vertical(), Horizontal(), Cross())}

#: Which of two labels for the same operators says more.
_SPECIFIC = ("compound", "horizontal", "cross", "vertical")

#: Compares a candidate with others: a refusal if the best plan of those inside it is as good.
Compare = Callable[["Candidate", Sequence["Candidate"]], Verdict | None]


@dataclasses.dataclass(frozen=True)
class Timing:
    """A measured time.

    Attributes
    ----------
    microseconds : float
        The time.
    noise : float
        Microseconds by which another measurement may differ.
    """

    microseconds: float
    noise: float = 0.0


#: Measures kernels: the time of each proposal as one kernel, None where unknown.
Measure = Callable[[Sequence[Proposal]], Sequence[Timing | None]]


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A proposal with its verdict and its costs.

    Attributes
    ----------
    proposal : Proposal
        The group.
    verdict : Verdict
        What the guards, and later the compiler and the clock, say of it.
    before, after : Cost
        Predicted cost with a kernel per operator, and as one kernel.
    resources : Resources or None
        What the compiler says of the kernel, once it was asked.
    measured_before, measured_after : float or None
        Measured microseconds.
    """

    proposal: Proposal
    verdict: Verdict
    before: Cost
    after: Cost
    resources: Resources | None = None
    measured_before: float | None = None
    measured_after: float | None = None

    @property
    def saving(self) -> float:
        """Microseconds saved against one kernel per operator: measured where known, else predicted."""
        if self.measured_before is not None and self.measured_after is not None:
            return self.measured_before - self.measured_after
        return self.before.microseconds - self.after.microseconds

    @property
    def operators(self) -> tuple[str, ...]:
        """Operators of the proposal."""
        return self.proposal.operators

    @property
    def key(self) -> tuple[tuple[str, ...], str, tuple[tuple[str, str], ...]]:
        """What distinguishes candidates: operators, strategy and options."""
        return self.proposal.operators, self.proposal.strategy, self.proposal.options


def evaluate(
    graph: DataflowGraph, proposals: Iterable[Proposal], device: DeviceSpec, config: FusionConfig
) -> list[Candidate]:
    """Judge and cost proposals."""
    out = []
    for proposal in proposals:
        verdict = judge(proposal, graph, config, device)
        before = unfused_cost(graph, proposal.operators, device)
        after = fused_cost(graph, proposal, device)
        if verdict.accepted and before.microseconds <= after.microseconds:
            numbers = {
                "predicted_us_before": round(before.microseconds, 3),
                "predicted_us_after": round(after.microseconds, 3),
                "members": len(proposal.members),
            }
            detail = "one kernel is predicted no faster than its parts"
            verdict = Verdict("unprofitable", "slower_predicted", numbers, detail)
        out.append(Candidate(proposal, verdict, before, after))
    return out


def propose(
    graph: DataflowGraph,
    device: DeviceSpec,
    config: FusionConfig,
    existing: Mapping[str, Proposal],
    slower: Compare,
    beaten: Compare,
) -> list[Candidate]:
    """Collect the candidates of all strategies.

    Parameters
    ----------
    graph : DataflowGraph
        The graph.
    device : DeviceSpec
        The device to predict for.
    config : FusionConfig
        Strategies and limits.
    existing : mapping of str to Proposal
        Groups that stand already, by id; no proposal may cut one.
    slower, beaten : callable
        Say whether a candidate is no better than the best plan of others inside it: of a horizontal
        or cross one against vertical chains, of a compound one against everything that survived.
    """
    composing = "compound" in config.strategies
    found: dict[tuple, Proposal] = {
        (p.operators, p.strategy, p.options): p for p in existing.values()
    }
    for name, strategy in _SIMPLE.items():
        if name in config.strategies or (composing and name != "cross"):
            for proposal in strategy.propose(graph, config):
                whole = _absorbing(proposal, existing)
                if whole is not None:
                    found.setdefault((whole.operators, whole.strategy, whole.options), whole)
    parts = evaluate(graph, found.values(), device, config)
    if "vertical" in config.strategies:  # chains that may be taken instead
        chains = [c for c in parts if c.proposal.strategy == "vertical" and c.verdict.accepted]
        first = by_operator(chains)
        parts = [_against(c, first, slower) for c in parts]
    kept = {p.operators for p in existing.values()}
    enabled = [c for c in parts if c.proposal.strategy in config.strategies or c.operators in kept]
    if not composing:
        return enabled
    survived = [c for c in parts if c.verdict.accepted]
    composed = []
    for proposal in Compound().compose(graph, config, [c.proposal for c in survived]):
        whole = _absorbing(proposal, existing)
        if whole is not None:
            composed.append(whole)
    alone, judged = by_operator(survived), {}
    for candidate in evaluate(graph, composed, device, config):
        judged[candidate.key] = _against(candidate, alone, beaten)
    # A compound that stands already is the same group as the one composed again.
    return [c for c in enabled if c.key not in judged] + list(judged.values())


def by_operator(candidates: Iterable[Candidate]) -> dict[str, list[Candidate]]:
    """Candidates by their first operator."""
    out: dict[str, list[Candidate]] = {}
    for candidate in candidates:
        out.setdefault(candidate.operators[0], []).append(candidate)
    return out


def _against(
    candidate: Candidate, others: Mapping[str, Sequence[Candidate]], compare: Compare
) -> Candidate:
    """A candidate of several members with what the comparison with those inside it says."""
    if not candidate.verdict.accepted or len(candidate.proposal.members) < 2:
        return candidate
    inside = set(candidate.operators)
    parts = [
        c
        for name in candidate.operators
        for c in others.get(name, ())
        if len(c.operators) < len(inside) and inside.issuperset(c.operators)
    ]
    verdict = compare(candidate, parts)
    return dataclasses.replace(candidate, verdict=verdict) if verdict else candidate


def _absorbing(proposal: Proposal, existing: Mapping[str, Proposal]) -> Proposal | None:
    """A proposal with the existing groups that it absorbs as parts; None if it cuts one or is one."""
    if not existing:
        return proposal
    inside, parts = set(proposal.operators), list(proposal.parts)
    itself = (proposal.strategy, proposal.operators)
    for group in existing.values():
        if inside.intersection(group.operators):
            if not inside.issuperset(group.operators):
                return None
            if len(inside) == len(group.operators):
                return None  # it stands already, whatever another strategy calls it
            part = (group.strategy, group.operators)
            if part not in parts and part != itself:
                parts.append(part)
    return dataclasses.replace(proposal, parts=tuple(parts))


def most_specific(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Keep, of accepted candidates for the same operators, the one that saves most; on a tie, says most."""
    best: dict[tuple[str, ...], Candidate] = {}
    for candidate in candidates:
        if candidate.verdict.accepted:
            rival = best.get(candidate.operators)
            if rival is None or _merit(candidate) < _merit(rival):
                best[candidate.operators] = candidate
    return [c for c in candidates if not c.verdict.accepted or best[c.operators].key == c.key]


def _merit(candidate: Candidate) -> tuple[float, int]:
    # The saving first: a label must not cost the optimum.
    return -round(candidate.saving, 6), _SPECIFIC.index(candidate.proposal.strategy)
