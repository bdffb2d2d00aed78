"""The guards in the order in which they are asked."""

from __future__ import annotations

from ..config import FusionConfig
from ..devices import CPU, DeviceSpec
from ..graph.dataflow import DataflowGraph
from ..strategies.base import Proposal
from .attention import AttentionTemplate
from .base import ACCEPTED, Guard, Verdict
from .compile_time import CompileTime
from .denied import Denied
from .dependence import Convex, IndependentMembers
from .dynamic_shape import StaticShape
from .group_size import GroupSize
from .member_shapes import EqualDtype, EqualLayout, EqualShape, EqualStructure
from .on_chip import Occupancy, Registers, SharedMemory
from .recompute import Recompute
from .roundings import Roundings
from .supported import Supported
from .template_pairs import TemplatePairs
from .work_ratio import WorkRatio

#: The user's word first, then what would be wrong, then what cannot be built, then what would not
#: pay.
GUARDS: tuple[Guard, ...] = (
    Denied(), IndependentMembers(), Convex(), Roundings(), Supported(), StaticShape(), TemplatePairs(),
    AttentionTemplate(), EqualDtype(), EqualLayout(), EqualShape(), EqualStructure(), WorkRatio(), Recompute(),
    GroupSize(), SharedMemory(), Registers(), Occupancy(), CompileTime(),
)  # fmt: skip


def judge(
    proposal: Proposal, graph: DataflowGraph, config: FusionConfig, device: DeviceSpec = CPU
) -> Verdict:
    """Return the first refusal of a proposal, or `ACCEPTED`."""
    for guard in GUARDS:
        verdict = guard.check(proposal, graph, config, device)
        if not verdict.accepted:
            return verdict
    return ACCEPTED
