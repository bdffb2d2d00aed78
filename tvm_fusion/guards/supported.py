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
        for name in proposal.operators:
            operator = graph.by_name[name]
            if operator.pattern == "opaque":
                return Verdict(
                    "unsupported", self.reason, {"op": operator.op},
                    f"{name} is a {operator.op}, which cannot share a kernel",
                )  # fmt: skip
        return ACCEPTED
