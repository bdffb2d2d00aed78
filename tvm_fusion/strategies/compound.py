"""Compound fusion: one kernel that holds at least two strategies.

A compound proposal is composed of proposals that survived alone: the vertical chains inside the
branches of a horizontal group, or sibling vertical groups that no other strategy puts side by side
(a matrix product with the normalisation that follows it, two anchors back to back, the rotary
embeddings of queries and keys).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

from ..config import FusionConfig
from ..graph.dataflow import DataflowGraph
from .base import Proposal, depth_of

#: A proposal's strategy and operators, as ``Proposal.parts`` holds them.
Part = tuple[str, tuple[str, ...]]


class Compound:
    """Serial compounds: vertical inside each branch, then horizontal across the branches."""

    name = "compound"

    def compose(
        self, graph: DataflowGraph, config: FusionConfig, survived: Sequence[Proposal]
    ) -> Iterator[Proposal]:
        """Yield the compounds of some proposals.

        Parameters
        ----------
        graph : DataflowGraph
            The graph.
        config : FusionConfig
            Limits.
        survived : sequence of Proposal
            Proposals of the other strategies that may be built and pay on their own.
        """
        known: dict[Part, Proposal] = {(p.strategy, p.operators): p for p in survived}
        for proposal in survived:
            if proposal.strategy == "horizontal":
                parts = _parts_of(graph, proposal, known)
                if parts:
                    yield dataclasses.replace(proposal, strategy="compound", parts=parts)
        for members in _sibling_groups(graph, config, survived):
            yield _side_by_side(graph, members)
        for members in _sibling_cones(graph, config, survived):
            yield _side_by_side(graph, members)


def _parts_of(
    graph: DataflowGraph, proposal: Proposal, known: Mapping[Part, Proposal]
) -> tuple[Part, ...]:
    """The vertical chains in the members of a horizontal group, and its heads as a group of their own."""
    chains = [("vertical", graph.sort(member)) for member in proposal.members if len(member) > 1]
    parts = [part for part in chains if part in known]
    if not parts:
        return ()
    heads = ("horizontal", graph.sort(member[0] for member in proposal.members))
    return (*parts, heads) if heads in known else tuple(parts)


def _sibling_groups(
    graph: DataflowGraph, config: FusionConfig, survived: Sequence[Proposal]
) -> Iterator[tuple[Proposal, ...]]:
    """Sets of vertical groups with more than one anchor that read one tensor, or stand at one level."""
    largest: dict[str, Proposal] = {}
    for proposal in survived:
        # An attention kernel fills the chip by itself.
        if proposal.strategy == "vertical" and proposal.option("form") not in ("", "attention"):
            best = largest.get(proposal.anchors[0])
            if best is None or len(proposal.operators) > len(best.operators):
                largest[proposal.anchors[0]] = proposal
    buckets: dict[tuple, list[Proposal]] = {}
    for anchor, proposal in largest.items():
        operator = graph.by_name[anchor]
        form = proposal.option("form")
        buckets.setdefault((form, operator.op, "input", operator.inputs[0]), []).append(proposal)
        buckets.setdefault((form, operator.op, "level", graph.level[anchor]), []).append(proposal)
    seen: set[tuple[str, ...]] = set()
    for bucket in buckets.values():
        for start in range(0, len(bucket), config.max_members):
            members = tuple(bucket[start : start + config.max_members])
            names = tuple(p.anchors[0] for p in members)
            if len(members) > 1 and names not in seen:
                seen.add(names)
                yield members


def _sibling_cones(
    graph: DataflowGraph, config: FusionConfig, survived: Sequence[Proposal]
) -> Iterator[tuple[Proposal, ...]]:
    """Sets of groups that move elements (``cones.py``), run the same operators and stand at one level.

    The rotary embeddings of queries and keys, for one; groups inside larger ones are left out.
    """
    largest: dict[str, Proposal] = {}  # by operator, the largest group that holds it
    for proposal in survived:
        lone = proposal.strategy == "vertical" and not proposal.anchors and not proposal.options
        if not lone or all(graph.by_name[n].pattern != "injective" for n in proposal.operators):
            continue
        for name in proposal.operators:
            best = largest.get(name)
            if best is None or len(proposal.operators) > len(best.operators):
                largest[name] = proposal
    buckets: dict[tuple, list[Proposal]] = {}
    for proposal in dict.fromkeys(largest.values()):
        last = proposal.operators[-1]
        if all(largest[name] is proposal for name in proposal.operators):
            ops = tuple(graph.by_name[name].op for name in proposal.operators)
            buckets.setdefault((graph.level[last], ops), []).append(proposal)
    for bucket in buckets.values():
        for start in range(0, len(bucket), config.max_members):
            members = tuple(bucket[start : start + config.max_members])
            if len(members) > 1:
                yield members


def _side_by_side(graph: DataflowGraph, members: Sequence[Proposal]) -> Proposal:
    """Vertical groups as the members of one partitioned launch, with the concat that joins them."""
    names = graph.sort(name for p in members for name in p.operators)
    results = [t for p in members for t in graph.external_outputs(p.operators)]
    readers = {c.name for t in results for c in graph.consumers[t]}
    join = "apart"
    if len(readers) == 1 and not any(t in graph.outputs for t in results):
        reader = graph.by_name[next(iter(readers))]
        if reader.op == "concat" and sorted(reader.inputs) == sorted(results):
            names, join = graph.sort((*names, reader.name)), "concat"
    return Proposal(
        "compound",
        names,
        tuple(a for p in members for a in p.anchors),
        tuple(p.operators for p in members),
        depth_of(graph, names),
        tuple((p.strategy, p.operators) for p in members),
        (("form", "partitioned"), ("join", join)),
    )
