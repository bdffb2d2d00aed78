"""Which float32 groups multiply-add kernels with asynchronous copies compute, and what they need there.

A tile has rows and columns. The innermost axis of the output is a column: channels where they are last (and of matrix
products), else the positions of the image, whose rows are then the channels.
"""

from __future__ import annotations

import dataclasses
import math

from ..devices import DeviceSpec, capability
from ..graph.dataflow import POINTWISE, DataflowGraph, Operator
from ..strategies.base import Proposal
from .fma_model import Choice
from .fma_tiles import VECTOR, Problem, Side
from .needs import Footprint
from .split_tiles import best_fma_choices
from .tiling import Contraction, contraction_of, product_count

#: Least compute capability times ten with the ``cp.async`` that the template uses.
_LEAST_CAPABILITY = 80

#: Rows and columns, and depth, from which on the template takes a product (see schedules/cuda/simt/template.py).
_LEAST_LINES, _LEAST_DEPTH = 4, 16

#: Longest sum that an operand is computed from: a window of 7x7.
_MOST_TAPS = 49

_ANCHORS = ("matmul", "conv1d", "conv2d", "conv3d")


def multiplies_by_fma(graph: DataflowGraph, dense: list[Operator], device: DeviceSpec) -> bool:
    """Whether the template takes these anchors: float32, dense, not too small."""
    if device.kind != "cuda" or capability(device.arch) < _LEAST_CAPABILITY or not dense:
        return False
    if not all(_takes(graph, anchor) for anchor in dense):
        return False
    return max(contraction_of(graph, anchor).depth for anchor in dense) >= _LEAST_DEPTH


def _takes(graph: DataflowGraph, anchor: Operator) -> bool:
    tensors = [graph.tensors[name] for name in (*anchor.inputs[:2], anchor.outputs[0])]
    if anchor.op not in _ANCHORS or any(tensor.dtype != "float32" for tensor in tensors):
        return False
    if int(anchor.attrs.get("groups") or 1) > 1:
        return False
    what = contraction_of(graph, anchor)
    positions = what.rows // product_count(graph, anchor)
    if min(positions, what.columns) < _LEAST_LINES:
        return False
    # Without positions, the innermost axis that is wider than one would be the channels.
    return _channels_last(anchor) or what.rows > 1


def _channels_last(anchor: Operator) -> bool:
    return anchor.op == "matmul" or str(anchor.attrs.get("data_layout", "NCHW")).endswith("C")


