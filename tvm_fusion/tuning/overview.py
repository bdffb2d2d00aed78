"""What a tuning run knows at the moment, as plain data for people: the live table, the log, the page."""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Mapping

from ..strategies.base import Proposal
from .session import Session
from .tuned_kernel import TunedKernel


@dataclasses.dataclass(frozen=True)
class KernelView:
    """One kernel; times in microseconds, infinite where there is none.

    Attributes
    ----------
    kernel : str
        Its digest.
    operators : tuple of str
        What it computes.
    strategy : str
        That of the group which it is; empty for one operator.
    depth : int
        Working operators on its longest path.
    calls : int
        How often the plan of the moment calls it.
    trials : int
        Candidates tried, now or before.
    best_us, untuned_us : float
        Its best time; that of what would be compiled without tuning.
    unfused_us : float
        Sum of the best times of its operators, each as a kernel of its own; infinite where one has
        none, and for a kernel of one operator.
    parts : tuple of (str, int)
        The kernels of these operators, and how often each.
    nbytes, floor_us : int, float
        What it moves, each tensor counted once; no kernel of it takes less than the floor.
    problem : str
        Why it cannot be tuned, if so.
    """

    kernel: str
    operators: tuple[str, ...]
    strategy: str = ""
    depth: int = 1
    calls: int = 0
    trials: int = 0
    best_us: float = math.inf
    untuned_us: float = math.inf
    unfused_us: float = math.inf
    parts: tuple[tuple[str, int], ...] = ()
    nbytes: int = 0
    floor_us: float = 0.0
    problem: str = ""

    @property
    def reference_us(self) -> float:
        """What the best time is compared with: unfused where that is known, else untuned."""
        return self.unfused_us if self.parts else self.untuned_us

    @property
    def cost_us(self) -> float:
        """Time in one run of the model; 0 where the plan does not call it."""
        return self.calls * self.best_us if self.calls else 0.0


@dataclasses.dataclass(frozen=True)
class Overview:
    """A whole run.

    Attributes
    ----------
    kernels : tuple of KernelView
        Those that cost the model most first, then those that the plan does not call.
    trials, new_trials, budget : int
        Candidates tried, now or before; those of this run; how many may be.
    seconds, limit : float
        Since the start, and how many may be (infinite without a limit).
    groups, launches, unfused_launches : int
        Of the plan of the moment; zero while there is none.
    model_us, unfused_us : float
        Sums over the kernels of that plan, and with one kernel per operator.
    disk_problem : str
        Why trials cannot be kept, if so.
    """

    kernels: tuple[KernelView, ...]
    trials: int
    new_trials: int
    budget: int
    seconds: float
    limit: float
    groups: int = 0
    launches: int = 0
    unfused_launches: int = 0
    model_us: float = math.inf
    unfused_us: float = math.inf
    disk_problem: str = ""

    @property
    def seconds_left(self) -> float:
        """Until the time or the trials are spent, at the pace so far; infinite while nothing is known of it."""
        pace = self.seconds / self.new_trials if self.new_trials else math.inf
        trials = max(0, self.budget - self.trials)
        return min(max(0.0, self.limit - self.seconds), trials * pace if trials else 0.0)


def overview(session: Session, seconds: float) -> Overview:
    """Describe a run after so many seconds."""
    views = kernel_views(session)
    plan, tuner = session.plan, session.tuner
    called = [view for view in views if view.calls]
    singles = single_kernels(session).values()
    return Overview(
        kernels=tuple(sorted(views, key=_urgency)),
        trials=tuner.trials,
        new_trials=tuner.new_trials,
        budget=session.budget.trials,
        seconds=seconds,
        limit=session.budget.seconds,
        groups=len(plan.groups) if plan else 0,
        launches=plan.totals.launches_after if plan else 0,
        unfused_launches=plan.totals.launches_before if plan else 0,
        model_us=sum(view.cost_us for view in called) if called else math.inf,
        unfused_us=sum(k.best_us for k in singles) if singles else math.inf,
        disk_problem=tuner.disk_problem,
    )


def _urgency(view: KernelView) -> tuple:
    return not view.calls, -view.cost_us, -view.trials, view.operators, view.kernel


def single_kernels(session: Session) -> dict[str, TunedKernel]:
    """The kernel of each operator alone, as far as there is one."""
    pairs = ((p, k) for p, k in session.times.asked if len(p.operators) == 1)
    return {p.operators[0]: k for p, k in pairs if k is not None}


def kernel_views(session: Session) -> list[KernelView]:
    """Describe every kernel of a run, in the order in which they came."""
    calls = {kernel.digest: count for kernel, count in session.calls}
    singles = single_kernels(session)
    found: dict[str, KernelView] = {}
    for proposal, kernel in session.times.asked:
        if kernel is None:
            continue
        view = _view(session, kernel, proposal, singles, calls.get(kernel.digest, 0))
        found.setdefault(kernel.digest, view)
    return list(found.values())


def _view(
    session: Session, kernel: TunedKernel, proposal: Proposal, singles: Mapping[str, TunedKernel],
    calls: int,
) -> KernelView:  # fmt: skip
    graph = session.graph
    working = [name for name in proposal.operators if graph.by_name[name].does_work]
    grouped = len(working) > 1
    parts = [singles[name] for name in working if name in singles] if grouped else []
    complete = grouped and len(parts) == len(working)
    return KernelView(
        kernel=kernel.digest,
        operators=kernel.operators,
        strategy=proposal.strategy if grouped else "",
        depth=proposal.depth if grouped else 1,
        calls=calls,
        trials=kernel.trials,
        best_us=kernel.best_us,
        untuned_us=kernel.default_us,
        unfused_us=sum(part.best_us for part in parts) if complete else math.inf,
        parts=tuple(collections.Counter(part.digest for part in parts).items()),
        nbytes=sum(graph.traffic(proposal.operators)),
        floor_us=kernel.progress.floor_us,
        problem=kernel.problem,
    )
