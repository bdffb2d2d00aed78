"""The passes that decide groups and annotate them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..compat import Target, tvm
from ..config import FusionConfig
from ..devices import TF32, device_for
from ..frontend.canonical import canonicalize
from ..graph.dataflow import DataflowGraph
from ..graph.relax import RelaxGraph, from_relax
from ..guards import Verdict
from ..planner.assemble import make_plan, proposals_of
from ..planner.candidates import Measure
from ..planner.compare import Kernel
from ..planner.plan import Plan, TargetInfo
from ..planner.planner import Compiler, Solution, solve
from ..strategies.attributes import proposal_from
from ..strategies.base import Proposal, Strategy
from ..targets import parse_target, with_products
from .annotate import annotate
from .strip_fusion import ExistingGroup, is_group, strip


def plan_module(
    mod: tvm.IRModule,
    target: Target | str | None,
    config: FusionConfig,
    *,
    model: str = "model",
    excluded: Mapping[Kernel, Verdict] | None = None,
    offered: Sequence[Proposal] = (),
    proposers: Sequence[Strategy] = (),
    compiler: Compiler | None = None,
    measure: Measure | None = None,
    recall: Measure | None = None,
) -> Plan:
    """Plan a canonical module, respecting groups that it already has.

    Parameters
    ----------
    mod : tvm.IRModule
        Canonical, possibly annotated.
    target : Target, str or None
        Target to predict for; None takes the current one.
    config : FusionConfig
        Strategies and limits.
    model : str
        Name shown in reports.
    excluded : mapping of (operators, options) to Verdict, optional
        Groups that must not be taken, and why.
    offered : sequence of Proposal, optional
        Further proposals.
    proposers : sequence of Strategy, optional
        Strategies beside those that the configuration names; guards, cost and search treat all alike.
    compiler, measure, recall : callable, optional
        What the compiler and the clock say of kernels (see ``planner.solve``).
    """
    resolved = target_of(target, config)
    flat, groups = strip(mod)
    found = from_relax(flat)
    existing = {group.name: _as_proposal(found, group) for group in groups}
    device = device_for(resolved)
    arch = resolved.attrs.get("arch") if resolved.kind.name == "cuda" else None
    info = TargetInfo(resolved.kind.name, str(arch) if arch else None, device.name)
    own = [p for strategy in proposers for p in strategy.propose(found.graph, config)]
    return make_plan(
        found.graph, device, info, config, model=model, existing=existing, excluded=excluded,
        offered=[*offered, *own], compiler=compiler, measure=measure, recall=recall,
    )  # fmt: skip


def solve_module(
    mod: tvm.IRModule, target: Target | str | None, config: FusionConfig
) -> tuple[DataflowGraph, Solution]:
    """Decide as `plan_module` does and return everything that was weighed, with the graph."""
    resolved = target_of(target, config)
    flat, groups = strip(mod)
    found = from_relax(flat)
    existing = {group.name: _as_proposal(found, group) for group in groups}
    return found.graph, solve(found.graph, device_for(resolved), config, existing)


def target_of(target: Target | str | None, config: FusionConfig) -> Target:
    """The complete target (None: the current one), with what a configuration says of float32 products."""
    resolved = parse_target(target)
    return with_products(resolved, TF32) if config.float32_products == TF32 else resolved


def canonical_for(mod: tvm.IRModule, float32_products: str = "float32") -> tvm.IRModule:
    """Clean a module up as plans with such products want it: channels-last for TF32.

    An annotated module stays as it is: it has been cleaned up, and its groups would be lost.
    """
    if any(is_group(function) for function in mod.functions.values()):
        return mod
    return canonicalize(mod, channels_last=float32_products == TF32)


def graph_of(mod: tvm.IRModule, float32_products: str = "float32") -> DataflowGraph:
    """The graph that plans of a module (canonical or not, annotated or not) are made for."""
    return from_relax(strip(canonical_for(mod, float32_products))[0]).graph


def apply_plan(mod: tvm.IRModule, plan: Plan) -> tvm.IRModule:
    """Annotate a module with the groups of a plan.

    Raises
    ------
    PlanError
        If the plan was made for another model.
    """
    flat, _ = strip(mod)
    found = from_relax(flat)
    proposals = proposals_of(plan, found.graph)
    groups = {g.id: p for g, p in zip(plan.groups, proposals, strict=True)}
    return annotate(flat, found, groups, numerics=plan.numerics)


def _as_proposal(found: RelaxGraph, group: ExistingGroup) -> Proposal:
    """Read a group of an annotated module back as a proposal."""
    bound = set(group.variables)
    names = [n for n, bindings in found.bindings.items() if bindings[0].var in bound]
    return proposal_from(found.graph, names, group.attrs)


class _DecidingPass:
    """What the strategy passes share: plan with their configuration, then annotate."""

    config: FusionConfig
    target: Target | str | None

    def transform_module(self, mod: tvm.IRModule, ctx: tvm.transform.PassContext) -> tvm.IRModule:
        """Annotate ``main``; groups that stand already are kept, or absorbed whole where that costs less."""
        return apply_plan(mod, plan_module(mod, self.target, self.config))


@tvm.transform.module_pass(opt_level=0, name="tvm_fusion.VerticalFusion")
class VerticalFusion(_DecidingPass):
    """Annotate producer→consumer chains.

    Parameters
    ----------
    max_depth : int
        Largest number of working operators on one path.
    target : Target, str or None
        Target to predict for; None takes the current one.
    **options
        Other fields of ``FusionConfig``.
    """

    def __init__(
        self, max_depth: int = 64, target: Target | str | None = None, **options: Any
    ) -> None:
        self.config = FusionConfig(strategies=("vertical",), max_depth=max_depth, **options)
        self.target = target


@tvm.transform.module_pass(opt_level=0, name="tvm_fusion.HorizontalFusion")
class HorizontalFusion(_DecidingPass):
    """Annotate independent branches of equal structure.

    Parameters
    ----------
    max_members : int
        Largest number of branches that stay apart in one kernel.
    target : Target, str or None
        Target to predict for; None takes the current one.
    **options
        Other fields of ``FusionConfig``.
    """

    def __init__(
        self, max_members: int = 6, target: Target | str | None = None, **options: Any
    ) -> None:
        self.config = FusionConfig(strategies=("horizontal",), max_members=max_members, **options)
        self.target = target


@tvm.transform.module_pass(opt_level=0, name="tvm_fusion.CrossFusion")
class CrossFusion(_DecidingPass):
    """Annotate branches with the operator that joins them.

    Parameters
    ----------
    max_work_ratio : float
        Largest ratio of the work of two branches.
    balance : str
        What to do above it: ``"refuse"``, ``"pad"`` or ``"warps"`` (see ``FusionConfig``).
    target : Target, str or None
        Target to predict for; None takes the current one.
    **options
        Other fields of ``FusionConfig``.
    """

    def __init__(
        self,
        max_work_ratio: float = 3.0,
        balance: str = "refuse",
        target: Target | str | None = None,
        **options: Any,
    ) -> None:
        self.config = FusionConfig(
            strategies=("cross",), max_work_ratio=max_work_ratio, balance=balance, **options
        )
        self.target = target


@tvm.transform.module_pass(opt_level=0, name="tvm_fusion.CompoundFusion")
class CompoundFusion(_DecidingPass):
    """Annotate kernels that hold several strategies, built from parts that pay on their own.

    Parameters
    ----------
    mode : str
        ``"serial"``: vertical inside each branch, then horizontal across the branches, one kernel.
        ``"parallel"``: several kernels of different strategies that serve one region; they are what
        the other passes annotate, so the module stays as it is, and the plan's ``regions`` names them.
    target : Target, str or None
        Target to predict for; None takes the current one.
    **options
        Other fields of ``FusionConfig``.

    Raises
    ------
    ValueError
        If the mode is unknown.
    """

    def __init__(
        self, mode: str = "serial", target: Target | str | None = None, **options: Any
    ) -> None:
        if mode not in ("serial", "parallel"):
            raise ValueError(f"unknown mode {mode!r}; choose from serial, parallel")
        self.mode = mode
        self.config = FusionConfig(strategies=("compound",), **options)
        self.target = target

    def transform_module(self, mod: tvm.IRModule, ctx: tvm.transform.PassContext) -> tvm.IRModule:
        """Annotate ``main``."""
        if self.mode == "parallel":
            return mod
        return super().transform_module(mod, ctx)


@tvm.transform.module_pass(opt_level=0, name="tvm_fusion.Fuse")
class Fuse:
    """Annotate with all strategies at once, by a plan or a configuration.

    Parameters
    ----------
    what : Plan, FusionConfig or None
        A plan to carry out, or the configuration to plan with (None: the default one).
    target : Target, str or None
        Target to predict for when planning; None takes the current one.
    proposers : sequence of Strategy
        Strategies of your own, beside those that the configuration names. A plan has been made already
        and asks none.

    Raises
    ------
    TypeError
        If the first argument is something else, as a target.
    """

    def __init__(
        self,
        what: Plan | FusionConfig | None = None,
        target: Target | str | None = None,
        *,
        proposers: Sequence[Strategy] = (),
    ) -> None:
        if what is not None and not isinstance(what, Plan | FusionConfig):
            raise TypeError(
                f"Fuse takes a Plan or a FusionConfig, not {type(what).__name__}; a target is given as target="
            )
        self.what = what
        self.target = target
        self.proposers = tuple(proposers)

    def transform_module(self, mod: tvm.IRModule, ctx: tvm.transform.PassContext) -> tvm.IRModule:
        """Annotate ``main``."""
        if isinstance(self.what, Plan):
            return apply_plan(mod, self.what)
        config = self.what or FusionConfig()
        plan = plan_module(mod, self.target, config, proposers=self.proposers)
        return apply_plan(mod, plan)
