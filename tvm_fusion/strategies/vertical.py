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

    Every depth is proposed, from the anchor with its first consumer up to ``config.max_depth`` operators, with and
    without the pointwise producers that only the anchor reads.
    """

    name = "vertical"

    def propose(self, graph: DataflowGraph, config: FusionConfig) -> Iterator[Proposal]:
        covered: set[str] = set()
        for operator in graph.operators:
            if operator.pattern in ANCHORS and len(operator.outputs) == 1:
                for proposal in self._around(graph, config, operator):
                    covered.update(proposal.operators)
                    yield proposal
        # Once as if there were no anchors (their groups may be refused), once for what they leave over.
        yield from self._chains(graph, config, set())
        if covered:
            yield from self._chains(graph, config, covered)

    def _around(
        self, graph: DataflowGraph, config: FusionConfig, anchor: Operator
    ) -> Iterator[Proposal]:
        epilogues = grow_epilogue(graph, (anchor.name,), max_operators=config.max_operators)
        prologues = grow_prologue(graph, anchor, max_operators=config.max_operators)
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
