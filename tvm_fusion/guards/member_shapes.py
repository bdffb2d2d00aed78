"""Agreement of horizontal members in shape, element type and layout."""

from __future__ import annotations

from ..config import FusionConfig
from ..devices import DeviceSpec
from ..graph.dataflow import DataflowGraph, Operator
from ..strategies.base import Proposal
from ..strategies.horizontal import structure_of
from .base import ACCEPTED, Guard, Verdict


def _is_exempt(proposal: Proposal) -> bool:
    """Whether members need not agree: there is one, or they only meet in a join (cross)."""
    return len(proposal.members) < 2 or proposal.strategy == "cross"


def _heads(proposal: Proposal, graph: DataflowGraph) -> list[Operator]:
    return [graph.by_name[member[0]] for member in proposal.members]


def _data(graph: DataflowGraph, head: Operator) -> str:
    """The operand that is not a constant (the first one if all are)."""
    return next((t for t in head.inputs if not graph.tensors[t].is_constant), head.inputs[0])


class EqualDtype(Guard):
    """Refuses members that differ in element type."""

    reason = "dtype_mismatch"

    def check(
        self, proposal: Proposal, graph: DataflowGraph, config: FusionConfig, device: DeviceSpec
    ) -> Verdict:
        if _is_exempt(proposal):
            return ACCEPTED
        dtypes = [graph.tensors[head.outputs[0]].dtype for head in _heads(proposal, graph)]
        if len(set(dtypes)) == 1:
            return ACCEPTED
        return Verdict(
            "unsupported", self.reason, {"dtypes": dtypes},
            f"members compute in {' and '.join(sorted(set(dtypes)))}",
        )  # fmt: skip


class EqualLayout(Guard):
    """Refuses members that differ in data layout."""

    reason = "layout_mismatch"

    def check(
        self, proposal: Proposal, graph: DataflowGraph, config: FusionConfig, device: DeviceSpec
    ) -> Verdict:
        if _is_exempt(proposal):
            return ACCEPTED
        layouts = [str(h.attrs.get("data_layout", "")) for h in _heads(proposal, graph)]
        if len(set(layouts)) == 1:
            return ACCEPTED
        return Verdict(
            "unsupported", self.reason, {"layouts": layouts},
            f"members use the layouts {' and '.join(sorted(set(layouts)))}",
        )  # fmt: skip


class EqualShape(Guard):
    """Refuses members that differ in input shape, stride or output extents besides channels."""

    reason = "shape_mismatch"

    def check(
        self, proposal: Proposal, graph: DataflowGraph, config: FusionConfig, device: DeviceSpec
    ) -> Verdict:
        if _is_exempt(proposal):
            return ACCEPTED
        heads = _heads(proposal, graph)
        inputs = [list(graph.tensors[_data(graph, h)].shape) for h in heads]
        if any(shape != inputs[0] for shape in inputs):
            return self._refuse(heads, {"input_shapes": inputs}, "read inputs of different shape")
        strides = [list(h.attrs.get("strides", ())) for h in heads]
        if any(stride != strides[0] for stride in strides):
            return self._refuse(heads, {"strides": strides}, "have different strides")
        spatial = [_without_channels(graph, h) for h in heads]
        if any(extents != spatial[0] for extents in spatial):
            return self._refuse(
                heads, {"output_extents": spatial}, "have outputs of different extent"
            )
        return ACCEPTED

    def _refuse(self, heads: list[Operator], numbers: dict, what: str) -> Verdict:
        names = ", ".join(h.name for h in heads[:3]) + (" …" if len(heads) > 3 else "")
        return Verdict("unsupported", self.reason, numbers, f"{names} {what}")


def _without_channels(graph: DataflowGraph, head: Operator) -> list[int | None]:
    shape = list(graph.tensors[head.outputs[0]].shape)
    layout = str(head.attrs.get("data_layout", ""))
    if "C" in layout and len(layout) == len(shape):
        return [extent for axis, extent in zip(layout, shape, strict=True) if axis != "C"]
    return shape[:-1] if head.op == "matmul" else shape


class EqualStructure(Guard):
    """Refuses members that run different operators where they cannot have blocks of their own.

    Members that a thread computes one after the other do not diverge, and members of a partitioned
    launch have blocks of their own; but a member smaller than a warp would leave lanes idle while
    they wait for other operators than their neighbours'.
    """

    reason = "divergence"

    def check(
        self, proposal: Proposal, graph: DataflowGraph, config: FusionConfig, device: DeviceSpec
    ) -> Verdict:
        if _is_exempt(proposal) or proposal.option("form") != "partitioned":
            return ACCEPTED
        forms = [structure_of(graph, member) for member in proposal.members]
        if len(set(forms)) == 1:
            return ACCEPTED
        sizes = [graph.tensors[graph.by_name[m[-1]].outputs[0]].size for m in proposal.members]
        if min(sizes) >= device.warp_size:
            return ACCEPTED
        texts = sorted({"+".join(form) for form in forms})
        return Verdict(
            "unprofitable", self.reason,
            {"sequences": texts, "elements": sizes, "warp_size": device.warp_size},
            f"members run {' and '.join(texts[:2])}, and one makes only {min(sizes)} elements, "
            "less than a warp",
        )  # fmt: skip
