"""Which candidate to try next: gradient-boosted trees on what was measured, on top of the templates' own models.

The trees are shared by all kernels of a template. What they learn is how much slower than its kernel's best a
decision is, from the integers it consists of and from what the template's own model says of it. Where earlier trials
have corrected that model (`refit`), what it says is the corrected time; by that alone kernels are ranked of which
little is known.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Mapping, Sequence

import numpy as np
import xgboost

from ..schedules.decisions import Decision
from .refit import Correction

#: Records of a template from which trees are grown; below, the template's own model ranks.
LEAST_RECORDS = 24

#: Records of a kernel below which a corrected model ranks its candidates, where there is one.
FEW_RECORDS = 8

#: Rounds of boosting and depth of a tree: small, because records are few and noisy.
_ROUNDS, _DEPTH = 60, 4

#: What a candidate that failed counts as: so many times slower than the best.
_FAILED = 8.0


@dataclasses.dataclass(frozen=True)
class Candidate:
    """One way to write a kernel.

    Attributes
    ----------
    template : str
        The template.
    decision : Decision
        What it decides.
    predicted_us : float
        What the template's model predicts, in microseconds; a guess where it only ranks.
    rank : int
        Its place among the options, best first, of all choices together.
    """

    template: str
    decision: Decision
    predicted_us: float = 1.0
    rank: int = 0


class CostModel:
    """Ranks candidates of a kernel; learns from those that were measured.

    Parameters
    ----------
    corrections : mapping of str to Correction
        What earlier trials say of the templates' models; only those count that are of use.
    seed : int
        Makes the trees the same each time.
    """

    def __init__(self, corrections: Mapping[str, Correction] | None = None, seed: int = 0) -> None:
        self._seed = seed
        self._rows: dict[str, list[tuple[str, Candidate, float]]] = collections.defaultdict(list)
        self._trees: dict[str, tuple[list[str], xgboost.Booster]] = {}
        self._stale: set[str] = set()
        self.correct(corrections or {})

    def add(self, kernel: str, candidate: Candidate, microseconds: float) -> None:
        """Note what a candidate took; infinite where it failed."""
        self._rows[candidate.template].append((kernel, candidate, microseconds))
        self._stale.add(candidate.template)

    def correct(self, corrections: Mapping[str, Correction]) -> None:
        """Take other corrections."""
        self._corrections = {t: c for t, c in corrections.items() if c.used}
        self._stale.update(self._rows)

    def corrects(self, template: str) -> bool:
        """Whether a template's model is corrected."""
        return template in self._corrections

    def predicted(self, candidate: Candidate) -> float:
        """Predicted microseconds, corrected where earlier trials allow."""
        correction = self._corrections.get(candidate.template)
        if correction is None:
            return candidate.predicted_us
        return correction.microseconds(candidate.predicted_us, candidate.decision)

    def right(self) -> list[tuple[str, Candidate, float]]:
        """Kernel, candidate and microseconds of everything that was measured and right."""
        return [row for rows in self._rows.values() for row in rows if math.isfinite(row[2])]

    def scores(self, candidates: Sequence[Candidate], kernel: str = "") -> np.ndarray:
        """Rank candidates of one kernel.

        Parameters
        ----------
        candidates : sequence of Candidate
            Of any templates.
        kernel : str
            Whose they are.

        Returns
        -------
        ndarray of float64
            Positive; the larger, the faster.
        """
        logs = np.array([math.log(self.predicted(c)) for c in candidates])
        if len(logs):
            logs -= logs.min()
        for template in {c.template for c in candidates}:
            chosen = [i for i, c in enumerate(candidates) if c.template == template]
            few = sum(name == kernel for name, _, _ in self._rows[template]) < FEW_RECORDS
            trees = None if few and self.corrects(template) else self._grown(template)
            if trees is not None:
                names, booster = trees
                data = self._matrix([candidates[i] for i in chosen], names)
                logs[chosen] = booster.predict(xgboost.DMatrix(data, nthread=1))
        return np.exp(-logs.astype("float64"))

    def _grown(self, template: str) -> tuple[list[str], xgboost.Booster] | None:
        """The trees of a template, grown again if there are new records."""
        rows = self._rows.get(template, [])
        if len(rows) < LEAST_RECORDS:
            return None
        if template in self._stale:
            best: dict[str, float] = {}
            for kernel, _, time in rows:
                best[kernel] = min(time, best.get(kernel, math.inf))
            rows = [row for row in rows if best[row[0]] < math.inf]
            if len(rows) < LEAST_RECORDS:
                return None
            names = sorted({name for _, c, _ in rows for name, _ in c.decision})
            data = self._matrix([c for _, c, _ in rows], names)
            wanted = [math.log(min(time / best[k], _FAILED)) for k, _, time in rows]
            parameters = {
                "max_depth": _DEPTH, "eta": 0.15, "seed": self._seed, "nthread": 1,
                "objective": "reg:squarederror", "base_score": 0.3, "verbosity": 0,
            }  # fmt: skip
            matrix = xgboost.DMatrix(data, label=np.array(wanted), nthread=1)
            self._trees[template] = names, xgboost.train(parameters, matrix, _ROUNDS)
            self._stale.discard(template)
        return self._trees.get(template)

    def _matrix(self, candidates: Sequence[Candidate], names: Sequence[str]) -> np.ndarray:
        """A row of features for each candidate: what the models say, and the decision's integers."""
        rows = []
        for candidate in candidates:
            values = dict(candidate.decision)
            row = [math.log(self.predicted(candidate)), float(candidate.rank)]
            rows.append(row + [_number(values.get(name)) for name in names])
        return np.array(rows, dtype="float32").reshape(len(candidates), 2 + len(names))


def _number(value: int | str | None) -> float:
    """A feature: sizes matter by their ratio, words are only told apart."""
    if value is None:
        return math.nan
    if isinstance(value, str):
        return float(sum(value.encode()) % 251)
    return math.copysign(math.log2(1 + abs(value)), value)
