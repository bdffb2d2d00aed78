"""The templates' own cost models, corrected by what was measured: a few coefficients for each template.

A template predicts the time of each way to write a kernel. What was measured corrects that by

    t = scale · p^exponent · Π (1 + |v|)^power,

where ``p`` is the prediction and each ``v`` one of the integers of which the decision consists. Fitted are the
logarithms, by ridge regression towards the uncorrected model (exponent 1, all powers 0). Each kernel has a level of its
own, so that only the order within kernels counts; ``scale`` is what the kernels have in common. A correction is used
only where it ranks the candidates of kernels that it has not seen better than the template's model does (rank
correlation, Spearman 1904).

This module imports neither TVM nor anything that touches the disk.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from ..schedules.decisions import Decision

#: Kernels with enough trials from which a template is fitted; and trials of a kernel that are enough.
LEAST_KERNELS, LEAST_TRIALS = 3, 6

#: Kernels are left out in so many turns, fewer where there are fewer.
_FOLDS = 8

#: Strengths of the pull towards the uncorrected model that are tried, in shares of the trials. Kernels differ in more
#: than their trials show, so that none is weak.
_RIDGES = (0.1, 0.5, 2.0)

#: By how much the rank correlation must grow for a correction to be used; and in standard errors of that growth.
_GAIN, _ERRORS = 0.01, 1.0

#: A trial this many times slower than its kernel's best counts this much less: the order of bad ones does not matter.
_LEAST_WEIGHT = 0.1


#: Features and logarithms of times of one kernel's trials.
_Table = tuple[np.ndarray, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Row:
    """One right trial.

    Attributes
    ----------
    kernel, template : str
        What was tried.
    decision : Decision
        What the template decided.
    predicted_us, measured_us : float
        Microseconds.
    """

    kernel: str
    template: str
    decision: Decision
    predicted_us: float
    measured_us: float


@dataclasses.dataclass(frozen=True)
class Correction:
    """What was fitted for a template.

    Attributes
    ----------
    template : str
        Its name.
    scale, exponent : float
        See the module.
    powers : dict of str to float
        By the name of a decision's integer.
    kernels, trials : int
        What it was fitted from.
    before, after : float
        Mean rank correlation of predicted and measured times within kernels that a fit has not seen: without, and with
        correction.
    error : float
        Standard error of what the correction gains.
    """

    template: str
    scale: float
    exponent: float
    powers: Mapping[str, float]
    kernels: int
    trials: int
    before: float
    after: float
    error: float = 0.0

    @property
    def used(self) -> bool:
        """Whether it ranks kernels that it has not seen better than the template's own model."""
        return self.after - self.before > max(_GAIN, _ERRORS * self.error)

    def microseconds(self, predicted_us: float, decision: Decision) -> float:
        """The corrected time."""
        log = math.log(self.scale) + self.exponent * math.log(predicted_us)
        values = dict(decision)
        for name, power in self.powers.items():
            log += power * _log(values.get(name))
        return math.exp(min(log, 60.0))

    def to_dict(self) -> dict[str, Any]:
        """As plain values for JSON."""
        return {**dataclasses.asdict(self), "powers": dict(self.powers), "used": self.used}

    @classmethod
    def from_dict(cls, fields: Any) -> Correction:
        """Read what `to_dict` made.

        Raises
        ------
        ValueError
            If it is no correction.
        """
        try:
            made = cls(**{f.name: fields[f.name] for f in dataclasses.fields(cls)})
            numbers = [made.scale, made.exponent, made.before, made.after, made.error]
            numbers += made.powers.values()
            legal = all(type(n) in (int, float) and math.isfinite(n) for n in numbers)
            legal = legal and made.scale > 0 and isinstance(made.template, str)
            legal = legal and type(made.kernels) is int and type(made.trials) is int
        except (AttributeError, KeyError, TypeError) as error:
            raise ValueError(f"no correction: {error}") from error
        if not legal:
            raise ValueError("no correction")
        return made


def refit(rows: Iterable[Row]) -> dict[str, Correction]:
    """Fit a correction for each template of which enough kernels were measured.

    Parameters
    ----------
    rows : iterable of Row
        Right trials of one device.

    Returns
    -------
    dict of str to Correction
        By template, those that are of no use among them.
    """
    by_template: dict[str, dict[str, list[Row]]] = collections.defaultdict(dict)
    for row in rows:
        by_template[row.template].setdefault(row.kernel, []).append(row)
    found = {}
    for template, kernels in sorted(by_template.items()):
        # Sorted, so that neither the fit nor the folds depend on the order of the trials.
        enough = [
            sorted(kernels[k], key=_order) for k in sorted(kernels) if _is_telling(kernels[k])
        ]
        if len(enough) >= LEAST_KERNELS:
            found[template] = _fitted(template, enough)
    return found


