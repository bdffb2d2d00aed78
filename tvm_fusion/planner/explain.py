"""Why is a node fused as it is? Every group that it could have joined, and what stopped each.

The answer comes from the candidates that the planner weighed, so that it is the planner's own and
not a second opinion.
"""

from __future__ import annotations

import collections
import difflib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ..config import STRATEGIES
from ..errors import UnknownNodeError
from ..graph.dataflow import DataflowGraph, Operator
from ..guards.base import REASONS
from .candidates import Candidate
from .explanation import (
    Alternative,
    GroupFacts,
    ModelExplanation,
    Neighbour,
    NodeExplanation,
    OperatorExplanation,
    OperatorFacts,
    ReasonSummary,
)
from .plan import Rejection
from .refusals import CANDIDATE_INTENSITY, refusals, ungrouped

#: Groups told for one operator, and examples for one reason.
MAX_ALTERNATIVES, MAX_EXAMPLES = 10, 3


def explain_model(
    graph: DataflowGraph,
    chosen: Sequence[Candidate],
    considered: Sequence[Candidate],
    strategies: Sequence[str] = STRATEGIES,
) -> ModelExplanation:
    """Sum up why a model is fused as it is.

    Parameters
    ----------
    graph : DataflowGraph
        The model.
    chosen, considered : sequence of Candidate
        The groups that were taken, and every candidate (see ``planner.solve``).
    strategies : sequence of str
        Those that were asked for.
    """
    rejected = refusals(graph, chosen, considered, strategies)
    found: dict[tuple[str, str], list[Rejection]] = {}
    for entry in rejected:
        found.setdefault((entry.reason, entry.outcome), []).append(entry)
    reasons = [
        ReasonSummary(
            reason, REASONS.get(reason, ""), outcome, len(entries), tuple(entries[:MAX_EXAMPLES])
        )
        for (reason, outcome), entries in found.items()
    ]
    return ModelExplanation(
        operators=sum(o.does_work for o in graph.operators),
        considered=len(considered),
        accepted=sum(c.verdict.accepted for c in considered),
        groups=dict(collections.Counter(c.proposal.strategy for c in chosen)),
        ungrouped=ungrouped(graph, chosen, rejected),
        reasons=tuple(sorted(reasons, key=lambda r: (-r.count, r.reason, r.outcome))),
    )


def explain_node(
    graph: DataflowGraph,
    chosen: Sequence[Candidate],
    considered: Sequence[Candidate],
    node: str,
    strategies: Sequence[str] = STRATEGIES,
) -> NodeExplanation:
    """Explain one node: which groups it could have joined and what stopped each.

    Parameters
    ----------
    graph : DataflowGraph
        The model.
    chosen, considered : sequence of Candidate
        The groups that were taken, and every candidate (see ``planner.solve``).
    node : str
        Name of an operator, or of a node of the user's model, which may have become several
        operators.
    strategies : sequence of str
        Those that were asked for.

    Raises
    ------
    UnknownNodeError
        If the model has no such node; the message names similar ones.
    """
    operators = find_operators(graph, node)
    rejected = {entry.nodes: entry for entry in refusals(graph, chosen, considered, strategies)}
    names = group_ids(chosen)
    return NodeExplanation(
        node,
        tuple(_operator(graph, chosen, considered, names, rejected, o) for o in operators),
    )


def find_operators(graph: DataflowGraph, node: str) -> list[Operator]:
    """Return the operators of a node, in topological order (see `explain_node`)."""
    found = [o for o in graph.operators if node == o.name or node in o.source_names]
    if found:
        return found
    names = list(dict.fromkeys(n for o in graph.operators for n in (o.name, *o.source_names)))
    of_type = [o.name for o in graph.operators if o.op == node]
    close = difflib.get_close_matches(node, names, n=MAX_EXAMPLES)
    close = close or [n for n in names if node.lower() in n.lower()]
    hint = "; tvm-fusion plan with --format json lists the nodes"
    if of_type:
        hint = f"; it is an operator type, of nodes like {_listed(of_type)}"
    elif close:
        hint = f"; did you mean {_listed(close)}?"
    raise UnknownNodeError(f"the model has no node {node!r}{hint}")


def _listed(names: Sequence[str]) -> str:
    return " or ".join(map(repr, names[:MAX_EXAMPLES]))


def group_ids(chosen: Sequence[Candidate]) -> list[str]:
    """Ids that the plan gives to the groups that were taken."""
    counter: collections.Counter[str] = collections.Counter()
    out = []
    for candidate in chosen:
        strategy = candidate.proposal.strategy
        out.append(f"fused_{strategy}_{counter[strategy]}")
        counter[strategy] += 1
    return out


def _operator(
    graph: DataflowGraph,
    chosen: Sequence[Candidate],
    considered: Sequence[Candidate],
    names: Sequence[str],
    rejected: Mapping[tuple[str, ...], Rejection],
    operator: Operator,
) -> OperatorExplanation:
    own = next((i for i, c in enumerate(chosen) if operator.name in c.operators), None)
    taken = None if own is None else chosen[own]
    covering = [c for c in considered if operator.name in c.operators]
    others = _telling(graph, covering, set(taken.operators) if taken else {operator.name})
    return OperatorExplanation(
        facts=_facts(graph, operator),
        group=None if taken is None else _group(names[own], taken),
        alternatives=tuple(_alternative(c, operator, chosen, names) for c in others),
        considered=len({c.operators for c in covering}),
        neighbours=tuple(_neighbours(graph, chosen, considered, names, rejected, operator)),
    )


