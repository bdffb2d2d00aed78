"""One kernel on its way: what it computes, what may be decided about it, and how far its tuning is."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from ..compat import Target, tirx
from ..schedules.registry import Space
from .allocation import Progress
from .cost_model import Candidate, CostModel
from .measure import KernelSource, RunResult
from .search import KernelSearch
from .trials import Trial

#: Candidates of a kernel's first batch.
FIRST = 8


@dataclasses.dataclass(frozen=True)
class NewKernel:
    """A kernel to tune.

    Attributes
    ----------
    func : tirx.PrimFunc
        Unscheduled function.
    operators : sequence of str
        What it computes.
    floor_us : float
        No kernel of it takes less.
    """

    func: tirx.PrimFunc
    operators: Sequence[str]
    floor_us: float = 0.0


class TunedKernel:
    """One kernel that is tuned.

    Attributes
    ----------
    digest : str
        Its name in records.
    func : tirx.PrimFunc
        The unscheduled function.
    operators : tuple of str
        What it computes, for people.
    progress : Progress
        How far it is.
    trials : int
        Candidates that were tried, now or before.
    problem : str
        Why it cannot be tuned, if so.
    default_us : float
        Time of what would be compiled without tuning.
    waiting : list of Candidate
        What is tried next: the default, what is said to be fastest, what the models rank first.
    """

    def __init__(
        self, new: NewKernel, source: KernelSource, target: Target, found: Sequence[Space],
        model: CostModel, batch: int, hint: Trial | None = None,
    ) -> None:  # fmt: skip
        self.digest, self.source, self.func = source.kernel, source, new.func
        self.operators = tuple(new.operators)
        seed = int(self.digest[:8], 16)
        self.search = KernelSearch(new.func, target, found, model, batch, seed)
        self.progress = Progress(0.0, new.floor_us)
        self.trials = 0
        self.problem = ""
        self.default_us = math.inf
        self._hint = self.search.candidate_of(hint.template, hint.decision) if hint else None
        self.waiting = self.first()
        self.codes: dict[str, RunResult] = {}

    def first(self, *, new: bool = False) -> list[Candidate]:
        """The first batch; with ``new``, without what was tried."""
        found, hint = self.search.first(FIRST, new=new), self._hint
        if hint is None or hint in found[:1] or (new and self.search.knows(hint)):
            return found
        others = [candidate for candidate in found if candidate != hint]
        place = 1 if others[:1] == self.search.first() else 0
        return [*others[:place], hint, *others[place:]]

    @property
    def opening(self) -> list[Candidate]:
        """Of what is waiting: what would be compiled without tuning, and what is said to be fastest."""
        early = [*self.search.first(), self._hint]
        return [candidate for candidate in self.waiting if candidate in early]

    @property
    def best_us(self) -> float:
        """Best time so far; infinite while there is none."""
        return min(self.progress.best, default=math.inf)
