"""Why not: one refusal per edge, or set of branches, that stays unfused.

Each carries the verdict of the largest proposal that covered it; an edge that no proposal covered
is explained from the two operators themselves.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from ..config import STRATEGIES
from ..graph.dataflow import DataflowGraph, Operator
from ..guards import Verdict
from ..guards.template_pairs import describe, pair_has_template
from ..strategies.attention import attention_of
from ..strategies.growth import POINTWISE
from ..strategies.vertical import ANCHORS
from .candidates import Candidate
from .plan import Rejection, Ungrouped

#: FLOP per byte under which an operator is bound by memory on every GPU, so that fusing it would
#: pay.
CANDIDATE_INTENSITY = 10.0


def refusals(
    graph: DataflowGraph,
    chosen: Sequence[Candidate],
    considered: Sequence[Candidate],
    strategies: Sequence[str] = STRATEGIES,
) -> tuple[Rejection, ...]:
    """Explain every branch set and every edge between working operators that is not inside a group.

    ``strategies`` are those that were asked for.
    """
    owner = {name: i for i, c in enumerate(chosen) for name in c.operators}
    attention = [*_attention(graph, owner, considered), *_before_attention(graph, chosen)]
    out = [*_branch_sets(graph, owner, considered), *attention]
    told = {entry.nodes for entry in attention}
    covering = _by_pair(graph, considered)
    for consumer in graph.operators:
        for producer in graph.predecessors(consumer):
            if not (producer.does_work and consumer.does_work):
                continue
            if owner.get(producer.name, -1) == owner.get(consumer.name, -2):
                continue
            if (producer.name, consumer.name) in told:
                continue
            best = covering.get((producer.name, consumer.name))
            strategy = best.proposal.strategy if best else "vertical"
            verdict = (
                _verdict_of(best)
                if best
                else explain_edge(graph, chosen, owner, producer, consumer)
            )
            chain = verdict.reason == "no_template" and consumer.pattern in POINTWISE
            if chain and "vertical" not in strategies:
                pair = f"{producer.name} and {consumer.name}"
                detail = f"vertical fusion, which would join {pair}, was not asked for"
                verdict = Verdict("unsupported", "denied", {"strategy": "vertical"}, detail)
            out.append(_rejection(strategy, (producer.name, consumer.name), verdict))
    return tuple(out)


def _attention(
    graph: DataflowGraph, owner: Mapping[str, int], considered: Sequence[Candidate]
) -> Iterable[Rejection]:
    """Attention that no kernel takes: views may stand between its products, so that no edge tells of it."""
    told: set[tuple[str, ...]] = set()
    for candidate in considered:
        proposal = candidate.proposal
        anchors = graph.sort(proposal.anchors)
        if proposal.option("form") != "attention" or anchors in told:
            continue
        if len({owner.get(name, name) for name in anchors}) > 1:
            told.add(anchors)
            yield _rejection(proposal.strategy, anchors, _verdict_of(candidate))


def _before_attention(graph: DataflowGraph, chosen: Sequence[Candidate]) -> Iterable[Rejection]:
    """Transposes and slices of operands that stay kernels, with views before the product that reads them."""
    for candidate in chosen:
        form = candidate.proposal.option("form")
        group = attention_of(graph, candidate.proposal) if form == "attention" else None
        for name, why in () if group is None else group.before:
            stray = graph.by_name[name]
            products = (group.scores, group.mixed)
            reader = next(p for p in products if graph.depends(p, name))
            detail = (
                f"{name} ({stray.op}) stays a kernel before attention around {group.softmax}: {why}"
            )
            verdict = Verdict("unsupported", "no_template", {"node": name, "op": stray.op}, detail)
            yield _rejection("vertical", (name, reader), verdict)


def _rejection(strategy: str, nodes: tuple[str, ...], verdict: Verdict) -> Rejection:
    numbers = {key: _freeze(value) for key, value in verdict.numbers.items()}
    return Rejection(strategy, nodes, verdict.outcome, verdict.reason, numbers, verdict.detail)


def _freeze(value: object) -> object:
    return tuple(_freeze(v) for v in value) if isinstance(value, list | tuple) else value


def _branch_sets(
    graph: DataflowGraph, owner: Mapping[str, int], considered: Sequence[Candidate]
) -> Iterable[Rejection]:
    """The largest refused set of branches of each family of heads that ended in different groups."""
    wide = [c for c in considered if len(c.proposal.members) > 1]
    told: list[set[str]] = []
    for candidate in sorted(
        wide, key=lambda c: (-len(c.proposal.members), *_telling(c), graph.index[c.operators[0]])
    ):
        heads = {member[0] for member in candidate.proposal.members}
        groups = {owner.get(head, head) for head in heads}
        if len(groups) == 1 or any(heads <= seen for seen in told):
            continue
        told.append(heads)
        yield _rejection(candidate.proposal.strategy, graph.sort(heads), _verdict_of(candidate))


#: Strategies by how much their refusal tells of operators that meet in a join.
_TELLING = ("cross", "compound", "horizontal", "vertical")


#: Refusals that somebody had to build, run or time the kernel for.
_TRIED = ("slower_measured", "numerics", "spill")


def _telling(candidate: Candidate) -> tuple[int, int]:
    return int(candidate.verdict.accepted), _TELLING.index(candidate.proposal.strategy)


def _by_pair(
    graph: DataflowGraph, considered: Sequence[Candidate]
) -> dict[tuple[str, str], Candidate]:
    """The largest candidate that covers each edge: what was found out by building, running or timing it goes before
    what a rule says, a refused one before one that merely lost."""
    out: dict[tuple[str, str], Candidate] = {}
    ranked = sorted(
        considered,
        key=lambda c: (
            c.verdict.accepted,
            c.verdict.reason not in _TRIED,
            -len(c.operators),
            *_telling(c),
            graph.places(c.operators),
        ),
    )
    # Successors whose edge no candidate has covered yet: most are covered by the first few.
    left = {o.name: {s.name for s in graph.successors(o)} for o in graph.operators}
    for candidate in ranked:
        inside = set(candidate.operators)
        for name in candidate.operators:
            if left[name]:
                covered = left[name] & inside
                left[name] -= covered
                out.update(((name, successor), candidate) for successor in covered)
    return out


def _verdict_of(candidate: Candidate) -> Verdict:
    if not candidate.verdict.accepted:
        return candidate.verdict
    numbers = {"saving_us": round(candidate.saving, 3), "operators": len(candidate.operators)}
    return Verdict(
        "unprofitable",
        "overlaps_better",
        numbers,
        "its operators save more in the groups that were taken",
    )


def explain_edge(
    graph: DataflowGraph,
    chosen: Sequence[Candidate],
    owner: Mapping[str, int],
    producer: Operator,
    consumer: Operator,
) -> Verdict:
    """Say what stops two neighbouring operators that no proposal put together."""
    for operator in (producer, consumer):
        if operator.pattern == "opaque":
            detail = f"{operator.name} is a {operator.op}, which cannot share a kernel"
            return Verdict("unsupported", "unsupported_op", {"op": operator.op}, detail)
    out, result = graph.tensors[producer.outputs[0]], graph.tensors[consumer.outputs[0]]
    if not (out.is_static and result.is_static):
        detail = f"{producer.name} or {consumer.name} has a symbolic shape; fix it with --shape"
        return Verdict("unprovable", "dynamic_shape", {}, detail)
    if consumer.pattern in POINTWISE:
        return _explain_pointwise(graph, chosen, owner, producer, consumer)
    pair = [_core(graph, chosen, owner, operator) for operator in (producer, consumer)]
    if pair_has_template(graph, *pair) and _is_needed_elsewhere(graph, producer):
        return _needed_elsewhere(graph, producer)
    return _no_template(graph, chosen, owner, producer, consumer)


def _is_needed_elsewhere(graph: DataflowGraph, producer: Operator) -> bool:
    result = producer.outputs[0]
    return len(graph.consumers[result]) > 1 or result in graph.outputs


def _needed_elsewhere(graph: DataflowGraph, producer: Operator) -> Verdict:
    readers = len(graph.consumers[producer.outputs[0]])
    detail = f"the result of {producer.name} is needed elsewhere and must be written anyway"
    return Verdict("unprofitable", "overlaps_better", {"readers": readers}, detail)


def _no_template(
    graph: DataflowGraph,
    chosen: Sequence[Candidate],
    owner: Mapping[str, int],
    producer: Operator,
    consumer: Operator,
) -> Verdict:
    """Name what the two kernels are built around: no template has both."""
    sides = [_core(graph, chosen, owner, operator) for operator in (producer, consumer)]
    texts = [f"{describe(graph, side)} ({side.name})" for side in sides]
    detail = f"no schedule template has {texts[0]} and {texts[1]} in one kernel"
    return Verdict("unsupported", "no_template", {"ops": tuple(s.op for s in sides)}, detail)


def _core(
    graph: DataflowGraph, chosen: Sequence[Candidate], owner: Mapping[str, int], operator: Operator
) -> Operator:
    """The anchor of the member that an operator belongs to, or the operator itself."""
    if operator.name not in owner:
        return operator
    proposal = chosen[owner[operator.name]].proposal
    own = next((m for m in proposal.members if operator.name in m), proposal.operators)
    anchors = [a for a in proposal.anchors if a in own] or proposal.anchors
    return graph.by_name[anchors[0]] if anchors else operator


def _explain_pointwise(
    graph: DataflowGraph,
    chosen: Sequence[Candidate],
    owner: Mapping[str, int],
    producer: Operator,
    consumer: Operator,
) -> Verdict:
    made, result = graph.tensors[producer.outputs[0]], graph.tensors[consumer.outputs[0]]
    if result.size > made.size:
        factor = result.size // max(made.size, 1)
        detail = f"{producer.name} would be recomputed {factor} times inside {consumer.name}"
        return Verdict("unprofitable", "recompute", {"factor": factor}, detail)
    group = chosen[owner[producer.name]].operators if producer.name in owner else (producer.name,)
    if not graph.is_convex([*group, consumer.name]):
        detail = f"{consumer.name} also needs a value that is computed from {producer.name} by another kernel"
        return Verdict("illegal", "not_convex", {"operators": len(group)}, detail)
    if _is_needed_elsewhere(graph, producer):
        return _needed_elsewhere(graph, producer)
    if consumer.name in owner:
        detail = f"{consumer.name} already belongs to a group that saves more"
        return Verdict("unprofitable", "overlaps_better", {}, detail)
    return _no_template(graph, chosen, owner, producer, consumer)


def ungrouped(
    graph: DataflowGraph, chosen: Sequence[Candidate], rejected: Sequence[Rejection]
) -> tuple[Ungrouped, ...]:
    """List the working operators outside every group, each with the reason that weighs most."""
    inside = {name for c in chosen for name in c.operators}
    why: dict[str, Rejection] = {}
    for rejection in rejected:
        for node in rejection.nodes:
            why.setdefault(node, rejection)
    out = []
    for operator in graph.operators:
        if operator.name in inside or not operator.does_work:
            continue
        known = why.get(operator.name)
        reason = known.reason if known else _lone_reason(operator)
        low = operator.intensity < CANDIDATE_INTENSITY and operator.pattern != "opaque"
        out.append(Ungrouped(operator.name, operator.op, reason, low))
    return tuple(out)


def _lone_reason(operator: Operator) -> str:
    known = operator.pattern in (*ANCHORS, *POINTWISE, "injective")
    return "no_partner" if known else "unsupported_op"
