"""Cross fusion: branches and the operator that joins them, in one kernel.

A branch is an anchor with its epilogue (and prologue), or empty: a shortcut, whose tensor is an
operand of the join. Forms:

* ``joined``: element by element; every anchor accumulates in the registers of one thread block
* ``partitioned``: a concatenation; one launch whose blocks are divided among the branches
* ``merged``: unequal kernels of one input, the smaller padded with zeros; one convolution
* ``collapsed``: the same where the join is a plain sum; the padded weights are added
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence, Set

from ..config import FusionConfig
from ..graph.dataflow import DataflowGraph, Operator
from .base import Proposal, Strategy, depth_of
from .branches import JOINS, Branch, Join
from .growth import grow_epilogue, grow_prologue
from .horizontal import can_concatenate_weights, form_of, is_linear
from .padding import pad_offsets
from .vertical import anchor_epilogues, chains_by_result

#: Anchor and operators by the tensor that they make.
Chains = Mapping[str, tuple[Operator, tuple[str, ...]]]


@dataclasses.dataclass(frozen=True)
class JoinTree:
    """Joining operators, the tensors that they combine, and how."""

    operators: tuple[str, ...]
    leaves: tuple[str, ...]
    kind: str


class Cross(Strategy):
    """Split-then-join regions: projection and identity shortcuts, two-branch heads, gates."""

    name = "cross"

    def propose(self, graph: DataflowGraph, config: FusionConfig) -> Iterator[Proposal]:
        chains = chains_by_result(graph, anchor_epilogues(graph, config))
        for operator in graph.operators:
            tree = join_tree(graph, operator)
            if tree is not None:
                yield from self._joined(graph, config, tree, chains)
            yield from self._gated(graph, config, operator, chains)

    def _joined(
        self, graph: DataflowGraph, config: FusionConfig, tree: JoinTree, chains: Chains
    ) -> Iterator[Proposal]:
        inside = set(tree.operators)
        branches, operands = [], []
        for leaf in tree.leaves:
            lone = leaf not in graph.outputs and all(
                c.name in inside for c in graph.consumers[leaf]
            )
            if lone and leaf in chains and tree.leaves.count(leaf) == 1:
                anchor, names = chains[leaf]
                branches.append(Branch(anchor.name, names, leaf))
            else:
                operands.append(leaf)
        branches.sort(key=lambda b: graph.index[b.head])
        owned = [name for b in branches for name in b.operators]
        if not branches or len(owned) != len(set(owned)):
            return
        shortcut = any(is_shortcut(graph, t, branches) for t in operands)
        if len(branches) < 2 and not shortcut:
            return
        alike = form_of(graph, Join(tuple(branches), tree.kind)) in ("collapsed", "merged")
        if len(branches) > 1 and alike:
            return  # equal branches of one input: a horizontal group shares more
        options = {"form": "partitioned" if tree.kind == "concat" else "joined", "join": tree.kind}
        if shortcut:
            options["shortcut"] = "identity"
        chosen = balance(graph, config, branches, tree.kind)
        if tree.kind == "concat" and operands and chosen.get("balance") == "pad":
            chosen = {}  # a concatenated shortcut has no weights to merge with the others'
        options |= chosen
        yield from _with_tails(graph, config, branches, tree, options)
        # What an earlier anchor's epilogue can hold is left to it: there it is computed once.
        held = {n for sets in anchor_epilogues(graph, config).values() for n in sets[-1]}
        wide = [_with_prologue(graph, config, b, held) for b in branches]
        if wide != branches and options["form"] == "joined":
            yield from _with_tails(graph, config, wide, tree, options)

    def _gated(
        self, graph: DataflowGraph, config: FusionConfig, operator: Operator, chains: Chains
    ) -> Iterator[Proposal]:
        """A small product whose result multiplies a map per channel (squeeze and excite)."""
        if operator.op != "multiply" or len(set(operator.inputs)) != 2:
            return
        size = graph.tensors[operator.outputs[0]].size
        for gate in operator.inputs:
            tensor, views = _behind_views(graph, gate)
            small = graph.tensors[gate].size < size and tensor in chains
            if not small or gate in graph.outputs or len(graph.consumers[gate]) != 1:
                continue
            anchor, names = chains[tensor]
            other = next(t for t in operator.inputs if t != gate)
            branch = Branch(anchor.name, (*names, *views), gate)
            if graph.tensors[other].size != size or not is_shortcut(graph, other, [branch]):
                continue
            tree = JoinTree((operator.name,), operator.inputs, "multiply")
            options = {"form": "joined", "join": "multiply", "shortcut": "identity"}
            yield from _with_tails(graph, config, [branch], tree, options)


def join_tree(graph: DataflowGraph, root: Operator) -> JoinTree | None:
    """Collect the joins that end in an operator, as far as each has one reader and the same shape.

    Returns
    -------
    JoinTree or None
        None when the operator joins nothing.
    """
    if root.op == "concat":
        leaves = root.inputs
        if len(leaves) < 2 or any(graph.tensors[t].is_constant for t in leaves):
            return None
        return JoinTree((root.name,), leaves, "concat")
    if not _is_join(graph, root):
        return None
    names, leaves, todo = [root.name], [], list(reversed(root.inputs))
    while todo:
        tensor = todo.pop()
        producer = graph.producer.get(tensor)
        lone = tensor not in graph.outputs and len(graph.consumers[tensor]) == 1
        if producer is not None and lone and _is_join(graph, producer):
            names.append(producer.name)
            todo += reversed(producer.inputs)
        else:
            leaves.append(tensor)
    kinds = {graph.by_name[name].op for name in names}
    kind = kinds.pop() if len(kinds) == 1 else "mixed"
    return JoinTree(graph.sort(names), tuple(leaves), kind)


def _is_join(graph: DataflowGraph, operator: Operator) -> bool:
    """Whether an operator combines two tensors of one shape, neither of them constant."""
    if operator.op not in JOINS or len(set(operator.inputs)) != 2:
        return False
    tensors = [graph.tensors[t] for t in (*operator.inputs, *operator.outputs)]
    return len({t.shape for t in tensors}) == 1 and not any(t.is_constant for t in tensors)


def is_shortcut(graph: DataflowGraph, tensor: str, branches: Sequence[Branch]) -> bool:
    """Whether a tensor is what a branch starts from, directly or through other operators."""
    producer = graph.producer.get(tensor)
    for branch in branches:
        if tensor in graph.external_inputs(branch.operators):
            return True
        if producer is not None:
            if graph.depends(branch.head, producer.name):
                return True
        elif any(graph.depends(branch.head, c.name) for c in graph.consumers[tensor]):
            return True
    return False


def _behind_views(graph: DataflowGraph, tensor: str) -> tuple[str, tuple[str, ...]]:
    """The tensor whose bytes another one shows in another shape, and the views between them."""
    views: list[str] = []
    while (producer := graph.producer.get(tensor)) is not None and producer.pattern == "view":
        source = producer.inputs[0]
        if source in graph.outputs or len(graph.consumers[source]) != 1:
            break
        views.append(producer.name)
        tensor = source
    return tensor, tuple(reversed(views))


def work_of(graph: DataflowGraph, operators: Sequence[str]) -> int:
    """FLOPs of a branch."""
    return sum(graph.by_name[name].flops for name in operators)


def balance(
    graph: DataflowGraph, config: FusionConfig, branches: Sequence[Branch], join: str
) -> dict[str, str]:
    """How branches of unequal work are balanced: options that replace those of the plain form.

    Returns
    -------
    dict of str to str
        Empty where the ratio is within the limit, where nothing is asked for, and where the kernels
        cannot be padded; a guard then refuses the ratio.
    """
    work = [work_of(graph, b.operators) for b in branches]
    if len(work) < 2 or max(work) <= config.max_work_ratio * min(work):
        return {}
    if config.balance == "warps":
        return {"balance": "warps"}
    if config.balance != "pad":
        return {}
    heads = [graph.by_name[b.head] for b in branches]
    if not can_concatenate_weights(graph, heads) or pad_offsets(graph, heads) is None:
        return {}
    channels = {graph.tensors[h.outputs[0]].shape for h in heads}
    if join == "add" and len(channels) == 1 and all(is_linear(graph, b) for b in branches):
        return {"form": "collapsed", "balance": "pad"}
    return {"form": "merged", "balance": "pad"}


def _with_prologue(
    graph: DataflowGraph, config: FusionConfig, branch: Branch, held: Set[str]
) -> Branch:
    """A branch with the pointwise operators that only its anchor reads."""
    found = grow_prologue(
        graph,
        graph.by_name[branch.head],
        max_operators=config.max_operators,
        allowed=lambda o: o.name not in held,
    )
    if not found:
        return branch
    return Branch(branch.head, graph.sort((*found[-1], *branch.operators)), branch.result)


def _with_tails(
    graph: DataflowGraph,
    config: FusionConfig,
    branches: Sequence[Branch],
    tree: JoinTree,
    options: Mapping[str, str],
) -> Iterator[Proposal]:
    """The branches with their join, and with each number of the pointwise operators that follow."""
    members = tuple(b.operators for b in branches)
    seed = graph.sort((*(name for m in members for name in m), *tree.operators))
    for names in grow_epilogue(graph, seed, max_operators=max(config.max_operators, len(seed))):
        yield Proposal(
            "cross", names, tuple(b.head for b in branches), members, depth_of(graph, names), (),
            tuple(sorted(options.items())),
        )  # fmt: skip
