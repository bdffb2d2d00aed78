"""Horizontal fusion: independent branches of the same structure in one kernel.

Forms, from the most to the least that the members share:

* ``collapsed``: a linear sum of convolutions of one input; one convolution with the added weights
* ``merged``: one input, one kernel shape; one anchor with concatenated weights (stacked ones where a row operator,
  such as a layer norm, follows each)
* ``joined``: other inputs, joined element by element; every anchor accumulates in the registers of
  one block
* ``elementwise``: branches without an anchor, joined or reading one tensor; one pointwise kernel
* ``partitioned``: returned apart or concatenated; one launch whose blocks are divided among the
  members
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from ..config import FusionConfig
from ..graph.dataflow import DataflowGraph, Operator
from .base import Proposal, Strategy, depth_of
from .branch_parts import alike_sets, around, stems, tails
from .branches import JOINS, Branch, Join, find_branches, find_joins
from .growth import POINTWISE, grow_epilogue
from .stacked_rows import stacked_rows
from .vertical import ANCHORS

#: Anchors whose members can be merged by concatenating weights along output channels.
MERGEABLE = ("conv2d", "matmul")
_CONV_FIELDS = ("strides", "padding", "dilation", "groups", "data_layout", "kernel_layout")


class Horizontal(Strategy):
    """Branches at the same level: parallel convolutions and dense layers, and pointwise branches."""

    name = "horizontal"

    def propose(self, graph: DataflowGraph, config: FusionConfig) -> Iterator[Proposal]:
        seen: set[tuple[str, ...]] = set()
        siblings = list(sibling_sets(graph))
        found = (p for heads in siblings for p in self._from_heads(graph, config, heads))
        readers = (p for heads in reader_sets(graph) for p in _readers(graph, config, heads))
        rows = (p for heads in siblings for p in self._with_rows(graph, config, heads))
        parts = (p for heads in siblings for p in self._cut(graph, config, heads))
        beside = (p for heads in alike_sets(graph) for p in self._beside(graph, config, heads))
        for proposal in itertools.chain(found, readers, rows, parts, beside):
            if proposal.operators not in seen:
                seen.add(proposal.operators)
                yield proposal

    def _from_heads(
        self, graph: DataflowGraph, config: FusionConfig, heads: Sequence[Operator]
    ) -> Iterator[Proposal]:
        branches = find_branches(graph, heads, config.max_operators)
        # A linear sum collapses to one convolution, however many its branches are; another join of
        # more than max_members is refused as a whole (the reason that the report gives) and then
        # proposed in pieces.
        whole = find_joins(graph, branches, None)
        for join in whole:
            if len(join.branches) > 1:
                yield _proposal(graph, config, join, whole)
        most = member_limit(graph, config, heads)
        lone = tuple(join.branches[0] for join in whole if not join.operators)
        if len(lone) > most:
            yield _proposal(graph, config, Join(lone, "apart"), whole)
        while most > 1:
            yield from self._in_pieces(graph, config, heads, branches, most)
            most //= 2  # fewer members may pay more

    def _with_rows(
        self, graph: DataflowGraph, config: FusionConfig, heads: Sequence[Operator]
    ) -> Iterator[Proposal]:
        """Products of one input, each with the row operator that follows it, as one product of stacked weights."""
        members = stacked_rows(graph, config, heads)
        alike = len({_weight_shape(graph, graph.by_name[b.head]) for b in members}) == 1
        first = [graph.by_name[b.head] for b in members]
        if not alike or not _mergeable(graph, first) or not same_structure(graph, members):
            return
        most = member_limit(graph, config, first)
        while most > 1:
            for chunk in _chunks(members, most):
                names = graph.sort(name for b in chunk for name in b.operators)
                anchors = [n for n in names if graph.by_name[n].pattern not in POINTWISE]
                options = (("form", "merged"), ("join", "apart"))
                yield Proposal(
                    self.name, names, tuple(anchors), tuple(b.operators for b in chunk),
                    depth_of(graph, names), (), options,
                )  # fmt: skip
            most //= 2

    def _cut(
        self, graph: DataflowGraph, config: FusionConfig, heads: Sequence[Operator]
    ) -> Iterator[Proposal]:
        """Branches whose anchors merge and whole chains do not: what merges, and the rest side by side."""
        if heads[0].pattern in POINTWISE or not _mergeable(graph, heads):
            return
        branches = find_branches(graph, heads, config.max_operators)
        if same_structure(graph, branches):
            return
        depth, merged = 1, ()
        while made := stems(graph, branches, depth + 1):
            if not same_structure(graph, made):
                break
            depth, merged = depth + 1, made
        for members, most in (
            (merged, member_limit(graph, config, heads)),
            (tails(branches, depth), config.max_members),
        ):
            while members and most > 1:
                for chunk in _chunks(members, most):
                    yield _proposal(graph, config, Join(chunk, "apart"), ())
                most //= 2

    def _beside(
        self, graph: DataflowGraph, config: FusionConfig, heads: Sequence[Operator]
    ) -> Iterator[Proposal]:
        """Row operators, reductions and pools of parallel branches, without the anchors of these, in one launch."""
        for members in around(graph, config, heads):
            most = config.max_members
            while most > 1:
                joins = find_joins(graph, members, most)
                joined = [j for j in joins if j.kind == "concat"]
                lone = [b for j in joins if j.kind != "concat" for b in j.branches]
                apart = (Join(chunk, "apart") for chunk in _chunks(lone, most))
                for join in (*joined, *apart):
                    yield _partitioned(graph, join)
                most //= 2

    def _in_pieces(
        self,
        graph: DataflowGraph,
        config: FusionConfig,
        heads: Sequence[Operator],
        branches: Sequence[Branch],
        most: int,
    ) -> Iterator[Proposal]:
        """Branches in groups of at most ``most`` members, joined and apart."""
        lone: list[Branch] = []
        joins = find_joins(graph, branches, most)
        for join in joins:
            if len(join.branches) > 1:
                yield _proposal(graph, config, join, joins)
            elif not join.operators:
                lone.extend(join.branches)
        for chunk in _chunks(lone, most):
            yield _proposal(graph, config, Join(chunk, "apart"), joins)
        # The heads without what follows them: a part that a compound group is measured against.
        if any(len(b.operators) > 1 for b in branches):
            bare = [Branch(h.name, (h.name,), h.outputs[0]) for h in heads]
            for chunk in _chunks(bare, most):
                yield _proposal(graph, config, Join(chunk, "apart"), ())


def member_limit(graph: DataflowGraph, config: FusionConfig, heads: Sequence[Operator]) -> int:
    """Most members that stay apart.

    Products of one input that merge into one wider product need no more registers the more they
    are; in a transformer, whose heads are such products, four times as many may be merged.
    """
    merging = heads[0].op == "matmul" and len(heads) > 1 and _mergeable(graph, heads)
    return config.max_members * (4 if merging and config.preset == "transformer" else 1)


def _chunks(branches: Sequence[Branch], size: int) -> Iterator[tuple[Branch, ...]]:
    """Cut branches into groups of at most ``size``, leaving out a last one that is alone."""
    for start in range(0, len(branches), size):
        if len(branches) - start > 1:
            yield tuple(branches[start : start + size])


def sibling_sets(graph: DataflowGraph) -> Iterator[list[Operator]]:
    """Yield sets of operators that could head the branches of one group, each in topological order.

    Operators of one type that read the same tensor, or stand at the same level; first those of
    equal signature, then all of them (which a guard may refuse, with the reason).
    """
    anchors = [o for o in graph.operators if o.op in MERGEABLE]
    heads = [o for o in graph.operators if _heads_pointwise_branch(graph, o)]
    buckets: dict[Any, list[Operator]] = {}
    for operator in anchors:
        buckets.setdefault(("input", operator.op, operator.inputs[0]), []).append(operator)
    for operator in anchors:
        buckets.setdefault(("level", operator.op, graph.level[operator.name]), []).append(operator)
    for operator in heads:
        buckets.setdefault(("pointwise", graph.level[operator.name]), []).append(operator)
    for bucket in buckets.values():
        classes: dict[Any, list[Operator]] = {}
        for operator in bucket:
            classes.setdefault(signature(graph, operator), []).append(operator)
        yield from (members for members in classes.values() if len(members) > 1)
        if len(classes) > 1:
            yield bucket


def reader_sets(graph: DataflowGraph) -> Iterator[list[Operator]]:
    """Yield the pointwise readers of each tensor that several read, and nothing else but constants."""
    for readers in graph.consumers.values():
        if len(readers) < 2:
            continue
        lone = [
            o
            for o in readers
            if o.pattern in POINTWISE
            and len(o.outputs) == 1
            and len({t for t in o.inputs if not graph.tensors[t].is_constant}) == 1
        ]
        if len(lone) > 1:
            yield lone


def _readers(
    graph: DataflowGraph, config: FusionConfig, heads: Sequence[Operator]
) -> Iterator[Proposal]:
    """Readers of one tensor as one kernel with several results.

    Those that meet again are left to a vertical chain, which holds them all.
    """
    branches = find_branches(graph, heads, config.max_operators)
    alone = [j.branches[0] for j in find_joins(graph, branches, None) if not j.operators]
    for chunk in _chunks(alone, config.max_members):
        yield _proposal(graph, config, Join(chunk, "apart"), ())


def _heads_pointwise_branch(graph: DataflowGraph, operator: Operator) -> bool:
    """A pointwise operator that follows no other pointwise operator or anchor it could be fused into."""
    if operator.pattern not in POINTWISE or len(operator.outputs) != 1:
        return False
    data = [t for t in operator.inputs if not graph.tensors[t].is_constant]
    producers = [graph.producer.get(t) for t in data]
    return len(data) == 1 and all(
        p is None or p.pattern in ("injective", "opaque", "view") for p in producers
    )


def signature(graph: DataflowGraph, operator: Operator) -> tuple[Any, ...]:
    """What members of one merged anchor must agree in (output channels may differ)."""
    data = graph.tensors[operator.inputs[0]]
    common = (operator.op, data.shape, data.dtype)
    if operator.op == "conv2d":
        attrs = tuple(str(operator.attrs.get(field)) for field in _CONV_FIELDS)
        return (*common, *attrs, kernel_size(graph, operator))
    if operator.op == "matmul":
        return (*common, len(graph.tensors[operator.inputs[1]].shape))
    return (operator.op, graph.tensors[operator.outputs[0]].shape, data.dtype)


def kernel_size(graph: DataflowGraph, operator: Operator) -> tuple[int | None, ...]:
    """Spatial extents of a convolution's weight."""
    layout = str(operator.attrs.get("kernel_layout", "OIHW"))
    shape = graph.tensors[operator.inputs[1]].shape
    return tuple(extent for axis, extent in zip(layout, shape, strict=True) if axis not in "OI")


