"""Kernels that would take too long to compile."""

from __future__ import annotations

from ..config import FusionConfig
from ..devices import DeviceSpec
from ..graph.dataflow import DataflowGraph
from ..strategies.base import Proposal
from .base import ACCEPTED, Guard, Verdict

#: Seconds that nvcc takes for any kernel, and for each operator, anchor and unrolled accumulator
#: group of one, on one core of a common server. Fitted to the kernels of the ONNX light models.
_SECONDS, _PER_OPERATOR, _PER_ANCHOR = 1.2, 0.05, 0.6


def build_seconds(graph: DataflowGraph, proposal: Proposal) -> float:
    """Estimate the time that a compiler needs for one group.

    Parameters
    ----------
    graph : DataflowGraph
        The graph.
    proposal : Proposal
        The group. Members that one merged anchor computes compile as one.

    Returns
    -------
    float
        Seconds.
    """
    merged = proposal.option("form") in ("collapsed", "merged")
    anchors = min(len(proposal.anchors), 1) if merged else len(proposal.anchors)
    return _SECONDS + _PER_OPERATOR * len(proposal.operators) + _PER_ANCHOR * anchors


class CompileTime(Guard):
    """Refuses groups whose kernel is predicted to compile longer than ``max_build_seconds``."""

    reason = "compile_time"

    def check(
        self, proposal: Proposal, graph: DataflowGraph, config: FusionConfig, device: DeviceSpec
    ) -> Verdict:
        seconds = build_seconds(graph, proposal)
        if seconds <= config.max_build_seconds:
            return ACCEPTED
        return Verdict(
            "unprofitable", self.reason,
            {"seconds": round(seconds, 1), "max_build_seconds": config.max_build_seconds},
            f"its kernel would take about {seconds:.0f} s to compile",
        )  # fmt: skip
