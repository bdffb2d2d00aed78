"""Anchors that a schedule template has in one kernel: two of a chain, and products merged with row operators."""

from __future__ import annotations

from ..config import FusionConfig
from ..devices import DeviceSpec
from ..graph.dataflow import DataflowGraph, Operator
from ..strategies.base import Proposal
from ..strategies.horizontal import kernel_size
from .base import ACCEPTED, Guard, Verdict
from .tensor_cores import rows_footprint


class TemplatePairs(Guard):
    """Refuses chains of two anchors for which no template exists.

    The second anchor must read, for each of its outputs, the first one's at the same position (a
    1x1 convolution, a matrix product): anything else would recompute whole windows of all channels.
    A depthwise convolution of a 1x1 convolution's result has a template too, but was measured 2 to 12
    times slower than both alone (benchmarks/results/h200-forms.md), and is refused.
    """

    reason = "no_template"

    def check(
        self, proposal: Proposal, graph: DataflowGraph, config: FusionConfig, device: DeviceSpec
    ) -> Verdict:
        if proposal.option("form") == "merged":
            return self._merged_rows(proposal, graph, device)
        if proposal.option("form") != "back_to_back":
            return ACCEPTED
        first, second = (graph.by_name[name] for name in proposal.anchors[:2])
        if pair_has_template(graph, first, second):
            return ACCEPTED
        texts = [f"{describe(graph, o)} ({o.name})" for o in (first, second)]
        return Verdict(
            "unsupported", self.reason, {"ops": [first.op, second.op]},
            f"no schedule template has {texts[0]} and {texts[1]} in one kernel",
        )  # fmt: skip

    def _merged_rows(self, proposal: Proposal, graph: DataflowGraph, device: DeviceSpec) -> Verdict:
        """Products merged with the row operators that follow them need tensor cores, and rows that fit on chip."""
        anchors = [graph.by_name[name] for name in proposal.anchors]
        dense = [anchor for anchor in anchors if anchor.pattern == "anchor"]
        if len(dense) == len(anchors) or rows_footprint(graph, proposal, dense, device):
            return ACCEPTED
        row = next(anchor for anchor in anchors if anchor.pattern != "anchor")
        return Verdict(
            "unsupported", self.reason, {"ops": [dense[0].op, row.op]},
            f"no schedule template has {len(dense)} merged products with {row.op} in one kernel here",
        )  # fmt: skip


def pair_has_template(graph: DataflowGraph, first: Operator, second: Operator) -> bool:
    """Whether two dependent anchors can share a kernel."""
    if first.op == second.op == "matmul":
        return True
    if first.op != "conv2d" or second.op != "conv2d":
        return False
    return is_pointwise(graph, second)


def is_pointwise(graph: DataflowGraph, conv: Operator) -> bool:
    """Whether a convolution is 1x1, dense, without stride and padding."""
    plain = all(int(s) == 1 for s in conv.attrs.get("strides") or (1,)) and not any(
        int(p) for p in conv.attrs.get("padding") or (0,)
    )
    dense = int(conv.attrs.get("groups", 1) or 1) == 1
    return plain and dense and all(e == 1 for e in kernel_size(graph, conv))


def is_depthwise(graph: DataflowGraph, conv: Operator) -> bool:
    """Whether a convolution has one input channel for each group."""
    layout = str(conv.attrs.get("kernel_layout", "OIHW"))
    inputs = graph.tensors[conv.inputs[1]].shape[layout.index("I")]
    return int(conv.attrs.get("groups", 1) or 1) > 1 and inputs == 1


def describe(graph: DataflowGraph, operator: Operator) -> str:
    """An operator in words: type, and kernel size of a convolution."""
    if not operator.op.startswith("conv"):
        return operator.op
    size = "x".join(map(str, kernel_size(graph, operator)))
    return f"{size} {'depthwise ' if is_depthwise(graph, operator) else ''}{operator.op}"
