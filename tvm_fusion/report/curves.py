"""Best-so-far curves: one small plot a kernel, in pixels."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from ..tuning.trials import Trial
from .words import microseconds

#: Pixels of a plot, and of its margins (left, top, right, bottom).
WIDTH, HEIGHT = 300, 130
MARGIN = (46, 10, 12, 22)

#: Least ratio of the ends of the axis of times, so that noise does not fill a plot.
_LEAST_SPAN = 1.2


@dataclasses.dataclass(frozen=True)
class Level:
    """A time to compare with, as a line across the plot."""

    name: str
    y: float
    microseconds: float


@dataclasses.dataclass(frozen=True)
class Curve:
    """The trials of a kernel in their order.

    Attributes
    ----------
    dots : tuple of (float, float, str)
        Each right trial: place and title.
    failed : tuple of (float, str)
        Each other one: place along the axis of trials, and title.
    line : str
        Best so far, as a path; empty where no trial is right.
    levels : tuple of Level
        Times to compare with.
    y_ticks : tuple of (float, str)
        Ends of the axis of times.
    count : int
        Trials.
    """

    dots: tuple[tuple[float, float, str], ...]
    failed: tuple[tuple[float, str], ...]
    line: str
    levels: tuple[Level, ...]
    y_ticks: tuple[tuple[float, str], ...]
    count: int


def build_curve(trials: Sequence[Trial], references: Sequence[tuple[str, float]]) -> Curve:
    """Draw the trials of one kernel.

    Parameters
    ----------
    trials : sequence of Trial
        In the order in which they were measured.
    references : sequence of (str, float)
        Names and microseconds of times to compare with; those that are not finite, or are beyond
        the plot, are left out.
    """
    right = [t.microseconds for t in trials if t.verdict == "ok"]
    known = [(name, us) for name, us in references if math.isfinite(us) and us > 0]
    low, high = _ends(right, [us for _, us in known])
    x0, y0, x1, y1 = MARGIN[0], MARGIN[1], WIDTH - MARGIN[2], HEIGHT - MARGIN[3]
    step = (x1 - x0) / max(1, len(trials))

    def y_of(us: float) -> float:
        share = math.log(min(max(us, low), high) / low) / math.log(high / low)
        return round(y1 - share * (y1 - y0), 1)

    dots, failed, path, best = [], [], "", math.inf
    for number, trial in enumerate(trials):
        x = round(x0 + (number + 0.5) * step, 1)
        title = f"trial {number + 1}: {decision_text(trial)}"
        if trial.verdict != "ok":
            failed.append((x, f"{title}: {trial.verdict}"))
            continue
        us = trial.microseconds
        dots.append((x, y_of(us), f"{title}: {microseconds(us)} µs"))
        if us < best:
            best = us
            path += f"H{x}V{y_of(us)}" if path else f"M{x} {y_of(us)}"
    levels = [Level(name, y_of(us), us) for name, us in known if low <= us <= high]
    ticks = ((y_of(high), microseconds(high)), (y_of(low), microseconds(low))) if right else ()
    line = f"{path}H{x1}" if path else ""
    return Curve(tuple(dots), tuple(failed), line, tuple(levels), ticks, len(trials))


def _ends(right: Sequence[float], references: Sequence[float]) -> tuple[float, float]:
    """Ends of the axis of times: what is within a factor of four of the best, and of the others nothing."""
    if not right:
        return 1.0, 10.0
    best = min(right)
    shown = [us for us in [*right, *references] if best / 4 <= us <= 4 * best]
    low, high = min(shown), max(shown)
    wider = math.sqrt(max(1.0, _LEAST_SPAN * low / high)) * 1.05
    return low / wider, high * wider


def decision_text(trial: Trial) -> str:
    """What a trial tried, as ``matmul rows=64 columns=128``."""
    return " ".join([trial.template, *(f"{key}={value}" for key, value in trial.decision)])
