"""Care of work dirs: several made one, and what is slower thrown away."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable

from .journal import Journal
from .summary import load_summaries, save_summary
from .trials import NewerSchema, Trial, TrialSet, parse_line, ranked
from .work_dir import Place, WorkDir


def merge(sources: Iterable[WorkDir], target: WorkDir) -> tuple[int, int]:
    """Add the records of work dirs to another one, which may be new or one of them.

    Of a trial that several have (on one device), and of a model's summary, the latest counts.

    Parameters
    ----------
    sources : iterable of WorkDir
        Where they are; nothing there is changed.
    target : WorkDir
        Where they are added.

    Returns
    -------
    trials, records : int
        How many trials, and records of meta-schedule's, were new.

    Raises
    ------
    DatabaseError
        If a source holds no records, or a file cannot be read or written.
    """
    trials = records = 0
    for place in [place for source in sources for place in source.places()]:
        into = target.place(place.arch, place.dtype_policy, place.tvm)
        into.create()
        known = into.records()
        before = set(known)
        known.add(*place.records())
        trials += len(set(known) - before)
        records += into.meta_database().merge(place.meta_database())
        there = {summary.model: summary.date for summary in load_summaries(into.folder)}
        for summary in load_summaries(place.folder):
            if summary.date > there.get(summary.model, ""):
                save_summary(into.folder, summary)
    return trials, records


@dataclasses.dataclass(frozen=True)
class Pruned:
    """What was dropped.

    Attributes
    ----------
    trials, records : int
        Trials, and records of meta-schedule.
    damaged : int
        Lines that are neither, in either file.
    """

    trials: int
    records: int
    damaged: int = 0

    def __str__(self) -> str:
        lines = f", {self.damaged} damaged line{'s' * (self.damaged != 1)}" if self.damaged else ""
        trials = f"{self.trials} trial{'s' * (self.trials != 1)}"
        return f"{trials}{lines} and {self.records} records of meta-schedule"


def prune(place: Place, keep: int) -> Pruned:
    """Drop all but the best trials and records of each kernel, and damaged lines.

    Trials without a time are dropped too, and so are tried again by the next tuning. Lines of a
    later release stay.

    Parameters
    ----------
    place : Place
        The folder.
    keep : int
        How many to keep of each kernel, on each device.

    Returns
    -------
    Pruned
        How much was dropped.

    Raises
    ------
    DatabaseError
        If a file cannot be read or written; it is left as it was.
    """
    dropped = damaged = 0

    def best(lines: list[bytes]) -> list[bytes]:
        nonlocal dropped, damaged
        lines = list(filter(bytes.strip, lines))
        kept, damaged = _best(lines, keep)
        dropped = len(lines) - damaged - len(kept)
        return kept

    torn = Journal(place.folder / "trials.jsonl").rewrite(best)
    records, others = place.meta_database().prune(keep)
    return Pruned(dropped, records, damaged + torn + others)


def _best(lines: list[bytes], keep: int) -> tuple[list[bytes], int]:
    """The lines that ``prune`` keeps, in their order, and how many are damaged."""
    damaged = 0
    trials: dict[bytes, Trial] = {}
    newer: set[bytes] = set()
    for line in lines:
        try:
            trials[line] = Trial.from_dict(parse_line(line))
        except NewerSchema:
            newer.add(line)
        except ValueError:
            damaged += 1
    groups = collections.defaultdict(list)
    for trial in TrialSet(trials.values()):
        groups[trial.kernel, trial.arch, trial.device].append(trial)
    best = {trial for group in groups.values() for trial in ranked(group)[:keep]}
    kept = [line for line in dict.fromkeys(lines) if line in newer or trials.get(line) in best]
    return kept, damaged
