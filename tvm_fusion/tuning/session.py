"""One tuning run of one model: explore, measure, choose, and measure on where it pays."""

from __future__ import annotations

import collections
import dataclasses
import math
import time
from collections.abc import Iterable, Sequence

from ..build.model import drop_groups
from ..build.resources import KernelCompiler
from ..compat import Target, tvm
from ..config import FusionConfig
from ..devices import device_for
from ..errors import TuningError
from ..graph.relax import from_relax
from ..guards import Resources
from ..pipeline import before_lowering
from ..planner.assemble import proposals_of
from ..planner.compare import single
from ..planner.cost import operator_cost
from ..planner.plan import Plan, Rejection
from ..strategies.base import Proposal
from ..transform.fuse import plan_module
from ..transform.strip_fusion import strip
from .asked import asked_before
from .candidates import Variation, explore
from .choice import Times, resources_of
from .summary import Summary
from .tuned_kernel import TunedKernel
from .tuner import Budget, Tuner
from .whole import WholeTimes

#: Weight of kernels that the plan of the moment does not call, against those that it does.
_OTHERS = 0.25

#: Parts in which the trials are spent; after each the plan is made again.
_PARTS = 4

#: Plans made again because a group failed.
_AGAIN = 8

#: Share of the time in which candidates are tried; the rest is for measuring again what seems fastest.
_TUNING = 0.85