def problem_of(graph: DataflowGraph, proposal: Proposal, dense: list[Operator]) -> Problem:
    """Describe a group to the search for a tile."""
    form, join = proposal.option("form"), proposal.option("join")
    parts = [contraction_of(graph, anchor) for anchor in dense]
    first, batch = parts[0], product_count(graph, dense[0])
    channels, copies = first.columns, 1
    depths = (first.depth,)
    if form == "merged" and join in ("apart", "concat"):
        channels = sum(part.columns for part in parts)
    elif form == "merged":
        depths, copies = (max(part.depth for part in parts),), len(parts)
    elif form == "joined":
        depths = tuple(part.depth for part in parts)
    elif form == "collapsed":
        depths = (max(part.depth for part in parts),)
    data = [_data_side(graph, proposal, anchor) for anchor in dense]
    weights = [
        _weight_side(graph, anchor, part, proposal.operators)
        for anchor, part in zip(dense, parts, strict=True)
    ]
    return _problem(
        dense[0],
        dataclasses.replace(_worst(data), count=first.rows // batch),
        dataclasses.replace(_worst(weights), count=channels, copies=copies),
        batch,
        depths,
        (copies,) if form == "merged" else (1,) * len(depths),
    )


def _problem(
    anchor: Operator,
    positions: Side,
    channels: Side,
    batch: int,
    depths: tuple[int, ...],
    sums: tuple[int, ...],
) -> Problem:
    sides = (positions, channels) if _channels_last(anchor) else (channels, positions)
    return Problem(*sides, batch, depths, sums)


def _worst(sides: list[Side]) -> Side:
    """What holds for all operands of a side."""
    return Side(
        sides[0].count,
        width=min(side.width for side in sides),
        transposed=any(side.transposed for side in sides),
    )


def _data_side(graph: DataflowGraph, proposal: Proposal, anchor: Operator) -> Side:
    """How the positions of an anchor's data are read."""
    name = anchor.inputs[0]
    producer = graph.producer.get(name)
    computed = (
        producer is not None
        and producer.name in proposal.operators
        and producer.pattern in POINTWISE
    )
    if _channels_last(anchor):
        return Side(0, width=0 if computed else 1, transposed=True)
    shape, out = graph.tensors[name].shape, graph.tensors[anchor.outputs[0]].shape
    strides = [int(s) for s in anchor.attrs.get("strides") or (1,)]
    padding = [int(p) for p in anchor.attrs.get("padding") or (0,)]
    wide = (graph.tensors[anchor.inputs[1]].shape[-1] or 1) > 1
    if computed:
        return Side(0, width=0, transposed=wide and strides[-1] > 1)
    if strides[-1] > 1:
        return Side(0, width=1, transposed=wide)
    # Neighbours that are copied at once are never partly outside, and begin where 16 bytes do.
    width = 1 if any(padding) or wide else math.gcd(VECTOR, out[-1] or 1, shape[-1] or 1)
    return Side(0, width=width, transposed=False)


def _weight_side(
    graph: DataflowGraph, anchor: Operator, part: Contraction, inside: tuple[str, ...]
) -> Side:
    """How the channels of an anchor's weights are read: constants are stored as they are read best."""
    weight = graph.tensors[anchor.inputs[1]]
    if weight.is_constant:
        return Side(0, width=math.gcd(VECTOR, part.columns))
    if anchor.op != "matmul":
        return Side(0, width=1, transposed=True)
    producer = graph.producer.get(weight.name)
    if producer is not None and producer.op == "permute_dims" and producer.name in inside:
        return Side(0, width=1, transposed=True)
    return Side(0, width=math.gcd(VECTOR, part.columns))


def fma_footprint(
    graph: DataflowGraph, proposal: Proposal, dense: list[Operator], flops: int, device: DeviceSpec
) -> Footprint | None:
    """Estimate a group of products; None where another template takes it, or no tile fits."""
    if not multiplies_by_fma(graph, dense, device):
        return None
    problem = problem_of(graph, proposal, dense)
    chosen = best_fma_choices(problem, device, clusters=not proposal.option("member"))
    return _footprint(problem, chosen[0], flops, device) if chosen else None


def depthwise_fma(
    graph: DataflowGraph, proposal: Proposal, dense: list[Operator], device: DeviceSpec
) -> Footprint | None:
    """Estimate a depthwise convolution whose result a block multiplies at once; None when it is anything else."""
    first, second = (contraction_of(graph, anchor) for anchor in dense)
    if not first.is_depthwise or second.window != 1 or second.stride != 1:
        return None
    if first.window > _MOST_TAPS or not multiplies_by_fma(graph, dense[1:], device):
        return None
    last = _channels_last(dense[1])
    data = Side(second.rows, width=0, transposed=last, taps=first.window)
    channels = dataclasses.replace(
        _weight_side(graph, dense[1], second, proposal.operators), count=second.columns
    )
    problem = _problem(dense[1], data, channels, 1, (second.depth,), (1,))
    chosen = best_fma_choices(problem, device, clusters=not proposal.option("member"))
    if not chosen:
        return None
    tile = chosen[0].tile
    # Every tile of channels computes the depthwise convolution again.
    repeats = -(-second.columns // (tile.columns if last else tile.rows))
    total = sum(graph.by_name[name].flops for name in proposal.operators)
    again = dense[0].flops * (repeats - 1)
    return dataclasses.replace(
        _footprint(problem, chosen[0], total + again, device),
        recompute=1 + again / max(total, 1),
        repeated=dense[0].name if repeats > 1 else "",
    )


def _footprint(problem: Problem, chosen: Choice, flops: int, device: DeviceSpec) -> Footprint:
    tile = chosen.tile
    return Footprint(
        tile.threads,
        tile.blocks(problem),
        min(tile.registers(problem), device.registers_per_multiprocessor // tile.threads),
        tile.shared_bytes(problem),
        flops,
        outputs=problem.rows.count * problem.columns.count * problem.batch,
        depth=sum(problem.depths),
        microseconds=chosen.microseconds,
        dynamic_shared=True,
    )
