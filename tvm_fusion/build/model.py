"""Canonical module → compiled model: plan, annotate, lower, schedule, build."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Collection, Mapping
from typing import Any

from ..compat import Target, import_tensor_intrinsics, ir, relax, tirx, tvm
from ..config import FusionConfig
from ..errors import CompilerError, LoweringError
from ..pipeline import before_lowering, build_pipeline
from ..planner.plan import Plan, Rejection, Ungrouped
from ..targets import with_products, with_variant
from ..transform.fuse import apply_plan, plan_module
from ..transform.lower_groups import lower_groups
from ..transform.schedule_groups import TEMPLATE, schedule_functions
from . import tir_pipeline
from .executable import CompiledModel
from .signature import signature_of, with_signature

#: What TVM's passes and code generators raise on a function that they cannot take.
BUILD_ERRORS = (tvm.error.InternalError, RuntimeError, TypeError, ValueError)

#: What lowering raises, TVM's Python code with it: there is no common base class.
_LOWERING_ERRORS = (LoweringError, AssertionError, LookupError, NotImplementedError, *BUILD_ERRORS)

#: Called with the module, the plan and the target; returns why each wrong group must go, by group
#: id.
Checker = Callable[[tvm.IRModule, Plan, Target], Mapping[str, Rejection]]


@dataclasses.dataclass(frozen=True)
class Lowered:
    """A module whose functions are scheduled, and the plan that is left."""

    mod: tvm.IRModule
    plan: Plan
    kernels: dict[str, str]


def compile_model(
    mod: tvm.IRModule,
    target: Target,
    *,
    plan: Plan | None = None,
    config: FusionConfig | None = None,
    strict: bool = False,
    checker: Checker | None = None,
    model: str = "model",
) -> CompiledModel:
    """Compile a canonical module with one kernel per group.

    Parameters
    ----------
    mod : tvm.IRModule
        Canonical module; it is left untouched.
    target : Target
        Complete target (see ``targets.parse_target``).
    plan : Plan, optional
        The groups; planned with ``config`` when absent.
    config : FusionConfig, optional
        Strategies and limits.
    strict : bool
        Whether a group that cannot be lowered, or that the checker refuses, is an error; else it is
        left unfused with a warning.
    checker : callable, optional
        Verification of the groups.
    model : str
        Name in the plan.

    Raises
    ------
    LoweringError
        With ``strict``, if a group fails.
    PlanError
        If the plan was made for another model.
    """
    if plan is not None and plan.pipeline == "tvm":
        stock = build_stock(mod, target)
        return CompiledModel(stock, signature_of(mod, target), plan, {}, target)
    config = config or FusionConfig()
    mod = prepared(mod, target)
    plan = plan or plan_module(mod, target, config, model=model)
    if checker is not None:
        for group_id, refusal in checker(mod, plan, target).items():
            _complain(f"{group_id} is left unfused: {refusal.detail}", strict)
            plan = drop_groups(plan, {group_id: refusal})
    signature = signature_of(mod, target)
    default: set[str] = set()  # functions outside groups that are left to TVM's default schedule
    while True:
        lowered = lower_plan(mod, plan, target, strict=strict, default=default)
        try:
            executable = build_module(with_signature(lowered.mod, signature), target)
        except CompilerError:
            failed = failing_kernels(lowered.mod, target)
            bad = {g: failed[k] for g, k in lowered.kernels.items() if k in failed}
            alone = set(failed) - set(lowered.kernels.values()) - default
            if not bad and not alone:
                raise
            for group_id, message in bad.items():
                _complain(f"{group_id} is left unfused: {message}", strict)
            plan = drop_groups(lowered.plan, {g: _refusal(plan, g, m) for g, m in bad.items()})
            default |= alone
            continue
        return CompiledModel(executable, signature, lowered.plan, lowered.kernels, target)


def build_module(mod: tvm.IRModule, target: Target) -> Any:
    """Compile a lowered and scheduled module with TVM.

    Raises
    ------
    CompilerError
        If TVM, LLVM or nvcc rejects a function.
    """
    try:
        with tvm.transform.PassContext(opt_level=3, config={"tirx.use_async_copy": True}):
            if target.kind.name == "cuda":
                target = tir_pipeline.target_of(mod, target)
            return tvm.compile(
                mod,
                target=target,
                relax_pipeline=build_pipeline(target),
                tir_pipeline=tir_pipeline.NAME,
            )
    except BUILD_ERRORS as err:
        raise CompilerError(f"the compiler rejects the generated code: {last_line(err)}") from err


def build_stock(mod: tvm.IRModule, target: Target) -> Any:
    """Compile a canonical module by TVM's default pipeline, without anything of this package.

    Raises
    ------
    CompilerError
        If TVM does not compile it.
    """
    if target.kind.name == "cuda":
        import_tensor_intrinsics()
    try:
        with target, tvm.transform.PassContext(opt_level=3):
            return tvm.compile(
                with_signature(mod, signature_of(mod, target)),
                target=target,
                relax_pipeline=relax.get_default_pipeline(target),
            )
    except BUILD_ERRORS as err:
        raise CompilerError(
            f"TVM's default pipeline does not compile the model: {last_line(err)}"
        ) from err


def failing_kernels(mod: tvm.IRModule, target: Target) -> dict[str, str]:
    """Compile each PrimFunc alone, as `build_module` does all, and return the message of each that fails, by name."""
    failed = {}
    for gv, func in mod.functions_items():
        if not isinstance(func, tirx.PrimFunc):
            continue
        alone = tvm.IRModule({"kernel": func.with_attr("global_symbol", "kernel")})
        try:
            build_module(alone, target)
        except CompilerError as err:
            failed[gv.name_hint] = str(err)
    return failed


def last_line(err: BaseException) -> str:
    """The last line of a message (TVM puts its stack trace before it); the error's type where a script ends there."""
    last = (str(err).strip().splitlines() or [""])[-1]
    return type(err).__name__ if not last or last.startswith("#") else last