def _facts(graph: DataflowGraph, operator: Operator) -> OperatorFacts:
    def types(tensors: Iterable[str]) -> tuple[str, ...]:
        return tuple(str(graph.tensors[t]) for t in tensors)

    candidate = operator.does_work and operator.pattern != "opaque"
    return OperatorFacts(
        operator.name, operator.op, operator.source_names, types(operator.inputs),
        types(operator.outputs), operator.bytes_read, operator.bytes_written, operator.flops,
        round(operator.intensity, 4), operator.does_work,
        candidate and operator.intensity < CANDIDATE_INTENSITY,
    )  # fmt: skip


def _group(name: str, taken: Candidate) -> GroupFacts:
    return GroupFacts(
        name, taken.proposal.strategy, taken.operators, dict(taken.proposal.options),
        round(taken.before.microseconds, 4), round(taken.after.microseconds, 4),
        round(taken.saving, 4),
    )  # fmt: skip


def _telling(
    graph: DataflowGraph, covering: Sequence[Candidate], inside: set[str]
) -> list[Candidate]:
    """The largest group of each kind of verdict first, then the next ones; never a part of another.

    Groups inside the one that was taken were outdone by it and are left out.
    """
    ranked = sorted(
        (c for c in covering if not inside.issuperset(c.operators)),
        key=lambda c: (
            -len(c.operators),
            c.verdict.accepted,
            -round(c.saving, 6),
            graph.places(c.operators),
        ),
    )
    kinds: dict[tuple[str, str], list[Candidate]] = {}
    for candidate in ranked:
        kind = kinds.setdefault((candidate.proposal.strategy, candidate.verdict.reason), [])
        if not any(set(c.operators).issuperset(candidate.operators) for c in kind):
            kind.append(candidate)
    depth = max((len(kind) for kind in kinds.values()), default=0)
    in_turn = [kind[i] for i in range(depth) for kind in kinds.values() if i < len(kind)]
    kept = {id(c) for c in in_turn[:MAX_ALTERNATIVES]}
    return [c for c in ranked if id(c) in kept]


def _alternative(
    candidate: Candidate, operator: Operator, chosen: Sequence[Candidate], names: Sequence[str]
) -> Alternative:
    partners = tuple(n for n in candidate.operators if n != operator.name)
    inside = set(candidate.operators)
    rivals = [i for i, c in enumerate(chosen) if inside.intersection(c.operators)]
    overlaps = tuple(names[i] for i in rivals)
    before, after = candidate.before.microseconds, candidate.after.microseconds
    times = (round(before, 4), round(after, 4))
    verdict = candidate.verdict
    if not verdict.accepted:
        costed = times if verdict.outcome == "unprofitable" else (None, None)
        return Alternative(
            candidate.proposal.strategy, partners, verdict.outcome, verdict.reason,
            dict(verdict.numbers), verdict.detail, *costed, overlaps,
        )  # fmt: skip
    theirs = sum(chosen[i].saving for i in rivals)
    detail = f"it would save {candidate.saving:.1f} µs, but "
    if rivals:
        which = overlaps[0] if len(rivals) == 1 else f"{len(rivals)} groups that were taken"
        detail += (
            f"{which} {'holds' if len(rivals) == 1 else 'hold'} some of its operators and "
            f"{'saves' if len(rivals) == 1 else 'save'} {theirs:.1f} µs"
        )
        if theirs < candidate.saving:
            detail += ", and the model as a whole is predicted faster so"
    else:
        detail += "together with the groups that were taken it would close a cycle"
    numbers = {"saving_us": round(candidate.saving, 3), "taken_saving_us": round(theirs, 3)}
    return Alternative(
        candidate.proposal.strategy, partners, "unprofitable", "overlaps_better", numbers, detail,
        *times, overlaps,
    )  # fmt: skip


def _neighbours(
    graph: DataflowGraph,
    chosen: Sequence[Candidate],
    considered: Sequence[Candidate],
    names: Sequence[str],
    rejected: Mapping[tuple[str, ...], Rejection],
    operator: Operator,
) -> Iterable[Neighbour]:
    """Producers, then consumers, that are not in the operator's group; views are looked through."""
    owner = {n: i for i, c in enumerate(chosen) for n in c.operators}
    own = owner.get(operator.name, -1)
    covered = {n for c in considered if operator.name in c.operators for n in c.operators}
    for role, step in (("producer", graph.predecessors), ("consumer", graph.successors)):
        for other, views in _beyond_views(operator, step):
            if own == owner.get(other.name, -2):
                continue
            group = names[owner[other.name]] if other.name in owner else None
            edge = (
                (other.name, operator.name) if role == "producer" else (operator.name, other.name)
            )
            entry = rejected.get(edge)
            if entry is not None:
                verdict = (entry.outcome, entry.reason, entry.numbers, entry.detail)
            elif views and other.name not in covered:
                detail = f"no group reaches through {views[0].name}, a {views[0].op}, between them"
                verdict = ("unsupported", "no_partner", {}, detail)
            else:
                continue
            yield Neighbour(other.name, other.op, role, group, *verdict)


def _beyond_views(operator: Operator, step: Any) -> Iterable[tuple[Operator, list[Operator]]]:
    """Working neighbours, each with the views between."""
    todo: list[tuple[Operator, list[Operator]]] = [(o, []) for o in step(operator)]
    seen = set()
    while todo:
        other, views = todo.pop(0)
        if other.name in seen:
            continue
        seen.add(other.name)
        if other.does_work:
            yield other, views
        else:
            todo += [(o, [*views, other]) for o in step(other)]
