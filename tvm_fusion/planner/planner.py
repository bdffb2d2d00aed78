"""Choosing disjoint, jointly acyclic groups of least total time.

The native search is exact where it can be and bounded elsewhere, and says which. Where a compiler
or a clock can be asked, the chosen kernels are built or measured, what they say replaces the
estimates, and the choice is made again until it rests on what is known.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence, Set

from ..config import FusionConfig
from ..devices import DeviceSpec
from ..graph.dataflow import DataflowGraph
from ..guards import Resources, Verdict, judge_resources
from ..guards.footprint import footprint
from ..strategies.base import Proposal, depth_of
from ..strategies.cross import work_of
from .candidates import Candidate, Measure, evaluate, most_specific, propose
from .compare import PER_MICROSECOND, Clock, Kernel, kernel_of, no_better, search
from .plan import Search
from .presets import Heat, family_of, heat_of
from .search import SearchResult

#: Asks the compiler about proposals, in order; None where it has no answer (a CPU).
Compiler = Callable[[Sequence[Proposal]], Sequence[Resources | None]]

#: Times that the choice may be made again; each round settles at least one more kernel.
_ROUNDS = 12

#: Operators of a chain up to which every length is tried after a spill.
_FEW = 8


@dataclasses.dataclass(frozen=True)
class Solution:
    """What was decided.

    Attributes
    ----------
    chosen : list of Candidate
        In topological order of their first operators.
    considered : list of Candidate
        Every candidate, chosen or not.
    search : Search
        Which part of the choice is provably optimal.
    preset : str
        The model family.
    heat : Heat
        Hot and cold operators.
    strategies : tuple of str
        Those that were asked for.
    """

    chosen: list[Candidate]
    considered: list[Candidate]
    search: Search
    preset: str
    heat: Heat
    strategies: tuple[str, ...]


def solve(
    graph: DataflowGraph,
    device: DeviceSpec,
    config: FusionConfig,
    existing: Mapping[str, Proposal] | None = None,
    excluded: Mapping[Kernel, Verdict] | None = None,
    *,
    offered: Sequence[Proposal] = (),
    compiler: Compiler | None = None,
    measure: Measure | None = None,
    recall: Measure | None = None,
) -> Solution:
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
    excluded : mapping of (operators, options) to Verdict, optional
        Groups that must not be taken, and why (they failed to lower, or gave wrong results).
    offered : sequence of Proposal, optional
        Further proposals: what was measured under other limits, where chains are cut elsewhere.
    compiler : callable, optional
        Builds chosen kernels and says what they take.
    measure : callable, optional
        Times chosen kernels.
    recall : callable, optional
        Says what is known of times without measuring; asked about every candidate. What it knows counts more than what
        was predicted, and than what the compiler says.
    """
    existing, barred, clock = existing or {}, excluded or {}, Clock(graph)
    preset = family_of(graph) if config.preset == "auto" else config.preset
    config = dataclasses.replace(config, preset=preset)
    heat = heat_of(graph, device)

    def slower(candidate: Candidate, chains: Sequence[Candidate]) -> Verdict | None:
        return no_better(graph, candidate, chains, "slower_predicted")

    def beaten(candidate: Candidate, parts: Sequence[Candidate]) -> Verdict | None:
        return no_better(graph, candidate, parts, "parts_better")

    considered = propose(graph, device, config, existing, slower, beaten)
    have = {kernel_of(c.proposal) for c in considered}
    grouped = {name for p in existing.values() for name in p.operators}
    more = [p for p in offered if kernel_of(p) not in have and grouped.isdisjoint(p.operators)]
    considered = _barring(considered + evaluate(graph, more, device, config), barred)
    if recall is not None:
        considered = clock.judge(considered, recall)
    kept = {p.operators for p in existing.values()}
    asked: set[tuple] = set()

    def rank(candidate: Candidate) -> tuple:
        return _rank(graph, candidate, heat, preset)

    for turn in range(_ROUNDS + 1):
        # When enough was asked, the plan rests on what is known.
        known_only = asked if turn == _ROUNDS else None
        result, chosen, considered = _decide(clock, considered, kept, rank, known_only)
        new = [c for c in chosen if c.key not in asked]
        if not new or (compiler is None and measure is None):
            break
        asked.update(c.key for c in new)
        considered = _ask(graph, device, config, considered, new, compiler, measure, clock)
        considered = _barring(considered, barred)
        known = {c.key: c for c in considered}
        if all(known[c.key] == c for c in chosen):
            break
    chosen.sort(key=lambda c: graph.index[c.operators[0]])
    found = Search(
        result.regions, result.exact_regions, result.bounded_regions,
        round((result.upper_bound - result.saving) / PER_MICROSECOND, 4),
    )  # fmt: skip
    return Solution(chosen, most_specific(considered), found, preset, heat, config.strategies)


def _decide(
    clock: Clock,
    considered: list[Candidate],
    kept: Set[tuple[str, ...]],
    rank: Callable[[Candidate], tuple],
    known_only: Set[tuple] | None,
) -> tuple[SearchResult, list[Candidate], list[Candidate]]:
    """The best choice, what it takes, and all candidates: chosen groups that their parts beat by the clock are refused.

    Of those not in ``known_only``, where it is given, only measured ones are usable.
    """
    while True:
        usable = [c for c in most_specific(considered) if c.verdict.accepted or c.operators in kept]
        if known_only is not None:
            usable = [c for c in usable if c.key in known_only or c.measured_after is not None]
        usable.sort(key=rank)
        result = search(clock.graph, usable, kept)
        chosen = [usable[i] for i in result.chosen]
        timed = [c for c in chosen if c.measured_after is not None and c.operators not in kept]
        beaten = {c.key: verdict for c in timed if (verdict := clock.no_better(c, usable))}
        if not beaten:
            return result, chosen, considered
        considered = [
            dataclasses.replace(c, verdict=beaten.get(c.key, c.verdict)) for c in considered
        ]


