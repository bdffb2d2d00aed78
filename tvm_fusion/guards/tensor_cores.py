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
    return _footprint(problem, min(chosen, key=operator.attrgetter("microseconds")), flops)


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
