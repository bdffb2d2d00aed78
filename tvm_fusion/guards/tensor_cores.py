"""Which groups multiply on tensor cores, and what they need there."""

from __future__ import annotations

import dataclasses
import math
import operator

from ..devices import DeviceSpec, capability
from ..graph.dataflow import DTYPE_BYTES, DataflowGraph, Operator
from ..strategies.base import Proposal
from .bulk_tiles import BulkTile, bulk_choices
from .needs import Footprint
from .patch_tiles import (
    PatchProblem,
    PatchTile,
    padded_depth,
    patch_choices,
    registers,
    shared_bytes,
)
from .split_tiles import best_choices
from .tensor_rows import RowProblem, best_row_tiles, row_blocks, row_tile_bytes
from .tensor_tiles import PIECE_BYTES, WORD_BYTES, Choice, Problem
from .tiling import contraction_of, product_count

#: Least compute capability times ten with ``cp.async`` and the ``mma.sync`` that the template uses.
_LEAST_CAPABILITY = 80
#: Rows, columns and depth from which on the template takes a product (see schedules/cuda/tensor_core/template.py).
_LEAST_ROWS, _LEAST_COLUMNS, _LEAST_DEPTH = 4, 8, 16


def multiplies_on_tensor_cores(
    graph: DataflowGraph, dense: list[Operator], device: DeviceSpec
) -> bool:
    """Whether the tensor-core template takes these anchors: 16-bit (or float32 in TF32), dense, channels last."""
    if device.kind != "cuda" or capability(device.arch) < _LEAST_CAPABILITY or not dense:
        return False
    dtypes = {graph.tensors[anchor.inputs[0]].dtype for anchor in dense}
    if not (dtypes <= {"float16", "bfloat16"} or (device.tf32 and dtypes == {"float32"})):
        return False
    return all(_takes(graph, anchor) for anchor in dense)


def _takes(graph: DataflowGraph, anchor: Operator) -> bool:
    if anchor.op != "matmul":
        layout = str(anchor.attrs.get("data_layout", "NCHW"))
        if layout != "NHWC" or int(anchor.attrs.get("groups") or 1) > 1:
            return False
    what = contraction_of(graph, anchor)
    if what.rows < _LEAST_ROWS or what.columns < _LEAST_COLUMNS or what.depth < _LEAST_DEPTH:
        return False
    # Constant weights get the layout that copies of at least four bytes need, if either side allows one.
    weight = graph.tensors[anchor.inputs[1]]
    lines, across = (n * DTYPE_BYTES[weight.dtype] for n in (what.depth, what.columns))
    return not weight.is_constant or lines % WORD_BYTES == 0 or across % PIECE_BYTES == 0


def problem_of(graph: DataflowGraph, proposal: Proposal, dense: list[Operator]) -> Problem:
    """Describe a group to the search for a tile."""
    form, join = proposal.option("form"), proposal.option("join")
    parts = [contraction_of(graph, anchor) for anchor in dense]
    first, batch = parts[0], product_count(graph, dense[0])
    rows, columns, part = first.rows // batch, first.columns, 0
    depths, copies = (first.depth,), (1,)
    if form == "merged" and join in ("apart", "concat"):
        columns = sum(c.columns for c in parts)
        part = math.gcd(*(c.columns for c in parts)) if join == "apart" else 0
    elif form == "merged":
        depths, copies = (max(c.depth for c in parts),), (len(parts),)
    elif form == "joined":
        depths, copies = tuple(c.depth for c in parts), (1,) * len(parts)
    elif form == "collapsed":
        depths = (max(c.depth for c in parts),)
    inner = all(_packs(graph, anchor) for anchor in dense)
    size = _element_bytes(graph, dense[0])
    return Problem(rows, columns, batch, depths, copies, part, 0, 0, inner, size)


def _packs(graph: DataflowGraph, anchor: Operator) -> bool:
    """Whether the reduction is the innermost axis of both operands: a constant gets the layout that is asked for."""
    data, weight = (graph.tensors[name] for name in anchor.inputs[:2])
    return weight.is_constant and (data.shape[-1] or 1) % 8 == 0


