"""Bounds on members, operators and depth."""

from __future__ import annotations

from ..config import FusionConfig
from ..devices import DeviceSpec
from ..graph.dataflow import DataflowGraph
from ..strategies.base import Proposal
from ..strategies.horizontal import member_limit
from .base import ACCEPTED, Guard, Verdict


class GroupSize(Guard):
    """Refuses groups with more members, operators or depth than the configuration allows.

    Members of a linear sum collapse into one convolution and do not count.
    """

    reason = "group_too_large"

    def check(
        self, proposal: Proposal, graph: DataflowGraph, config: FusionConfig, device: DeviceSpec
    ) -> Verdict:
        if proposal.option("form") == "collapsed":
            return ACCEPTED
        heads = [graph.by_name[member[0]] for member in proposal.members]
        merged = proposal.option("form") == "merged" and proposal.option("join") == "apart"
        most = member_limit(graph, config, heads) if merged else config.max_members
        counts = [
            ("members", len(proposal.members), most),
            ("operators", len(proposal.operators), config.max_operators),
            ("depth", proposal.depth, config.max_depth),
        ]
        for what, count, limit in counts:
            if count > limit:
                return Verdict(
                    "unprofitable", self.reason, {what: count, f"max_{what}": limit},
                    f"{count} {what} exceed the limit of {limit}",
                )  # fmt: skip
        return ACCEPTED
