"""Views as steps in memory, against numpy."""

from __future__ import annotations

import numpy as np
import pytest

from tvm_fusion.strategies.strided import StridedView


def places(view: StridedView) -> np.ndarray:
    """Element number of every place of a view."""
    flat = np.zeros((), dtype=int)
    for dim in view.dims:
        for extent, step in dim:
            flat = flat[..., None] + step * np.arange(extent)
    return flat.reshape(view.shape)


def test_transposes_and_reshapes():
    whole = StridedView.of((2, 6, 4))
    numbers = np.arange(48).reshape(2, 6, 4)
    np.testing.assert_array_equal(places(whole), numbers)
    split = whole.reshaped((2, 2, 3, 4)).permuted((0, 2, 1, 3))
    np.testing.assert_array_equal(places(split), numbers.reshape(2, 2, 3, 4).transpose(0, 2, 1, 3))
    flat = split.reshaped((6, 8))
    np.testing.assert_array_equal(
        places(flat), numbers.reshape(2, 2, 3, 4).transpose(0, 2, 1, 3).reshape(6, 8)
    )
    assert split.step(1) == 4 and split.step(2) == 12
    assert flat.step(1) is None and whole.reshaped((12, 4)).step(0) == 4


def test_repetitions():
    heads = StridedView.of((2, 1, 4)).broadcast((2, 3, 4)).reshaped((6, 4))
    want = np.repeat(np.arange(8).reshape(2, 4), 3, axis=0)
    np.testing.assert_array_equal(places(heads), want)
    assert heads.step(0) is None and heads.step(1) == 1
    np.testing.assert_array_equal(places(StridedView.of((4,)).broadcast((2, 4))), [range(4)] * 2)


@pytest.mark.parametrize("shape", [(4, 9), (9, 4), (8, 4)])
def test_a_dimension_that_begins_within_a_step(shape):
    turned = StridedView.of((6, 6)).permuted((1, 0))
    assert turned.reshaped(shape) is None
