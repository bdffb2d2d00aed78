"""What a group would need as one kernel: threads, registers, shared memory, and repeated work.

Estimates, for ranking and for limits that must hold without a compiler; ``plan --build`` replaces
registers, spills and shared memory by what the compiler reports.
"""

from __future__ import annotations

import dataclasses

from ..devices import DeviceSpec
from ..graph.dataflow import DTYPE_BYTES, DataflowGraph, Operator
from ..strategies.base import Proposal
from .attention import attention_footprint
from .fma_products import depthwise_fma, fma_footprint
from .grouped_products import grouped_footprint, is_grouped
from .needs import (
    BASE_REGISTERS,
    PER_ACCUMULATOR,
    PER_OPERAND,
    POINTWISE_REGISTERS,
    Footprint,
    outside_operands,
    result_size,
)
from .tensor_cores import (
    depthwise_product,
    multiplies_on_tensor_cores,
    rows_footprint,
    tensor_footprint,
)
from .tensor_tiles import RATES
from .tiling import (
    THREADS,
    Contraction,
    block_tile,
    contraction_of,
    serial_depth,
    staged_bytes,
)
from .two_anchors import anchor_row, back_to_back


def footprint(graph: DataflowGraph, proposal: Proposal, device: DeviceSpec) -> Footprint:
    """Estimate what a proposal needs as one kernel.

    Parameters
    ----------
    graph : DataflowGraph
        The graph.
    proposal : Proposal
        The group.
    device : DeviceSpec
        The device that its tiles are chosen for.
    """
    where = (device.name, device.arch, device.tf32)
    key = ("footprint", proposal.operators, proposal.options, proposal.members, where)
    if key not in graph.memo:
        graph.memo[key] = _estimate(graph, proposal, device)
    return graph.memo[key]


def _estimate(graph: DataflowGraph, proposal: Proposal, device: DeviceSpec) -> Footprint:
    form = proposal.option("form")
    anchors = [graph.by_name[name] for name in proposal.anchors]
    dense = [a for a in anchors if a.pattern == "anchor"]
    flops = sum(graph.by_name[name].flops for name in proposal.operators)
    if form == "partitioned":
        return _partitioned(graph, proposal, device)
    if form == "attention":
        return attention_footprint(graph, proposal, flops, device)
    if form == "back_to_back" and len(dense) == 2:
        found = depthwise_product(graph, proposal, dense, device)
        found = found or depthwise_fma(graph, proposal, dense, device)
        return found or back_to_back(graph, proposal, dense, device)
    if form == "anchor_row" and dense:
        return anchor_row(graph, proposal, dense[0], device)
    if form == "merged" and len(dense) < len(anchors):
        return rows_footprint(graph, proposal, dense, device) or _partitioned(
            graph, proposal, device
        )
    if _gates(graph, proposal, dense):
        return _gated(graph, proposal, dense)
    if dense:
        return _contraction(graph, proposal, dense, flops, device)
    return _without_products(graph, proposal, anchors, flops)


