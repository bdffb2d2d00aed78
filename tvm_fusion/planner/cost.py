"""Predicted latency of kernels: a roofline with launch overhead and fitted efficiencies.

A static cost ranks candidates; it does not promise a time. The model is the usual roofline
(Williams, Waterman and Patterson, CACM 2009): a kernel takes the longer of its memory time and its
compute time. Arithmetic is slower where too few sums are in flight to hide latency, and the launch
comes on top.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping

from ..devices import DeviceSpec
from ..graph.dataflow import DataflowGraph, Operator
from ..guards.footprint import footprint
from ..guards.needs import Footprint, kind_of
from ..strategies.base import Proposal


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


@dataclasses.dataclass(frozen=True)
class Rates:
    """What generated kernels reach of a device's peaks, fitted to measured kernels.

    Attributes
    ----------
    memory : float
        Share of the memory bandwidth.
    compute : mapping of str to float
        Share of the peak float32 FLOP/s of a kernel that has enough sums in flight, by kind
        (see `guards.needs.kind_of`). Kernels on tensor cores have a model of their own
        (`guards.tensor_tiles`); others multiply narrow types on the same units.
    latency : mapping of str to float
        Seconds that a kernel takes at least, its launch aside: filling and draining the chip.
    step : mapping of str to float
        Seconds from one product of a thread's sum to the next, by kind.
    saturation : int
        Sums in flight on a multiprocessor from which on latency is hidden; below, throughput falls
        with their square root. 0: always hidden.
    forms : mapping of str to float
        Time of a kernel of this form against the same work with as many sums in flight apart.
    crowding : float
        What each member over ``crowd`` adds to the time of members joined in registers: they divide
        the accumulators of a thread, so that operands are loaded more often.
    crowd : int
        Members up to which this costs nothing.
    """

    memory: float
    compute: Mapping[str, float]
    latency: Mapping[str, float]
    step: Mapping[str, float]
    saturation: int
    forms: Mapping[str, float]
    crowding: float = 0.0
    crowd: int = 6


#: For one H200, taken for all GPUs, whose peaks the device table has. ``compute``, ``step`` and
#: ``saturation`` were chosen with ``benchmarks/fit_cost.py``; ``memory``, ``latency`` and ``forms``
#: by hand from the same tables (benchmarks/results/kernels-h200.json, kernels-h200-forms.json);
#: ``crowding`` so that 12 members lose about 8 % against twice 6 (given when the project began;
#: measured: -23 to 85 %, h200-kernels.md).
GPU_RATES = Rates(
    memory=0.85,
    compute={
        "convolution": 0.24, "product": 0.4, "grouped": 0.055, "window": 0.3, "pointwise": 0.5,
    },
    latency={"convolution": 0.2e-6, "product": 0.2e-6, "grouped": 0.5e-6, "window": 0.5e-6},
    step={"convolution": 20e-9},
    saturation=24_000,
    forms={
        "merged": 1.03, "joined": 1.0, "partitioned": 1.03, "back_to_back": 0.85, "anchor_row": 1.0,
        "attention": 1.0,
    },
    crowding=0.09,
)  # fmt: skip

#: For the CPU templates, a reference point like the CPU of the device table; a launch is a call.
CPU_RATES = Rates(
    memory=0.6,
    compute={
        "convolution": 0.4,
        "product": 0.4,
        "grouped": 0.2,
        "window": 0.2,
        "pointwise": 0.5,
    },
    latency={},
    step={},
    saturation=0,
    forms={},
)


def operator_cost(graph: DataflowGraph, operator: Operator, device: DeviceSpec) -> Cost:
    """Cost of one operator as a kernel of its own; nothing for a view."""
    known = _operator_costs(graph, device)
    if operator.name not in known:
        anchors = (operator.name,) if kind_of(operator) != "pointwise" else ()
        alone = Proposal("vertical", (operator.name,), anchors, ((operator.name,),))
        known[operator.name] = fused_cost(graph, alone, device) if operator.does_work else Cost()
    return known[operator.name]


def _operator_costs(graph: DataflowGraph, device: DeviceSpec) -> dict[str, Cost]:
    """Costs of single operators that are known so far, by name."""
    return graph.memo.setdefault(("operator_costs", device.name, device.arch, device.tf32), {})


def unfused_cost(graph: DataflowGraph, names: Iterable[str], device: DeviceSpec) -> Cost:
    """Cost of the named operators with a kernel each."""
    launches = nbytes = flops = 0
    microseconds = 0.0
    known = _operator_costs(graph, device)
    for name in names:
        cost = known.get(name) or operator_cost(graph, graph.by_name[name], device)
        launches += cost.launches
        nbytes += cost.nbytes
        flops += cost.flops
        microseconds += cost.microseconds
    return Cost(launches, nbytes, flops, microseconds)


def fused_cost(graph: DataflowGraph, proposal: Proposal, device: DeviceSpec) -> Cost:
    """Cost of a proposal as one kernel.

    Parameters
    ----------
    graph : DataflowGraph
        The graph.
    proposal : Proposal
        The group.
    device : DeviceSpec
        Peak rates, multiprocessors and launch overhead.

    Returns
    -------
    Cost
        One launch; bytes count each outside tensor once.
    """
    needs = footprint(graph, proposal, device)
    nbytes = sum(graph.traffic(proposal.operators))
    # A shortcut is an operand: with one branch the kernel is the one of a vertical group.
    lone = proposal.option("form") == "joined" and len(proposal.members) < 2
    form = "" if lone else proposal.option("form")
    kind, dtype = _kind(graph, proposal), _dtype(graph, proposal)
    # Merged products are one wider product, however many they were: they do not crowd anything.
    members = 1 if form == "merged" and kind == "product" else len(proposal.members)
    seconds = kernel_seconds(needs, nbytes, kind, dtype, form, members, device)
    return Cost(1, nbytes, needs.flops, seconds * 1e6)


def kernel_seconds(
    needs: Footprint,
    nbytes: int,
    kind: str,
    dtype: str,
    form: str,
    members: int,
    device: DeviceSpec,
    rates: Rates | None = None,
) -> float:
    """Predicted time of one kernel, launch included.

    Parameters
    ----------
    needs : Footprint
        Its blocks, threads and FLOPs.
    nbytes : int
        Bytes to and from device memory.
    kind : str
        What its anchors are (see `Rates`).
    dtype : str
        Element type.
    form : str
        How members share the kernel; empty for none.
    members : int
        How many do.
    device : DeviceSpec
        The device.
    rates : Rates, optional
        Constants to predict with; those of the device's kind when absent.
    """
    rates = rates or (GPU_RATES if device.kind == "cuda" else CPU_RATES)
    memory = nbytes / (device.memory_bandwidth * rates.memory)
    crowd = members - rates.crowd if form in ("merged", "joined") else 0
    crowded = 1 + rates.crowding * max(0, crowd)
    if needs.microseconds:
        # The model of the kernel's tiles has everything but device memory, and was not fitted to a crowd.
        return max(needs.microseconds * 1e-6 * crowded, device.launch_overhead + memory)
    peak = min(device.peak_flops(dtype), device.peak_flops("float32"))  # no tensor cores
    full = peak * rates.compute[kind]
    compute = max(
        flops / (full * _in_flight(outputs, rates, device))
        for flops, outputs in ((needs.flops, needs.outputs), needs.heaviest)
    )
    if needs.stages:  # one after the other in every block
        compute = sum(
            flops / (peak * rates.compute[k] * _in_flight(outputs, rates, device))
            for k, flops, outputs in needs.stages
        )
    chain = needs.depth * rates.step.get(kind, 0.0)
    body = max(compute, memory, chain) * rates.forms.get(form, 1.0) * crowded
    return device.launch_overhead + rates.latency.get(kind, 0.0) + body


def _in_flight(outputs: int, rates: Rates, device: DeviceSpec) -> float:
    """Share of the full rate that a chip reaches with so many sums in flight."""
    if not (rates.saturation and outputs):
        return 1.0
    return min(1.0, math.sqrt(outputs / (device.multiprocessors * rates.saturation)))


def _kind(graph: DataflowGraph, proposal: Proposal) -> str:
    """The kind of the anchor with most work."""
    anchors = [graph.by_name[name] for name in proposal.anchors]
    heaviest = max(anchors, key=lambda o: o.flops, default=None)
    return "pointwise" if heaviest is None else kind_of(heaviest)


def _dtype(graph: DataflowGraph, proposal: Proposal) -> str:
    name = proposal.anchors[0] if proposal.anchors else proposal.operators[0]
    return graph.tensors[graph.by_name[name].outputs[0]].dtype
