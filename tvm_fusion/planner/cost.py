"""Predicted latency of kernels: a roofline with launch overhead.

A static cost ranks candidates; it does not promise a time. The model is the usual roofline
(Williams, Waterman and Patterson, CACM 2009): a kernel takes the longer of its memory time and its
compute time, plus the launch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from ..devices import DeviceSpec
from ..graph.dataflow import DataflowGraph
from ..strategies.base import Proposal

#: Share of the peak rates that generated kernels are taken to reach: the same for every kernel, so
#: that it scales predictions against launch overhead without changing which of two kernels is
#: better.
EFFICIENCY = 0.6


@dataclasses.dataclass(frozen=True)
class Cost:
    """What one kernel, or several, move and compute.

    Attributes
    ----------
    launches : int
        Kernels.
    nbytes : int
        Bytes to and from device memory.
    flops : int
        Floating-point operations.
    microseconds : float
        Predicted time.
    """

    launches: int = 0
    nbytes: int = 0
    flops: int = 0
    microseconds: float = 0.0

    def __add__(self, other: Cost) -> Cost:
        return Cost(
            self.launches + other.launches,
            self.nbytes + other.nbytes,
            self.flops + other.flops,
            self.microseconds + other.microseconds,
        )


def kernel_cost(
    graph: DataflowGraph, names: Iterable[str], device: DeviceSpec, flops: int | None = None
) -> Cost:
    """Cost of one kernel that computes the named operators.

    Parameters
    ----------
    graph : DataflowGraph
        The graph.
    names : iterable of str
        Operators of the kernel.
    device : DeviceSpec
        Peak rates and launch overhead.
    flops : int, optional
        Overrides the sum of the operators' FLOPs.
    """
    inside = tuple(names)
    operators = [graph.by_name[name] for name in inside]
    if not any(o.does_work for o in operators):
        return Cost()
    nbytes = sum(graph.traffic(inside))
    count = sum(o.flops for o in operators) if flops is None else flops
    dtype = graph.tensors[operators[0].outputs[0]].dtype
    seconds = max(nbytes / device.memory_bandwidth, count / device.peak_flops(dtype)) / EFFICIENCY
    return Cost(1, nbytes, count, (seconds + device.launch_overhead) * 1e6)


def unfused_cost(graph: DataflowGraph, names: Iterable[str], device: DeviceSpec) -> Cost:
    """Cost of the named operators with a kernel each."""
    total = Cost()
    for name in names:
        total += kernel_cost(graph, (name,), device)
    return total


def fused_cost(graph: DataflowGraph, proposal: Proposal, device: DeviceSpec) -> Cost:
    """Cost of a proposal as one kernel."""
    return kernel_cost(graph, proposal.operators, device, fused_flops(graph, proposal))


def fused_flops(graph: DataflowGraph, proposal: Proposal) -> int:
    """FLOPs of a proposal as one kernel; a collapsed sum computes one convolution instead of all, and no sums."""
    total = sum(graph.by_name[name].flops for name in proposal.operators)
    if proposal.option("form") != "collapsed":
        return total
    branches = [sum(graph.by_name[name].flops for name in member) for member in proposal.members]
    inside = {name for member in proposal.members for name in member}
    joins = [n for n in proposal.operators if n not in inside and graph.by_name[n].op == "add"]
    summed = joins[: len(branches) - 1]
    return total - sum(branches[1:]) - sum(graph.by_name[name].flops for name in summed)