def lower_plan(
    mod: tvm.IRModule,
    plan: Plan,
    target: Target,
    *,
    strict: bool = False,
    default: Collection[str] = (),
) -> Lowered:
    """Annotate, lower and schedule, leaving groups that fail unfused.

    ``default`` names functions outside groups that are left to TVM's default schedule.

    Raises
    ------
    LoweringError
        With ``strict``, if a group fails.
    """
    while True:
        scheduled, kernels, failures = lower_once(mod, plan, target, default)
        if not failures:
            break
        for group_id, message in failures.items():
            _complain(f"{group_id} is left unfused: {message}", strict)
        plan = drop_groups(plan, {g: _refusal(plan, g, m) for g, m in failures.items()})
    return Lowered(scheduled, _with_templates(plan, scheduled, kernels), kernels)


def lower_once(
    mod: tvm.IRModule, plan: Plan, target: Target, default: Collection[str] = ()
) -> tuple[tvm.IRModule, dict[str, str], dict[str, str]]:
    """Annotate, lower and schedule once.

    Returns
    -------
    mod : tvm.IRModule
        The scheduled module; of no use when there are failures.
    kernels : dict of str to str
        Kernel name by group.
    failures : dict of str to str
        Why, by group, for each that cannot be one kernel.
    """
    lowered, kernels, failures = _lower(mod, plan)
    if failures:
        return lowered, kernels, failures
    exact = with_variant(with_products(target, plan.float32_products))
    scheduled, messages = schedule_functions(lowered, exact, default)
    return scheduled, kernels, {g: messages[k] for g, k in kernels.items() if k in messages}


def _complain(message: str, strict: bool) -> None:
    if strict:
        raise LoweringError(message)
    warnings.warn(message, RuntimeWarning, stacklevel=3)