def _order(row: Row) -> tuple:
    return row.decision, row.measured_us


def _is_telling(rows: Sequence[Row]) -> bool:
    return len(rows) >= LEAST_TRIALS and len({row.measured_us for row in rows}) > 1


def _fitted(template: str, kernels: Sequence[Sequence[Row]]) -> Correction:
    """Fit all kernels, and tell how well fits without a kernel rank its candidates."""
    names = _names(kernels)
    tables = [_table(rows, names) for rows in kernels]
    before, after = _held_out(tables, None)
    error = float(np.std(after - before, ddof=1) / math.sqrt(len(tables)))
    coefficients = _solve(tables, _best_ridge(tables))
    levels = [np.mean(times - features @ coefficients) for features, times in tables]
    return Correction(
        template, float(np.exp(np.mean(levels))), float(coefficients[0]),
        {name: float(c) for name, c in zip(names, coefficients[1:], strict=True)},
        len(kernels), sum(map(len, kernels)), float(before.mean()), float(after.mean()), error,
    )  # fmt: skip


def _held_out(tables: Sequence[_Table], ridge: float | None) -> tuple[np.ndarray, np.ndarray]:
    """Rank correlation of each kernel without and with correction, of kernels that the fit has not seen.

    Where no strength is given, each fit chooses its own without the kernels that are left out.
    """
    folds = min(_FOLDS, len(tables))
    before, after = [], []
    for fold in range(folds):
        seen = [t for i, t in enumerate(tables) if i % folds != fold]
        coefficients = _solve(seen, _best_ridge(seen) if ridge is None else ridge)
        for features, times in tables[fold::folds]:
            before.append(rank_correlation(features[:, 0], times))
            after.append(rank_correlation(features @ coefficients, times))
    return np.array(before), np.array(after)


def _best_ridge(tables: Sequence[_Table]) -> float:
    """The strength that ranks kernels best that are left out; the greatest of equal ones."""
    if len(tables) < LEAST_KERNELS:
        return _RIDGES[-1]
    return max(reversed(_RIDGES), key=lambda ridge: round(_held_out(tables, ridge)[1].mean(), 6))


def _names(kernels: Sequence[Sequence[Row]]) -> list[str]:
    """Integers that differ within some kernel; of the others nothing can be learnt."""
    found = set()
    for rows in kernels:
        values: dict[str, set] = collections.defaultdict(set)
        for row in rows:
            for name, value in row.decision:
                if not isinstance(value, str):
                    values[name].add(value)
        found |= {name for name, seen in values.items() if len(seen) > 1}
    return sorted(found)


def _table(rows: Sequence[Row], names: Sequence[str]) -> _Table:
    """Logarithms of predictions and values, a row for each trial, and of the measured times."""
    features = []
    for row in rows:
        values = dict(row.decision)
        features.append([math.log(row.predicted_us), *(_log(values.get(name)) for name in names)])
    return np.array(features), np.log([row.measured_us for row in rows])


def _log(value: int | str | None) -> float:
    return math.log1p(abs(value)) if isinstance(value, int) else 0.0


def _solve(tables: Sequence[_Table], ridge: float) -> np.ndarray:
    """Coefficients by weighted ridge regression within kernels, towards 1 for the prediction and 0 for the rest."""
    centred = []
    for features, times in tables:
        slower = np.exp(times.min() - times)
        weights = np.maximum(slower, _LEAST_WEIGHT)
        weights = weights / weights.sum()
        means = weights @ features, weights @ times
        # Each kernel counts by its number of trials, whatever their times.
        root = np.sqrt(len(times) * weights)
        centred.append((root[:, None] * (features - means[0]), root * (times - means[1])))
    left = np.concatenate([c[0] for c in centred])
    right = np.concatenate([c[1] for c in centred]) - left[:, 0]
    # In units of each column's spread, so that one strength fits all.
    spread = np.maximum((left**2).sum(axis=0) / len(left), 1e-12)
    gram = left.T @ left + np.diag(ridge * len(left) * spread)
    coefficients = np.linalg.solve(gram, left.T @ right)
    coefficients[0] += 1.0
    return coefficients


def rank_correlation(one: np.ndarray, other: np.ndarray) -> float:
    """Spearman's rank correlation; equal values share their mean rank, and a constant correlates with nothing."""
    ranks = [_ranks(np.asarray(values, "float64")) for values in (one, other)]
    ranks = [r - r.mean() for r in ranks]
    norm = math.sqrt(float((ranks[0] ** 2).sum() * (ranks[1] ** 2).sum()))
    return float(ranks[0] @ ranks[1]) / norm if norm else 0.0


def _ranks(values: np.ndarray) -> np.ndarray:
    """Ranks from 0, equal values the mean of theirs."""
    _, place, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts) - 1
    return (last - (counts - 1) / 2)[place]
