"""Work that a fused kernel would do again and again."""

from __future__ import annotations

from ..config import FusionConfig
from ..devices import DeviceSpec
from ..graph.dataflow import DataflowGraph
from ..strategies.base import Proposal
from .base import ACCEPTED, Guard, Verdict
from .footprint import footprint


class Recompute(Guard):
    """Refuses groups in which a value is computed more than ``max_recompute`` times.

    A pointwise operator pulled over a broadcast is computed for every element that it is broadcast
    to; the first of two anchors is computed again by every block that needs it (halos, blocks of
    output channels).
    """

    reason = "recompute"

    def check(
        self, proposal: Proposal, graph: DataflowGraph, config: FusionConfig, device: DeviceSpec
    ) -> Verdict:
        needs = footprint(graph, proposal, device)
        if needs.recompute <= config.max_recompute:
            return ACCEPTED
        factor = round(needs.recompute, 2)
        whole = int(factor) if factor == int(factor) else factor
        return Verdict(
            "unprofitable", self.reason,
            {"factor": whole, "max_recompute": config.max_recompute},
            f"{needs.repeated} would be computed {whole:g} times inside the group",
        )  # fmt: skip
