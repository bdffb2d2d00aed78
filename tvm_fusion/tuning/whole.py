"""The whole model timed: tuned, unfused, untuned, and by TVM's default pipeline."""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..build.executable import LoadedModel
from ..build.inputs import random_array
from ..build.model import (
    BUILD_ERRORS,
    build_stock,
    compile_model,
    lower_plan,
    prepared,
    unfused_plan,
)
from ..build.signature import signature_of
from ..compat import Target, structural_equal, tirx, tvm
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


class Untuned(NamedTuple):
    """What decides about a model where nothing was tuned: its plan, and what is known of kernels."""

    plan: Plan
    lookup: Lookup


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
        against the fastest of ours.
    untuned_us : float or None
        What is compiled without a record of the work dir; None where that was not timed, or is wrong.
    untuned_noise : float
        Standard error, relative, of the untuned time against the tuned, or against the unfused where that is taken
        instead.
    """

    tuned_us: float
    unfused_us: float
    default_us: float | None = None
    noise: float = 0.0
    default_noise: float = 0.0
    untuned_us: float | None = None
    untuned_noise: float = 0.0

    @staticmethod
    def of_samples(samples: Mapping[str, Sequence[float]]) -> WholeTimes:
        """Summarise measurements in seconds by side; the same round at the same place.

        Sides: tuned and unfused, perhaps untuned, perhaps TVM's default. Those of the same code have the same ones.
        """
        times = {side: 1e6 * statistics.median(found) for side, found in samples.items()}
        whole = WholeTimes(**{f"{side}_us": us for side, us in times.items()})
        whole = dataclasses.replace(whole, noise=_noise(samples["unfused"], samples["tuned"]))
        if "untuned" in samples:
            noise = _noise(samples["untuned"], samples[whole._best_tuned])
            whole = dataclasses.replace(whole, untuned_noise=noise)
        if "default" in samples:
            fastest = min(samples.keys() - {"default"}, key=lambda side: (times[side], side))
            noise = _noise(samples["default"], samples[fastest])
            whole = dataclasses.replace(whole, default_noise=noise)
        return whole

    @property
    def _best_tuned(self) -> str:
        """Each kernel of the tuned plan was measured to be faster than its parts.

        So the plan has its groups unless the whole model is slower with them by more than the noise.
        """
        slower = self.unfused_us < self.tuned_us * (1 - _SIGMAS * self.noise)
        return "unfused" if slower else "tuned"

    @property
    def _best_us(self) -> float:
        """Least time of those that are not TVM's default."""
        times = (self.tuned_us, self.unfused_us, self.untuned_us)
        return min(us for us in times if us is not None)

    @property
    def fastest(self) -> str:
        """What is compiled: ``"tuned"``, ``"unfused"``, ``"untuned"``, or ``"default"`` if that is clearly faster.

        Each kernel was measured to be no slower than its untuned one. So what was tuned counts unless the whole model
        is slower with it by more than the noise.
        """
        if self.default_us is not None:
            ratio = self.default_us / self._best_us
            if ratio < _CLEARLY and ratio < 1 - _SIGMAS * self.default_noise:
                return "default"
        best = self._best_tuned
        us = self.unfused_us if best == "unfused" else self.tuned_us
        if self.untuned_us is not None and self.untuned_us < us * (
            1 - _SIGMAS * self.untuned_noise
        ):
            return "untuned"
        return best

    def is_settled(self, same: Mapping[str, str]) -> bool:
        """Whether more measurements would hardly change what is fastest.

        They may where a limit is within the noise, and where the whole model contradicts its kernels.

        Parameters
        ----------
        same : mapping of str to str
            Sides that are the same code as another one.
        """
        if self.default_us is not None:
            ratio = self.default_us / self._best_us
            if abs(ratio - _CLEARLY) <= _SIGMAS * self.default_noise:
                return False
            if self.fastest == "default":
                return True
        others = {"unfused": (self.unfused_us, self.noise)}
        if self.untuned_us is not None:
            others["untuned"] = (self.untuned_us, self.untuned_noise)
        return all(
            same.get(side) == "tuned" or self.tuned_us < us * (1 - _SIGMAS * noise)
            for side, (us, noise) in others.items()
        )

    def of(self, side: str) -> float | None:
        """Microseconds of a side by its name."""
        return {
            "tuned": self.tuned_us, "unfused": self.unfused_us, "untuned": self.untuned_us,
        }.get(side, self.default_us)  # fmt: skip


def _noise(one: Sequence[float], other: Sequence[float]) -> float:
    """Relative standard error of two sides' median ratio, round by round, so that a drifting clock cancels out."""
    ratios = [a / b for a, b in zip(one, other, strict=True)]
    middle = statistics.median(ratios)
    spread = _DEVIATION * statistics.median(abs(ratio - middle) for ratio in ratios)
    return _OF_MEDIAN * spread / middle / math.sqrt(len(ratios))


