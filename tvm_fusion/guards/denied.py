"""Fusions that the user forbids."""

from __future__ import annotations

import fnmatch

from ..config import FusionConfig
from ..devices import DeviceSpec
from ..graph.dataflow import DataflowGraph
from ..strategies.base import Proposal
from .base import ACCEPTED, Guard, Verdict


class Denied(Guard):
    """Refuses groups with an operator whose type or source node matches ``config.deny``."""

    reason = "denied"

    def check(
        self, proposal: Proposal, graph: DataflowGraph, config: FusionConfig, device: DeviceSpec
    ) -> Verdict:
        for name in proposal.operators if config.deny else ():
            operator = graph.by_name[name]
            for pattern in config.deny:
                if any(
                    fnmatch.fnmatchcase(text, pattern)
                    for text in (operator.op, name, *operator.source_names)
                ):
                    return Verdict(
                        "unsupported", self.reason, {"pattern": pattern},
                        f"{name} matches the denied pattern {pattern!r}",
                    )  # fmt: skip
        return ACCEPTED
