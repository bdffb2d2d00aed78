"""The search of one kernel's space: ranked as a whole, or by meta-schedule's evolutionary search where it is large.

A template's space is a trace of TVM: one ``sample_categorical`` for each of its choices, whose result is annotated. The
evolution mutates these samples; what they mean is looked up when a candidate is built.
"""

from __future__ import annotations

import functools
import itertools
import math
import random
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from ..compat import Target, s_tir, tirx, tvm
from ..schedules.decisions import Point
from ..schedules.registry import Space
from .cost_model import Candidate, CostModel
from .kernels import bare, kernel_digest
from .picking import pick

ms = s_tir.meta_schedule

#: Annotations of the root block.
_TEMPLATE, _CHOICE = "tvm_fusion.template", "tvm_fusion.choice."

#: Candidates of a generation, how many are random at first, and generations of a batch.
_POPULATION, _RANDOM, _GENERATIONS = 96, 24, 3

#: Share of a batch that is picked without the model.
_GREEDY = 0.1

#: Size of a space that is ranked as a whole instead of evolved: that takes milliseconds, a batch of an evolution more
#: than half a second.
_ENUMERATED = 4096

#: Candidates that a corrected model ranks before anything of a kernel is known.
_CORRECTED = 1024

#: How much slower each rank is taken to be where a template only ranks its options.
_RANK = 0.01

#: What failed counts as, in seconds.
_FAILED = 1.0


