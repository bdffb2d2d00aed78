"""The passes that decide groups and annotate them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ..compat import Target, tvm
from ..config import FusionConfig
from ..devices import device_for
from ..graph.relax import RelaxGraph, from_relax
from ..planner.assemble import make_plan, proposals_of
from ..planner.plan import Plan, TargetInfo
from ..strategies.base import Proposal, depth_of
from ..strategies.decompose import decompose
from ..targets import parse_target
from .annotate import annotate
from .strip_fusion import ExistingGroup, strip


def plan_module(
    mod: tvm.IRModule,
    target: Target | str | None,
    config: FusionConfig,
    *,
    model: str = "model",
    excluded: Iterable[tuple[str, ...]] = (),
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
    excluded : iterable of tuple of str
        Operator sets that must not be grouped.
    """
    resolved = parse_target(target)
    flat, groups = strip(mod)
    found = from_relax(flat)
    existing = {group.name: _as_proposal(found, group) for group in groups}
    device = device_for(resolved)
    arch = resolved.attrs.get("arch") if resolved.kind.name == "cuda" else None
    info = TargetInfo(resolved.kind.name, str(arch) if arch else None, device.name)
    return make_plan(
        found.graph, device, info, config, model=model, existing=existing, excluded=excluded
    )


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
    return annotate(flat, found, {g.id: p for g, p in zip(plan.groups, proposals, strict=True)})


def _as_proposal(found: RelaxGraph, group: ExistingGroup) -> Proposal:
    """Read a group of an annotated module back as a proposal."""
    bound = set(group.variables)
    names = [n for n, bindings in found.bindings.items() if bindings[0].var in bound]
    operators = found.graph.sort(names)
    shape = decompose(found.graph, operators)
    options = tuple(sorted((k, str(v)) for k, v in dict(group.attrs["tvm_fusion.options"]).items()))
    wide = group.attrs["tvm_fusion.strategy"] == "horizontal"
    members = tuple(b.operators for b in shape.branches) if wide else (operators,)
    return Proposal(
        str(group.attrs["tvm_fusion.strategy"]), operators, shape.anchors, members,
        depth_of(found.graph, operators), (), options,
    )  # fmt: skip


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
        self, max_depth: int = 16, target: Target | str | None = None, **options: Any
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


@tvm.transform.module_pass(opt_level=0, name="tvm_fusion.Fuse")
class Fuse:
    """Annotate with all strategies at once, by a plan or a configuration.

    Parameters
    ----------
    what : Plan, FusionConfig or None
        A plan to carry out, or the configuration to plan with (None: the default one).
    target : Target, str or None
        Target to predict for when planning; None takes the current one.
    """

    def __init__(
        self, what: Plan | FusionConfig | None = None, target: Target | str | None = None
    ) -> None:
        self.what = what
        self.target = target

    def transform_module(self, mod: tvm.IRModule, ctx: tvm.transform.PassContext) -> tvm.IRModule:
        """Annotate ``main``."""
        if isinstance(self.what, Plan):
            return apply_plan(mod, self.what)
        return apply_plan(mod, plan_module(mod, self.target, self.what or FusionConfig()))
