"""The verbs: plan, explain, compile, verify."""

from __future__ import annotations

import functools
from collections.abc import Mapping

from .build.executable import CompiledModel
from .build.model import compile_model
from .build.resources import KernelCompiler
from .compat import Target, tvm
from .config import FusionConfig
from .errors import PlanError
from .frontend.canonical import canonicalize
from .planner.explain import explain_model, explain_node
from .planner.explanation import ModelExplanation, NodeExplanation
from .planner.plan import Plan, Rejection
from .schedules import remembering
from .targets import parse_target, runnable
from .transform.fuse import plan_module, solve_module
from .transform.strip_fusion import is_group
from .verification.report import VerificationReport
from .verification.verify import Progress, check_groups, refusals_of, verify_module


def plan(
    mod: tvm.IRModule,
    target: Target | str | None = "llvm",
    config: FusionConfig | None = None,
    *,
    name: str = "model",
    build: bool = False,
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

    Returns
    -------
    Plan
        Printable; ``to_json()`` and ``Plan.from_json`` keep it.

    Raises
    ------
    InvalidModelError, TargetError
        If the module or the target is not usable.
    """
    resolved, canonical = parse_target(target), _canonical(mod)
    compiler = KernelCompiler(canonical, resolved) if build else None
    return plan_module(canonical, resolved, config or FusionConfig(), model=name, compiler=compiler)


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
    graph, solution = solve_module(_canonical(mod), parse_target(target), config)
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
    resolved, canonical = parse_target(target), _canonical(mod)
    if plan is not None and config is not None:
        raise ValueError("give a plan or a configuration, not both: the plan holds the decisions")
    if plan is not None and plan.target.kind != resolved.kind.name:
        raise PlanError(
            f"the plan is for {plan.target.kind}, not for {resolved.kind.name}; plan again"
        )
    checker = functools.partial(_wrong_groups, progress=progress) if verify else None
    with remembering():
        if plan is None and resolved.kind.name == "cuda":
            # What the compiler says of registers and spills is part of the decision.
            compiler = KernelCompiler(canonical, resolved)
            decide = config or FusionConfig()
            plan = plan_module(canonical, resolved, decide, model=name, compiler=compiler)
        return compile_model(
            canonical,
            resolved,
            plan=plan,
            config=config,
            strict=strict,
            checker=checker,
            model=name,
        )


def _canonical(mod: tvm.IRModule) -> tvm.IRModule:
    """Clean a module up, unless it is annotated: then it has been, and its groups would be lost."""
    if not isinstance(mod, tvm.IRModule):
        raise TypeError(
            f"a model is a tvm.IRModule, not {type(mod).__name__}; import files with frontend.load"
        )
    return mod if any(is_group(f) for f in mod.functions.values()) else canonicalize(mod)


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
    resolved, canonical = parse_target(target), _canonical(mod)
    decided = plan or plan_module(canonical, resolved, config or FusionConfig())
    compiled = compile_model(canonical, runnable(resolved), plan=decided)
    return verify_module(canonical, compiled, decided, inputs=inputs, seed=seed, progress=progress)


__all__: list[str] = ["compile", "explain", "plan", "verify"]
