"""Which kernel gets the next trials: the one from which the model gains most.

The rule of Ansor's task scheduler (Zheng et al., OSDI 2020, section 6), in the terms of this package: what another
batch of a kernel is expected to save is estimated from what its last batches saved and from how far it is from its
floor, and is weighted by how often the model calls it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

#: Trials over all kernels when nobody says how many.
TRIALS = 1000

#: Batches over which the recent gain is averaged.
_WINDOW = 3

#: By how much the hope for a kernel shrinks with each batch that brings it nothing.
_DECAY = 0.5

#: Part of the way to the floor that a batch is hoped to bring.
_HOPE = 0.1

#: A kernel this close to its floor (relative) has nothing to gain.
NEAR_FLOOR = 1.03

#: A gain below this (relative) is none.
_GAIN = 0.005


@dataclasses.dataclass
class Progress:
    """What is known of one kernel's tuning.

    Attributes
    ----------
    weight : float
        How often the model calls it; less where it is only one that the model might call.
    floor_us : float
        No kernel of this function takes less, in microseconds; 0 where unknown.
    best : list of float
        Best time in microseconds after each batch; infinite while every candidate failed.
    exhausted : bool
        Whether nothing is left to try.
    """

    weight: float = 1.0
    floor_us: float = 0.0
    best: list[float] = dataclasses.field(default_factory=list)
    exhausted: bool = False

    @property
    def is_done(self) -> bool:
        """Whether another batch cannot pay."""
        if self.exhausted:
            return True
        return bool(self.best) and self.best[-1] <= NEAR_FLOOR * self.floor_us

    def expected_gain(self) -> float:
        """Microseconds per run of the model that another batch is expected to save; infinite before the first."""
        if self.is_done:
            return 0.0
        if not self.best or not math.isfinite(self.best[-1]):
            # Nothing works yet: first of all, but not forever.
            return math.inf if len(self.best) < _WINDOW else 0.0
        now = self.best[-1]
        recent = [b for b in self.best[-1 - _WINDOW :] if math.isfinite(b)]
        slope = (recent[0] - now) / max(1, len(recent) - 1)
        hope = _HOPE * (now - self.floor_us) * _DECAY ** self._idle()
        return self.weight * max(slope * _DECAY ** self._idle(), hope)

    def _idle(self) -> int:
        """Batches since the last gain."""
        count = 0
        for older, newer in zip(self.best[-2::-1], self.best[:0:-1], strict=True):
            if newer < older * (1 - _GAIN):
                break
            count += 1
        return count


def next_kernel(progress: Sequence[Progress], busy: Sequence[int] = ()) -> int | None:
    """Number of the kernel whose next batch pays most; the first of equal ones.

    Parameters
    ----------
    progress : sequence of Progress
        All kernels.
    busy : sequence of int
        Kernels whose results are awaited.

    Returns
    -------
    int or None
        None when none pays.
    """
    gains = [(-p.expected_gain(), i) for i, p in enumerate(progress) if i not in busy]
    gains = [(gain, i) for gain, i in gains if gain < 0]
    return min(gains)[1] if gains else None
