"""Shapes that are not known at compile time."""

from __future__ import annotations

from ..config import FusionConfig
from ..devices import DeviceSpec
from ..graph.dataflow import DataflowGraph
from ..strategies.base import Proposal
from .base import ACCEPTED, Guard, Verdict


class StaticShape(Guard):
    """Refuses groups that touch a tensor with a symbolic extent."""

    reason = "dynamic_shape"

    def check(
        self, proposal: Proposal, graph: DataflowGraph, config: FusionConfig, device: DeviceSpec
    ) -> Verdict:
        if "symbolic" not in graph.memo:
            graph.memo["symbolic"] = {n for n, t in graph.tensors.items() if not t.is_static}
        symbolic = graph.memo["symbolic"]
        for name in proposal.operators if symbolic else ():
            operator = graph.by_name[name]
            for tensor in (*operator.inputs, *operator.outputs):
                if tensor in symbolic:
                    return Verdict(
                        "unprovable", self.reason, {"shape": list(graph.tensors[tensor].shape)},
                        f"{tensor} of {name} has a symbolic shape; fix it with --shape",
                    )  # fmt: skip
        return ACCEPTED
