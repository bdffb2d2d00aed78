"""Branches of one join must do comparable amounts of work."""

from __future__ import annotations

from ..config import FusionConfig
from ..devices import DeviceSpec
from ..graph.dataflow import DataflowGraph
from ..strategies.base import Proposal
from .base import ACCEPTED, Guard, Verdict


class WorkRatio(Guard):
    """Refuses joined branches of which the heaviest does over ``max_work_ratio`` times the lightest's work.

    An empty branch (an identity shortcut) has no work and is exempt: it is an operand of the join.
    A group that was balanced, by padding or by giving the heavy branch more warps, passes.
    """

    reason = "work_ratio"

    def check(
        self, proposal: Proposal, graph: DataflowGraph, config: FusionConfig, device: DeviceSpec
    ) -> Verdict:
        # Every member of a joined group is computed by the same threads, whatever the group's label.
        if proposal.strategy != "cross" and proposal.option("form") != "joined":
            return ACCEPTED
        if len(proposal.members) < 2 or proposal.option("balance"):
            return ACCEPTED
        work = [sum(graph.by_name[n].flops for n in member) for member in proposal.members]
        heavy, light = max(work), min(work)
        if heavy <= config.max_work_ratio * light:
            return ACCEPTED
        ratio = heavy / light if light else float(heavy)
        names = [proposal.members[work.index(w)][0] for w in (heavy, light)]
        numbers = {
            "ratio": round(ratio, 2), "max_work_ratio": config.max_work_ratio,
            "heavy_flops": heavy, "light_flops": light,
        }  # fmt: skip
        tried = ""
        if config.balance == "pad":
            tried = "; its kernel cannot be padded to the heavy one's"
        return Verdict(
            "unprofitable", self.reason, numbers,
            f"{names[0]} does {ratio:.1f} times the work of {names[1]}{tried}",
        )  # fmt: skip
