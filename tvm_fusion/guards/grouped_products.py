"""Which kernel computes a grouped convolution, and what it needs: strips, tensor cores or multiply-adds.

The template with the shortest predicted time takes it, here as in `schedules`; a depthwise convolution is always made
of strips.
"""

from __future__ import annotations

import dataclasses
import math

from ..devices import DeviceSpec, capability
from ..graph.dataflow import DTYPE_BYTES, DataflowGraph, Operator
from ..strategies.base import Proposal
from . import fma_tiles, strip_model, tensor_tiles
from .needs import Footprint
from .split_tiles import best_choices, best_fma_choices
from .strip_model import Problem
from .tiling import Contraction, contraction_of

#: Least compute capability times ten of the templates of products; rows, columns and depth from which on tensor cores
#: take them, and multiply-adds (see schedules/cuda).
_LEAST_CAPABILITY = 80
_LEAST_ROWS, _LEAST_COLUMNS, _LEAST_DEPTH = 4, 8, 16

#: Columns, and elements of a reduction that follow each other, up to which groups of a convolution are joined.
_JOINED = 64


def is_grouped(dense: list[Operator]) -> bool:
    """Whether anchors are convolutions, and one of them has groups."""
    return any(int(anchor.attrs.get("groups") or 1) > 1 for anchor in dense)


def grouped_footprint(
    graph: DataflowGraph, proposal: Proposal, dense: list[Operator], flops: int, device: DeviceSpec
) -> Footprint | None:
    """Estimate grouped convolutions as one kernel; None where none of these templates takes them.

    Parameters
    ----------
    graph : DataflowGraph
        The graph.
    proposal : Proposal
        The group of operators.
    dense : list of Operator
        Its anchors.
    flops : int
        Operations that the kernel executes.
    device : DeviceSpec
        The device.
    """
    if proposal.option("form") == "merged" or any(a.op == "matmul" for a in dense):
        return None
    parts = [contraction_of(graph, anchor) for anchor in dense]
    if any(part.groups < 2 for part in parts):
        return None
    found = [_strips(graph, dense, parts, flops, device)]
    if len(dense) == 1 and not parts[0].is_depthwise:
        clusters = not proposal.option("member")
        product = (graph, dense[0], parts[0], flops, device, clusters)
        found.append(_on_tensor_cores(*product) or _by_fma(*product))
    return min((f for f in found if f is not None), key=lambda f: f.microseconds, default=None)


def joinable(groups: int, columns: int, channels: int) -> list[int]:
    """How many groups of a convolution may be one product: all divisors that leave it narrow.

    Parameters
    ----------
    groups : int
        Groups of the convolution.
    columns, channels : int
        Output and input channels of a group.
    """
    widest = max(columns, channels)
    return [
        n for n in range(1, groups + 1) if groups % n == 0 and (n == 1 or n * widest <= _JOINED)
    ]


