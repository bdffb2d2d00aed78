"""Tunes kernels: proposes candidates, has them built and measured, keeps what came of them.

While one kernel's candidates are measured, those of others are built.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import math
import time
from collections.abc import Callable, Iterable, Sequence

from ..compat import Target, ir, tvm
from ..errors import DatabaseError, LoweringError, TuningError
from ..schedules.registry import Space, schedule_with
from .allocation import next_kernel
from .corrections import models_of, refitted, save_models
from .cost_model import Candidate, CostModel
from .finals import Finals
from .flights import BuildsCandidates, Flight, MakesReferences, measured
from .kernels import bare, kernel_digest
from .measure import BuildFailure, Built, KernelSource, Runner, RunResult
from .trials import Trial, TrialSet
from .tuned_kernel import NewKernel, TunedKernel
from .work_dir import Records

#: Candidates of a batch.
BATCH = 16

#: Batches in a row of which nothing could be measured, after which a run ends.
_LOST = 2


@dataclasses.dataclass(frozen=True)
class Device:
    """Where candidates are measured.

    Attributes
    ----------
    name : str
        What it is called in records.
    driver : str
        Version of its driver.
    former : str
        What it was called in records before processors had names; empty if it was always called so.
    """

    name: str = ""
    driver: str = ""
    former: str = dataclasses.field(default="", compare=False)


@dataclasses.dataclass
class Budget:
    """When to stop.

    Attributes
    ----------
    trials : int
        Candidates in all; those in the records count.
    seconds : float
        From now on.
    """

    trials: int
    seconds: float = math.inf
    started: float = dataclasses.field(default_factory=time.monotonic)

    @property
    def is_over(self) -> bool:
        """Whether the time is up."""
        return time.monotonic() - self.started >= self.seconds


class Tuner:
    """Tunes any number of kernels for one target.

    Parameters
    ----------
    target : Target
        Complete target, with its variant.
    builder, references, runner : BuildsCandidates, MakesReferences, Runner
        What compiles, checks and measures; None for a tuner that only knows what is on record.
    records : Records or TrialSet
        Where trials are kept; those that are there already are not tried again. A tuner that only knows what is on
        record writes nothing.
    device : Device
        Where the runner measures; trials of another device are not used.
    hints : TrialSet, optional
        Trials of other devices: the fastest of each kernel is tried early. Nothing else is taken from them.
    batch : int
        Candidates of a batch, also an attribute.
    ahead : int, optional
        Candidates that are compiled while others are measured; two batches when absent.
    report : callable, optional
        Called after each batch.
    """

    def __init__(
        self,
        target: Target,
        builder: BuildsCandidates | None,
        references: MakesReferences | None,
        runner: Runner | None,
        records: Records | TrialSet,
        device: Device,
        *,
        hints: TrialSet | None = None,
        batch: int = BATCH,
        ahead: int | None = None,
        report: Callable[[], None] | None = None,
    ) -> None:
        self.kernels: dict[str, TunedKernel] = {}
        self.records, self.device = records, device
        #: A problem with the disk, if any: what is measured stays in memory.
        self.disk_problem = ""
        #: Whether to begin nothing new; may be set at any moment, by a signal handler too.
        self.stopping = False
        #: Candidates that this object tried; `trials` counts those of earlier runs too.
        self.new_trials = 0
        self._target, self.batch = target, batch
        self._ahead = ahead or 2 * batch
        self._builder, self._references, self._runner = builder, references, runner
        self._hints = hints or TrialSet()
        self._lost = 0
        self._outdated: set[str] = set()
        self._buildable: set[str] = set()
        self.report = report
        #: Corrections of the templates' cost models, by template.
        self.models = models_of(records, device.name) if builder is not None else {}
        self._model = CostModel(self.models)

    def add(self, kernels: Sequence[NewKernel]) -> list[TunedKernel]:
        """Take kernels in, with what is known of them; equal ones are one."""
        digests = [kernel_digest(new.func) for new in kernels]
        pairs = zip(digests, kernels, strict=True)
        fresh = {digest: new for digest, new in pairs if digest not in self.kernels}
        sources = [
            KernelSource(digest, ir.save_json(tvm.IRModule({"main": bare(new.func)})), str(self._target))
            for digest, new in fresh.items()
        ]  # fmt: skip
        for new, source, found in zip(fresh.values(), sources, self._spaces(sources), strict=True):
            usable = () if isinstance(found, str) else found
            hint = self._hints.best(source.kernel)
            kernel = TunedKernel(new, source, self._target, usable, self._model, self.batch, hint)
            if isinstance(found, str):
                kernel.problem = found
            elif self.measures and not found:
                kernel.problem = "no template takes it"
            self.kernels[kernel.digest] = kernel
            self._recall(kernel)
        return [self.kernels[digest] for digest in digests]

    def _spaces(self, sources: Sequence[KernelSource]) -> Sequence[Sequence[Space] | str]:
        """What templates may decide about kernels; who only recalls need not know."""
        if self._builder is None:
            return [() for _ in sources]
        return [future.result() for future in self._builder.find_spaces(sources)]

    def _recall(self, kernel: TunedKernel) -> None:
        """Learn from the trials of earlier runs."""
        if not self.measures:
            kernel.trials = len(self.records.trials(kernel.digest, self.device.name))
            best = self.best(kernel)
            if kernel.trials:
                kernel.progress.best.append(best.microseconds if best is not None else math.inf)
            return
        found = []
        for trial in self.records.trials(kernel.digest, self.device.name):
            candidate = kernel.search.candidate_of(trial.template, trial.decision)
            if candidate is None:
                continue  # of another version
            result = RunResult(trial.verdict, trial.samples_us, trial.message)
            found.append((candidate, result))
            if trial.code:
                kernel.codes[trial.code] = result
        if found:
            self._learn(kernel, found)

    @property
    def measures(self) -> bool:
        """Whether it can measure, and does not only know what is on record."""
        return self._builder is not None

    def refit(self) -> None:
        """Correct the templates' cost models by all trials so far; what is tried next follows, in later runs too."""
        self.models = refitted(self.records, self.device.name, self._model.right())
        self._model.correct(self.models)
        for kernel in self.kernels.values():
            if kernel.waiting:
                kernel.waiting = kernel.first(new=True)
        try:
            save_models(self.records.folder, self.device.name, self.models)
        except DatabaseError as error:  # that trials are not written is worse
            self.disk_problem = self.disk_problem or str(error)

    def best(self, kernel: TunedKernel) -> Trial | None:
        """The fastest right trial of a kernel on this device; none where that is outdated."""
        if kernel.digest in self._outdated:
            return None
        return self.records.best(kernel.digest, self.device.name)

    def leave_outdated(self, kernels: Iterable[TunedKernel]) -> bool:
        """Forget records of which the templates of this version make no kernel; say whether there were some."""
        before = len(self._outdated)
        for kernel in kernels:
            best = self.best(kernel)
            if best is None or kernel.digest in self._buildable:
                continue
            try:
                schedule_with(kernel.func, self._target, best.template, best.decision)
            except LoweringError:
                self._outdated.add(kernel.digest)
                kernel.progress.best.clear()
            else:
                self._buildable.add(kernel.digest)
        return len(self._outdated) > before

    @property
    def trials(self) -> int:
        """Candidates tried, of all kernels, now or before."""
        return sum(kernel.trials for kernel in self.kernels.values())

    def run(self, budget: Budget) -> None:
        """Tune the kernels that are called, until the budget is spent or nothing pays any more.

        When the time is up, or `stopping` is set, the batch whose turn it is is finished.
        """
        flights: collections.deque[Flight] = collections.deque()
        try:
            while True:
                while self._count(flights) < self._ahead and (new := self._next(budget, flights)):
                    flights.append(new)
                if not flights:
                    return
                self._measure([flights.popleft()])
                if budget.is_over or self.stopping:
                    return
        finally:
            for flight in flights:
                flight.cancel()
                flight.kernel.waiting = flight.candidates + flight.kernel.waiting

    def measure_first(self, kernels: Iterable[TunedKernel], budget: Budget) -> None:
        """Measure the defaults and hints of kernels of which nothing is known, as far as trials go."""
        distinct = {k.digest: k for k in kernels}.values()
        new = [k for k in distinct if not k.progress.best and not k.problem and k.waiting]
        sizes = itertools.accumulate(len(kernel.opening) for kernel in new)
        left = budget.trials - self.trials
        new = [kernel for kernel, size in zip(new, sizes, strict=True) if size <= left]
        if budget.is_over or self.stopping:
            return
        flights = [self._begin(kernel, kernel.opening) for kernel in new]
        try:
            while flights and not (budget.is_over or self.stopping):
                self._measure(flights[: self.batch])
                flights = flights[self.batch :]
        finally:
            for flight in flights:
                flight.cancel()

    @staticmethod
    def _count(flights: Iterable[Flight]) -> int:
        return sum(len(flight.candidates) for flight in flights)

    def _begin(self, kernel: TunedKernel, candidates: list[Candidate]) -> Flight:
        return Flight.of(kernel, candidates, self._builder, self._references)

    def _next(self, budget: Budget, under_way: Sequence[Flight]) -> Flight | None:
        """What to build next; None when the budget is spent or nothing pays."""
        left = budget.trials - self.trials - self._count(under_way)
        if left <= 0 or budget.is_over or self.stopping:
            return None
        kernels = [k for k in self.kernels.values() if k.progress.weight and not k.problem]
        busy = [i for i, k in enumerate(kernels) if any(k is f.kernel for f in under_way)]
        while (number := next_kernel([k.progress for k in kernels], busy)) is not None:
            kernel = kernels[number]
            candidates = kernel.waiting or kernel.search.propose()
            kernel.waiting = []
            if candidates:
                return self._begin(kernel, candidates[:left])
            kernel.progress.exhausted = True
            busy.append(number)
        return None

    def _measure(self, flights: Sequence[Flight]) -> None:
        """Measure what was built, keep what came of every candidate, and learn from it.

        Raises
        ------
        TuningError
            If for some time nothing could be measured.
        """
        for some in measured(flights, self._runner):
            self._keep([self._trial(flight.kernel, *tried) for flight, tried in some])
        asked = [f for f in flights if not f.kernel.problem]
        if any(f.tried for f in asked):
            self._lost = 0
        elif asked:
            self._lost += 1
            if self._lost >= _LOST:
                raise TuningError(
                    f"no server is left that measures; {self.trials} trials are on record, and the same "
                    "command goes on from there"
                )
        for flight in flights:
            if not flight.kernel.problem:
                self._learn(flight.kernel, [(c, result) for c, _, result in flight.tried])
        if self.report is not None:
            self.report()

    def _trial(
        self,
        kernel: TunedKernel,
        candidate: Candidate,
        found: Built | BuildFailure,
        result: RunResult,
    ) -> Trial:
        return Trial(
            kernel=kernel.digest, template=candidate.template, decision=candidate.decision,
            verdict=result.verdict, arch=self.records.arch, samples_us=result.samples_us,
            registers=found.registers, spill_bytes=found.spill_bytes,
            shared_bytes=found.shared_bytes, predicted_us=candidate.predicted_us,
            code=found.code_digest if isinstance(found, Built) else "",
            device=self.device.name, driver=self.device.driver, operators=kernel.operators,
            message=result.message,
        )  # fmt: skip

    def settle(self, kernels: Iterable[TunedKernel], budget: Budget) -> None:
        """Measure the fastest candidates of kernels again beside their defaults (see `finals`)."""
        if self._builder is None or self._references is None or self._runner is None:
            return
        finals = Finals(self._builder, self._references, self._runner)
        for kernel in kernels:
            if budget.is_over or self.stopping:
                return
            first = next(iter(kernel.search.first()), None)
            tried = self.records.trials(kernel.digest, self.device.name)
            self._record(finals.decide(kernel.source, first, tried))
            if self.report is not None:
                self.report()

    def _keep(self, trials: Sequence[Trial]) -> None:
        self.new_trials += len(trials)
        self._record(trials)

    def _record(self, trials: Sequence[Trial]) -> None:
        try:
            self.records.add(*trials)
            self.disk_problem = ""
        except DatabaseError as error:  # tuning goes on; the records write it later if they can
            self.disk_problem = str(error)

    def _learn(self, kernel: TunedKernel, results: Sequence[tuple[Candidate, RunResult]]) -> None:
        times = [(c, _median(r)) for c, r in results]
        kernel.search.tell(times)
        kernel.trials += len(results)
        first = kernel.search.first(1)
        for candidate, microseconds in times:
            if first and candidate == first[0]:
                kernel.default_us = microseconds
        known = {(c.template, c.decision) for c, _ in results}
        kernel.waiting = [c for c in kernel.waiting if (c.template, c.decision) not in known]
        kernel.progress.best.append(min([kernel.best_us, *(t for _, t in times)]))


def _median(result: RunResult) -> float:
    samples = sorted(result.samples_us)
    if result.verdict != "ok" or not samples:
        return math.inf
    middle = len(samples) // 2
    return samples[middle] if len(samples) % 2 else (samples[middle - 1] + samples[middle]) / 2
