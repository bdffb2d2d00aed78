"""Attention that a schedule template has in one kernel, and what it needs."""

from __future__ import annotations

import math

from ..config import FusionConfig
from ..devices import DeviceSpec, capability
from ..graph.dataflow import DataflowGraph
from ..strategies.attention import AttentionGroup, attention_of
from ..strategies.base import Proposal
from .attention_tiles import AttentionProblem, best_attention_tiles
from .base import ACCEPTED, Guard, Verdict
from .needs import BASE_REGISTERS, Footprint
from .tiling import THREADS

#: Least compute capability times ten with ``cp.async`` and the ``mma.sync`` that the template uses.
_LEAST_CAPABILITY = 80

_NARROW = ("float16", "bfloat16")


class AttentionTemplate(Guard):
    """Refuses attention for which there is no kernel, and names the operator that is in the way."""

    reason = "no_template"

    def check(
        self, proposal: Proposal, graph: DataflowGraph, config: FusionConfig, device: DeviceSpec
    ) -> Verdict:
        if proposal.option("form") != "attention":
            return ACCEPTED
        group = attention_of(graph, proposal)
        if group is None:
            return ACCEPTED
        if group.stray:
            stray = graph.by_name[group.stray]
            return Verdict(
                "unsupported", self.reason, {"node": stray.name, "op": stray.op},
                f"{stray.name} ({stray.op}) stops attention around {group.softmax}: {group.why}",
            )  # fmt: skip
        if device.kind != "cuda":
            return ACCEPTED
        if group.dtype not in _NARROW:
            detail = (
                f"attention around {group.softmax} is in {group.dtype}; its kernels multiply float16 and bfloat16, "
                "to which a model is converted by dtype"
            )
            return Verdict("unsupported", self.reason, {"dtype": group.dtype}, detail)
        if capability(device.arch) < _LEAST_CAPABILITY:
            detail = f"attention around {group.softmax} needs sm_{_LEAST_CAPABILITY} or later"
            return Verdict("unsupported", self.reason, {"arch": device.arch}, detail)
        if not best_attention_tiles(problem_of(group), device):
            detail = (
                f"heads of {group.width} and {group.value_width} places do not fit in registers"
            )
            numbers = {"width": group.width, "value_width": group.value_width}
            return Verdict("unsupported", self.reason, numbers, detail)
        return ACCEPTED


def problem_of(group: AttentionGroup) -> AttentionProblem:
    """Describe a group to the search for a tile."""
    return AttentionProblem(
        group.heads, group.rows, group.keys, group.width, group.value_width,
        group.shift is not None, group.is_scored, group.shift or 0,
    )  # fmt: skip


def attention_footprint(
    graph: DataflowGraph, proposal: Proposal, flops: int, device: DeviceSpec
) -> Footprint:
    """Estimate attention as one kernel."""
    group = attention_of(graph, proposal)
    chosen = ()
    if group is not None and not group.stray and device.kind == "cuda":
        chosen = best_attention_tiles(problem_of(group), device)
    size = math.prod(graph.tensors[graph.by_name[proposal.anchors[-1]].outputs[0]].shape or (1,))
    if not chosen:
        return Footprint(THREADS, max(1, size // THREADS), BASE_REGISTERS, 0, flops, outputs=size)
    problem, tile = problem_of(group), chosen[0].tile
    return Footprint(
        tile.threads,
        tile.blocks(problem),
        tile.registers(problem),
        tile.shared_bytes(problem),
        flops,
        outputs=size,
        depth=group.keys,
        microseconds=chosen[0].microseconds,
        dynamic_shared=True,
    )
