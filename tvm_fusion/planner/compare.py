"""Comparing groups with the best plan of what lies inside them, by prediction and by the clock."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence, Set

from ..graph.dataflow import DataflowGraph
from ..guards import Verdict
from ..guards.base import ACCEPTED
from ..strategies.base import Proposal
from .candidates import Candidate, Measure, Timing
from .search import SearchResult, choose

#: Savings are compared in picoseconds, so that rounding errors cannot decide.
PER_MICROSECOND = 1_000_000

#: What makes a kernel: operators and options of a proposal.
Kernel = tuple[tuple[str, ...], tuple[tuple[str, str], ...]]

#: Refusals by prediction or by a rule of thumb: a clock may overrule them.
_PREDICTED = ("slower_predicted", "parts_better", "work_ratio")


def search(
    graph: DataflowGraph, candidates: Sequence[Candidate], kept: Set[tuple[str, ...]] = frozenset()
) -> SearchResult:
    """Choose among candidates, the first ones on a tie; ``kept`` ones stay even where they save nothing."""
    sets = [
        (
            [graph.index[name] for name in c.operators],
            max(round(c.saving * PER_MICROSECOND), int(c.operators in kept)),
        )
        for c in candidates
    ]
    return choose(graph.reachability, sets)


def no_better(
    graph: DataflowGraph, candidate: Candidate, parts: Sequence[Candidate], reason: str
) -> Verdict | None:
    """Compare a group with the best plan of what lies inside it.

    Parameters
    ----------
    graph : DataflowGraph
        The graph.
    candidate : Candidate
        The group.
    parts : sequence of Candidate
        Accepted candidates inside the group.
    reason : str
        The refusal's reason code.

    Returns
    -------
    Verdict or None
        A refusal with both times when the parts, fused on their own, are predicted at least as fast.
    """
    best = search(graph, parts).saving / PER_MICROSECOND if parts else 0.0
    if candidate.saving > best:
        return None
    before = candidate.before.microseconds
    numbers = {
        "predicted_us_parts": round(before - best, 3),
        "predicted_us_one_kernel": round(before - candidate.saving, 3),
        "members": len(candidate.proposal.members),
    }
    detail = "its parts, fused on their own, are predicted no slower than one kernel"
    return Verdict("unprofitable", reason, numbers, detail)


def kernel_of(proposal: Proposal) -> Kernel:
    """What makes its kernel: whatever strategy proposed it does not."""
    return proposal.operators, proposal.options


def single(name: str) -> Proposal:
    """One operator as a kernel of its own."""
    return Proposal("vertical", (name,), (), ((name,),))


class Clock:
    """Judges candidates of one graph by measured times.

    Parameters
    ----------
    graph : DataflowGraph
        The graph.
    """

    def __init__(self, graph: DataflowGraph) -> None:
        self.graph = graph
        self._known: dict[Kernel, Timing] = {}

    def judge(self, candidates: Sequence[Candidate], measure: Measure) -> list[Candidate]:
        """Candidates with their times.

        All times are asked for at once. Where they are known, the clock decides: one kernel must be faster than one
        per operator by more than the noise, whatever was predicted. What guards or the compiler refuse is left alone.
        """
        ours = [c for c in candidates if c.verdict.accepted or c.verdict.reason in _PREDICTED]
        wanted = {kernel_of(p): p for c in ours for p in (c.proposal, *self._alone(c.operators))}
        if not wanted:
            return list(candidates)
        answers = zip(wanted, measure(list(wanted.values())), strict=True)
        self._known.update((key, timing) for key, timing in answers if timing is not None)
        judged = {id(c) for c in ours}
        return [self._judged(c) if id(c) in judged else c for c in candidates]

    def _alone(self, operators: Iterable[str]) -> list[Proposal]:
        """Those of the operators that need a kernel, each as one."""
        return [single(name) for name in operators if self.graph.by_name[name].does_work]

    def _judged(self, candidate: Candidate) -> Candidate:
        before, after = self._sum(self._alone(candidate.operators)), self._sum([candidate.proposal])
        if before is None or after is None:
            return candidate
        timed = dataclasses.replace(
            candidate, measured_before=before.microseconds, measured_after=after.microseconds
        )
        noise = math.hypot(before.noise, after.noise)
        if before.microseconds > after.microseconds + noise:
            return dataclasses.replace(timed, verdict=ACCEPTED)
        numbers = _numbers(before, after, noise)
        detail = "one kernel was measured no faster than its parts"
        verdict = Verdict("unprofitable", "slower_measured", numbers, detail)
        return dataclasses.replace(timed, verdict=verdict)

    def _sum(self, proposals: Iterable[Proposal]) -> Timing | None:
        """Time of several kernels; None where one is unknown."""
        times = [self._known.get(kernel_of(p)) for p in proposals]
        known = [t for t in times if t is not None]
        if len(known) < len(times):
            return None
        # Independent errors add up by their squares.
        return Timing(sum(t.microseconds for t in known), math.hypot(*(t.noise for t in known)))

    def no_better(self, candidate: Candidate, parts: Sequence[Candidate]) -> Verdict | None:
        """A refusal if a group was measured no faster than the best plan of groups inside it, by more than the noise.

        Parameters
        ----------
        candidate : Candidate
            The group.
        parts : sequence of Candidate
            Accepted candidates; of those that lie inside the group and were measured, any may be taken.
        """
        inside = set(candidate.operators)
        smaller = [
            c
            for c in parts
            if c.measured_after is not None
            and len(c.operators) < len(inside)
            and inside.issuperset(c.operators)
        ]
        after = self._sum([candidate.proposal])
        if not smaller or after is None:
            return None
        best = [smaller[i] for i in search(self.graph, smaller).chosen]
        rest = inside.difference(*(c.operators for c in best))
        parted = self._sum([*(c.proposal for c in best), *self._alone(rest)])
        if parted is None:
            return None
        noise = math.hypot(parted.noise, after.noise)
        if parted.microseconds > after.microseconds + noise:
            return None
        before = self._sum(self._alone(candidate.operators)) or parted
        numbers = {
            **_numbers(before, after, noise),
            "measured_us_parts": round(parted.microseconds, 3),
            "parts": [list(c.operators) for c in best],
        }
        detail = "its parts, fused on their own, were measured no slower than one kernel"
        return Verdict("unprofitable", "slower_measured", numbers, detail)


def _numbers(before: Timing, after: Timing, noise: float) -> dict[str, object]:
    return {
        "measured_us_before": round(before.microseconds, 3),
        "measured_us_after": round(after.microseconds, 3),
        "noise_us": round(noise, 3),
    }
