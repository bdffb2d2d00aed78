"""Fused against unfused, interleaved."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Callable

import numpy as np

from ..compat import Target, tvm
from ..planner.plan import Plan
from .inputs import random_array, require_static
from .model import compile_model, unfused_plan
from .signature import signature_of

#: Least seconds of one measurement: shorter ones show the clock and the launch rather than the model.
_MEASUREMENT = 2e-3


@dataclasses.dataclass(frozen=True)
class BenchResult:
    """Medians in seconds per call.

    Attributes
    ----------
    fused, unfused : float
        Median time of each side.
    ratio : float
        Unfused over fused: above 1 the fused model is faster.
    repeat : int
        Measurements of each side.
    fused_launches, unfused_launches : int
        Kernels of each side.
    pipeline : str
        What compiled the fused side (see ``Plan``).
    same : bool
        Whether both sides are the same code, which was timed once.
    """

    fused: float
    unfused: float
    ratio: float
    repeat: int
    fused_launches: int
    unfused_launches: int
    pipeline: str = "tvm_fusion"
    same: bool = False

    def __str__(self) -> str:
        if self.same:
            return (
                f"unfused {self.unfused * 1e3:10.3f} ms  ({self.unfused_launches} kernels, median of {self.repeat})\n"
                "the plan has no groups: fused and unfused are the same code"
            )
        stock = self.pipeline == "tvm"
        kernels = "TVM's default pipeline" if stock else f"{self.fused_launches} kernels"
        return (
            f"fused   {self.fused * 1e3:10.3f} ms  ({kernels})\n"
            f"unfused {self.unfused * 1e3:10.3f} ms  ({self.unfused_launches} kernels)\n"
            f"ratio   {self.ratio:10.2f}x  (medians of {self.repeat}, interleaved)"
        )


def compare(
    mod: tvm.IRModule,
    target: Target,
    plan: Plan,
    *,
    repeat: int = 20,
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> BenchResult:
    """Time a plan against one kernel per operator.

    Both sides come from the same canonical module and the same templates, run in the same way (on
    a GPU as CUDA graphs, or both without if one of them cannot) and take turns, so that a drifting
    clock touches both. Without groups they are the same code, which is timed once; a plan that TVM's
    default pipeline compiles is timed against our kernels.

    Parameters
    ----------
    mod : tvm.IRModule
        Canonical module.
    target : Target
        Target that this machine can run.
    plan : Plan
        The groups.
    repeat : int
        Measurements of each side.
    seed : int
        Seed of the random inputs.
    progress : callable, optional
        Called with the measurements done and their number.

    Raises
    ------
    ValueError
        If the shape of an input is symbolic.
    """
    require_static(signature_of(mod, target).inputs)
    same = not plan.groups and plan.pipeline != "tvm"
    plans = [plan] if same else [plan, unfused_plan(plan)]
    sides = [compile_model(mod, target, plan=chosen) for chosen in plans]
    rng = np.random.default_rng(seed)
    arrays = [random_array(spec, rng) for spec in sides[0].signature.inputs]
    times: list[list[float]] = [[] for _ in sides]
    for side in sides:
        side.time(*arrays)  # warm up: first calls allocate, load and capture
    if not all(side.cuda_graph for side in sides):
        for side in sides:
            side.cuda_graph = False
    slowest = max(min(side.time(*arrays)) for side in sides)
    number = max(1, math.ceil(_MEASUREMENT / max(slowest, 1e-6)))
    for i in range(repeat):
        for k, side in enumerate(sides):
            times[k] += side.time(*arrays, number=number, repeat=1)
        if progress:
            progress(i + 1, repeat)
    medians = [statistics.median(found) for found in times]
    fused, unfused = medians[0], medians[-1]
    totals = sides[0].plan.totals
    return BenchResult(
        fused, unfused, unfused / fused, repeat, totals.launches_after, totals.launches_before,
        plan.pipeline, same,
    )  # fmt: skip
