"""Plan → plan with what the compiler says of each kernel."""

from __future__ import annotations

import dataclasses

from ..compat import Target, tvm
from ..planner.plan import Plan
from .executable import device_sources
from .model import build_module, lower_plan
from .ptxas import kernel_resources


def with_resources(mod: tvm.IRModule, plan: Plan, target: Target) -> Plan:
    """Lower and compile the kernels of a plan and fill in what they take.

    Parameters
    ----------
    mod : tvm.IRModule
        Canonical module.
    plan : Plan
        Its plan.
    target : Target
        Complete target. For a CPU there are no registers to report; groups are lowered all the
        same.

    Returns
    -------
    Plan
        Without the groups that cannot be one kernel; templates and, for CUDA, registers a thread,
        spilled bytes a thread and shared bytes a block filled in.

    Raises
    ------
    CompilerError
        If nvcc is missing or rejects the generated code.
    """
    lowered = lower_plan(mod, plan, target)
    if target.kind.name != "cuda":
        return lowered.plan
    sources = device_sources(build_module(lowered.mod, target).mod)
    arch = str(target.attrs["arch"])
    found = {name: r for source in sources for name, r in kernel_resources(source, arch).items()}
    groups = []
    for group in lowered.plan.groups:
        used = found.get(f"{lowered.kernels[group.id]}_kernel")
        if used is not None:
            group = dataclasses.replace(
                group,
                registers=used.registers,
                spill_bytes=used.spill_bytes,
                shared_bytes=used.shared_bytes,
            )
        groups.append(group)
    return dataclasses.replace(lowered.plan, groups=tuple(groups))