def _rank(graph: DataflowGraph, candidate: Candidate, heat: Heat, preset: str) -> tuple:
    """Most saving first; then by preset; then the group whose anchor comes first keeps the pointwise operators."""
    anchors = candidate.proposal.anchors
    first = graph.index[anchors[0]] if anchors else len(graph)
    preferred = heat.preference(preset, candidate.proposal.strategy, candidate.operators)
    size = len(candidate.operators)
    return (-round(candidate.saving, 9), preferred, first, size, graph.places(candidate.operators))


def _barring(candidates: list[Candidate], barred: Mapping[Kernel, Verdict]) -> list[Candidate]:
    """Candidates, refused where they must not be taken."""
    return [
        dataclasses.replace(c, verdict=barred.get(kernel_of(c.proposal), c.verdict))
        for c in candidates
    ]


def _ask(
    graph: DataflowGraph,
    device: DeviceSpec,
    config: FusionConfig,
    considered: list[Candidate],
    new: list[Candidate],
    compiler: Compiler | None,
    measure: Measure | None,
    clock: Clock,
) -> list[Candidate]:
    """Let the compiler and the clock judge the chosen; add what could take the place of the refused."""
    known: dict[tuple, Candidate] = {}
    more: list[Proposal] = []
    answers = compiler([c.proposal for c in new]) if compiler else [None] * len(new)
    for candidate, found in zip(new, answers, strict=True):
        if found is None:
            continue
        needs = footprint(graph, candidate.proposal, device)
        products = sum(
            graph.by_name[name].pattern == "anchor" for name in candidate.proposal.operators
        )
        verdict = judge_resources(found, needs, config, device, products)
        if candidate.measured_after is not None:  # whatever it takes, it is known to be worth it
            verdict = candidate.verdict
        known[candidate.key] = dataclasses.replace(candidate, verdict=verdict, resources=found)
        more += _alternatives(graph, candidate.proposal, verdict)
    if measure is not None:
        built = (known.get(c.key, c) for c in new)
        timed = clock.judge([c for c in built if c.verdict.accepted], measure)
        known |= {c.key: c for c in timed}
    out = [known.get(c.key, c) for c in considered]
    for refused in known.values():
        if _must_be_cut(refused):
            out = [_cut_with(refused, c, known) for c in out]
    have = {c.key for c in out}
    extra = [c for c in evaluate(graph, more, device, config) if c.key not in have]
    return out + extra


def _must_be_cut(candidate: Candidate) -> bool:
    """Whether a chain spills whatever is staged: only a shorter one can fit."""
    proposal = candidate.proposal
    staged = not proposal.anchors or bool(proposal.option("stage"))
    return candidate.verdict.reason == "spill" and staged and len(proposal.members) < 2


def _cut_with(
    refused: Candidate, candidate: Candidate, known: Mapping[tuple, Candidate]
) -> Candidate:
    """A candidate, refused with a spilling chain that it makes more than half of.

    Asking the compiler about every length would take as many rounds as a chain is long.
    """
    inside, whole = set(candidate.operators), set(refused.operators)
    if len(whole) <= _FEW:  # every length of a short chain is tried
        return candidate
    close = candidate.verdict.accepted and inside < whole and 2 * len(inside) > len(whole)
    if not close or candidate.key in known or len(candidate.proposal.members) > 1:
        return candidate
    numbers = {**refused.verdict.numbers, "operators": len(inside), "of": len(whole)}
    detail = f"it is most of a group of {len(whole)} operators that spills"
    return dataclasses.replace(candidate, verdict=Verdict("unprofitable", "spill", numbers, detail))


def _halves(graph: DataflowGraph, proposal: Proposal) -> list[Proposal]:
    """A chain without anchors in two, at the middle or the last single result before it."""
    names = proposal.operators
    cuts = (k for k in range(len(names) // 2, 0, -1))
    cut = next((k for k in cuts if len(graph.external_outputs(names[:k])) == 1), 0)
    halves = (names[:cut], names[cut:]) if cut else ()
    return [
        Proposal(proposal.strategy, half, (), (half,), depth_of(graph, half))
        for half in halves
        if len(half) > 1
    ]


def _alternatives(graph: DataflowGraph, proposal: Proposal, verdict: Verdict) -> list[Proposal]:
    """What to try after a refusal by the compiler; shorter groups are candidates anyhow.

    A spill: results go through shared memory before the epilogue, a chain without anchors is cut in
    two. Too low occupancy or too many registers: the heaviest member is left out.
    """
    if verdict.reason == "spill" and not proposal.anchors and len(proposal.members) < 2:
        return _halves(graph, proposal)
    if verdict.reason == "spill" and proposal.anchors and not proposal.option("stage"):
        options = tuple(sorted((*proposal.options, ("stage", "shared"))))
        return [dataclasses.replace(proposal, options=options)]
    apart = proposal.option("join") == "apart"
    if (
        verdict.reason in ("occupancy", "registers", "spill")
        and apart
        and len(proposal.members) > 2
    ):
        heaviest = max(proposal.members, key=lambda m: work_of(graph, m))
        members = tuple(m for m in proposal.members if m is not heaviest)
        operators = graph.sort(n for m in members for n in m)
        return [
            dataclasses.replace(
                proposal,
                operators=operators,
                anchors=tuple(a for a in proposal.anchors if a not in heaviest),
                members=members,
                depth=depth_of(graph, operators),
                parts=tuple(part for part in proposal.parts if set(part[1]) <= set(operators)),
            )
        ]
    return []
