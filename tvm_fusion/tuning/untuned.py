"""The model as it is compiled without a work dir: by the cost models and by the records that come with the package."""

from __future__ import annotations

from collections.abc import Sequence

from ..build.model import prepared
from ..build.resources import KernelCompiler
from ..compat import Target, tvm
from ..config import FusionConfig
from ..planner.plan import Plan
from ..schedules.registry import deciding_by
from ..targets import with_variant
from ..transform.fuse import plan_module
from .lookup import lookup_in, recorded_device, tuned_records
from .session import Session
from .trials import TrialSet
from .tuner import Budget, Tuner
from .whole import Untuned
from .workbench import device_of


def untuned_model(
    mod: tvm.IRModule,
    target: Target,
    *,
    config: FusionConfig | None = None,
    name: str = "model",
) -> Untuned:
    """Return what decides about a canonical module where nothing was tuned.

    Parameters
    ----------
    mod : tvm.IRModule
        Canonical module.
    target : Target
        Complete target.
    config : FusionConfig, optional
        Strategies and limits.
    name : str
        Name of the model in the plan.
    """
    records = tuned_records(mod, target)
    lookup = lookup_in(records, device_of(target, None))
    with deciding_by(lookup):
        return Untuned(plan_untuned(mod, target, records, config=config, name=name), lookup)


def plan_untuned(
    mod: tvm.IRModule,
    target: Target,
    shipped: Sequence[TrialSet],
    *,
    config: FusionConfig | None = None,
    name: str = "model",
) -> Plan:
    """Plan a canonical module as it is compiled without a work dir.

    For CUDA what the compiler says of registers and spills is part of the decision.

    Parameters
    ----------
    mod : tvm.IRModule
        Canonical module.
    target : Target
        Complete target.
    shipped : sequence of TrialSet
        What comes with the package for this target.
    config : FusionConfig, optional
        Strategies and limits.
    name : str
        Name of the model in the plan.
    """
    decide = config or FusionConfig()
    if target.kind.name != "cuda":
        return plan_module(prepared(mod, target), target, decide, model=name)
    plan = plan_module(mod, target, decide, model=name, compiler=KernelCompiler(mod, target))
    for trials in filter(len, shipped):
        plan = plan_from_shipped(mod, target, trials, plan, config=config, name=name)
    return plan


def plan_from_shipped(
    mod: tvm.IRModule,
    target: Target,
    shipped: TrialSet,
    planned: Plan,
    *,
    config: FusionConfig | None = None,
    name: str = "model",
) -> Plan:
    """Plan a canonical module with times that come with the package, where they cover the model.

    Parameters
    ----------
    mod : tvm.IRModule
        Canonical module.
    target : Target
        Complete target.
    shipped : TrialSet
        What comes with the package for this target.
    planned : Plan
        The plan by the cost model; returned as it is where a kernel that it calls is not on record, because measured
        and predicted times do not compare.
    config : FusionConfig, optional
        Strategies and limits.
    name : str
        Name of the model in the plan.
    """
    device = recorded_device(shipped, device_of(target, None))
    tuner = Tuner(with_variant(target), None, None, None, shipped, device)
    session = Session(mod, target, config or FusionConfig(), tuner, Budget(0), name)
    return session.recall() if session.covers(planned) else planned