class Session:
    """Tunes a model.

    Parameters
    ----------
    mod : tvm.IRModule
        Canonical module.
    target : Target
        Complete target.
    config : FusionConfig
        Strategies and limits.
    tuner : Tuner
        Tunes kernels for that target.
    budget : Budget
        Trials and time of the whole run.
    name : str
        Name of the model in the plan.
    runs : sequence of Summary
        Earlier runs that used the same records; those of this model say what was asked for.

    Attributes
    ----------
    name, runs
        As given.
    variations : list of Variation
        What was explored.
    times : Times
        Times of groups.
    plan : Plan or None
        The plan of the moment.
    groups : list of Proposal
        Its groups.
    calls : list of (TunedKernel, int)
        The kernels that it calls, and how often.
    finished : bool
        Whether nothing more is tried.
    """

    def __init__(
        self,
        mod: tvm.IRModule,
        target: Target,
        config: FusionConfig,
        tuner: Tuner,
        budget: Budget,
        name: str = "model",
        *,
        runs: Sequence[Summary] = (),
    ) -> None:
        with target:
            self.mod = tvm.transform.Sequential(before_lowering())(mod)
        self.target, self.config, self.tuner, self.budget = target, config, tuner, budget
        self.name, self.runs = name, tuple(runs)
        # As it stands: the compiler lowers these operators, and no others. Groups that the model brings are seen
        # through, as in planning.
        self.graph = from_relax(strip(self.mod)[0]).graph
        self._device = device_for(target)
        self._compiler = KernelCompiler(self.mod, target)
        self.times = Times(self.graph, self._device, self._compiler, tuner, self._measure)
        self.variations: list[Variation] = []
        self.plan: Plan | None = None
        self.finished = False
        self.groups: list[Proposal] = []
        self.calls: list[tuple[TunedKernel, int]] = []

    def run(self) -> Plan:
        """Tune within the budget and return the best plan; what it left unmeasured counts as predicted."""
        kernels = self._begin()
        self.tuner.measure_first([k for k in kernels if k is not None], self.budget)
        self._choose()
        part = max(16, (self.budget.trials - self.tuner.trials) // _PARTS)
        tuned = dataclasses.replace(self.budget, seconds=_TUNING * self.budget.seconds)
        while not (tuned.is_over or self._is_over) and self.tuner.trials < self.budget.trials:
            before = self.tuner.trials
            self.tuner.run(self._slice(part, tuned.seconds))
            if self.tuner.trials == before:
                break  # nothing pays any more
            self.tuner.refit()
            self._choose()
        plan = self._settled()
        self.finished = True
        if self.tuner.report is not None:
            self.tuner.report()
        return plan

    def _begin(self) -> list[TunedKernel | None]:
        """Take in what is on record of all that is explored or was ever asked for; return the former's kernels."""
        self.variations = explore(self.graph, self._device, self.config)
        kernels = self.times.kernels_of(self.explored())
        self.times.kernels_of(asked_before(self.graph, self.runs))
        return kernels

    def _settled(self) -> Plan:
        """Measure again what seems fastest of the kernels that the plan calls, until it asks for nothing more.

        Returns
        -------
        Plan
            The same that the same command makes again with its budget spent. Each kernel has one round at most, so
            there are no more rounds than kernels.
        """
        settled: set[str] = set()
        while True:
            asked = len(self.times.asked)
            plan = self._choose()
            new = [call for call in self.calls if call[0].digest not in settled]
            if self._is_over or (not new and len(self.times.asked) == asked):
                return plan
            new.sort(key=lambda call: (-call[0].best_us * call[1], call[0].digest))
            self.tuner.settle([kernel for kernel, _ in new], self.budget)
            settled.update(kernel.digest for kernel, _ in new)

    @property
    def _is_over(self) -> bool:
        return self.budget.is_over or self.tuner.stopping

    def recall(self, *, require_all: bool = False) -> Plan:
        """Return the plan that follows from the records alone.

        Parameters
        ----------
        require_all : bool
            Whether it is an error if a kernel of the plan was never measured; else its predicted time counts.

        Raises
        ------
        TuningError
            With ``require_all``, if one was not.
        """
        self._begin()
        plan = self._choose()
        while self.tuner.leave_outdated(kernel for kernel, _ in self.calls):
            plan = self._choose()
        if not require_all:
            return plan
        missing = [k for k, _ in self.calls if self.tuner.best(k) is None]
        if missing:
            names = "; ".join(" + ".join(kernel.operators) for kernel in missing[:3])
            were = "kernel of the plan was" if len(missing) == 1 else "kernels of the plan were"
            raise TuningError(
                f"{len(missing)} {were} never measured ({names}); tune first, without require_cached (--require-cached)"
            )
        return plan

    def covers(self, plan: Plan) -> bool:
        """Whether there is a record of every kernel that a plan of this model calls."""
        self.groups = proposals_of(plan, self.graph)
        kernels = self.times.kernels_of(self._called())
        return all(self.tuner.best(kernel) is not None for kernel in kernels if kernel is not None)

    def with_totals(self, plan: Plan, whole: WholeTimes, side: str = "tuned") -> Plan:
        """A plan with the times of the whole model: unfused, and as this side."""
        us = whole.of(side)
        totals = dataclasses.replace(
            plan.totals, measured_us_before=round(whole.unfused_us, 3),
            measured_us_after=round(us, 3) if us is not None else None,
        )  # fmt: skip
        return dataclasses.replace(plan, totals=totals)

    def without_tuning(self, untuned: Plan, whole: WholeTimes) -> Plan:
        """The plan of the model as it is without tuning, because the whole model was faster so.

        ``groups`` and ``calls`` are those of this plan from then on, as far as the run has looked at its kernels.

        Parameters
        ----------
        untuned : Plan
            What is planned without a record of the work dir.
        whole : WholeTimes
            Times of the whole model.
        """
        self.groups = proposals_of(untuned, self.graph)
        self.calls = self._counted(self.times.known(self._called()))
        timed = self.with_totals(untuned, whole, "untuned")
        return dataclasses.replace(timed, pipeline="untuned")

    def without_groups(self, plan: Plan, whole: WholeTimes, side: str) -> Plan:
        """A plan that fuses nothing, because the whole model was faster so, or by TVM's default pipeline.

        ``groups`` and ``calls`` are those of this plan from then on.

        Parameters
        ----------
        plan : Plan
            The plan with groups.
        whole : WholeTimes
            Times of the whole model.
        side : {"unfused", "default"}
            What is compiled.
        """
        stock = side == "default"
        us = whole.default_us if stock and whole.default_us is not None else whole.unfused_us
        numbers = {
            "measured_us_before": round(us, 3), "measured_us_after": round(whole.tuned_us, 3),
        }  # fmt: skip
        detail = "the whole model was measured " + (
            "faster by TVM's default pipeline"
            if stock
            else "no faster with the groups of its best plan"
        )
        # What is compiled calls each operator's own kernel, or none of these at all.
        self.groups = []
        self.calls = [] if stock else self._calls()
        refusals = {
            g.id: Rejection(g.strategy, g.nodes, "unprofitable", "slower_measured", numbers, detail)
            for g in plan.groups
        }
        alone = self.with_totals(drop_groups(plan, refusals), WholeTimes(us, whole.unfused_us))
        return dataclasses.replace(alone, pipeline="tvm" if stock else alone.pipeline)

    def _slice(self, trials: int, seconds: float) -> Budget:
        """So many trials, within what is left of the seconds from the start."""
        left = seconds - (time.monotonic() - self.budget.started)
        return Budget(min(self.budget.trials, self.tuner.trials + trials), left)

    def explored(self) -> list[Proposal]:
        """What every run of this model looks at: the operators alone, and the groups of all variations."""
        return [*self._singles(), *self._offered()]

    def _offered(self) -> list[Proposal]:
        return [p for variation in self.variations for p in variation.proposals]

    def _singles(self) -> list[Proposal]:
        """Each operator that does work, alone."""
        return [single(operator.name) for operator in self.graph.operators if operator.does_work]

    def _measure(self, kernels: Iterable[TunedKernel]) -> None:
        """Measure what the planner asks about and nothing is known of; for that, one batch more is allowed."""
        if self.tuner.measures:
            most = self.budget.trials + self.tuner.batch
            self.tuner.measure_first(kernels, dataclasses.replace(self.budget, trials=most))

    def _resources(self, proposals: Sequence[Proposal]) -> list[Resources | None]:
        """What kernels take: the fastest of those tried; the compiler is asked about others."""
        kernels = self.times.kernels_of(proposals)
        self._measure({k.digest: k for k in kernels if k is not None}.values())
        found = [self.tuner.best(k) if k is not None else None for k in kernels]
        asked = [p for p, trial in zip(proposals, found, strict=True) if trial is None]
        answers = iter(self._compiler(asked) if asked else ())
        return [resources_of(trial) if trial is not None else next(answers) for trial in found]

    def _choose(self) -> Plan:
        """Plan with what is known, and weigh the kernels by it."""
        for _ in range(_AGAIN):
            failed = self.times.failed()
            plan = plan_module(
                self.mod, self.target, self.config, model=self.name, excluded=failed,
                offered=self._offered(), compiler=self._resources, measure=self.times, recall=self.times.recall,
            )  # fmt: skip
            if failed.keys() == self.times.failed().keys():
                break
        self.plan = plan
        self.groups = proposals_of(plan, self.graph)
        self.calls = self._calls()
        self._weigh()
        if self.tuner.report is not None:
            self.tuner.report()
        return plan

    def _weigh(self) -> None:
        """Give each kernel the weight of what tuning it may bring.

        Those that the plan calls count as often as it calls them. Others count less, and the less the more they take
        than what the plan spends on the same operators: they must get that much faster to be called at all. Operators
        alone are among them, so that no group wins because nobody tuned its parts.
        """
        spent = self._spent()
        for kernel in self.tuner.kernels.values():
            kernel.progress.weight = 0.0
        explored = self.explored()
        for proposal, kernel in zip(explored, self.times.kernels_of(explored), strict=True):
            if kernel is not None:
                now = sum(spent.get(name, 0.0) for name in proposal.operators)
                near = now / kernel.best_us if math.isfinite(kernel.best_us) else 1.0
                kernel.progress.weight += _OTHERS * min(1.0, near) ** 2
        for kernel, calls in self.calls:
            kernel.progress.weight = max(kernel.progress.weight, float(calls))

    def _spent(self) -> dict[str, float]:
        """Microseconds of the plan by operator; those of a group divided as its operators would take alone."""
        spent: dict[str, float] = {}
        called = self._called()
        for proposal, kernel in zip(called, self.times.kernels_of(called), strict=True):
            operators = [self.graph.by_name[name] for name in proposal.operators]
            costs = [operator_cost(self.graph, o, self._device).microseconds for o in operators]
            time = kernel.best_us if kernel is not None else math.inf
            time = time if math.isfinite(time) else sum(costs)
            for operator, cost in zip(operators, costs, strict=True):
                spent[operator.name] = time * cost / max(sum(costs), 1e-9)
        return spent

    def _called(self) -> list[Proposal]:
        """The groups of the plan, and the operators that it leaves alone."""
        grouped = {name for group in self.groups for name in group.operators}
        return [*self.groups, *(p for p in self._singles() if p.operators[0] not in grouped)]

    def _calls(self) -> list[tuple[TunedKernel, int]]:
        """The kernels of the plan's groups and of what is in none, and how often each is called."""
        return self._counted(self.times.kernels_of(self._called()))

    def _counted(self, kernels: Iterable[TunedKernel | None]) -> list[tuple[TunedKernel, int]]:
        counts = collections.Counter(k.digest for k in kernels if k is not None)
        return [(self.tuner.kernels[digest], n) for digest, n in counts.items()]
