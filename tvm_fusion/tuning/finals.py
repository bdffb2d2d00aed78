"""The last round of a kernel: what seems fastest, measured again beside what would be compiled without tuning.

Of hundreds of candidates the one that measured fastest is also the luckiest: buffers that happened to lie well, clocks
that happened to be high. Its advantage counts if it is still there when both are measured again, in turn. Else the
kernel stays what it would be without tuning.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from .cost_model import Candidate
from .flights import BuildsCandidates, MakesReferences
from .measure import BuildRequest, Built, KernelSource, Runner, RunRequest
from .trials import Trial, now, ranked

#: How many candidates are measured again beside the default one, and how often.
FINALISTS, ROUNDS = 2, 3

#: A gain below this (relative) over what would be compiled without tuning is none. On an H200 the fastest of some
#: hundred candidates took 0.9 to 3.5 % more than the default, in a benchmark of its own, for four of ten kernels.
LEAST_GAIN = 0.015


@dataclasses.dataclass(frozen=True)
class Finals:
    """Measures finalists.

    Attributes
    ----------
    builder, references, runner : BuildsCandidates, MakesReferences, Runner
        As of the tuner.
    """

    builder: BuildsCandidates
    references: MakesReferences
    runner: Runner

    def decide(
        self, source: KernelSource, first: Candidate | None, tried: Sequence[Trial]
    ) -> list[Trial]:
        """Decide between the fastest candidates of a kernel and its default.

        Parameters
        ----------
        source : KernelSource
            The kernel.
        first : Candidate or None
            What would be compiled without tuning.
        tried : sequence of Trial
            All trials of the kernel on this device.

        Returns
        -------
        list of Trial
            Trials to be recorded: those that were measured again, with the samples of all rounds, the winner among
            them `settled`. None where nothing was tried since the last time, or the default does not work.
        """
        right = ranked(tried)
        default = next((t for t in right if first and _is(t, first)), None)
        if default is None or _is_settled(tried):
            return []
        ahead = [t for t in sorted(right, key=_time) if is_gain(t, default)]
        again = self._again(source, [default, *ahead[:FINALISTS]]) if ahead else [default]
        if not again:
            return []
        winner, date = winner_of(again), now()
        changed = {t.trial: t for t in tried if t.settled} | {t.trial: t for t in again}
        return [
            dataclasses.replace(t, settled=t.trial == winner.trial, date=date)
            for t in changed.values()
        ]

    def _again(self, source: KernelSource, finalists: Sequence[Trial]) -> list[Trial]:
        """The finalists with the samples of all rounds; nothing where one fails now."""
        (inputs,) = self.references.submit([source])
        requests = [BuildRequest(source, t.template, t.decision) for t in finalists]
        built = [future.result() for future in self.builder.submit(requests)]
        made = inputs.result()
        if isinstance(made, str):
            return []
        runs = [RunRequest(b, made, source.kind) for b in built if isinstance(b, Built)]
        if len(runs) < len(finalists):
            return []
        samples: list[list[float]] = [[] for _ in finalists]
        for _ in range(ROUNDS):
            for result, found in zip(self.runner.run(runs), samples, strict=True):
                if result.verdict != "ok":
                    return []
                found += result.samples_us
        return [
            dataclasses.replace(t, samples_us=tuple(found))
            for t, found in zip(finalists, samples, strict=True)
        ]


def is_gain(trial: Trial, default: Trial) -> bool:
    """Whether a trial is faster than the default by more than chance."""
    noise = 2 * math.hypot(trial.error_us, default.error_us)
    gain = default.microseconds - trial.microseconds
    return gain > max(LEAST_GAIN * default.microseconds, noise)


def winner_of(finalists: Sequence[Trial]) -> Trial:
    """The fastest, if it is clearly faster than the first one, which is the default."""
    default, *others = finalists
    best = min(others, key=_time, default=default)
    return best if is_gain(best, default) else default


def _is(trial: Trial, candidate: Candidate) -> bool:
    return (trial.template, trial.decision) == (candidate.template, candidate.decision)


def _time(trial: Trial) -> tuple[float, str]:
    return trial.microseconds, trial.trial


def _is_settled(tried: Sequence[Trial]) -> bool:
    """Whether nothing was tried since the winner was found."""
    winner = next((t for t in tried if t.settled), None)
    return winner is not None and all(t.date <= winner.date for t in tried)