class KernelSearch:
    """Proposes candidates for one kernel.

    Parameters
    ----------
    func : tirx.PrimFunc
        The unscheduled function.
    target : Target
        Where it will run.
    found : sequence of Space
        What templates may decide about it (`registry.spaces`).
    model : CostModel
        Shared by all kernels; this object tells it what was measured.
    batch : int
        Candidates of a proposal.
    seed : int
        Makes the search the same each time.
    """

    def __init__(
        self, func: tirx.PrimFunc, target: Target, found: Sequence[Space], model: CostModel,
        batch: int = 16, seed: int = 0,
    ) -> None:  # fmt: skip
        self.kernel = kernel_digest(func)
        self.spaces = tuple(found)
        self.model, self._target, self._batch, self._seed = model, target, batch, seed
        self.mod = tvm.IRModule({"main": bare(func)})
        self._database = ms.database.MemoryDatabase()
        self._known: dict[tuple, float] = {}
        self._tried: dict[Candidate, float] = {}
        self._left: dict[tuple, Candidate] | None = None
        points = self.spaces[0].points if self.spaces else ()
        self._first_us = sum(p.microseconds[0] for p in points if p.microseconds) or 1.0
        self._context: Any = None
        self._drawn: list[Any] = []
        self._exhausted = not any(space.points for space in self.spaces)

    @property
    def size(self) -> int:
        """Number of candidates there are."""
        return sum(math.prod(len(p.options) for p in space.points) for space in self.spaces)

    def first(self, count: int = 1, *, new: bool = False) -> list[Candidate]:
        """What is worth trying before anything is known: what would be compiled without tuning, then what the models
        rank next, with the first of every other template among them; with ``new``, without what was tried."""
        if not self.spaces:
            return []
        found = [self._candidate(space, [0] * len(space.points)) for space in self.spaces]
        if count > len(found) and self.model.corrects(self.spaces[0].template):
            found += self._ranked_anew(count - len(found))
        rank = 1
        longest = max((len(p.options) for p in self.spaces[0].points), default=0)
        while len(found) < count and rank < longest:
            places = [min(rank, len(p.options) - 1) for p in self.spaces[0].points]
            candidate = self._candidate(self.spaces[0], places)
            if candidate not in found:
                found.append(candidate)
            rank += 1
        known = self._known if new else ()
        return [c for c in found[:count] if (c.template, c.decision) not in known]

    def _ranked_anew(self, count: int) -> list[Candidate]:
        """What a corrected model ranks first among those that the template's model puts first."""
        space, most = self.spaces[0], _CORRECTED
        sizes = [len(p.options) for p in space.points]
        while math.prod(min(size, most) for size in sizes) > _CORRECTED:
            most //= 2
        places = itertools.product(*(range(min(size, most)) for size in sizes))
        near = [self._candidate(space, p) for p in places if any(p)]
        order = np.argsort(-self.model.scores(near, self.kernel), kind="stable")[:count]
        return [near[i] for i in order]

    def propose(self) -> list[Candidate]:
        """The next batch, without what is known; empty when nothing new is found."""
        if self._exhausted:
            return []
        if self.size <= max(_ENUMERATED, 4 * self._batch):
            return self._best_of_all()
        if self._context is None:
            self._context = self._start()
        self._drawn = self._evolved()
        fresh: dict[tuple, Candidate] = {}
        for candidate in map(self._read, self._drawn):
            key = candidate.template, candidate.decision
            if key not in self._known:
                fresh.setdefault(key, candidate)
        self._exhausted = not fresh
        return list(fresh.values())

    def _evolved(self) -> list[Any]:
        """What meta-schedule wants to be measured."""
        try:
            return list(self._context.generate_measure_candidates() or [])
        except RuntimeError:  # it finds nothing that was not measured
            return []

    def _best_of_all(self) -> list[Candidate]:
        """The next batch where every candidate can be ranked."""
        if self._left is None:
            self._left = {(c.template, c.decision): c for c in self._all()}
            for key in self._known:
                self._left.pop(key, None)
        left = list(self._left.values())
        scores = self.model.scores(left, self.kernel)
        chosen = pick(left, scores, self._tried, self._batch)
        self._exhausted = len(left) <= self._batch
        return [left[number] for number in chosen]

    def _all(self) -> Iterator[Candidate]:
        """Every candidate."""
        for space in self.spaces:
            for places in itertools.product(*(range(len(p.options)) for p in space.points)):
                yield self._candidate(space, places)

    def tell(self, results: Iterable[tuple[Candidate, float]]) -> None:
        """Learn what candidates took, in microseconds; infinite where one failed."""
        for candidate, microseconds in results:
            key = candidate.template, candidate.decision
            self._known[key] = self._tried[candidate] = microseconds
            if self._left is not None:
                self._left.pop(key, None)
            self.model.add(self.kernel, candidate, microseconds)
            if self._context is not None:
                self._commit(candidate, microseconds)
        if self._context is not None:
            runs = [self._seconds(self._read(c)) for c in self._drawn]
            answers = [ms.runner.RunnerResult([s], None) for s in runs]
            self._context.notify_runner_results(self._drawn, answers)
            self._drawn = []

    def knows(self, candidate: Candidate) -> bool:
        """Whether a candidate was tried."""
        return (candidate.template, candidate.decision) in self._known

    def candidate_of(
        self, template: str, decision: Sequence[tuple[str, int | str]]
    ) -> Candidate | None:
        """The candidate of a recorded decision; None where this version has no such option."""
        values = dict(decision)
        for space in self.spaces:
            if space.template != template:
                continue
            places = [_place(point, values) for point in space.points]
            if None in places:
                continue
            found = self._candidate(space, places)
            if len(found.decision) == len(values):  # it says nothing that nobody asks for
                return found
        return None

    def trace_of(self, candidate: Candidate) -> Any:
        """A candidate as a trace of TVM on the unscheduled module `mod`; None where this version has no such option."""
        space = next((s for s in self.spaces if s.template == candidate.template), None)
        values = dict(candidate.decision)
        places = [_place(point, values) for point in space.points] if space is not None else []
        if space is None or None in places:
            return None
        return _design(s_tir.Schedule(self.mod), space, places).trace

    def _candidate(self, space: Space, places: Sequence[int]) -> Candidate:
        """The candidate that takes the option at each place."""
        chosen = list(zip(space.points, places, strict=True))
        decision = tuple(entry for point, place in chosen for entry in point.options[place])
        timed = [point.microseconds[place] for point, place in chosen if point.microseconds]
        rank = sum(places)
        # What only ranks its options counts as twice as slow as the template before it.
        guess = self._first_us * 2 ** self.spaces.index(space) * (1 + _RANK * rank)
        return Candidate(space.template, decision, sum(timed) if timed else guess, rank)

    def _seconds(self, candidate: Candidate) -> float:
        time = self._known.get((candidate.template, candidate.decision), math.inf)
        return time * 1e-6 if math.isfinite(time) else _FAILED

    def _commit(self, candidate: Candidate, microseconds: float) -> None:
        """Let the evolution start from what is known."""
        trace = self.trace_of(candidate) if math.isfinite(microseconds) else None
        if trace is None:
            return
        arguments = ms.arg_info.ArgInfo.from_prim_func(self.mod["main"])
        record = ms.database.TuningRecord(
            trace, self._database.commit_workload(self.mod), [microseconds * 1e-6], self._target,
            arguments,
        )  # fmt: skip
        self._database.commit_tuning_record(record)

    def _start(self) -> Any:
        """A context of meta-schedule with one design space for each template, and what is known so far."""
        for candidate, microseconds in self._tried.items():
            self._commit(candidate, microseconds)
        searched = [space for space in self.spaces if space.points]

        def designs(sch: s_tir.Schedule) -> list[s_tir.Schedule]:
            return [_design(sch.copy(), space, [0] * len(space.points)) for space in searched]

        generator = ms.space_generator.ScheduleFn(
            designs, sch_rules=[], postprocs=[], mutator_probs={_mutator(searched): 1.0}
        )
        strategy = ms.search_strategy.EvolutionarySearch(
            population_size=_POPULATION, init_min_unmeasured=_RANDOM,
            genetic_num_iters=_GENERATIONS, eps_greedy=_GREEDY,
        )  # fmt: skip
        context = _context(self.mod, self._target, generator, strategy, self._seed)
        context.pre_tuning(
            2**30, self._batch, database=self._database, cost_model=_ranking(self._rank)
        )
        return context

    def _rank(self, candidates: Sequence[Any]) -> np.ndarray:
        return self.model.scores([self._read(c) for c in candidates], self.kernel)

    def _read(self, drawn: Any) -> Candidate:
        """What a schedule of meta-schedule's stands for."""
        notes = drawn.sch.get(drawn.sch.get_sblock("root")).annotations
        template = str(notes[_TEMPLATE])
        space = next(s for s in self.spaces if s.template == template)
        return self._candidate(space, [int(notes[_CHOICE + point.name]) for point in space.points])