def _without_products(
    graph: DataflowGraph, proposal: Proposal, anchors: list[Operator], flops: int
) -> Footprint:
    """Pointwise chains, pooling, reductions and row operators."""
    size = result_size(graph, proposal)
    operands = len(graph.external_inputs(proposal.operators))
    registers = min(POINTWISE_REGISTERS + PER_OPERAND * operands, 255)
    shared, blocks = 0, max(1, -(-size // THREADS))
    if any(a.pattern in ("row", "reduction") for a in anchors):
        anchor = next(a for a in anchors if a.pattern in ("row", "reduction"))
        data = graph.tensors[anchor.inputs[0]]
        rows = size if anchor.pattern == "reduction" else data.size // max(data.shape[-1] or 1, 1)
        blocks, shared, registers = max(1, rows), 4 * THREADS, registers + 8
    factor, repeated, executed = _pulled_over_broadcast(graph, proposal, flops)
    return Footprint(THREADS, blocks, registers, shared, executed, factor, repeated)


def _pulled_over_broadcast(
    graph: DataflowGraph, proposal: Proposal, flops: int
) -> tuple[float, str, int]:
    """Factor by which pointwise values inside are computed again for every element they serve."""
    made = {n: graph.tensors[graph.by_name[n].outputs[0]].size for n in proposal.operators}
    factor, repeated, executed = 1.0, "", flops
    if len(set(made.values())) == 1:
        return factor, repeated, executed
    served: dict[str, int] = {}
    for name in reversed(graph.sort(proposal.operators)):
        operator = graph.by_name[name]
        pointwise = operator.pattern in ("elementwise", "broadcast")
        if not pointwise and operator.pattern not in ("view", "injective"):
            continue  # behind an anchor or a reduction values are computed from staged operands
        readers = (served.get(c.name, 0) for c in graph.successors(operator))
        served[name] = max([made[name] if pointwise else 0, *readers])
        if pointwise and operator.flops and served[name] > made[name]:  # a cast is no work
            times = served[name] / max(made[name], 1)
            executed += int(operator.flops * (times - 1))
            if times >= factor:  # the first of a chain names it
                factor, repeated = times, name
    return factor, repeated, executed


def _contraction(
    graph: DataflowGraph,
    proposal: Proposal,
    dense: list[Operator],
    flops: int,
    device: DeviceSpec,
) -> Footprint:
    """One convolution or product, or several that meet in the registers of a thread."""
    form, join = proposal.option("form"), proposal.option("join")
    parts = [contraction_of(graph, a) for a in dense]
    executed = _executed_flops(graph, proposal, parts, flops)
    if is_grouped(dense):
        found = grouped_footprint(graph, proposal, dense, executed, device)
    elif multiplies_on_tensor_cores(graph, dense, device):
        found = tensor_footprint(graph, proposal, dense, executed, device)
    else:
        found = fma_footprint(graph, proposal, dense, executed, device)
    if found is not None:
        return found
    largest = max(parts, key=lambda c: c.rows * c.columns * c.depth)
    copies = 1
    if form == "merged" and join in ("apart", "concat"):
        largest = dataclasses.replace(largest, columns=sum(c.columns for c in parts))
    elif form in ("merged", "joined"):
        copies = len(parts)
    tile = block_tile(largest, device, copies)
    limit = device.shared_memory_per_block
    stacked = copies if form == "merged" else 1
    staged = max(staged_bytes(c, tile, limit, stacked) for c in parts)
    registers = (
        BASE_REGISTERS
        + round(PER_ACCUMULATOR * tile.accumulators * copies)
        + PER_OPERAND * outside_operands(graph, proposal)
    )
    # Branches of other inputs are summed one after the other: only one of them is in flight.
    together = copies if form == "merged" else 1
    outputs = largest.rows * largest.columns * together
    depths = [serial_depth(c) for c in parts]
    return Footprint(
        tile.threads,
        tile.blocks,
        registers,
        staged,
        executed,
        outputs=outputs,
        depth=sum(depths) if form == "joined" else max(depths),
    )


def _executed_flops(
    graph: DataflowGraph, proposal: Proposal, parts: list[Contraction], flops: int
) -> int:
    """FLOPs after collapsing a linear sum, and after padding small kernels to the largest."""
    form = proposal.option("form")
    work = [2 * c.rows * c.columns * c.depth for c in parts]
    heaviest = max(parts, key=lambda c: c.window)
    padded = [2 * c.rows * c.columns * (c.depth // c.window) * heaviest.window for c in parts]
    if form == "collapsed":
        branches = [sum(graph.by_name[n].flops for n in m) for m in proposal.members]
        inside = {n for m in proposal.members for n in m}
        joins = [n for n in proposal.operators if n not in inside and graph.by_name[n].op == "add"][
            : len(branches) - 1
        ]
        rest = flops - sum(branches) - sum(graph.by_name[n].flops for n in joins)
        first = max(branches) if proposal.option("balance") == "pad" else branches[0]
        return rest + first
    if proposal.option("balance") == "pad":
        return flops + sum(padded) - sum(work)
    return flops


def _partitioned(graph: DataflowGraph, proposal: Proposal, device: DeviceSpec) -> Footprint:
    """Members side by side in one launch: blocks add up, the largest member sizes the block."""
    inside = {name for member in proposal.members for name in member}
    members = [footprint(graph, as_proposal(graph, m), device) for m in proposal.members]
    rest = sum(graph.by_name[n].flops for n in proposal.operators if n not in inside)
    worst = max(members, key=lambda m: m.recompute)
    return Footprint(
        max(m.threads for m in members),
        sum(m.blocks for m in members),
        max(m.registers for m in members) + 2,
        max(m.shared_bytes for m in members),
        sum(m.flops for m in members) + rest,
        worst.recompute,
        worst.repeated,
        sum(m.outputs for m in members),
        max(m.depth for m in members),
        max((m.flops, m.outputs) for m in members),
        microseconds=_side_by_side(members, device),
        dynamic_shared=any(m.dynamic_shared for m in members),
    )


def _side_by_side(members: list[Footprint], device: DeviceSpec) -> float:
    """Microseconds of members in one launch, 0 unless all are predicted: as long as the longest, or as all the work."""
    if not all(m.microseconds for m in members):
        return 0.0
    start = (RATES.start + RATES.latency) / RATES.clock
    bodies = [max(0.0, m.microseconds - start) for m in members]
    filled = [min(1.0, m.blocks / device.multiprocessors) for m in members]
    return start + max(*bodies, sum(b * f for b, f in zip(bodies, filled, strict=True)))


def as_proposal(graph: DataflowGraph, member: tuple[str, ...]) -> Proposal:
    """One member of a partitioned group as a group of its own."""
    anchors = tuple(
        n for n in member if graph.by_name[n].pattern in ("anchor", "pool", "reduction", "row")
    )
    dense = [n for n in anchors if graph.by_name[n].pattern == "anchor"]
    form = ""
    if len(dense) == 2:
        form = "back_to_back"
    elif len(dense) == 1 and len(anchors) > 1:
        form = "anchor_row"
    options = (("form", form),) if form else ()
    # Its kernel has no clusters.
    options = (*options, ("member", "1"))
    return Proposal("vertical", member, anchors, (member,), 1, (), options)


def _gates(graph: DataflowGraph, proposal: Proposal, dense: list[Operator]) -> bool:
    """Whether every product is small and broadcast into a larger result (squeeze and excite)."""
    if not dense or len(proposal.operators) == len(dense) or proposal.option("join") == "concat":
        return False
    size = result_size(graph, proposal)
    return all(graph.tensors[a.outputs[0]].size < size for a in dense)


def _gated(graph: DataflowGraph, proposal: Proposal, dense: list[Operator]) -> Footprint:
    """Blocks of a large pointwise result, each of which computes the gate values of its channels."""
    size = result_size(graph, proposal)
    gates = max(graph.tensors[a.outputs[0]].size for a in dense)
    per_value = size // max(gates, 1)  # result elements that one gate value serves
    blocks = max(1, -(-size // (4 * THREADS)))
    # A block covers some channels and some positions; it needs each of its channels' values once.
    repeats = max(1.0, per_value / (4 * THREADS))
    total = sum(graph.by_name[n].flops for n in proposal.operators)
    small = sum(
        graph.by_name[n].flops
        for n in proposal.operators
        if graph.tensors[graph.by_name[n].outputs[0]].size < size
    )
    executed = total + int(small * (repeats - 1))
    operands = len(graph.external_inputs(proposal.operators))
    nbytes = DTYPE_BYTES.get(graph.tensors[dense[0].outputs[0]].dtype, 4)
    return Footprint(
        THREADS,
        blocks,
        BASE_REGISTERS + 2 * operands,
        4 * nbytes * THREADS,
        executed,
        executed / max(total, 1),
        dense[0].name if executed > total else "",
    )