def form_of(graph: DataflowGraph, join: Join) -> str:
    """Choose the form in which branches and their join share a kernel."""
    heads = [graph.by_name[b.head] for b in join.branches]
    elementwise_join = join.kind in JOINS or join.kind == "mixed"
    if all(head.pattern in POINTWISE for head in heads):
        # Readers of one tensor are computed by the same thread, which loads it once.
        return "elementwise" if elementwise_join or _read_alike(graph, heads) else "partitioned"
    if _mergeable(graph, heads) and same_structure(graph, join.branches):
        linear = all(is_linear(graph, b) for b in join.branches)
        if join.kind == "add" and linear and len({_weight_shape(graph, h) for h in heads}) == 1:
            return "collapsed"
        if heads[0].op == "conv2d" or not elementwise_join:
            return "merged"
    if elementwise_join and _stacks(graph, heads):
        return "merged"
    return "joined" if elementwise_join else "partitioned"


def _read_alike(graph: DataflowGraph, heads: Sequence[Operator]) -> bool:
    """Whether pointwise operators read one tensor, apart from constants, and make one shape."""
    read = {t for h in heads for t in h.inputs if not graph.tensors[t].is_constant}
    shapes = {graph.tensors[h.outputs[0]].shape for h in heads}
    return len(read) == 1 and len(shapes) == 1