def time_whole(
    mod: tvm.IRModule,
    target: Target,
    plan: Plan,
    lookup: Lookup,
    untuned: Untuned | None = None,
    *,
    seed: int = 0,
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
    untuned : Untuned, optional
        What is compiled without it. Where that is the code of another side, it is not timed twice.
    seed : int
        Seed of the inputs.
    """
    bare = unfused_plan(plan)
    same: dict[str, str] = {}
    sides: dict[str, LoadedModel] = {}
    with remembering():
        with deciding_by(lookup):
            sides["tuned"] = compile_model(mod, target, plan=plan)
            if plan.groups:
                sides["unfused"] = compile_model(mod, target, plan=bare)
            else:
                same["unfused"] = "tuned"
        reference = sides.get("unfused", sides["tuned"])
        if untuned is not None:
            ways = {"tuned": Untuned(plan, lookup), "unfused": Untuned(bare, lookup)}
            twin = next((n for n in sides if _same(mod, target, ways[n], untuned)), "")
            if twin:
                same["untuned"] = twin
            elif (side := _untuned(mod, target, untuned, reference, seed)) is not None:
                sides["untuned"] = side
    stock = _stock(mod, target, plan, reference, seed)
    if stock is not None:
        sides["default"] = stock
    rng = np.random.default_rng(seed)
    arrays = [random_array(spec, rng) for spec in reference.signature.inputs]
    with device_lock(device_name(target.kind.name, 0)):
        return _settle(sides, arrays, same=same)


def _settle(
    sides: Mapping[str, LoadedModel],
    arrays: Sequence[Any],
    *,
    same: Mapping[str, str],
    clock: Callable[[], float] = time.monotonic,
) -> WholeTimes:
    """Time the sides in turns until it is clear which one is fastest, or they are equal as far as one can tell.

    Parameters
    ----------
    sides : mapping of str to LoadedModel
        Tuned; unfused and untuned unless they are the ``same``; perhaps TVM's default.
    arrays : sequence
        Inputs.
    same : mapping of str to str
        Sides that are the same code as another one, which is timed.
    clock : callable
        Seconds that go by.
    """
    numbers = {}
    for name, side in sides.items():
        side.time(*arrays)  # warm up: first calls allocate, load and capture
        once = max(1e-6, min(side.time(*arrays)))
        numbers[name] = max(1, math.ceil(_SECONDS / once))
    samples: dict[str, list[float]] = {name: [] for name in sides}
    begin = clock()
    for _ in range(_MOST_BLOCKS):
        for _ in range(_ROUNDS):
            for name, side in sides.items():
                samples[name] += side.time(*arrays, number=numbers[name], repeat=1)
        twins = {name: samples[other] for name, other in same.items()}
        whole = WholeTimes.of_samples({**samples, **twins})
        if whole.is_settled(same) or clock() - begin > _PATIENCE:
            break
    return whole


def _same(mod: tvm.IRModule, target: Target, one: Untuned, other: Untuned) -> bool:
    """Whether two ways to compile a model come to the same kernels."""
    groups = [{frozenset(group.nodes) for group in way.plan.groups} for way in (one, other)]
    if groups[0] != groups[1]:
        return False
    found = [_kernels(mod, target, way) for way in (one, other)]
    return found[0].keys() == found[1].keys() and all(
        structural_equal(func, found[1][name]) for name, func in found[0].items()
    )


def _kernels(mod: tvm.IRModule, target: Target, way: Untuned) -> dict[str, tirx.PrimFunc]:
    """The scheduled functions of a model by name."""
    with deciding_by(way.lookup), warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # compiling tells the same
        lowered = lower_plan(prepared(mod, target), way.plan, target)
    functions = lowered.mod.functions_items()
    return {gv.name_hint: func for gv, func in functions if isinstance(func, tirx.PrimFunc)}


def _untuned(
    mod: tvm.IRModule, target: Target, untuned: Untuned, reference: LoadedModel, seed: int
) -> LoadedModel | None:
    """The model as without tuning; None where that does not compile, or not exactly enough."""
    try:
        with deciding_by(untuned.lookup), warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # of groups that nobody asked for
            side = compile_model(mod, target, plan=untuned.plan)
        agrees = _agree(untuned.plan, target, reference, side, seed)
    except (FusionError, *BUILD_ERRORS):
        return None
    return side if agrees else None


def _stock(
    mod: tvm.IRModule, target: Target, plan: Plan, reference: LoadedModel, seed: int
) -> LoadedModel | None:
    """TVM's default pipeline; None where it does not compile the model, or not exactly enough."""
    try:
        stock = LoadedModel(build_stock(mod, target), signature_of(mod, target))
        agrees = _agree(plan, target, reference, stock, seed)
    except (FusionError, *BUILD_ERRORS):
        return None
    return stock if agrees else None


def _agree(
    plan: Plan, target: Target, reference: LoadedModel, other: LoadedModel, seed: int
) -> bool:
    """Whether a model's results are those of another way to compile it, whose kernels were checked."""
    tolerance = tolerance_of(plan, target, MODEL_TOLERANCE)
    signature = reference.signature
    return compare("model", (), reference, other, signature, tolerance, 1, seed).passed
