"""Kernels that would take too long to compile."""

from __future__ import annotations

from ..config import FusionConfig
from ..devices import DeviceSpec
from ..graph.dataflow import DataflowGraph
from ..graph.expression import build_seconds, expression_size
from ..strategies.base import Proposal
from .base import ACCEPTED, Guard, Verdict


class CompileTime(Guard):
    """Refuses groups whose kernel is predicted to compile longer than ``max_build_seconds``."""

    reason = "compile_time"

    def check(
        self, proposal: Proposal, graph: DataflowGraph, config: FusionConfig, device: DeviceSpec
    ) -> Verdict:
        merged = proposal.option("form") in ("collapsed", "merged")
        anchors = min(len(proposal.anchors), 1) if merged else len(proposal.anchors)
        seconds = build_seconds(graph, proposal.operators, anchors)
        if seconds <= config.max_build_seconds:
            return ACCEPTED
        size = expression_size(graph, proposal.operators)
        return Verdict(
            "unprofitable", self.reason,
            {
                "seconds": round(seconds, 1), "max_build_seconds": config.max_build_seconds,
                "operations": size,
            },
            f"its kernel would take about {seconds:.0f} s to compile ({size} operations inlined)",
        )  # fmt: skip