def _context(
    mod: tvm.IRModule, target: Target, generator: Any, strategy: Any, seed: int
) -> ms.TuneContext:
    """A tuning context on one thread that logs nothing.

    Its own constructor imports all of TVM's tensor intrinsics, which nobody here uses: 20 to 75 seconds.
    """
    context = ms.TuneContext.__new__(ms.TuneContext)
    context.__init_handle_by_constructor__(
        ms._ffi_api.TuneContext, mod, target, generator, strategy, "main", 1,
        1 + seed % (2**31 - 2), _discard,
    )  # fmt: skip
    ms._ffi_api.TuneContextInitialize(context)
    return context


def _discard(level: int, filename: str, line: int, message: str) -> None:
    """A logger of meta-schedule's that keeps nothing."""


def _place(point: Point, values: dict[str, int | str]) -> int | None:
    """Place of the option that a decision names; None where there is none.

    Options of one choice may consist of different numbers: one whose numbers are among another's is not that one.
    """
    inside = f"{point.name}."
    own = {k: v for k, v in values.items() if k == point.name or k.startswith(inside)}
    for number, option in enumerate(point.options):
        if len(option) == len(own) and all(own.get(name) == value for name, value in option):
            return number
    return None


def _design(sch: s_tir.Schedule, space: Space, places: Sequence[int]) -> s_tir.Schedule:
    """Write a template's choices into a trace."""
    root = sch.get_sblock("root")
    sch.annotate(root, _TEMPLATE, space.template)
    for point, place in zip(space.points, places, strict=True):
        count = len(point.options)
        chosen = sch.sample_categorical(list(range(count)), [1.0 / count] * count, decision=place)
        sch.annotate(root, _CHOICE + point.name, chosen)
    return sch


@functools.cache
def _classes() -> tuple[type, type]:
    """Python classes that meta-schedule calls; made on first use, because importing it takes time."""
    from tvm.ir.utils import derived_object

    @derived_object
    class Mutator(ms.mutator.PyMutator):
        """Moves one choice to an option that differs in little, or to any other."""

        def __init__(self, found: Sequence[Space]) -> None:
            super().__init__()
            self.spaces = found

        def _initialize_with_tune_context(self, context: Any) -> None:
            pass

        def apply(self, trace: Any, seed: int) -> Any:
            return _mutated(trace, self.spaces, random.Random(seed))

        def clone(self) -> Any:
            return Mutator(self.spaces)

    @derived_object
    class Ranking(ms.cost_model.PyCostModel):
        """Asks a function."""

        def __init__(self, rank: Any) -> None:
            super().__init__()
            self.rank = rank

        def load(self, path: str) -> None:
            pass

        def save(self, path: str) -> None:
            pass

        def update(self, context: Any, candidates: Any, results: Any) -> None:
            pass

        def predict(self, context: Any, candidates: Any) -> np.ndarray:
            return self.rank(candidates)

    return Mutator, Ranking


def _mutator(found: Sequence[Space]) -> Any:
    return _classes()[0](found)


def _ranking(rank: Any) -> Any:
    return _classes()[1](rank)


def _mutated(trace: Any, found: Sequence[Space], chance: random.Random) -> Any:
    """Another decision of one choice; None where there is none."""
    samples = [i for i in trace.insts if i.kind.name == "SampleCategorical"]
    notes = [i for i in trace.insts if i.kind.name == "Annotate"]
    template = next(str(i.inputs[1]) for i in notes if str(i.attrs[0]) == _TEMPLATE)
    space = next(s for s in found if s.template == template)
    movable = [n for n, point in enumerate(space.points) if len(point.options) > 1]
    if not movable:
        return None
    number = chance.choice(movable)
    old = int(trace.decisions[samples[number]])
    new = _neighbour(space.points[number], old, chance)
    return trace.with_decision(samples[number], new, remove_postproc=True)


def _neighbour(point: Point, old: int, chance: random.Random) -> int:
    """Another option: one that differs in one or two of its parts, a few ranks away, or any."""
    count, kind = len(point.options), chance.random()
    if kind < 0.6:
        here = point.options[old]
        start = chance.randrange(count)
        for step in range(count):
            other = (start + step) % count
            pairs = zip(here, point.options[other], strict=False)
            if other != old and sum(a != b for a, b in pairs) <= 2:
                return other
    if kind < 0.8:
        jump = chance.choice((-1, 1)) * (1 + int(chance.expovariate(0.25)))
        return (old + jump) % count if (old + jump) % count != old else (old + 1) % count
    return (old + chance.randrange(1, count)) % count
