"""Data dependence: between members, and through operators outside the group."""

from __future__ import annotations

import itertools

from ..config import FusionConfig
from ..devices import DeviceSpec
from ..graph.dataflow import DataflowGraph
from ..strategies.base import Proposal
from .base import ACCEPTED, Guard, Verdict


class IndependentMembers(Guard):
    """Refuses members of which one needs another's result."""

    reason = "dependence"

    def check(
        self, proposal: Proposal, graph: DataflowGraph, config: FusionConfig, device: DeviceSpec
    ) -> Verdict:
        for left, right in itertools.permutations(proposal.members, 2):
            # The first operator of a member reaches all of it, its last is reached by all of it.
            if graph.depends(right[-1], left[0]):
                return Verdict(
                    "illegal", self.reason, {"earlier": left[0], "later": right[-1]},
                    f"{right[-1]} needs the result of {left[0]}",
                )  # fmt: skip
        return ACCEPTED


class Convex(Guard):
    """Refuses groups that a path leaves and enters again: no order of kernels would satisfy them."""

    reason = "not_convex"

    def check(
        self, proposal: Proposal, graph: DataflowGraph, config: FusionConfig, device: DeviceSpec
    ) -> Verdict:
        if graph.is_convex(proposal.operators):
            return ACCEPTED
        return Verdict(
            "illegal", self.reason, {"operators": len(proposal.operators)},
            f"a path leaves the group of {proposal.operators[0]} and comes back to it",
        )  # fmt: skip
