"""Compare fused with unfused: each group alone, then the whole model."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from ..build.executable import CompiledModel, LoadedModel
from ..build.inputs import make_inputs, numpy_dtype
from ..build.model import build_module, lower_once
from ..build.signature import Signature, TensorSpec, signature_of
from ..compat import Constant, Target, ir, relax, structural_equal, structural_hash, tvm
from ..errors import CompilerError
from ..graph.dataflow import DataflowGraph
from ..graph.relax import from_relax
from ..planner.plan import Group, Plan, Rejection
from ..targets import runnable
from ..transform.fuse import apply_plan
from ..transform.legalize import NARROW_TYPES
from ..transform.strip_fusion import is_group, strip
from .batch import join_modules
from .reference import Reference, group_module
from .report import Comparison, VerificationReport

#: Largest accepted difference, relative to the largest reference value of the output, by model
#: type. float32: sums of up to some thousand products in another order; float16 and bfloat16: a few
#: roundings of 2**-11 and 2**-8. tf32 stands for products of float32 operands that are rounded to it: it has float16's
#: 10 bits of mantissa, so that a rounding of 2**-11 for each operand lets a sum of products differ by at most 2**-10 of
#: the sum of their absolute values (Blanchard et al., Mixed precision block fused multiply-add, SIAM J. Sci. Comput.
#: 42(3), 2020).
GROUP_TOLERANCE: Mapping[str, float] = {
    "float32": 1e-5, "tf32": 4e-3, "float16": 4e-3, "bfloat16": 3e-2,
}  # fmt: skip
#: Whole models: rounding adds up over the layers.
MODEL_TOLERANCE: Mapping[str, float] = {
    "float32": 1e-4, "tf32": 2e-2, "float16": 2e-2, "bfloat16": 1e-1,
}  # fmt: skip

#: How much more than the unfused model a fused one may differ where rounding between the operators alone exceeds the
#: tolerance, and how often the tolerance that may be at most.
_SLACK, _MOST = 1.5, 5.0

Progress = Callable[[int, int], None]


def verify_module(
    mod: tvm.IRModule,
    compiled: CompiledModel,
    plan: Plan,
    *,
    inputs: int = 3,
    seed: int = 0,
    progress: Progress | None = None,
) -> VerificationReport:
    """Verify a compiled model as a whole, and each group of a plan alone.

    Parameters
    ----------
    mod : tvm.IRModule
        The canonical module.
    compiled : CompiledModel
        What it was compiled to.
    plan : Plan
        The groups to verify (those that were left out of ``compiled`` included).
    inputs : int
        Random inputs of the whole model, beside a position-coded one; a group gets one of each.
    seed : int
        Seed of the random values.
    progress : callable, optional
        Called with the comparisons done and their number.
    """
    flat, _ = strip(mod)
    groups = check_groups(flat, plan, compiled.target, seed=seed, progress=progress)
    reference = Reference(flat, plan.dtype)
    graph = from_relax(flat).graph
    tolerance = tolerance_of(plan, compiled.target, MODEL_TOLERANCE, graph=graph)
    whole = compare("model", (), reference, compiled, compiled.signature, tolerance, inputs, seed)
    if not whole.passed and plan.dtype in NARROW_TYPES:
        # Deep models in narrow types round much, fused or not: what counts is that fusing adds little.
        rounded = Reference(flat, plan.dtype, widen=False)
        inherent = compare(
            "rounded", (), reference, rounded, compiled.signature, tolerance, inputs, seed
        )
        if np.isfinite(inherent.error):
            allowed = min(_SLACK * inherent.error, _MOST * tolerance)
            whole = dataclasses.replace(whole, tolerance=max(tolerance, allowed))
    if progress:
        progress(len(groups) + 1, len(groups) + 1)
    return VerificationReport((whole, *groups))


def check_groups(
    mod: tvm.IRModule,
    plan: Plan,
    target: Target,
    *,
    seed: int = 0,
    progress: Progress | None = None,
) -> tuple[Comparison, ...]:
    """Verify each group alone, on a position-coded and a random input.

    Equal groups with equal weights are compared once. A CUDA group is verified on the GPU where
    there is one; without one the same functions are scheduled and run on the CPU.
    """
    where = runnable(target)
    annotated = apply_plan(mod, plan)
    calls = _group_calls(annotated)
    bodies = {g.id: group_module(annotated[g.id], calls[g.id]) for g in plan.groups}
    twin = _twins(bodies)
    distinct = [g for g in plan.groups if twin[g.id] == g.id]
    sides = _compile_all(distinct, bodies, plan, where)
    found: dict[str, Comparison] = {}
    out = []
    for i, group in enumerate(plan.groups):
        if group.id in sides:
            graph = from_relax(bodies[group.id]).graph
            dense = any(o.pattern == "anchor" for o in graph.operators)
            tolerance = tolerance_of(plan, where, GROUP_TOLERANCE, dense=dense, graph=graph)
            found[group.id] = _check_group(group, sides[group.id], tolerance, seed)
        out.append(dataclasses.replace(found[twin[group.id]], name=group.id, nodes=group.nodes))
        if progress:
            progress(i + 1, len(plan.groups) + 1)
    return tuple(out)


def _twins(bodies: Mapping[str, tvm.IRModule]) -> dict[str, str]:
    """For each group the first one of equal body and weights."""
    seen: dict[Any, list[str]] = {}
    out = {}
    for name, body in bodies.items():
        same = seen.setdefault(structural_hash(body), [])
        out[name] = next((n for n in same if structural_equal(bodies[n], body)), name)
        if out[name] == name:
            same.append(name)
    return out


@dataclasses.dataclass(frozen=True)
class _Side:
    """A group alone, fused and unfused, or what stopped it."""

    fused: LoadedModel | None = None
    reference: Reference | None = None
    problem: str = ""


def _compile_all(
    groups: Sequence[Group], bodies: Mapping[str, tvm.IRModule], plan: Plan, target: Target
) -> dict[str, _Side]:
    """Compile every group alone, all in one run of the compiler; one by one if that fails."""
    lowered, sides = {}, {}
    for group in groups:
        alone = dataclasses.replace(
            plan, groups=(_renamed(group, bodies[group.id]),), rejected=(), ungrouped=()
        )
        mod, _, failures = lower_once(bodies[group.id], alone, target)
        if failures:
            sides[group.id] = _Side(problem=next(iter(failures.values())))
        else:
            lowered[group.id] = mod
    try:
        return sides | _compile_together(lowered, bodies, plan, target)
    except CompilerError:
        pass
    for name, mod in lowered.items():
        try:
            sides |= _compile_together({name: mod}, bodies, plan, target)
        except CompilerError as err:
            sides[name] = _Side(problem=str(err))
    return sides


def _compile_together(
    lowered: Mapping[str, tvm.IRModule],
    bodies: Mapping[str, tvm.IRModule],
    plan: Plan,
    target: Target,
) -> dict[str, _Side]:
    if not lowered:
        return {}
    library = build_module(join_modules(lowered), target)
    references = Reference.of_all({name: bodies[name] for name in lowered}, plan.dtype)
    return {
        name: _Side(
            # Called a few times only, which a graph does not pay for.
            LoadedModel(library, signature_of(bodies[name], target), name, cuda_graph=False),
            references[name],
        )
        for name in lowered
    }


def _group_calls(annotated: tvm.IRModule) -> dict[str, list[Any]]:
    """For each group the constant operands of its call, None where an operand is computed."""
    out = {}
    for binding in annotated["main"].body.blocks[0].bindings:
        value = binding.value
        if (
            isinstance(value, relax.Call)
            and isinstance(value.op, ir.GlobalVar)
            and is_group(annotated[value.op])
        ):
            out[value.op.name_hint] = [a if isinstance(a, Constant) else None for a in value.args]
    return out


def tolerance_of(
    plan: Plan,
    target: Target,
    table: Mapping[str, float],
    *,
    dense: bool = True,
    graph: DataflowGraph | None = None,
) -> float:
    """Largest accepted difference of what is computed by a plan.

    Parameters
    ----------
    plan : Plan
        Says what its products are computed in.
    target : Target
        Where they run: a CPU has no TF32.
    table : mapping of str to float
        `GROUP_TOLERANCE` or `MODEL_TOLERANCE`.
    dense : bool
        Whether there are convolutions or matrix products among it; nothing else is rounded to TF32.
    graph : DataflowGraph, optional
        What is computed: where some of its results are narrower than the plan's type, they are rounded.
    """
    rounded = dense and target.kind.name == "cuda"
    found = [table.get(plan.precision if rounded else plan.dtype, 0.0)]
    for operator in graph.operators if graph is not None else ():
        types = (graph.tensors[name].dtype for name in operator.outputs)
        found += [table[dtype] for dtype in types if dtype in NARROW_TYPES and dtype in table]
    return max(found)


def _check_group(group: Group, side: _Side, tolerance: float, seed: int) -> Comparison:
    """Compare one group."""
    if side.fused is None or side.reference is None:
        return Comparison(group.id, group.nodes, float("inf"), tolerance, problem=side.problem)
    return compare(
        group.id, group.nodes, side.reference, side.fused, side.fused.signature, tolerance, 1, seed
    )


def _renamed(group: Group, body: tvm.IRModule) -> Group:
    """The same group on its own body, whose operators may be numbered otherwise than in the model."""
    names = [o.name for o in from_relax(body).graph.operators]
    here = dict(zip(group.nodes, names, strict=True))
    branches = tuple(tuple(here[n] for n in branch) for branch in group.branches)
    return dataclasses.replace(group, nodes=tuple(names), branches=branches)


def compare(
    name: str,
    nodes: Sequence[str],
    reference: Callable[..., list[np.ndarray]],
    fused: Callable[..., list[np.ndarray]],
    signature: Signature,
    tolerance: float,
    count: int,
    seed: int,
) -> Comparison:
    """Run both on the same inputs and keep the worst element."""
    worst, where, done = 0.0, "", 0
    for arrays in make_inputs(signature.inputs, count, seed):
        done += 1
        pairs = zip(signature.outputs, fused(*arrays), reference(*arrays), strict=True)
        for spec, got, wanted in pairs:
            error, text = worst_element(spec, got, wanted)
            if not error <= worst:
                worst, where = error, text
    return Comparison(name, tuple(nodes), worst, tolerance, where, done)


def worst_element(spec: TensorSpec, got: np.ndarray, wanted: np.ndarray) -> tuple[float, str]:
    """Largest difference relative to the largest reference value, and where it is.

    A NaN or infinity that the reference has too counts as equal, and so does an infinity where the reference is beyond
    the range of the output's type.
    """
    if got.size == 0:
        return 0.0, ""
    got, wanted = got.astype("float64"), wanted.astype("float64")
    with np.errstate(over="ignore"):
        beyond = np.isinf(wanted.astype(numpy_dtype(spec.dtype)).astype("float64"))
    wanted = np.where(beyond, np.copysign(np.inf, wanted), wanted)
    with np.errstate(invalid="ignore"):
        same = (got == wanted) | (np.isnan(got) & np.isnan(wanted))
        difference = np.where(same, 0.0, np.abs(got - wanted))
    difference = np.where(np.isnan(difference), np.inf, difference)
    finite = np.abs(wanted[np.isfinite(wanted)])
    scale = max(float(finite.max()) if finite.size else 0.0, 1e-6)
    index = np.unravel_index(int(difference.argmax()), difference.shape)
    at = ", ".join(str(int(i)) for i in index)
    text = f"{spec.name}[{at}] = {got[index]:.7g}, reference {wanted[index]:.7g}"
    return float(difference[index]) / scale, text


def refusals_of(comparisons: Iterable[Comparison], plan: Plan) -> dict[str, Rejection]:
    """Turn failed comparisons of a plan's groups into refusals by group id."""
    out = {}
    for c in comparisons:
        if c.passed:
            continue
        strategy = plan.group(c.name).strategy
        if c.problem:
            refusal = Rejection(strategy, c.nodes, "unsupported", "no_template", {}, c.problem)
        else:
            # JSON has no infinity.
            error = c.error if np.isfinite(c.error) else str(c.error)
            numbers = {"error": error, "tolerance": c.tolerance}
            detail = f"its result differs from the unfused one: {c.worst}"
            refusal = Rejection(strategy, c.nodes, "illegal", "numerics", numbers, detail)
        out[c.name] = refusal
    return out
