"""Parts of parallel branches that stand beside their anchors.

Where the anchors of branches merge and what follows them (or comes before) cannot join them in their kernel, or had
better not, the parts left over are alike too: they do independent work of one kind, and one launch can do it all.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from ..config import FusionConfig
from ..graph.dataflow import DataflowGraph, Operator
from .branches import Branch, find_branches
from .growth import grow_prologue
from .vertical import anchor_epilogues

#: Patterns of operators that decide loops and multiply nothing.
LOOPS = ("row", "reduction", "pool")


def alike_sets(graph: DataflowGraph) -> Iterator[list[Operator]]:
    """Yield row operators, reductions and pools that differ in their operands alone, in topological order.

    Those of one set stand at one level, and so depend on each other in no way: in branches of equal structure they have
    the same distance from the inputs.
    """
    buckets: dict[Any, list[Operator]] = {}
    for operator in graph.operators:
        if operator.pattern in LOOPS and len(operator.outputs) == 1:
            buckets.setdefault(_likeness(graph, operator), []).append(operator)
    yield from (members for members in buckets.values() if len(members) > 1)


def _likeness(graph: DataflowGraph, operator: Operator) -> tuple[Any, ...]:
    """What operators that differ in their operands alone agree in."""
    operands = [graph.tensors[t] for t in (*operator.inputs, *operator.outputs)]
    kinds = tuple((t.shape, t.dtype, t.is_constant) for t in operands)
    attrs = operator.structure
    return graph.level[operator.name], operator.op, attrs, kinds


def around(
    graph: DataflowGraph, config: FusionConfig, heads: Sequence[Operator]
) -> Iterator[tuple[Branch, ...]]:
    """Yield members around operators of one of `alike_sets`: with what goes before and after them, and without.

    Parameters
    ----------
    graph : DataflowGraph
        The graph.
    config : FusionConfig
        Limits.
    heads : sequence of Operator
        The operators.

    Yields
    ------
    tuple of Branch
        One for each operator, headed by it. What the kernel of merged anchors can hold is left to it.
    """
    followed = find_branches(graph, heads, config.max_operators)
    before = [_prologue(graph, config, head) for head in heads]
    seen = set()
    for leading in (before, [()] * len(heads)):
        for branches in (followed, [Branch(h.name, (h.name,), h.outputs[0]) for h in heads]):
            made = tuple(
                Branch(b.head, graph.sort((*first, *b.operators)), b.result)
                for first, b in zip(leading, branches, strict=True)
            )
            if made not in seen:
                seen.add(made)
                yield made


def _prologue(graph: DataflowGraph, config: FusionConfig, head: Operator) -> tuple[str, ...]:
    """The pointwise producers of an operator from the first one on that merged anchors before them cannot hold."""
    sets = grow_prologue(graph, head, max_operators=config.max_operators)
    names = list(sets[-1]) if sets else []
    epilogues = anchor_epilogues(graph, config)
    anchors = (name for name in epilogues if graph.by_name[name].pattern == "anchor")
    key = ("held_by_anchors", config.max_operators)
    if key not in graph.memo:
        graph.memo[key] = {n: a for a in anchors for n in epilogues[a][-1]}
    held = graph.memo[key]
    while names and names[0] in held and _reads_constants(graph, names[0]):
        names.pop(0)
    return tuple(names)


def _reads_constants(graph: DataflowGraph, name: str) -> bool:
    """Whether an operator reads one tensor, and constants besides."""
    inputs = graph.by_name[name].inputs
    return len({t for t in inputs if not graph.tensors[t].is_constant}) == 1


def stems(graph: DataflowGraph, branches: Sequence[Branch], depth: int) -> tuple[Branch, ...]:
    """Cut branches after so many operators; empty where one is shorter or has no single result there."""
    made = []
    for branch in branches:
        names = branch.operators[:depth]
        results = graph.external_outputs(names)
        if len(names) < depth or len(results) != 1:
            return ()
        made.append(Branch(branch.head, names, results[0]))
    return tuple(made)


def tails(branches: Sequence[Branch], depth: int) -> tuple[Branch, ...]:
    """What follows the first operators of branches; empty where one has nothing left."""
    rest = [branch.operators[depth:] for branch in branches]
    if not all(rest):
        return ()
    return tuple(Branch(r[0], r, b.result) for r, b in zip(rest, branches, strict=True))