def _lower(mod: tvm.IRModule, plan: Plan) -> tuple[tvm.IRModule, dict[str, str], dict[str, str]]:
    """Lower all groups at once; if that fails, find out which of them fail alone."""
    try:
        return *lower_groups(apply_plan(mod, plan)), {}
    except _LOWERING_ERRORS as err:
        failures = {}
        for group in plan.groups:
            alone = dataclasses.replace(plan, groups=(group,))
            try:
                lower_groups(apply_plan(mod, alone))
            except _LOWERING_ERRORS as own:
                failures[group.id] = last_line(own)
        if not failures:
            what = _first_failing_operator(mod) or "the model"
            raise LoweringError(f"{what} cannot be lowered: {last_line(err)}") from err
        return mod, {}, failures


def prepared(mod: tvm.IRModule, target: Target) -> tvm.IRModule:
    """Run the passes that come before lowering on a canonical module; it is left untouched.

    Raises
    ------
    LoweringError
        If they cannot take an operator; it is named.
    """
    try:
        with target:
            return tvm.transform.Sequential(before_lowering())(mod)
    except _LOWERING_ERRORS as err:
        what = _first_failing_operator(mod, target) or "the model"
        raise LoweringError(f"{what} cannot be lowered: {last_line(err)}") from err


def _first_failing_operator(mod: tvm.IRModule, target: Target | None = None) -> str:
    """Name the first operator that cannot be lowered alone; empty if each can."""
    for binding in mod["main"].body.blocks[0].bindings:
        call = binding.value
        if not isinstance(call, ir.Call) or not isinstance(call.op, ir.Op):
            continue
        params = list(relax.analysis.free_vars(call))
        builder = relax.BlockBuilder()
        with builder.function("main", params):
            builder.emit_func_output(builder.emit(call))
        try:
            if target is None:
                lower_groups(builder.get())
            else:
                with target:
                    tvm.transform.Sequential(before_lowering())(builder.get())
        except _LOWERING_ERRORS:
            return f"operator {call.op.name.removeprefix('relax.')} (node {binding.var.name!r})"
    return ""


def _refusal(plan: Plan, group_id: str, message: str) -> Rejection:
    group = plan.group(group_id)
    return Rejection(group.strategy, group.nodes, "unsupported", "no_template", {}, message)


def drop_groups(plan: Plan, refusals: Mapping[str, Rejection]) -> Plan:
    """Return a plan without some groups: refused, their operators ungrouped, the totals adjusted."""
    totals, alone = plan.totals, []
    for group_id, refusal in refusals.items():
        g = plan.group(group_id)
        pairs = zip(g.nodes, g.operators, strict=True)
        alone += [Ungrouped(node, op, refusal.reason) for node, op in pairs]
        totals = dataclasses.replace(
            totals,
            launches_after=totals.launches_after + g.launches_before - g.launches_after,
            bytes_after=totals.bytes_after + g.bytes_before - g.bytes_after,
            flops_after=totals.flops_after + g.flops_before - g.flops_after,
            predicted_us_after=round(
                totals.predicted_us_after + g.predicted_us_before - g.predicted_us_after, 4
            ),
        )
    return dataclasses.replace(
        plan,
        groups=tuple(g for g in plan.groups if g.id not in refusals),
        rejected=(*plan.rejected, *refusals.values()),
        ungrouped=(*plan.ungrouped, *alone),
        totals=totals,
    )


def _with_templates(plan: Plan, mod: tvm.IRModule, kernels: Mapping[str, str]) -> Plan:
    """Write into each group which template schedules it."""
    templates = {
        gv.name_hint: str(f.attrs.get(TEMPLATE))
        for gv, f in mod.functions.items()
        if isinstance(f, tirx.PrimFunc) and f.attrs is not None and TEMPLATE in f.attrs
    }
    groups = tuple(
        dataclasses.replace(g, template=templates.get(kernels[g.id], g.template))
        for g in plan.groups
    )
    return dataclasses.replace(plan, groups=groups)


def unfused_plan(plan: Plan) -> Plan:
    """The plan with a kernel per operator: the baseline of every comparison."""
    return dataclasses.replace(
        plan, groups=(), rejected=(), ungrouped=(), totals=plan.totals, pipeline="tvm_fusion"
    )
