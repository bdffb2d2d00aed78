"""Zero-padding of convolution kernels to one common kernel.

A tap of weight zero adds nothing, so a convolution with a small kernel equals one with a larger
kernel whose other taps are zero, as long as both read the same input positions: tap ``i`` of a
kernel reads position ``y · stride - padding + i · dilation``. With one common kernel, parallel
convolutions of one input can be added or concatenated into one (RepVGG: 3×3 and 1×1).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from ..graph.dataflow import DataflowGraph, Operator

#: Convolutions whose kernels can be padded.
_CONVOLUTIONS = ("conv1d", "conv2d", "conv3d")

#: Attributes that padding does not change and that must agree.
_EQUAL_FIELDS = ("strides", "groups", "data_layout", "kernel_layout")


@dataclasses.dataclass(frozen=True)
class CommonKernel:
    """The kernel that holds those of several convolutions.

    All tuples but ``padding`` have one entry per spatial axis, in the order of the kernel layout
    (top before left in two dimensions).

    Attributes
    ----------
    size : tuple of int
        Taps of the common kernel.
    padding : tuple of int
        As an attribute of the convolution: the leading paddings, then the trailing ones.
    dilation : tuple of int
        Dilation of the common kernel.
    offsets : tuple of tuple of int
        For each head the tap of the common kernel on which its first tap falls: (top, left).
    steps : tuple of tuple of int
        For each head the distance in the common kernel of its neighbouring taps: 1, or its dilation
        over the common one.
    """

    size: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    offsets: tuple[tuple[int, ...], ...]
    steps: tuple[tuple[int, ...], ...]

    @property
    def is_exact(self) -> bool:
        """Whether no head needs padding: they agree in kernel size, padding and dilation."""
        return not any(any(offsets) for offsets in self.offsets) and all(
            step == 1 for steps in self.steps for step in steps
        )


@dataclasses.dataclass(frozen=True)
class _Axis:
    """One spatial axis of one convolution."""

    taps: int
    leading: int
    trailing: int
    dilation: int

    @property
    def span(self) -> int:
        """Distance from the first tap to the last."""
        return (self.taps - 1) * self.dilation


def pad_offsets(graph: DataflowGraph, heads: Sequence[Operator]) -> CommonKernel | None:
    """Find where the kernels of parallel convolutions lie in one common kernel.

    Per spatial axis the common kernel is the longest one (in input positions, then in taps); its
    padding and dilation are taken over. Another kernel of ``k`` taps, padding ``p`` and dilation
    ``d`` fits into it (``K``, ``P``, ``D``) when each of its taps falls on a tap of the common one:
    ``P - p + i · d`` is a multiple of ``D`` in ``0 … (K - 1) · D`` for every ``i < k``. The axes
    are independent, so 1×3 and 3×1 meet in 3×3.

    Parameters
    ----------
    graph : DataflowGraph
        The graph that holds the heads.
    heads : sequence of Operator
        The convolutions, at least one.

    Returns
    -------
    CommonKernel or None
        None unless all are convolutions of one type and of one input tensor, with constant weights,
        equal strides, groups, layouts, element types and output extents besides channels, all
        extents known, and every kernel fits. Output channels may differ: adding weights needs equal
        ones, which the shapes of the joined results already say. Whether padding pays is not asked.
    """
    if not heads or heads[0].op not in _CONVOLUTIONS or not _agree(graph, heads):
        return None
    per_head = [_axes(graph, head) for head in heads]
    offsets: list[list[int]] = [[] for _ in heads]
    steps: list[list[int]] = [[] for _ in heads]
    common = []
    for axes in zip(*per_head, strict=True):
        largest = max(axes, key=lambda a: (a.span, a.taps))
        common.append(largest)
        for k, axis in enumerate(axes):
            placed = _place(axis, largest)
            if placed is None:
                return None
            offsets[k].append(placed[0])
            steps[k].append(placed[1])
    return CommonKernel(
        tuple(a.taps for a in common),
        (*(a.leading for a in common), *(a.trailing for a in common)),
        tuple(a.dilation for a in common),
        tuple(tuple(o) for o in offsets),
        tuple(tuple(s) for s in steps),
    )


def _agree(graph: DataflowGraph, heads: Sequence[Operator]) -> bool:
    first = heads[0]
    for head in heads:
        weight = graph.tensors[head.inputs[1]]
        same = head.op == first.op and head.inputs[0] == first.inputs[0]
        equal = all(head.attrs.get(f) == first.attrs.get(f) for f in _EQUAL_FIELDS)
        if not (same and equal and weight.is_constant and weight.is_static):
            return False
    results = [graph.tensors[h.outputs[0]] for h in heads]
    if not all(r.is_static for r in results) or len({r.dtype for r in results}) > 1:
        return False
    return len({_spatial_extents(graph, h) for h in heads}) == 1


def _spatial_extents(graph: DataflowGraph, head: Operator) -> tuple[int | None, ...]:
    layout = str(head.attrs.get("out_layout") or head.attrs.get("data_layout"))
    shape = graph.tensors[head.outputs[0]].shape
    return tuple(extent for axis, extent in zip(layout, shape, strict=True) if axis != "C")


def _axes(graph: DataflowGraph, head: Operator) -> list[_Axis]:
    layout = str(head.attrs["kernel_layout"])
    shape = graph.tensors[head.inputs[1]].shape
    taps = [int(n or 0) for axis, n in zip(layout, shape, strict=True) if axis not in "OI"]
    padding, dilation = head.attrs["padding"], head.attrs["dilation"]
    return [
        _Axis(n, int(padding[i]), int(padding[i + len(taps)]), int(dilation[i]))
        for i, n in enumerate(taps)
    ]


def _place(axis: _Axis, common: _Axis) -> tuple[int, int] | None:
    """Offset and step of one kernel in the common one, in taps; None where a tap falls beside."""
    first, step = common.leading - axis.leading, axis.dilation if axis.taps > 1 else common.dilation
    if first % common.dilation or step % common.dilation:
        return None
    offset, step = first // common.dilation, step // common.dilation
    fits = 0 <= offset and offset + (axis.taps - 1) * step < common.taps
    return (offset, step) if fits else None
