"""The verbs: plan, explain, compile, verify, tune."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping, Sequence
from typing import cast

from .build.executable import CompiledModel
from .build.model import compile_model
from .build.resources import KernelCompiler
from .compat import Target, tvm
from .config import FusionConfig
from .devices import TF32
from .errors import PlanError
from .planner.explain import explain_model, explain_node
from .planner.explanation import ModelExplanation, NodeExplanation
from .planner.plan import Plan, Rejection
from .schedules import remembering
from .schedules.registry import deciding_by
from .strategies.base import Strategy
from .targets import parse_target, runnable, with_products
from .transform.fuse import canonical_for, plan_module, solve_module, target_of
from .tuning.lookup import lookup_in, records_for, tuned_records
from .tuning.session import Session
from .tuning.trials import TrialSet
from .tuning.tune import TRIALS, Remote, plan_from_records, tune_model
from .tuning.untuned import plan_untuned
from .tuning.work_dir import Records
from .tuning.workbench import device_of
from .verification.report import VerificationReport
from .verification.verify import Progress, check_groups, refusals_of, verify_module


def plan(
    mod: tvm.IRModule,
    target: Target | str | None = "llvm",
    config: FusionConfig | None = None,
    *,
    name: str = "model",
    build: bool = False,
    proposers: Sequence[Strategy] = (),
) -> Plan:
    """Decide what to fuse.

    Parameters
    ----------
    mod : tvm.IRModule
        A Relax module, canonical or not.
    target : Target, str or None
        ``"llvm"``, ``"cuda"``, ``"cuda:sm_90a"``…; None takes the target in scope. ``"cuda:…"``
        needs no GPU.
    config : FusionConfig, optional
        Strategies and limits.
    name : str
        Name of the model in the plan.
    build : bool
        Also lower and compile the chosen kernels and choose again with what the compiler says:
        groups that cannot be one kernel, spill, or need too much are refused. Their templates,
        registers, spills and shared memory are in the plan.
    proposers : sequence of Strategy
        Strategies of your own, beside those that the configuration names: they propose groups, the
        guards and the search decide as they do about all others.

    Returns
    -------
    Plan
        Printable; ``to_json()`` and ``Plan.from_json`` keep it.

    Raises
    ------
    InvalidModelError, TargetError
        If the module or the target is not usable.
    """
    config = config or FusionConfig()
    resolved, canonical = resolve(mod, target, config)
    compiler = KernelCompiler(canonical, resolved) if build else None
    return plan_module(
        canonical, resolved, config, model=name, compiler=compiler, proposers=proposers
    )


def explain(
    mod: tvm.IRModule,
    target: Target | str | None = "llvm",
    config: FusionConfig | None = None,
    *,
    node: str | None = None,
) -> ModelExplanation | NodeExplanation:
    """Say why a model, or one node of it, is fused as it is.

    Parameters
    ----------
    mod : tvm.IRModule
        A Relax module, canonical or not.
    target : Target, str or None
        As in `plan`.
    config : FusionConfig, optional
        Strategies and limits.
    node : str, optional
        Name of a node of the model. Without it the whole model is summed up.

    Returns
    -------
    ModelExplanation or NodeExplanation
        For a node its group, every group that it could have joined and what stopped each, and what
        stopped it at each neighbour; for a model the reasons with counts and examples. ``to_dict()``
        gives plain values.

    Raises
    ------
    UnknownNodeError
        If the model has no such node.
    InvalidModelError, TargetError
        If the module or the target is not usable.
    """
    config = config or FusionConfig()
    resolved, canonical = resolve(mod, target, config)
    graph, solution = solve_module(canonical, resolved, config)
    decided = graph, solution.chosen, solution.considered
    if node is None:
        return explain_model(*decided, config.strategies)
    return explain_node(*decided, node, config.strategies)


def compile(
    mod: tvm.IRModule,
    target: Target | str | None = "llvm",
    *,
    plan: Plan | None = None,
    config: FusionConfig | None = None,
    strict: bool = False,
    verify: bool = True,
    work_dir: str | os.PathLike[str] | None = None,
    records: bool = True,
    name: str = "model",
    progress: Progress | None = None,
) -> CompiledModel:
    """Compile a model, one kernel per group.

    Parameters
    ----------
    mod : tvm.IRModule
        A Relax module, canonical or not.
    target : Target, str or None
        As in `plan`.
    plan : Plan, optional
        Decisions to carry out; planned with ``config`` when absent, for CUDA with what the
        compiler says of the kernels.
    config : FusionConfig, optional
        Strategies and limits.
    strict : bool
        Whether a group that cannot be lowered, or whose result is wrong, is an error. Otherwise it
        is left unfused, with a warning and a reason in the plan.
    verify : bool
        Whether to compare every group with the unfused operators first (on the GPU if there is one,
        else on the CPU).
    work_dir : str or path, optional
        Where `tune` kept what it measured: kernels are compiled as they were fastest, and the plan
        (where none is given) follows the measured times.
    records : bool
        Whether to use the records that come with the package: kernels that are in none of ``work_dir``
        are compiled as these say, and the plan follows their times where they cover the model.
    name : str
        Name of the model in the plan.
    progress : callable, optional
        Called with the groups verified and their number.

    Returns
    -------
    CompiledModel
        Callable on arrays; ``export`` writes a library, ``plan`` is what was carried out.

    Raises
    ------
    InvalidModelError, TargetError, PlanError, LoweringError
        If an argument is not usable, or, with ``strict``, a group fails.
    """
    if plan is not None and config is not None:
        raise ValueError("give a plan or a configuration, not both: the plan holds the decisions")
    resolved, canonical = resolve(mod, target, config, plan)
    if plan is not None and plan.target.kind != resolved.kind.name:
        raise PlanError(
            f"the plan is for {plan.target.kind}, not for {resolved.kind.name}; plan again"
        )
    checker = functools.partial(_wrong_groups, progress=progress) if verify else None
    found = tuned_records(canonical, resolved, work_dir, shipped=records)
    device = device_of(resolved, None)
    with remembering():
        if plan is None:
            with deciding_by(lookup_in(found, device)):
                plan = plan_with_records(
                    canonical, resolved, found, tuned=work_dir is not None, config=config, name=name
                )
        with deciding_by(lookup_in(records_for(plan, found), device)):
            return compile_model(
                canonical, resolved, plan=plan, config=config, strict=strict, checker=checker,
                model=name,
            )  # fmt: skip


def plan_with_records(
    canonical: tvm.IRModule,
    target: Target,
    records: Sequence[TrialSet],
    *,
    tuned: bool,
    config: FusionConfig | None = None,
    name: str = "model",
) -> Plan | None:
    """Plan as `compile` does, with measured times where there are some, and with what the compiler says of registers.

    None where there is neither: the cost model alone decides.

    Parameters
    ----------
    canonical : tvm.IRModule
        Canonical module.
    target : Target
        Complete target.
    records : sequence of TrialSet
        As of `tuned_records`.
    tuned : bool
        Whether the first ones are a work dir's: their times decide.
    config : FusionConfig, optional
        Strategies and limits.
    name : str
        Name of the model in the plan.
    """
    if tuned:
        own = cast("Records", records[0])  # a work dir's, not one of the package
        return plan_from_records(canonical, target, own, config=config, name=name)
    if target.kind.name != "cuda":
        return None
    return plan_untuned(canonical, target, records, config=config, name=name)


def tune(
    mod: tvm.IRModule,
    target: Target | str | None = "llvm",
    work_dir: str | os.PathLike[str] = "tuned",
    *,
    trials: int = TRIALS,
    minutes: float | None = None,
    config: FusionConfig | None = None,
    remote: Remote | None = None,
    devices: Sequence[int] | None = None,
    require_cached: bool = False,
    name: str = "model",
    report: Callable[[Session], None] | None = None,
) -> Plan:
    """Find the fastest kernels and how deep to fuse, by measuring.

    Parameters
    ----------
    mod : tvm.IRModule
        A Relax module, canonical or not.
    target : Target, str or None
        As in `plan`.
    work_dir : str or path
        Where every trial is kept. A run that was stopped goes on there; `compile` reads it.
    trials : int
        Candidates over all kernels, those of earlier runs in this directory included.
    minutes : float, optional
        When to stop at the latest.
    config : FusionConfig, optional
        Strategies and limits.
    remote : Remote, optional
        A TVM RPC tracker whose servers measure, instead of this machine.
    devices : sequence of int, optional
        Numbers of the GPUs of this machine that measure, all alike; GPU 0 when absent.
    require_cached : bool
        Measure nothing: an error if something would have to be.
    name : str
        Name of the model in the plan.
    report : callable, optional
        Called with the running session at the start, after each batch of candidates and with each
        new plan. Where it sets ``session.tuner.stopping``, what is under way is finished, and the
        best so far returned.

    Returns
    -------
    Plan
        With the measured times. It has no groups where the whole model was not faster with them, and is the
        untuned one where that was faster.

    Raises
    ------
    InvalidModelError, TargetError
        If the module or the target is not usable.
    DatabaseError
        If the work dir is not.
    TuningError
        If nothing can be measured, or with ``require_cached`` something would have to be.
    """
    resolved, canonical = resolve(mod, target, config)
    return tune_model(
        canonical, resolved, work_dir, config=config, trials=trials, minutes=minutes,
        remote=remote, devices=devices, require_cached=require_cached, name=name, report=report,
    ).plan  # fmt: skip


def resolve(
    mod: tvm.IRModule,
    target: Target | str | None,
    config: FusionConfig | None = None,
    plan: Plan | None = None,
) -> tuple[Target, tvm.IRModule]:
    """Return the complete target, and the module as plans for it (or this plan) have it.

    Parameters
    ----------
    mod : tvm.IRModule
        A Relax module, canonical or not.
    target : Target, str or None
        As in the verbs.
    config : FusionConfig, optional
        Says how float32 products are computed, unless a plan does.
    plan : Plan, optional
        Decisions that stand already.

    Raises
    ------
    InvalidModelError, TargetError
        If the module or the target is not usable.
    """
    if not isinstance(mod, tvm.IRModule):
        raise TypeError(
            f"a model is a tvm.IRModule, not {type(mod).__name__}; import files with frontend.load"
        )
    if plan is not None:
        decided = with_products(parse_target(target), plan.float32_products)
        return decided, canonical_for(mod, plan.float32_products)
    resolved = target_of(target, config or FusionConfig())
    return resolved, canonical_for(mod, TF32 if TF32 in resolved.keys else "float32")


def _wrong_groups(
    mod: tvm.IRModule, plan: Plan, target: Target, progress: Progress | None
) -> Mapping[str, Rejection]:
    return refusals_of(check_groups(mod, plan, target, progress=progress), plan)


def verify(
    mod: tvm.IRModule,
    target: Target | str | None = "llvm",
    *,
    plan: Plan | None = None,
    config: FusionConfig | None = None,
    inputs: int = 3,
    seed: int = 0,
    progress: Progress | None = None,
) -> VerificationReport:
    """Compare the fused model with the unfused one, as a whole and group by group.

    Parameters
    ----------
    mod : tvm.IRModule
        A Relax module, canonical or not.
    target : Target, str or None
        As in `plan`. A CUDA target is verified on the GPU, or, without one, on the CPU with the
        same lowered groups.
    plan : Plan, optional
        Decisions to verify; planned with ``config`` when absent.
    config : FusionConfig, optional
        Strategies and limits.
    inputs : int
        Random inputs of the whole model, beside a position-coded one.
    seed : int
        Seed of the random inputs.
    progress : callable, optional
        Called with the comparisons done and their number.

    Returns
    -------
    VerificationReport
        Printable; ``passed`` says whether everything is within tolerance.
    """
    resolved, canonical = resolve(mod, target, config, plan)
    decided = plan or plan_module(canonical, resolved, config or FusionConfig())
    compiled = compile_model(canonical, runnable(resolved), plan=decided)
    return verify_module(canonical, compiled, decided, inputs=inputs, seed=seed, progress=progress)


__all__: list[str] = ["compile", "explain", "plan", "tune", "verify"]