def strip_problem(graph: DataflowGraph, anchor: Operator, part: Contraction) -> Problem | None:
    """Describe a grouped convolution to the search for a strip; None where its window is no window."""
    layout = str(anchor.attrs.get("data_layout", "NCHW"))
    kernel_layout = str(anchor.attrs.get("kernel_layout", "OIHW"))
    kernel, out = graph.tensors[anchor.inputs[1]], graph.tensors[anchor.outputs[0]]
    sizes = [e or 1 for a, e in zip(kernel_layout, kernel.shape, strict=False) if a not in "OI"]
    image = [e or 1 for a, e in zip(layout, out.shape, strict=False) if a not in "NC"]
    if all(size == 1 for size in sizes):
        return None
    steps = [_numbers(anchor, key, len(sizes)) for key in ("strides", "dilation")]
    # Axes without a window are like other images; of three, the first is one of the places that a sum takes.
    rows, columns = (1, image[-1]) if len(sizes) == 1 else image[-2:]
    window, stride, dilation = (
        (1, given[-1]) if len(given) == 1 else tuple(given[-2:]) for given in (sizes, *steps)
    )
    last = layout.endswith("C")
    outputs = part.columns // part.groups
    channels = (
        (part.columns if part.depth == part.window and outputs == 1 else outputs) if last else 1
    )
    nbytes = DTYPE_BYTES.get(kernel.dtype, 4)
    return Problem(
        channels,
        rows,
        columns,
        out.size // (channels * rows * columns),
        window,
        stride,
        dilation,
        part.depth // math.prod(window),
        nbytes,
        last and outputs == 1 and part.is_depthwise,
        last,
        math.gcd(strip_model.WIDEST // nbytes, channels),
    )


def _numbers(anchor: Operator, key: str, count: int) -> list[int]:
    given = [int(n) for n in anchor.attrs.get(key) or (1,)]
    return given * count if len(given) == 1 else given


def _strips(
    graph: DataflowGraph,
    dense: list[Operator],
    parts: list[Contraction],
    flops: int,
    device: DeviceSpec,
) -> Footprint | None:
    if not strip_model.supports(device, graph.tensors[dense[0].inputs[0]].dtype):
        return None
    problems = [strip_problem(graph, a, p) for a, p in zip(dense, parts, strict=True)]
    if None in problems:
        return None
    problem = max(problems, key=lambda p: p.taps * p.depth)
    problem = dataclasses.replace(problem, anchors=len(problems))
    for choice in strip_model.best_strips(problem, device):
        tile = choice.tile
        return _footprint(
            tile.threads, tile.blocks(problem), tile.registers(problem), 0, flops, parts[0], choice
        )
    return None


def _on_tensor_cores(
    graph: DataflowGraph,
    anchor: Operator,
    part: Contraction,
    flops: int,
    device: DeviceSpec,
    clusters: bool,
) -> Footprint | None:
    data = graph.tensors[anchor.inputs[0]]
    last = str(anchor.attrs.get("data_layout", "NCHW")).endswith("C")
    channels = part.depth // part.window
    if not _has_products(device) or not _suits_tensor_cores(data.dtype, device):
        return None
    # No copy is shorter than four bytes.
    size = DTYPE_BYTES[data.dtype]
    if not last or channels * size % 4 or part.rows < _LEAST_ROWS:
        return None
    outputs, found = part.columns // part.groups, []
    inner = graph.tensors[anchor.inputs[1]].is_constant and channels % 8 == 0
    for count in joinable(part.groups, outputs, channels):
        columns, depth = count * outputs, count * part.depth
        if columns < _LEAST_COLUMNS or depth < _LEAST_DEPTH:
            continue
        problem = tensor_tiles.Problem(
            part.rows, columns, part.groups // count, (depth,), (1,), reduction_inner=inner,
            element_bytes=size,
        )  # fmt: skip
        found += [(c, problem) for c in best_choices(problem, device, clusters=clusters)]
    if not found:
        return None
    choice, problem = min(found, key=lambda pair: pair[0].microseconds)
    tile = choice.tile
    return _footprint(
        tile.threads, tile.blocks(problem), tile.registers(problem), tile.shared_bytes(problem),
        flops, part, choice,
    )  # fmt: skip


def _suits_tensor_cores(dtype: str, device: DeviceSpec) -> bool:
    return dtype in ("float16", "bfloat16") or (dtype == "float32" and device.tf32)


def _by_fma(
    graph: DataflowGraph,
    anchor: Operator,
    part: Contraction,
    flops: int,
    device: DeviceSpec,
    clusters: bool,
) -> Footprint | None:
    if not _has_products(device) or graph.tensors[anchor.inputs[0]].dtype != "float32":
        return None
    outputs, last = (
        part.columns // part.groups,
        str(anchor.attrs.get("data_layout", "")).endswith("C"),
    )
    if min(outputs, part.rows) < _LEAST_ROWS or part.depth < _LEAST_DEPTH:
        return None
    width = math.gcd(fma_tiles.VECTOR, outputs)
    channels = fma_tiles.Side(outputs, 1, width)
    positions = fma_tiles.Side(part.rows, 1, 1, last)
    sides = (positions, channels) if last else (channels, positions)
    problem = fma_tiles.Problem(*sides, part.groups, (part.depth,), (1,))
    for choice in best_fma_choices(problem, device, clusters=clusters):
        tile = choice.tile
        return _footprint(
            tile.threads, tile.blocks(problem), tile.registers(problem),
            tile.shared_bytes(problem), flops, part, choice,
        )  # fmt: skip
    return None


def _has_products(device: DeviceSpec) -> bool:
    return device.kind == "cuda" and capability(device.arch) >= _LEAST_CAPABILITY


def _footprint(
    threads: int, blocks: int, registers: int, shared: int, flops: int, part: Contraction, choice
) -> Footprint:
    return Footprint(
        threads,
        blocks,
        min(registers, 255),
        shared,
        flops,
        outputs=part.rows * part.columns,
        depth=part.depth,
        microseconds=choice.microseconds,
        dynamic_shared=shared > 0,
    )
