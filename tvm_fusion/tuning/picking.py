"""Which candidates of a ranked list make up a batch: mostly the best, and some that are unlike what was tried."""

from __future__ import annotations

import collections
import math
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from .cost_model import Candidate

#: Template, name and value of what a candidate decides.
_Choice = tuple[str, str, "int | str"]

#: Share of a batch that is picked for what it would teach.
_NEW = 0.4

#: Such a pick is predicted to take at most so many times what the best one takes.
_PLAUSIBLE = 2.5

#: A template of which so many candidates were tried is given up where its best takes `_HOPELESS` times the kernel's
#: best; earlier only where it takes `_FAR_OFF` times that.
_ENOUGH, _HOPELESS, _FAR_OFF = 8, 2.0, 4.0


def pick(
    candidates: Sequence[Candidate],
    scores: np.ndarray,
    tried: Mapping[Candidate, float],
    count: int,
) -> list[int]:
    """Choose a batch.

    Parameters
    ----------
    candidates : sequence of Candidate
        What was not tried.
    scores : ndarray of float64
        The larger, the faster the model takes a candidate to be: times are proportional to the inverse.
    tried : mapping of Candidate to float
        What was tried, with microseconds; infinite where it failed.
    count : int
        How many are chosen at most.

    Returns
    -------
    list of int
        Numbers of candidates. The first are those of the best scores; the others have choices that were tried least,
        as far as the model thinks that they may be good. Templates that are far slower come last of all.
    """
    hopeless = hopeless_templates(tried)
    order = sorted(
        range(len(candidates)), key=lambda i: (candidates[i].template in hopeless, -scores[i], i)
    )
    best = order[: count - int(_NEW * count)]
    chosen, rest = list(best), order[len(best) :]
    counts = collections.Counter(_choices(tried)) + collections.Counter(
        _choices(candidates[i] for i in best)
    )
    least = scores[order[0]] / _PLAUSIBLE if order else 0.0
    pool = [i for i in rest if scores[i] >= least and candidates[i].template not in hopeless]
    while pool and len(chosen) < count:
        fresh = max(pool, key=lambda i: (_novelty(candidates[i], counts), scores[i], -i))
        pool.remove(fresh)
        chosen.append(fresh)
        counts.update(_choices([candidates[fresh]]))
    taken = set(chosen)
    others = (i for i in rest if i not in taken)
    return chosen + [i for i, _ in zip(others, range(count - len(chosen)), strict=False)]


def hopeless_templates(tried: Mapping[Candidate, float]) -> set[str]:
    """Templates that are far slower than the best of a kernel."""
    times = collections.defaultdict(list)
    for candidate, time in tried.items():
        times[candidate.template].append(time)
    fastest = min((min(found) for found in times.values()), default=math.inf)
    if not math.isfinite(fastest):
        return set()
    return {
        template
        for template, found in times.items()
        if math.isfinite(min(found))
        and min(found) > fastest * (_HOPELESS if len(found) >= _ENOUGH else _FAR_OFF)
    }


def _choices(candidates: Iterable[Candidate]) -> list[_Choice]:
    return [(c.template, name, value) for c in candidates for name, value in c.decision]


def _novelty(candidate: Candidate, counts: Mapping[_Choice, int]) -> float:
    """How little a candidate's choices were tried: the sum of one over how often each was."""
    return sum(1 / (1 + counts[choice]) for choice in _choices([candidate]))