def _mergeable(graph: DataflowGraph, heads: Sequence[Operator]) -> bool:
    """One signature, and weights that can be concatenated."""
    return len({signature(graph, h) for h in heads}) == 1 and can_concatenate_weights(graph, heads)


def _stacks(graph: DataflowGraph, heads: Sequence[Operator]) -> bool:
    """Whether heads are products of one input and one size, which a thread can hold side by side.

    What follows each of them until they meet may differ: the gate of a gated linear unit has its
    activation, the other branch has none.
    """
    products = all(h.op == "matmul" for h in heads) and _mergeable(graph, heads)
    return products and len({_weight_shape(graph, h) for h in heads}) == 1


def can_concatenate_weights(graph: DataflowGraph, heads: Sequence[Operator]) -> bool:
    """Whether anchors read one input and have dense weights that are known at compile time."""
    same = len({h.inputs[0] for h in heads}) == 1
    constant = all(graph.tensors[h.inputs[1]].is_constant for h in heads)
    dense = all(int(h.attrs.get("groups", 1)) == 1 for h in heads)
    plain = all(h.op != "matmul" or len(graph.tensors[h.inputs[1]].shape) == 2 for h in heads)
    return same and constant and dense and plain


def _weight_shape(graph: DataflowGraph, head: Operator) -> tuple[int | None, ...]:
    return graph.tensors[head.inputs[1]].shape


