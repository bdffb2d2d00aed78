"""Estimates for kernels of two anchors: back to back, and a product with a row operator."""

from __future__ import annotations

import functools
import math

from ..devices import DeviceSpec
from ..graph.dataflow import DataflowGraph, Operator
from ..strategies.base import Proposal
from .needs import (
    BASE_REGISTERS,
    PER_ACCUMULATOR,
    PER_OPERAND,
    Footprint,
    kind_of,
    outside_operands,
)
from .tensor_cores import rows_footprint
from .tiling import (
    ACCUMULATORS,
    THREADS,
    BlockTile,
    Contraction,
    contraction_of,
    power_of_two,
    staged_bytes,
)

#: Channels of the first of two anchors that a block holds at a time.
_PAIR_SLICE = 16

#: Share of the multiprocessors that must have a block.
_BUSY = 0.7

#: Least rows and columns of the second of two anchors that a block computes: below, operands
#: dominate traffic.
_LEAST_ROWS, _LEAST_COLUMNS = 16, 32


@functools.lru_cache(maxsize=4096)
def back_to_back_tile(
    second: Contraction, multiprocessors: int, halo: int, stride: int
) -> tuple[int, int, float]:
    """Rows and columns of the second anchor's tile, and how often the first one is computed.

    As many columns as accumulators permit, since every block of columns computes the first anchor
    again; then as many rows as keep all multiprocessors busy. Where even the fewest rows leave some
    idle, fewer columns, and the first anchor is computed more often.

    Returns
    -------
    tuple of (int, int, float)
        Rows, columns, factor.
    """
    most = THREADS * ACCUMULATORS
    columns = min(power_of_two(second.columns), most // _LEAST_ROWS)
    rows = _LEAST_ROWS
    across = -(-second.columns // columns)
    while (
        rows * 2 * columns <= most
        and rows < second.rows
        and -(-second.rows // (rows * 2)) * across >= multiprocessors
    ):
        rows *= 2
    while columns > _LEAST_COLUMNS and -(-second.rows // rows) * across < _BUSY * multiprocessors:
        columns //= 2
        across = -(-second.columns // columns)
    side = max(1, math.isqrt(rows))
    reach = (side - 1) * stride + halo
    overlap = (reach / (side * stride)) ** 2 if halo > 1 else 1.0
    repeats = 1 if second.is_depthwise else across
    return rows, columns, repeats * max(1.0, overlap)


def back_to_back(
    graph: DataflowGraph, proposal: Proposal, dense: list[Operator], device: DeviceSpec
) -> Footprint:
    """Two anchors: a block holds a tile of the second and what it needs of the first."""
    first, second = (contraction_of(graph, a) for a in dense)
    halo, stride = math.isqrt(second.window), math.isqrt(second.stride)
    rows, columns, factor = back_to_back_tile(second, device.multiprocessors, halo, stride)
    channels = min(_PAIR_SLICE, max(1, second.depth // second.window))
    reach = rows * second.stride if halo == 1 else (math.isqrt(rows) * stride + halo - 1) ** 2
    middle = channels * reach * second.nbytes
    weights = 0 if second.is_depthwise else channels * columns * second.nbytes
    own = 0
    if not first.is_depthwise:
        tile = BlockTile(reach, channels, 1, 1, THREADS)
        own = staged_bytes(first, tile, device.shared_memory_per_block // 2)
    accumulators = max(1, rows * columns // THREADS)
    total = sum(graph.by_name[n].flops for n in proposal.operators)
    before = _upstream_flops(graph, proposal, dense[1])
    executed = total + int(before * (factor - 1))
    return Footprint(
        THREADS,
        -(-second.rows // rows) * -(-second.columns // columns),
        BASE_REGISTERS + round(PER_ACCUMULATOR * accumulators) + 8,
        middle + weights + own,
        executed,
        factor,
        dense[0].name if factor > 1 else "",
        second.rows * second.columns,
        # Each slice of the first anchor is summed before the second one goes on.
        second.depth + -(-second.depth // (channels * second.window)) * first.depth,
        stages=(
            (kind_of(dense[0]), int(before * factor), first.rows * first.columns),
            (kind_of(dense[1]), total - before, second.rows * second.columns),
        ),
    )


def _upstream_flops(graph: DataflowGraph, proposal: Proposal, anchor: Operator) -> int:
    """FLOPs of the operators of a group that an anchor depends on."""
    return sum(graph.by_name[n].flops for n in proposal.operators if graph.depends(anchor.name, n))


def anchor_row(
    graph: DataflowGraph, proposal: Proposal, anchor: Operator, device: DeviceSpec
) -> Footprint:
    """A block or a cluster holds whole rows of a product, in float32, for the row operator that follows."""
    found = rows_footprint(graph, proposal, [anchor], device)
    if found is not None:
        return found
    what = contraction_of(graph, anchor)
    rows = 1
    while rows < 16 and -(-what.rows // (rows * 2)) >= device.multiprocessors:
        rows *= 2
    accumulators = max(1, rows * what.columns // THREADS)
    stage = _PAIR_SLICE * (rows + min(what.columns, THREADS)) * what.nbytes
    flops = sum(graph.by_name[n].flops for n in proposal.operators)
    return Footprint(
        THREADS,
        -(-what.rows // rows),
        BASE_REGISTERS
        + round(PER_ACCUMULATOR * min(accumulators, ACCUMULATORS))
        + PER_OPERAND * outside_operands(graph, proposal),
        4 * rows * what.columns + stage,
        flops,
        outputs=what.rows * what.columns,
        depth=what.depth,
    )