def _element_bytes(graph: DataflowGraph, anchor: Operator) -> int:
    return DTYPE_BYTES[graph.tensors[anchor.inputs[0]].dtype]


def tensor_footprint(
    graph: DataflowGraph, proposal: Proposal, dense: list[Operator], flops: int, device: DeviceSpec
) -> Footprint | None:
    """Estimate a group on tensor cores; None when no tile fits."""
    problem, member = problem_of(graph, proposal, dense), proposal.option("member")
    chosen = [*best_choices(problem, device, clusters=not member)]
    if not member and all(_is_plain(graph, anchor) for anchor in dense):
        chosen += bulk_choices(problem, device)
    if not chosen:
        return None
    best = min(chosen, key=operator.attrgetter("microseconds"))
    patch = None if member else patch_of(graph, dense)
    if patch is not None:
        # The copies of 16 bytes that all others were counted with cannot be.
        found = patch_choices(patch, device)
        return (
            _patch_footprint(patch, found[0], flops) if found else _footprint(problem, best, flops)
        )
    return _footprint(problem, best, flops)


def patch_of(graph: DataflowGraph, dense: list[Operator]) -> PatchProblem | None:
    """Describe a convolution of an image with an odd number of channels, last; None of anything else.

    Kernels read windows of such an image from a patch in shared memory (schedules/cuda/tensor_core/patch.py).
    """
    if len(dense) != 1 or dense[0].op == "matmul" or len(dense[0].inputs) < 2:
        return None
    (anchor,) = dense
    data, weight, out = (graph.tensors[name] for name in (*anchor.inputs[:2], anchor.outputs[0]))
    layout, kernel_layout = (str(anchor.attrs.get(k)) for k in ("data_layout", "kernel_layout"))
    channels = data.shape[-1] or 1
    sizes = dict(zip(kernel_layout, weight.shape, strict=False))
    what = contraction_of(graph, anchor)
    if (
        (layout, len(kernel_layout)) != ("NHWC", 4)
        or channels % 2 == 0
        or DTYPE_BYTES[data.dtype] != 2
        or not weight.is_constant
        or what.columns * 2 % PIECE_BYTES
        or None in out.shape
    ):
        return None
    down, across = (int(n) for n in anchor.attrs.get("strides") or (1, 1))
    dilation = [int(n) for n in anchor.attrs.get("dilation") or (1, 1)]
    height, width = sizes.get("H") or 1, sizes.get("W") or 1
    rows, line = 1 + (height - 1) * dilation[0], width * channels
    if dilation[1] > 1:  # each place is a line of its own channels
        spans = (1, rows, 1 + (width - 1) * dilation[1], channels)
        steps = ((1, 0, 0), (0, down, 0), (0, 0, across), (0, 0, 0))
        return PatchProblem(
            out.shape[:3], steps, spans, what.columns,
            padded_depth(height * width * (channels + 1)),
        )  # fmt: skip
    steps = ((1, 0, 0), (0, down, 0), (0, 0, across * channels))
    depth = padded_depth(height * (line + line % 2))
    return PatchProblem(out.shape[:3], steps, (1, rows, line), what.columns, depth)


def _is_plain(graph: DataflowGraph, anchor: Operator) -> bool:
    """Whether both operands are tensors as they are, with rows of whole 16 bytes: the copy engine brings such."""
    what = contraction_of(graph, anchor)
    if anchor.op != "matmul" and (what.window != 1 or what.stride != 1):
        return False
    tensors = [graph.tensors[name] for name in anchor.inputs[:2]]
    return all((t.shape[-1] or 1) * DTYPE_BYTES[t.dtype] % 16 == 0 for t in tensors)


