"""The whole model timed: tuned, unfused, and by TVM's default pipeline."""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Sequence
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

#: Rounds of measurements, interleaved, after which it is asked whether they suffice, and how often they are repeated at
#: most; seconds after which they are not; least seconds of one measurement.
_ROUNDS, _MOST_BLOCKS, _PATIENCE, _SECONDS = 15, 6, 30.0, 2e-3
#: Share of our time that TVM's own pipeline may take at most to be taken instead.
_CLEARLY = 0.97
#: Standard errors by which a difference must exceed nothing to count.
_SIGMAS = 2.0
#: From median absolute deviation to standard deviation, and from the standard error of a mean to that of a median, of
#: normally distributed samples.
_DEVIATION, _OF_MEDIAN = 1.4826, 1.2533


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
    noise, default_noise : float
        Standard errors, relative: of the unfused time against the tuned, and of TVM's default
        against the faster of these.
    """

    tuned_us: float
    unfused_us: float
    default_us: float | None = None
    noise: float = 0.0
    default_noise: float = 0.0

    @staticmethod
    def of_samples(samples: Sequence[Sequence[float]]) -> WholeTimes:
        """Summarise measurements in seconds, one list for each side; the same round at the same place.

        Sides: tuned and unfused, or one for both; then perhaps TVM's default.
        """
        tuned, unfused, *default = samples
        times = [1e6 * statistics.median(side) for side in samples]
        faster = tuned if times[0] <= times[1] else unfused
        return WholeTimes(
            *times, noise=_noise(unfused, tuned),
            default_noise=_noise(default[0], faster) if default else 0.0,
        )  # fmt: skip

    @property
    def fastest(self) -> str:
        """What is compiled: ``"tuned"``, ``"unfused"``, or ``"default"`` if that is clearly faster than both.

        Each kernel of the tuned plan was measured to be faster than its parts. So the plan has its groups unless the
        whole model is slower with them by more than the noise.
        """
        ours = min(self.tuned_us, self.unfused_us)
        if self.default_us is not None:
            ratio = self.default_us / ours
            if ratio < _CLEARLY and ratio < 1 - _SIGMAS * self.default_noise:
                return "default"
        slower = self.unfused_us < self.tuned_us * (1 - _SIGMAS * self.noise)
        return "unfused" if slower else "tuned"

    def is_settled(self, *, one: bool = False) -> bool:
        """Whether more measurements would hardly change what is fastest.

        They may where a limit is within the noise, and where the whole model contradicts its kernels.

        Parameters
        ----------
        one : bool
            Whether tuned and unfused are the same code.
        """
        if self.default_us is not None:
            ratio = self.default_us / min(self.tuned_us, self.unfused_us)
            if abs(ratio - _CLEARLY) <= _SIGMAS * self.default_noise:
                return False
            if self.fastest == "default":
                return True
        return one or self.tuned_us < self.unfused_us * (1 - _SIGMAS * self.noise)

    def of(self, side: str) -> float | None:
        """Microseconds of a side by its name."""
        return {"tuned": self.tuned_us, "unfused": self.unfused_us}.get(side, self.default_us)


def _noise(one: Sequence[float], other: Sequence[float]) -> float:
    """Relative standard error of two sides' median ratio, round by round, so that a drifting clock cancels out."""
    ratios = [a / b for a, b in zip(one, other, strict=True)]
    middle = statistics.median(ratios)
    spread = _DEVIATION * statistics.median(abs(ratio - middle) for ratio in ratios)
    return _OF_MEDIAN * spread / middle / math.sqrt(len(ratios))


def time_whole(
    mod: tvm.IRModule, target: Target, plan: Plan, lookup: Lookup, *, seed: int = 0
) -> WholeTimes:
    """Compile and time a model on this machine, its sides interleaved.

    Where the whole model contradicts its kernels, or the noise does not let tell, it is timed again, up to six times.

    Parameters
    ----------
    mod : tvm.IRModule
        Canonical module.
    target : Target
        Complete target, of which this machine has a device.
    plan : Plan
        The tuned plan. Without groups, tuned and unfused are one.
    lookup : callable
        What was tuned (see ``registry.deciding_by``).
    seed : int
        Seed of the inputs.
    """
    plans = [plan, unfused_plan(plan)] if plan.groups else [plan]
    with remembering(), deciding_by(lookup):
        sides: list[LoadedModel] = [compile_model(mod, target, plan=chosen) for chosen in plans]
    stock = _stock(mod, target, plan, sides[-1], seed)
    if stock is not None:
        sides.append(stock)
    rng = np.random.default_rng(seed)
    arrays = [random_array(spec, rng) for spec in sides[0].signature.inputs]
    with device_lock(device_name(target.kind.name, 0)):
        return _settle(sides, arrays, one=not plan.groups)


def _settle(
    sides: Sequence[LoadedModel],
    arrays: Sequence[Any],
    *,
    one: bool = False,
    clock: Callable[[], float] = time.monotonic,
) -> WholeTimes:
    """Time the sides in turns until it is clear which one is fastest, or they are equal as far as one can tell.

    Parameters
    ----------
    sides : sequence of LoadedModel
        Tuned, unfused unless ``one``, and perhaps TVM's default.
    arrays : sequence
        Inputs.
    one : bool
        Whether tuned and unfused are the same code.
    clock : callable
        Seconds that go by.
    """
    numbers = []
    for side in sides:
        side.time(*arrays)  # warm up: first calls allocate, load and capture
        once = max(1e-6, min(side.time(*arrays)))
        numbers.append(max(1, math.ceil(_SECONDS / once)))
    samples: list[list[float]] = [[] for _ in sides]
    begin = clock()
    for _ in range(_MOST_BLOCKS):
        for _ in range(_ROUNDS):
            for side, number, found in zip(sides, numbers, samples, strict=True):
                found += side.time(*arrays, number=number, repeat=1)
        whole = WholeTimes.of_samples([samples[0], *samples] if one else samples)
        if whole.is_settled(one=one) or clock() - begin > _PATIENCE:
            break
    return whole


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