def is_linear(graph: DataflowGraph, branch: Branch) -> bool:
    """Whether a branch is its anchor and at most additions of constants."""
    rest = (graph.by_name[name] for name in branch.operators if name != branch.head)
    return all(o.op == "add" and _only_constants_besides_chain(graph, o, branch) for o in rest)


def _only_constants_besides_chain(graph: DataflowGraph, operator: Operator, branch: Branch) -> bool:
    made = {t for name in branch.operators for t in graph.by_name[name].outputs}
    return (
        all(t in made or graph.tensors[t].is_constant for t in operator.inputs)
        and len([t for t in operator.inputs if t in made]) == 1
    )


def same_structure(graph: DataflowGraph, branches: Iterable[Branch]) -> bool:
    """Whether branches run the same operators with the same attributes, differing only in constant operands.

    Each operator after the head must read its predecessor and constants alone: an operand from
    elsewhere cannot be concatenated at compile time.
    """
    forms = set()
    for branch in branches:
        steps, previous = [], graph.by_name[branch.head].outputs[0]
        for name in branch.operators:
            if name == branch.head:
                continue
            operator = graph.by_name[name]
            others = [t for t in operator.inputs if t != previous]
            chained = operator.inputs.count(previous) == 1
            if not chained or not all(graph.tensors[t].is_constant for t in others):
                return False
            steps.append(
                (
                    operator.op,
                    operator.inputs.index(previous),
                    operator.structure,
                    tuple(_channel_form(graph, t) for t in others),
                )
            )
            previous = operator.outputs[0]
        forms.add(tuple(steps))
    return len(forms) == 1


def _channel_form(graph: DataflowGraph, tensor: str) -> tuple[Any, ...]:
    """Rank of a constant operand and which of its axes are not broadcast."""
    shape = graph.tensors[tensor].shape
    return tuple(extent != 1 for extent in shape)


def structure_of(graph: DataflowGraph, branch: Branch | tuple[str, ...]) -> tuple[str, ...]:
    """Operator types of a branch in order."""
    names = branch.operators if isinstance(branch, Branch) else branch
    return tuple(graph.by_name[name].op for name in names)


def _partitioned(graph: DataflowGraph, join: Join) -> Proposal:
    """Members side by side in one launch, whatever they are."""
    names = graph.sort(join.all_operators)
    anchors = tuple(n for n in names if graph.by_name[n].pattern in ANCHORS)
    members = tuple(b.operators for b in join.branches)
    options = (("form", "partitioned"), ("join", join.kind))
    return Proposal("horizontal", names, anchors, members, depth_of(graph, names), (), options)


def _proposal(
    graph: DataflowGraph, config: FusionConfig, join: Join, joins: Sequence[Join]
) -> Proposal:
    """Build the proposal of one join with what follows it, leaving the other joins' operators to them."""
    form = form_of(graph, join)
    names = graph.sort(join.all_operators)
    if join.kind != "apart" and form != "partitioned":
        theirs = {name for other in joins if other is not join for name in other.all_operators}
        names = grow_epilogue(
            graph,
            names,
            max_operators=max(config.max_operators, len(names)),
            allowed=lambda c: c.name not in theirs,
        )[-1]
    anchors = tuple(b.head for b in join.branches if graph.by_name[b.head].pattern not in POINTWISE)
    members = tuple(b.operators for b in join.branches)
    options = (("form", form), ("join", join.kind))
    return Proposal("horizontal", names, anchors, members, depth_of(graph, names), (), options)
