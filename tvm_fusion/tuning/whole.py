"""The whole model timed: tuned, unfused, and by TVM's default pipeline."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..build.executable import LoadedModel
from ..build.inputs import random_array
from ..build.model import BUILD_ERRORS, build_stock, compile_model, unfused_plan
from ..build.signature import signature_of
from ..compat import Target, tvm
from ..errors import FusionError
from ..planner.plan import Plan
from ..schedules import remembering
from ..schedules.registry import Lookup, deciding_by
from ..verification.verify import MODEL_TOLERANCE, compare, tolerance_of
from .local_runner import device_lock, device_name

#: Measurements of each side, interleaved, and least seconds of one.
_REPEAT, _SECONDS = 15, 2e-3
#: Share of our time that TVM's own pipeline may take at most to be taken instead.
_CLEARLY = 0.97


@dataclasses.dataclass(frozen=True)
class WholeTimes:
    """Median microseconds per call of the whole model.

    Attributes
    ----------
    tuned_us, unfused_us : float
        The tuned plan; one kernel per operator, with the same records.
    default_us : float or None
        TVM's own default pipeline; None where that does not compile the model, or its results are
        not those of the model within tolerance (it adds up float16 in float16).
    """

    tuned_us: float
    unfused_us: float
    default_us: float | None = None

    @property
    def fastest(self) -> str:
        """What is compiled: ``"tuned"``, ``"unfused"``, or ``"default"`` if that is clearly faster than both."""
        ours = min(self.tuned_us, self.unfused_us)
        if self.default_us is not None and self.default_us < _CLEARLY * ours:
            return "default"
        return "tuned" if self.tuned_us < self.unfused_us else "unfused"

    def of(self, side: str) -> float | None:
        """Microseconds of a side by its name."""
        return {"tuned": self.tuned_us, "unfused": self.unfused_us}.get(side, self.default_us)


def time_whole(
    mod: tvm.IRModule, target: Target, plan: Plan, lookup: Lookup, *, seed: int = 0
) -> WholeTimes:
    """Compile and time a model on this machine, its sides interleaved.

    Parameters
    ----------
    mod : tvm.IRModule
        Canonical module.
    target : Target
        Complete target, of which this machine has a device.
    plan : Plan
        The tuned plan.
    lookup : callable
        What was tuned (see ``registry.deciding_by``).
    seed : int
        Seed of the inputs.
    """
    with remembering(), deciding_by(lookup):
        sides: list[LoadedModel] = [
            compile_model(mod, target, plan=chosen) for chosen in (plan, unfused_plan(plan))
        ]
    stock = _stock(mod, target, plan, sides[1], seed)
    if stock is not None:
        sides.append(stock)
    rng = np.random.default_rng(seed)
    arrays = [random_array(spec, rng) for spec in sides[0].signature.inputs]
    with device_lock(device_name(target.kind.name, 0)):
        return WholeTimes(*(1e6 * seconds for seconds in _interleaved(sides, arrays)))


def _interleaved(sides: Sequence[LoadedModel], arrays: Sequence[Any]) -> list[float]:
    """Median seconds per call of each side."""
    numbers = []
    for side in sides:
        side.time(*arrays)  # warm up: first calls allocate, load and capture
        once = max(1e-6, min(side.time(*arrays)))
        numbers.append(max(1, math.ceil(_SECONDS / once)))
    times: list[list[float]] = [[] for _ in sides]
    for _ in range(_REPEAT):
        for side, number, found in zip(sides, numbers, times, strict=True):
            found += side.time(*arrays, number=number, repeat=1)
    return [statistics.median(found) for found in times]


def _stock(
    mod: tvm.IRModule, target: Target, plan: Plan, unfused: LoadedModel, seed: int
) -> LoadedModel | None:
    """TVM's default pipeline; None where it does not compile the model, or not exactly enough."""
    signature = signature_of(mod, target)
    try:
        stock = LoadedModel(build_stock(mod, target), signature)
        tolerance = tolerance_of(plan, target, MODEL_TOLERANCE)
        found = compare("model", (), unfused, stock, signature, tolerance, 1, seed)
    except (FusionError, *BUILD_ERRORS):
        return None
    return stock if found.passed else None
