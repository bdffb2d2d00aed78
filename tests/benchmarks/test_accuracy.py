"""Errors against the reference, and what is within tolerance."""

from __future__ import annotations

import numpy as np
import pytest
from accuracy import Error, error_of, within


def test_error_of_a_known_difference() -> None:
    error = error_of([np.array([1.0, 2.0, 2.5])], [np.array([1.0, 2.0, 2.0])])
    assert error.l2 == pytest.approx(0.5 / 3.0)
    assert error.max == pytest.approx(0.25)


def test_every_output_counts() -> None:
    right = [np.ones(3), np.ones(3)]
    assert error_of([np.ones(3), np.ones(3)], right).l2 == 0
    assert error_of([np.ones(3), 2 * np.ones(3)], right).l2 == pytest.approx(np.sqrt(0.5))


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_finite_never_passes(bad: float) -> None:
    error = error_of([np.array([1.0, bad], "float16")], [np.array([1.0, 1.0])])
    assert error.to_dict() == {"l2": None, "max": None}
    assert not within(error.to_dict(), "float16")


def test_other_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match="shape"):
        error_of([np.ones((2, 3))], [np.ones((3, 2))])
    with pytest.raises(ValueError, match="outputs"):
        error_of([np.ones(2)], [np.ones(2), np.ones(2)])
    with pytest.raises(ValueError, match="zero"):
        error_of([np.ones(2)], [np.zeros(2)])


@pytest.mark.parametrize(
    ("dtype", "l2", "passes"),
    [
        ("float16", 2.0**-11, True),  # one rounding
        ("float16", 5e-3, False),
        ("float32", 1e-6, True),
        ("float32", 3e-4, False),  # TF32
    ],
)
def test_tolerance(dtype: str, l2: float, passes: bool) -> None:
    assert within(Error(l2, l2).to_dict(), dtype) is passes


def test_a_single_wrong_value_is_over_tolerance() -> None:
    right = np.ones(10**6)
    out = right.copy()
    out[3] = 1.1
    assert not within(error_of([out], [right]).to_dict(), "float16")
