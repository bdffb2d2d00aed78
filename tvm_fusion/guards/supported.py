"""Operators that no kernel can share."""

from __future__ import annotations

from ..config import FusionConfig
from ..devices import DeviceSpec
from ..graph.dataflow import DataflowGraph
from ..strategies.base import Proposal
from .base import ACCEPTED, Guard, Verdict


class Supported(Guard):
    """Refuses groups with an opaque operator."""

    reason = "unsupported_op"

    def check(
        self, proposal: Proposal, graph: DataflowGraph, config: FusionConfig, device: DeviceSpec
    ) -> Verdict:
        if "opaque" not in graph.memo:
            graph.memo["opaque"] = {o.name: o.op for o in graph.operators if o.pattern == "opaque"}
        opaque = graph.memo["opaque"]
        for name in proposal.operators if opaque else ():
            if name in opaque:
                return Verdict(
                    "unsupported", self.reason, {"op": opaque[name]},
                    f"{name} is a {opaque[name]}, which cannot share a kernel",
                )  # fmt: skip
        return ACCEPTED
