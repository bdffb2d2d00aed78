"""What one kernel needs: the numbers that guards and costs are made from."""

from __future__ import annotations

import dataclasses

from ..devices import DeviceSpec, capability
from ..graph.dataflow import DataflowGraph, Operator
from ..strategies.base import Proposal

#: Registers of a thread for addresses, loop counters and operands; for each accumulator (some are
#: reused); and of a kernel without accumulators, for itself and for each operand. Fitted to what the
#: compiler reports for the templates' kernels (benchmarks/results/kernels-h200.json).
BASE_REGISTERS, PER_ACCUMULATOR = 40, 0.8
POINTWISE_REGISTERS, PER_OPERAND = 8, 2


@dataclasses.dataclass(frozen=True)
class Footprint:
    """Estimated needs of one kernel.

    Attributes
    ----------
    threads : int
        Threads of a block.
    blocks : int
        Thread blocks.
    registers : int
        Registers of a thread.
    shared_bytes : int
        Shared memory of a block.
    flops : int
        Operations that the kernel executes: recomputed ones counted each time, collapsed ones once.
    recompute : float
        How often a value is computed that the block or its threads compute again and again,
        averaged over the group's FLOPs; 1 where nothing is repeated.
    repeated : str
        The operator that is repeated most, empty if none is.
    outputs : int
        Sums of products that are in flight together: what a chip has to hide latency with; 0 for a
        kernel without products.
    depth : int
        Products that a thread adds up one after the other.
    heaviest : tuple of (int, int)
        FLOPs and sums in flight of the heaviest member of a partitioned launch, which takes no less
        time than alone.
    stages : tuple of (str, int, int)
        Kind, FLOPs and sums in flight of what a block computes one after the other (two anchors);
        empty for a kernel of one stage.
    microseconds : float
        Time that the model of the kernel's tiles predicts, launch included; 0 where there is none.
    dynamic_shared : bool
        Whether the shared memory is sized at launch: a block may have more of it.
    """

    threads: int
    blocks: int
    registers: int
    shared_bytes: int
    flops: int
    recompute: float = 1.0
    repeated: str = ""
    outputs: int = 0
    depth: int = 0
    heaviest: tuple[int, int] = (0, 0)
    stages: tuple[tuple[str, int, int], ...] = ()
    microseconds: float = 0.0
    dynamic_shared: bool = False

    def resident_blocks(self, device: DeviceSpec) -> int:
        """Blocks that fit on one multiprocessor together; 0 if one alone does not."""
        limits = [
            device.max_threads_per_multiprocessor // max(self.threads, 1),
            device.max_blocks_per_multiprocessor,
        ]
        if device.registers_per_multiprocessor:
            # Registers are handed out to warps in units of 256 (CUDA occupancy calculator).
            each = -(-self.registers * device.warp_size // 256) * 256
            warps = -(-self.threads // device.warp_size)
            limits.append(device.registers_per_multiprocessor // max(each * warps, 1))
        if self.shared_bytes:
            # From sm_80 on the driver keeps 1 KiB of each block's shared memory for itself.
            own = 1024 if capability(device.arch) >= 80 else 0
            limits.append(device.shared_memory_per_multiprocessor // (self.shared_bytes + own))
        return max(0, min(limits))

    def occupancy(self, device: DeviceSpec) -> float:
        """Share of a multiprocessor's threads that are resident, in [0, 1]."""
        most = max(device.max_threads_per_multiprocessor, 1)
        return min(1.0, self.resident_blocks(device) * self.threads / most)


def result_size(graph: DataflowGraph, proposal: Proposal) -> int:
    """Elements of a group's largest result."""
    return max(
        (graph.tensors[t].size for t in graph.external_outputs(proposal.operators)), default=1
    )


def outside_operands(graph: DataflowGraph, proposal: Proposal) -> int:
    """Tensors that the epilogue reads from outside the group, weights and data of anchors aside."""
    held = {t for name in proposal.anchors for t in graph.by_name[name].inputs[:2]}
    return len([t for t in graph.external_inputs(proposal.operators) if t not in held])


def kind_of(operator: Operator) -> str:
    """The kind of kernel that an operator makes, for which the cost model has rates.

    Returns
    -------
    str
        ``"convolution"``, ``"product"``, ``"grouped"`` (grouped and depthwise convolutions, which
        reuse little of what they load), ``"window"`` (pooling, reductions, row operators) or
        ``"pointwise"``.
    """
    if operator.pattern == "anchor":
        if operator.op == "matmul":
            return "product"
        return "grouped" if int(operator.attrs.get("groups") or 1) > 1 else "convolution"
    return "window" if operator.pattern in ("pool", "reduction", "row") else "pointwise"
