"""How far outputs are from the float64 reference, and how far they may be."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

#: Largest error of a result that counts: relative L2, and maximum over the largest reference value.
#: A value rounded to float16 is off by up to 2**-11; the rows chain up to about 15 roundings, and 2**-8
#: allows eight times one of them. Sums in float16 (instead of float32) are mostly over it.
#: float32 arithmetic, Winograd's algorithm included, stays under 1e-5, TF32 is near 3e-4:
#: 5e-5 tells "equal precision" from TF32. A whole network chains ten times as many roundings.
TOLERANCE = {"float16": (2.0**-8, 2.0**-6), "float32": (5e-5, 2e-4)}
NETWORK_FACTOR = 4.0

_CHUNK = 1 << 22


@dataclasses.dataclass(frozen=True)
class Error:
    """‖out - ref‖ / ‖ref‖ and max |out - ref| / max |ref|; NaN if any output is not finite."""

    l2: float
    max: float

    def to_dict(self) -> dict[str, float | None]:
        """As plain values; JSON has no NaN, so it becomes None."""
        values = {"l2": self.l2, "max": self.max}
        return {k: float(f"{v:.4g}") if np.isfinite(v) else None for k, v in values.items()}


def error_of(outputs: Sequence[Any], reference: Sequence[Any]) -> Error:
    """Compare arrays of any float dtype with float64 ones of the same shapes.

    Raises
    ------
    ValueError
        If the number of outputs, or a shape, is another.
    """
    if len(outputs) != len(reference):
        raise ValueError(f"{len(outputs)} outputs, expected {len(reference)}")
    wrong = total = largest = highest = 0.0
    for out, ref in _chunks(outputs, reference):
        difference = out.astype(np.float64) - ref
        if not np.isfinite(difference).all():
            return Error(float("nan"), float("nan"))
        wrong += float(np.square(difference).sum())
        total += float(np.square(ref).sum())
        largest = max(largest, float(np.abs(difference).max(initial=0.0)))
        highest = max(highest, float(np.abs(ref).max(initial=0.0)))
    if not total:
        raise ValueError("the reference is zero: no relative error")
    return Error(float(np.sqrt(wrong / total)), largest / highest)


def _chunks(
    outputs: Sequence[Any], reference: Sequence[Any]
) -> Iterable[tuple[np.ndarray, np.ndarray]]:
    for out, ref in zip(outputs, reference, strict=True):
        if tuple(out.shape) != tuple(ref.shape):
            raise ValueError(f"an output has shape {tuple(out.shape)}, expected {tuple(ref.shape)}")
        flat, right = np.asarray(out).reshape(-1), np.asarray(ref).reshape(-1)
        for start in range(0, flat.size, _CHUNK):
            yield flat[start : start + _CHUNK], right[start : start + _CHUNK]


def within(error: dict[str, float | None], dtype: str, network: bool = False) -> bool:
    """Whether an error (``Error.to_dict``) is within tolerance; NaN never is."""
    l2, largest = (t * (NETWORK_FACTOR if network else 1) for t in TOLERANCE[dtype])
    values = (error.get("l2"), error.get("max"))
    return None not in values and values[0] <= l2 and values[1] <= largest
