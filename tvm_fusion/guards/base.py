"""Verdicts, and what a guard is."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Mapping
from typing import Any

from ..config import FusionConfig
from ..devices import DeviceSpec
from ..graph.dataflow import DataflowGraph
from ..strategies.base import Proposal

#: Outcomes. Only ``illegal`` would give wrong results; the others are limits of the package, of
#: profit, or of proof.
OUTCOMES: tuple[str, ...] = ("ok", "illegal", "unsupported", "unprofitable", "unprovable")

#: Reason codes and what they mean (docs/reason-codes.md lists default limits and options).
REASONS: Mapping[str, str] = {
    "dependence": "one member needs another member's result",
    "not_convex": "a path leaves the group and comes back to it",
    "shape_mismatch": "members differ in input shape, kernel, stride or padding",
    "layout_mismatch": "members differ in data layout",
    "dtype_mismatch": "members differ in element type",
    "dynamic_shape": "a shape is not known at compile time",
    "unsupported_op": "an operator has no form that a kernel could share",
    "no_template": "no schedule template makes one kernel of it",
    "no_partner": "no neighbouring operator can share its kernel",
    "group_too_large": "more members or operators than the limit",
    "work_ratio": "the branches of a join do too unequal amounts of work",
    "divergence": "members run different operators and cannot each have blocks of their own",
    "recompute": "a value would be recomputed too often",
    "registers": "a thread would need more registers than the limit",
    "spill": "the compiler spills registers to memory",
    "occupancy": "too few threads of a multiprocessor could be resident",
    "shared_memory": "a block would need more shared memory than the limit",
    "compile_time": "the kernel would take too long to compile",
    "slower_predicted": "predicted slower than its parts",
    "slower_measured": "measured slower than its parts",
    "parts_better": "the parts, fused on their own, are predicted faster",
    "overlaps_better": "an operator already belongs to a better group",
    "numerics": "the result differs from the reference by more than the tolerance, or from the roundings asked for",
    "denied": "forbidden by the user, or its strategy was not asked for",
}


@dataclasses.dataclass(frozen=True)
class Verdict:
    """A guard's answer.

    Attributes
    ----------
    outcome : str
        One of ``OUTCOMES``.
    reason : str
        One of ``REASONS``; empty when the outcome is ``"ok"``.
    numbers : mapping
        The figures behind the answer.
    detail : str
        One sentence in the user's words.
    """

    outcome: str
    reason: str = ""
    numbers: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    detail: str = ""

    def __post_init__(self) -> None:
        if self.outcome not in OUTCOMES:
            raise ValueError(f"unknown outcome {self.outcome!r}; use one of {', '.join(OUTCOMES)}")
        if (self.outcome == "ok") != (self.reason == "") or self.reason not in (*REASONS, ""):
            raise ValueError(f"outcome {self.outcome!r} does not go with reason {self.reason!r}")

    @property
    def accepted(self) -> bool:
        """Whether the proposal may be fused."""
        return self.outcome == "ok"


#: The verdict of a guard that has nothing against a proposal.
ACCEPTED = Verdict("ok")


class Guard(abc.ABC):
    """One limit on proposals."""

    #: The reason code it refuses with.
    reason: str

    @abc.abstractmethod
    def check(
        self, proposal: Proposal, graph: DataflowGraph, config: FusionConfig, device: DeviceSpec
    ) -> Verdict:
        """Judge one proposal; `ACCEPTED` when this limit does not stop it.

        Parameters
        ----------
        proposal : Proposal
            What a strategy would fuse.
        graph : DataflowGraph
            The model that it is part of.
        config : FusionConfig
            The user's limits.
        device : DeviceSpec
            The chip's: registers, shared memory, rates.
        """
