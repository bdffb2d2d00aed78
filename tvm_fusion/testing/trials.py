"""Trials for tests of what keeps and reads them."""

from __future__ import annotations

from typing import Any

from ..tuning.trials import Trial


def trial(kernel: str = "k0", rows: int = 64, us: float | None = 2.0, **fields: Any) -> Trial:
    """Make a trial of one sample, or of a kernel that spills.

    Parameters
    ----------
    kernel : str
        Its kernel.
    rows : int
        Its only decision.
    us : float or None
        Its time in microseconds; None for a kernel that spills.
    **fields
        Other fields of the trial.
    """
    known: dict[str, Any] = {
        "template": "matmul",
        "verdict": "spills" if us is None else "ok",
        "arch": "sm_90",
        "samples_us": () if us is None else (us,),
        "device": "a GPU",
        "date": "2026-01-01",
    }
    return Trial(kernel=kernel, decision=(("rows", rows),), **{**known, **fields})
