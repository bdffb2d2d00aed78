"""Plans of small modules for named devices, without a GPU and without compiling anything."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from ..compat import tvm
from ..config import FusionConfig
from ..devices import DeviceSpec, device_for
from ..graph.dataflow import DataflowGraph
from ..graph.relax import from_relax
from ..guards import Verdict
from ..planner import Plan, TargetInfo
from ..planner.assemble import make_plan
from ..planner.compare import Kernel
from ..planner.planner import Solution, solve
from ..strategies.base import Proposal
from ..targets import parse_target

#: The device that plans in tests are made for where a test does not say.
DEVICE: DeviceSpec = device_for(parse_target("cuda:sm_90"))

#: The same where a launch takes a millisecond: whatever may be fused is, whatever the cost model
#: thinks of the rest.
EAGER: DeviceSpec = dataclasses.replace(DEVICE, launch_overhead=1e-3)


def graph_of(mod: tvm.IRModule | DataflowGraph) -> DataflowGraph:
    """The graph of a canonical module; a graph as it is."""
    return mod if isinstance(mod, DataflowGraph) else from_relax(mod).graph


def planned(
    mod: tvm.IRModule | DataflowGraph,
    device: DeviceSpec | str = DEVICE,
    *,
    compiler: Any = None,
    measure: Any = None,
    recall: Any = None,
    existing: Mapping[str, Proposal] | None = None,
    excluded: Mapping[Kernel, Verdict] | None = None,
    **options: Any,
) -> Plan:
    """Plan a canonical module; ``options`` are fields of ``FusionConfig``."""
    spec = _device(device, options)
    target = TargetInfo(spec.kind, spec.arch if spec.kind == "cuda" else None, spec.name)
    return make_plan(
        graph_of(mod), spec, target, FusionConfig(**options), existing=existing, excluded=excluded,
        compiler=compiler, measure=measure, recall=recall,
    )  # fmt: skip


def solved(
    mod: tvm.IRModule | DataflowGraph,
    device: DeviceSpec | str = DEVICE,
    *,
    compiler: Any = None,
    measure: Any = None,
    **options: Any,
) -> Solution:
    """Everything that the planner weighed; ``options`` are fields of ``FusionConfig``."""
    return solve(
        graph_of(mod),
        _device(device, options),
        FusionConfig(**options),
        compiler=compiler,
        measure=measure,
    )


def _device(device: DeviceSpec | str, options: Mapping[str, Any]) -> DeviceSpec:
    spec = device_for(parse_target(device)) if isinstance(device, str) else device
    return dataclasses.replace(spec, tf32=options.get("float32_products") == "tf32")
