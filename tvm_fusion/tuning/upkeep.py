"""Care of work dirs: several made one, and what is slower thrown away."""

from __future__ import annotations

import collections
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


def prune(place: Place, keep: int) -> tuple[int, int]:
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
    trials, records : int
        How many lines were dropped.

    Raises
    ------
    DatabaseError
        If a file cannot be read or written; it is left as it was.
    """
    dropped = 0

    def best(lines: list[bytes]) -> list[bytes]:
        nonlocal dropped
        kept = _best(lines, keep)
        dropped = len(lines) - len(kept)
        return kept

    Journal(place.folder / "trials.jsonl").rewrite(best)
    return dropped, place.meta_database().prune(keep)


def _best(lines: list[bytes], keep: int) -> list[bytes]:
    """The lines that ``prune`` keeps, in their order."""
    trials: dict[bytes, Trial] = {}
    newer: set[bytes] = set()
    for line in lines:
        try:
            trials[line] = Trial.from_dict(parse_line(line))
        except NewerSchema:
            newer.add(line)
        except ValueError:
            continue
    groups = collections.defaultdict(list)
    for trial in TrialSet(trials.values()):
        groups[trial.kernel, trial.arch, trial.device].append(trial)
    best = {trial for group in groups.values() for trial in ranked(group)[:keep]}
    return [line for line in dict.fromkeys(lines) if line in newer or trials.get(line) in best]
