"""Constant causal masks become conditions; other masks stay."""

from __future__ import annotations

import numpy as np
import pytest

from tvm_fusion.compat import relax
from tvm_fusion.graph.causal import causal_mask

op = relax.op


def scores(rows=6, keys=8, dtype="float16"):
    return relax.Var("scores", relax.TensorType((2, 4, rows, keys), dtype))


def below(rows=6, keys=8, shift=0):
    return np.arange(keys)[None] - np.arange(rows)[:, None] <= shift


def added(mask):
    return causal_mask(op.add(scores(), relax.const(mask.astype("float16"))))


@pytest.mark.parametrize("shift", [0, 2])
@pytest.mark.parametrize("hidden", [-np.inf, -65504.0, -1e4])
def test_added_masks(shift, hidden):
    found = added(np.where(below(shift=shift), 0, hidden))
    assert found.shift == shift and found.hidden == np.float16(hidden)
    assert added(np.where(below(shift=shift), 0, hidden)[None, None]).shift == shift


@pytest.mark.parametrize(
    "mask",
    [
        pytest.param(np.where(below(), 0, -5.0), id="hides too little"),
        pytest.param(np.where(below(), 1, -np.inf), id="adds something"),
        pytest.param(np.where(below(shift=-1), 0, -np.inf), id="rows without keys"),
        pytest.param(np.where(below()[::-1], 0, -np.inf), id="another triangle"),
        pytest.param(np.zeros((6, 8)), id="hides nothing"),
        pytest.param(np.where(below(), 0, -np.inf)[:1], id="of keys alone"),
        pytest.param(np.stack([np.where(below(), 0, -np.inf)] * 4), id="of each head"),
    ],
)
def test_other_masks(mask):
    assert added(mask) is None


def test_selections():
    hidden, mask = relax.const(-1e4, "float16"), below()
    first = causal_mask(op.where(relax.const(mask), scores(), hidden))
    assert (first.shift, first.hidden) == (0, -1e4)
    assert causal_mask(op.where(relax.const(~mask), hidden, scores())).shift == 0
    assert causal_mask(op.where(relax.const(~mask), scores(), hidden)) is None
    assert causal_mask(op.where(relax.const(mask), scores(), relax.const(0.0, "float16"))) is None


def test_masks_that_are_no_constants():
    mask = relax.Var("mask", relax.TensorType((6, 8), "float16"))
    assert causal_mask(op.add(scores(), mask)) is None
    assert causal_mask(op.multiply(scores(), relax.const(np.zeros((6, 8), "float16")))) is None
