"""The passes that decide groups of a Relay function and annotate them, and the verbs plan and explain."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..config import FusionConfig
from ..graph.dataflow import DataflowGraph
from ..planner.assemble import make_plan, proposals_of
from ..planner.explain import explain_model, explain_node
from ..planner.explanation import ModelExplanation, NodeExplanation
from ..planner.plan import Plan
from ..planner.planner import solve
from ..strategies.attributes import proposal_from
from ..strategies.base import Proposal
from .annotate import annotate
from .compat import Target, tvm
from .from_relay import from_relay
from .nodes import RelayGraph
from .strip_fusion import strip
from .targets import device_of

#: What a target may be given as.
AnyTarget = Target | str | Mapping[str, Any] | None


def plan(
    mod: tvm.IRModule,
    target: AnyTarget = "llvm",
    config: FusionConfig | None = None,
    *,
    name: str = "model",
) -> Plan:
    """Decide what to fuse in the ``main`` of a Relay module.

    Parameters
    ----------
    mod : IRModule
        A Relay module, annotated or not. Bind its parameters and run ``SimplifyInference``,
        ``FoldScaleAxis`` and ``FoldConstant`` first, or batch norms stay apart.
    target : Target, str, mapping or None
        ``"llvm"``, ``"cuda:sm_90a"`` and the like; None takes the target in scope.
    config : FusionConfig, optional
        Strategies and limits.
    name : str
        Name of the model in the plan.

    Returns
    -------
    Plan
        As `tvm_fusion.plan` makes it of a Relax module.

    Raises
    ------
    InvalidModelError, TargetError
        If the module or the target is not usable.
    """
    _, found, existing = _read(mod)
    return _planned(found, existing, target, config or FusionConfig(), name)


def plan_with_graph(
    mod: tvm.IRModule, target: AnyTarget, config: FusionConfig
) -> tuple[Plan, DataflowGraph]:
    """Plan a Relay module, and return the graph too that the plan is of."""
    _, found, existing = _read(mod)
    return _planned(found, existing, target, config), found.graph


def explain(
    mod: tvm.IRModule,
    target: AnyTarget = "llvm",
    config: FusionConfig | None = None,
    *,
    node: str | None = None,
) -> ModelExplanation | NodeExplanation:
    """Say why a Relay module, or one operator of it, is fused as it is.

    Parameters
    ----------
    mod : IRModule
        As in `plan`.
    target : Target, str, mapping or None
        As in `plan`.
    config : FusionConfig, optional
        Strategies and limits.
    node : str, optional
        Name of an operator as plans have it, such as ``"conv2d_3"``.

    Raises
    ------
    UnknownNodeError
        If there is no such operator.
    InvalidModelError, TargetError
        If the module or the target is not usable.
    """
    config = config or FusionConfig()
    _, found, existing = _read(mod)
    solution = solve(found.graph, device_of(target, config)[0], config, existing)
    decided = found.graph, solution.chosen, solution.considered
    if node is None:
        return explain_model(*decided, config.strategies)
    return explain_node(*decided, node, config.strategies)


def _read(mod: tvm.IRModule) -> tuple[tvm.IRModule, RelayGraph, dict[str, Proposal]]:
    """The module without its groups, its graph, and its groups."""
    stripped = strip(mod)
    found = from_relay(stripped.mod, stripped.owners)
    members: dict[str, list[str]] = {name: [] for name in stripped.groups}
    for name, node in found.nodes.items():
        owner = stripped.owners.get(node.origin)
        if owner is not None and not (node.is_implied and _is_last(found, name, stripped.owners)):
            members[owner].append(name)
    existing = {
        group: proposal_from(found.graph, members[group], attrs)
        for group, attrs in stripped.groups.items()
        if members[group]
    }
    return stripped.mod, found, existing


def _is_last(found: RelayGraph, name: str, owners: Mapping[Any, str]) -> bool:
    """Whether nothing of its group reads an operator: an implied reshape there is none of its members."""
    own = owners.get(found.nodes[name].origin)
    (tensor,) = found.graph.by_name[name].outputs
    readers = (found.nodes[reader.name] for reader in found.graph.consumers[tensor])
    return all(owners.get(reader.origin) != own for reader in readers)


def _planned(
    found: RelayGraph,
    existing: Mapping[str, Proposal],
    target: AnyTarget,
    config: FusionConfig,
    name: str = "model",
) -> Plan:
    device, info = device_of(target, config)
    return make_plan(found.graph, device, info, config, model=name, existing=existing)


def _annotated(mod: tvm.IRModule, found: RelayGraph, decided: Plan) -> tvm.IRModule:
    proposals = proposals_of(decided, found.graph)
    groups = {g.id: p for g, p in zip(decided.groups, proposals, strict=True)}
    return annotate(mod, found, groups, numerics=decided.numerics)


class _DecidingPass:
    """What the strategy passes share: plan with their configuration, then annotate."""

    config: FusionConfig
    target: AnyTarget

    def transform_module(self, mod: tvm.IRModule, ctx: tvm.transform.PassContext) -> tvm.IRModule:
        """Annotate ``main``; groups that stand already are kept, or absorbed whole where that costs less."""
        flat, found, existing = _read(mod)
        return _annotated(flat, found, _planned(found, existing, self.target, self.config))


@tvm.transform.module_pass(opt_level=0, name="tvm_fusion.relay.VerticalFusion")
class VerticalFusion(_DecidingPass):
    """Annotate producer→consumer chains.

    Parameters
    ----------
    max_depth : int
        Largest number of working operators on one path.
    target : Target, str, mapping or None
        Target to predict for; None takes the current one.
    **options
        Other fields of ``FusionConfig``.
    """

    def __init__(self, max_depth: int = 64, target: AnyTarget = None, **options: Any) -> None:
        self.config = FusionConfig(strategies=("vertical",), max_depth=max_depth, **options)
        self.target = target


@tvm.transform.module_pass(opt_level=0, name="tvm_fusion.relay.HorizontalFusion")
class HorizontalFusion(_DecidingPass):
    """Annotate independent branches of equal structure.

    Parameters
    ----------
    max_members : int
        Largest number of branches that stay apart in one kernel.
    target : Target, str, mapping or None
        Target to predict for; None takes the current one.
    **options
        Other fields of ``FusionConfig``.
    """

    def __init__(self, max_members: int = 6, target: AnyTarget = None, **options: Any) -> None:
        self.config = FusionConfig(strategies=("horizontal",), max_members=max_members, **options)
        self.target = target


@tvm.transform.module_pass(opt_level=0, name="tvm_fusion.relay.CrossFusion")
class CrossFusion(_DecidingPass):
    """Annotate branches with the operator that joins them.

    Parameters
    ----------
    max_work_ratio : float
        Largest ratio of the work of two branches.
    balance : str
        What to do above it: ``"refuse"``, ``"pad"`` or ``"warps"`` (see ``FusionConfig``).
    target : Target, str, mapping or None
        Target to predict for; None takes the current one.
    **options
        Other fields of ``FusionConfig``.
    """

    def __init__(
        self,
        max_work_ratio: float = 3.0,
        balance: str = "refuse",
        target: AnyTarget = None,
        **options: Any,
    ) -> None:
        self.config = FusionConfig(
            strategies=("cross",), max_work_ratio=max_work_ratio, balance=balance, **options
        )
        self.target = target


@tvm.transform.module_pass(opt_level=0, name="tvm_fusion.relay.CompoundFusion")
class CompoundFusion(_DecidingPass):
    """Annotate kernels that hold several strategies, built from parts that pay on their own.

    Parameters
    ----------
    mode : str
        ``"serial"``: vertical inside each branch, then horizontal across the branches, one kernel.
        ``"parallel"``: several kernels of different strategies that serve one region; they are what
        the other passes annotate, so the module stays as it is.
    target : Target, str, mapping or None
        Target to predict for; None takes the current one.
    **options
        Other fields of ``FusionConfig``.

    Raises
    ------
    ValueError
        If the mode is unknown.
    """

    def __init__(self, mode: str = "serial", target: AnyTarget = None, **options: Any) -> None:
        if mode not in ("serial", "parallel"):
            raise ValueError(f"unknown mode {mode!r}; choose from serial, parallel")
        self.mode = mode
        self.config = FusionConfig(strategies=("compound",), **options)
        self.target = target

    def transform_module(self, mod: tvm.IRModule, ctx: tvm.transform.PassContext) -> tvm.IRModule:
        """Annotate ``main``."""
        return mod if self.mode == "parallel" else super().transform_module(mod, ctx)


@tvm.transform.module_pass(opt_level=0, name="tvm_fusion.relay.Fuse")
class Fuse:
    """Annotate with all strategies at once, by a plan or a configuration.

    Parameters
    ----------
    what : Plan, FusionConfig or None
        A plan to carry out, or the configuration to plan with (None: the default one).
    target : Target, str, mapping or None
        Target to predict for when planning; None takes the current one.

    Raises
    ------
    TypeError
        If the first argument is something else, as a target.
    """

    def __init__(self, what: Plan | FusionConfig | None = None, target: AnyTarget = None) -> None:
        if what is not None and not isinstance(what, Plan | FusionConfig):
            raise TypeError(
                f"Fuse takes a Plan or a FusionConfig, not {type(what).__name__}; a target is given as target="
            )
        self.what = what
        self.target = target

    def transform_module(self, mod: tvm.IRModule, ctx: tvm.transform.PassContext) -> tvm.IRModule:
        """Annotate ``main``."""
        flat, found, existing = _read(mod)
        decided = self.what
        if not isinstance(decided, Plan):
            decided = _planned(found, existing, self.target, decided or FusionConfig())
        return _annotated(flat, found, decided)
