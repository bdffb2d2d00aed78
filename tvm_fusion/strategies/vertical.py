"""Vertical fusion: producers and consumers on one path, around at most two anchors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ..config import FusionConfig
from ..graph.dataflow import DataflowGraph, Operator
from ..graph.expression import build_seconds
from .attention import attention_proposals
from .base import Proposal, Strategy, depth_of
from .cones import pointwise_cones, row_cones
from .growth import POINTWISE, grow_epilogue, grow_prologue

#: Patterns that decide a kernel's loops.
ANCHORS = ("anchor", "pool", "reduction", "row")

#: For each anchor the sets that its pointwise consumers make with it, smallest first.
Epilogues = Mapping[str, list[tuple[str, ...]]]


class Vertical(Strategy):
    """Chains around a convolution, matmul, pooling, reduction or row normalisation, and pointwise chains.

    Every depth is proposed, from the anchor with its first consumer up to ``config.max_depth``
    operators, with and without the pointwise producers that only the anchor reads. A producer that
    an earlier anchor's epilogue can hold is left to it: there it is computed once, in a prologue
    once for every tile that reads it. Two anchors share a kernel where the first one's tile fits on
    chip (``back_to_back``), and a matrix product shares one with the row operator that reads it
    (``anchor_row``). Two products around a softmax share one with it (``attention``). Slices, lookups
    and concatenations share the kernel of the result that alone needs them (``cones.py``).
    """

    name = "vertical"

    def propose(self, graph: DataflowGraph, config: FusionConfig) -> Iterator[Proposal]:
        anchors = [o for o in graph.operators if o.pattern in ANCHORS and len(o.outputs) == 1]
        epilogues = anchor_epilogues(graph, config)
        held = {name for sets in epilogues.values() for name in sets[-1]}
        covered: set[str] = set()
        for anchor in anchors:
            for proposal in self._around(graph, config, anchor, epilogues[anchor.name], held):
                covered.update(proposal.operators)
                yield proposal
        yield from _after_another(graph, config, anchors, epilogues)
        yield from attention_proposals(graph)
        # Once as if there were no anchors (their groups may be refused), once for what they leave
        # over.
        yield from self._chains(graph, config, set())
        if covered:
            yield from self._chains(graph, config, covered)
        for anchor in anchors:
            if is_over_last_axis(graph, anchor):
                yield from row_cones(graph, config, anchor, epilogues[anchor.name])
        yield from pointwise_cones(graph, config)

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
            sets = _with_producers(graph, config, sets, done)
            depths = {s: depth_of(graph, s) for s in sets if len(s) > 1}
            chains = [s for s, depth in depths.items() if depth <= config.max_depth]
            for names in chains:
                yield Proposal("vertical", names, (), (names,), depths[names])
            # A chain that would take too long to compile is refused: the next one starts earlier.
            fitting = [s for s in chains if build_seconds(graph, s) <= config.max_build_seconds]
            yield from _over_broadcast(graph, config, sets[-1])
            if fitting:
                done.update(fitting[-1])


def _with_producers(
    graph: DataflowGraph, config: FusionConfig, sets: list[tuple[str, ...]], done: set[str]
) -> list[tuple[str, ...]]:
    """Add to a chain's sets the pointwise producers of one shape that only the chain reads.

    They are the other branches of the fork that the chain starts from.
    """
    inside = set(sets[-1])
    shape = graph.tensors[graph.by_name[sets[0][0]].outputs[0]].shape
    branches: dict[str, str] = {}  # producer -> the operator of the chain that reads it
    for name in sets[-1]:
        for producer in graph.predecessors(graph.by_name[name]):
            result = producer.outputs[0]
            readers = graph.consumers[result]
            if (
                producer.name not in inside
                and producer.name not in done
                and producer.pattern in POINTWISE
                and graph.tensors[result].shape == shape
                and result not in graph.outputs
                and len(readers) == 1
            ):
                branches[producer.name] = name
    if not branches:
        return sets
    out = []
    for names in sets:
        held = set(names)
        whole = graph.sort((*names, *(p for p, reader in branches.items() if reader in held)))
        if len(whole) <= config.max_operators and graph.is_convex(whole):
            out.append(whole)
    return out or sets


def anchor_epilogues(graph: DataflowGraph, config: FusionConfig) -> Epilogues:
    """For every anchor the sets that it makes with the pointwise operators after it, smallest first."""
    key = ("anchor_epilogues", config.max_operators)
    if key not in graph.memo:
        graph.memo[key] = {
            o.name: grow_epilogue(graph, (o.name,), max_operators=config.max_operators)
            for o in graph.operators
            if o.pattern in ANCHORS and len(o.outputs) == 1
        }
    return graph.memo[key]


def chains_by_result(
    graph: DataflowGraph, epilogues: Epilogues, pattern: str = "anchor"
) -> dict[str, tuple[Operator, tuple[str, ...]]]:
    """For each tensor that an anchor with its epilogue makes: the anchor and the operators.

    Where several sets have the same result the largest one is given.
    """
    out: dict[str, tuple[Operator, tuple[str, ...]]] = {}
    for name, sets in epilogues.items():
        anchor = graph.by_name[name]
        if anchor.pattern != pattern:
            continue
        for names in sets:
            (result,) = graph.external_outputs(names) or ("",)
            out[result] = (anchor, names)
    return out


def _after_another(
    graph: DataflowGraph, config: FusionConfig, anchors: list[Operator], epilogues: Epilogues
) -> Iterator[Proposal]:
    """An anchor or row operator in one kernel with the product or convolution that it reads."""
    made = chains_by_result(graph, epilogues)
    for second in anchors:
        data = second.inputs[0]
        if data not in made or data in graph.outputs or len(graph.consumers[data]) != 1:
            continue
        first, before = made[data]
        if second.pattern == "anchor" and second.inputs.count(data) == 1:
            form = "back_to_back"
        elif first.op == "matmul" and is_over_last_axis(graph, second):
            form = "anchor_row"
        else:
            continue
        for after in epilogues[second.name]:
            names = graph.sort((*before, *after))
            depth = depth_of(graph, names)
            if len(names) <= config.max_operators and depth <= config.max_depth:
                anchored = (first.name, second.name)
                options = (("form", form),)
                yield Proposal("vertical", names, anchored, (names,), depth, (), options)


def is_over_last_axis(graph: DataflowGraph, operator: Operator) -> bool:
    """Whether a row operator or reduction works along the last axis alone."""
    if operator.pattern not in ("row", "reduction"):
        return False
    rank = len(graph.tensors[operator.inputs[0]].shape)
    axes = operator.attrs.get("axes", operator.attrs.get("axis"))
    if axes is None or operator.op in ("group_norm", "instance_norm", "argmax", "argmin"):
        return False
    axes = (axes,) if isinstance(axes, int) else tuple(axes)
    return [int(a) % rank for a in axes] == [rank - 1]


def _over_broadcast(
    graph: DataflowGraph, config: FusionConfig, chain: tuple[str, ...]
) -> Iterator[Proposal]:
    """A chain with the operator that broadcasts its result: computed again for every element.

    A guard refuses all but small factors, and the plan names the factor.
    """
    results = graph.external_outputs(chain)
    if len(results) != 1 or results[0] in graph.outputs:
        return
    consumers = graph.consumers[results[0]]
    if len(consumers) != 1 or consumers[0].pattern not in POINTWISE:
        return
    names = graph.sort((*chain, consumers[0].name))
    size = graph.tensors[consumers[0].outputs[0]].size
    if size > graph.tensors[results[0]].size and len(names) <= config.max_operators:
        yield Proposal("vertical", names, (), (names,), depth_of(graph, names))
