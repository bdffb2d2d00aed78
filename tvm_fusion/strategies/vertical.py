"""Vertical fusion: a producer→consumer chain on one path, around at most one anchor."""

from __future__ import annotations

from collections.abc import Iterator

from ..config import FusionConfig
from ..graph.dataflow import DataflowGraph, Operator
from .base import Proposal, Strategy, depth_of
from .growth import POINTWISE, grow_epilogue, grow_prologue

#: Patterns that decide a kernel's loops.
ANCHORS = ("anchor", "pool", "reduction", "row")


class Vertical(Strategy):
    """Chains around a convolution, matmul, pooling, reduction or row normalisation, and pointwise chains.

    Every depth is proposed, from the anchor with its first consumer up to ``config.max_depth``
    operators, with and without the pointwise producers that only the anchor reads. A producer that
    an earlier anchor's epilogue can hold is left to it: there it is computed once, in a prologue
    once for every tile that reads it.
    """

    name = "vertical"

    def propose(self, graph: DataflowGraph, config: FusionConfig) -> Iterator[Proposal]:
        anchors = [o for o in graph.operators if o.pattern in ANCHORS and len(o.outputs) == 1]
        epilogues = {
            a.name: grow_epilogue(graph, (a.name,), max_operators=config.max_operators)
            for a in anchors
        }
        held = {name for sets in epilogues.values() for name in sets[-1]}
        covered: set[str] = set()
        for anchor in anchors:
            for proposal in self._around(graph, config, anchor, epilogues[anchor.name], held):
                covered.update(proposal.operators)
                yield proposal
        # Once as if there were no anchors (their groups may be refused), once for what they leave
        # over.
        yield from self._chains(graph, config, set())
        if covered:
            yield from self._chains(graph, config, covered)

    def _around(
        self,
        graph: DataflowGraph,
        config: FusionConfig,
        anchor: Operator,
        epilogues: list[tuple[str, ...]],
        held: set[str],
    ) -> Iterator[Proposal]:
        prologues = grow_prologue(
            graph, anchor, max_operators=config.max_operators, allowed=lambda o: o.name not in held
        )
        seen = set()
        for before in [(), *prologues]:
            for after in epilogues:
                names = graph.sort((*before, *after))
                if len(names) < 2 or names in seen or len(names) > config.max_operators:
                    continue
                seen.add(names)
                depth = depth_of(graph, names)
                if depth <= config.max_depth:
                    yield Proposal("vertical", names, (anchor.name,), (names,), depth)

    def _chains(
        self, graph: DataflowGraph, config: FusionConfig, taken: set[str]
    ) -> Iterator[Proposal]:
        """Tile the pointwise operators outside ``taken`` with chains as long as the limits allow."""
        done = set(taken)
        for operator in graph.operators:
            seeds = operator.pattern in POINTWISE or operator.pattern == "injective"
            if operator.name in done or not seeds or len(operator.outputs) != 1:
                continue
            sets = grow_epilogue(
                graph,
                (operator.name,),
                max_operators=config.max_operators,
                allowed=lambda c: c.name not in done,
            )
            fitting = [s for s in sets if len(s) > 1 and depth_of(graph, s) <= config.max_depth]
            for names in fitting:
                yield Proposal("vertical", names, (), (names,), depth_of(graph, names))
            if fitting:
                done.update(fitting[-1])