def depthwise_product(
    graph: DataflowGraph, proposal: Proposal, dense: list[Operator], device: DeviceSpec
) -> Footprint | None:
    """Estimate a depthwise convolution whose result a block multiplies at once; None when it is anything else."""
    first, second = (contraction_of(graph, anchor) for anchor in dense)
    if not first.is_depthwise or second.window != 1 or second.stride != 1:
        return None
    if not multiplies_on_tensor_cores(graph, dense[1:], device):
        return None
    rows, columns = second.rows, second.columns
    problem = Problem(
        rows, columns, 1, (second.depth,), (1,), 0, columns, first.window,
        _packs(graph, dense[1]), _element_bytes(graph, dense[1]),
    )  # fmt: skip
    chosen = best_choices(problem, device, clusters=not proposal.option("member"))
    if not chosen:
        return None
    flops = sum(graph.by_name[name].flops for name in proposal.operators)
    repeats = -(-columns // chosen[0].tile.columns)
    found = _footprint(problem, chosen[0], flops)
    inner = sum(graph.by_name[n].flops for n in proposal.operators if n == dense[0].name)
    return dataclasses.replace(
        found,
        flops=flops + inner * (repeats - 1),
        recompute=1 + inner * (repeats - 1) / max(flops, 1),
        repeated=dense[0].name if repeats > 1 else "",
    )


#: How often a row operator reduces its rows; once where it is not listed.
_REDUCTIONS = {"layer_norm": 2, "softmax": 2, "log_softmax": 2}


def rows_of_product(
    graph: DataflowGraph, proposal: Proposal, dense: list[Operator]
) -> RowProblem | None:
    """Describe products whose rows a row operator reduces; None where the last operator is none."""
    rows = [graph.by_name[name] for name in proposal.anchors]
    rows = [o for o in rows if o.pattern in ("row", "reduction")]
    if not rows or any(anchor.op != "matmul" for anchor in dense):
        return None
    product = dataclasses.replace(problem_of(graph, proposal, dense), part=0)
    each = len(rows) // len(dense)
    reductions = sum(_REDUCTIONS.get(o.op, 1) for o in rows[:each])
    return RowProblem(product, contraction_of(graph, dense[0]).columns, reductions)


def rows_footprint(
    graph: DataflowGraph, proposal: Proposal, dense: list[Operator], device: DeviceSpec
) -> Footprint | None:
    """Estimate products with a row operator on tensor cores; None where a row does not fit, or in another form."""
    if not multiplies_on_tensor_cores(graph, dense, device):
        return None
    problem = rows_of_product(graph, proposal, dense)
    if problem is None or problem.length % 2:
        return None
    chosen = best_row_tiles(problem, device)
    if not chosen:
        return None
    flops = sum(graph.by_name[name].flops for name in proposal.operators)
    found = _footprint(problem.product, chosen[0], flops)
    return dataclasses.replace(
        found,
        blocks=row_blocks(problem, chosen[0].tile),
        shared_bytes=row_tile_bytes(problem, chosen[0].tile),
    )


def _patch_footprint(problem: PatchProblem, chosen: Choice, flops: int) -> Footprint:
    tile = chosen.tile
    assert isinstance(tile, PatchTile)
    across = -(-problem.columns // tile.columns)
    return Footprint(
        tile.threads,
        problem.blocks(tile.height, tile.width) * across,
        registers(tile.row_fragments, tile.column_fragments),
        shared_bytes(problem, tile),
        flops,
        outputs=math.prod(problem.extents) * problem.columns,
        depth=problem.depth,
        microseconds=chosen.microseconds,
        dynamic_shared=True,
    )


def _footprint(problem: Problem, chosen: Choice, flops: int) -> Footprint:
    tile = chosen.tile
    return Footprint(
        tile.block_threads if isinstance(tile, BulkTile) else tile.threads,
        tile.blocks(problem),
        tile.registers(problem),
        tile.shared_bytes(problem),
        flops,
        outputs=problem.rows * problem.columns * problem.batch,
        depth=sum(problem.depths),
        microseconds=chosen.microseconds,
        dynamic_shared=True,
    )
