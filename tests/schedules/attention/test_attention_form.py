"""Reading attention from a function's blocks: every form that models write, and what is none."""

from __future__ import annotations

import numpy as np
import pytest
from tvm import relax
from tvm_fusion.schedules import schedule
from tvm_fusion.schedules.cuda.attention.recognition import attention

from tvm_fusion.compat import te, tirx
from tvm_fusion.targets import parse_target
from tvm_fusion.testing.attention import (
    added,
    attention_function,
    causal,
    chosen_rows,
    flattened,
    grouped,
    heads,
    masked_rows,
    number,
    plain,
    scaled,
    scores_of,
    undefined,
    zeroed,
)

op = relax.op
FOUR = [(2, 4, 48, 32)] * 3


@pytest.mark.parametrize(
    ("make", "shapes", "scale"),
    [
        pytest.param(plain, FOUR, 0.125, id="plain"),
        pytest.param(flattened, FOUR, 0.125, id="flattened"),
        pytest.param(heads, [(2, 48, 128)] * 3, 0.125, id="heads"),
        pytest.param(grouped, [(2, 4, 48, 32), *[(2, 2, 48, 32)] * 2], 0.125, id="grouped"),
        pytest.param(plain, [(8, 48, 32)] * 3, 0.125, id="three axes"),
    ],
)
def test_scaled_forms(make, shapes, scale) -> None:
    form = attention(attention_function(make, shapes))
    assert form.score is None and form.limit is None and not form.zeroed
    assert form.scale == pytest.approx(scale, rel=2e-3)
    assert (form.row.extent, form.key.extent) == (48, 48)
    assert form.heads == 8
    assert form.query.width.extent == form.values.width.extent == 32


def test_masks_are_expressions() -> None:
    form = attention(attention_function(added, [*FOUR, (2, 1, 1, 48)]))
    assert form.score is not None and form.limit is None and not form.zeroed
    form = attention(attention_function(zeroed, [*FOUR, (2, 1, 48, 48)]))
    assert form.score is not None and form.zeroed == "masked"


@pytest.mark.parametrize("swapped", [False, True])
def test_weights_that_are_nan_become_zero(swapped: bool) -> None:
    shapes = [*FOUR, (2, 1, 48, 48)]
    assert attention(attention_function(undefined, shapes, swapped=swapped)).zeroed == "undefined"


@pytest.mark.parametrize("swapped", [False, True])
def test_rows_that_are_hidden_become_zero(swapped: bool) -> None:
    func = attention_function(masked_rows, [*FOUR, (2, 1, 48, 48)], swapped=swapped)
    assert attention(func).zeroed == "hidden"
    func = attention_function(chosen_rows, [*FOUR, (2, 1, 48, 1)], swapped=swapped)
    assert attention(func).zeroed == "hidden"


@pytest.mark.parametrize(
    ("make", "shape", "attrs"),
    [
        pytest.param(masked_rows, (2, 1, 48, 48), {"bound": 0.0}, id="another number"),
        pytest.param(masked_rows, (2, 1, 48, 48), {"factor": 0.5}, id="another mask"),
        pytest.param(chosen_rows, (2, 1, 48, 48), {}, id="keys"),
    ],
)
def test_conditions_that_hide_no_rows(make, shape, attrs) -> None:
    assert attention(attention_function(make, [*FOUR, shape], **attrs)) is None


def other_nan(builder, q, k, v):
    """Zeros where scores are NaN, which leaves the other weights of such a row NaN."""
    emit = builder.emit
    scores = scores_of(emit, q, k)
    weights = emit(op.nn.softmax(scores))
    zero = emit(op.full_like(weights, number(0, q)))
    return emit(op.matmul(emit(op.where(emit(op.isnan(scores)), zero, weights)), v))


def kept_nan(builder, q, k, v):
    """Zeros where weights are numbers."""
    emit = builder.emit
    weights = emit(op.nn.softmax(scores_of(emit, q, k)))
    zero = emit(op.full_like(weights, number(0, q)))
    return emit(op.matmul(emit(op.where(emit(op.isnan(weights)), weights, zero)), v))


def ones_for_nan(builder, q, k, v):
    emit = builder.emit
    weights = emit(op.nn.softmax(scores_of(emit, q, k)))
    one = emit(op.full_like(weights, number(1, q)))
    return emit(op.matmul(emit(op.where(emit(op.isnan(weights)), one, weights)), v))


@pytest.mark.parametrize("make", [other_nan, kept_nan, ones_for_nan])
def test_other_selections_are_none(make) -> None:
    assert attention(attention_function(make, [(2, 4, 32, 32)] * 3)) is None


@pytest.mark.parametrize("shift", [0, 3])
@pytest.mark.parametrize("hidden", [-np.inf, -1e4 - 1])
def test_a_causal_mask_is_a_limit(shift: int, hidden: float) -> None:
    form = attention(attention_function(causal, FOUR, shift=shift, hidden=hidden))
    assert form.limit.shift == shift and form.score is None


def clamped(builder, q, k, v, bound: float = -65504.0):
    """Scores with a causal mask, kept above a number."""
    emit = builder.emit

    def hide(scores):
        def element(*index):
            hidden = tirx.const(-65504.0, scores.dtype)
            return tirx.if_then_else(index[-1] <= index[-2], scores(*index), hidden)

        return te.compute(scores.shape, element, name="causal")

    scores = emit(builder.call_te(hide, scores_of(emit, q, k)))
    scores = emit(op.maximum(scores, number(bound, q)))
    return emit(op.matmul(emit(op.nn.softmax(scores)), v))


def test_a_causal_mask_that_is_clamped_is_a_limit() -> None:
    form = attention(attention_function(clamped, FOUR))
    assert form.limit.shift == 0 and form.score is None
    form = attention(attention_function(clamped, FOUR, bound=-1.0))
    assert form.limit is None and form.score is not None


def test_what_hides_too_little_is_no_limit() -> None:
    form = attention(attention_function(causal, FOUR, hidden=-10.0))
    assert form.limit is None and form.score is not None
    # Of rows without any key a finite mask leaves the mean.
    form = attention(attention_function(causal, FOUR, shift=-1, hidden=-2e4))
    assert form.limit is None and form.score is not None


def soft_cap(builder, q, k, v):
    emit = builder.emit
    capped = emit(op.tanh(scores_of(emit, q, k)))
    return emit(op.matmul(emit(op.nn.softmax(capped)), v))


def test_any_elementwise_score() -> None:
    assert attention(attention_function(soft_cap, FOUR)).score is not None


@pytest.mark.parametrize("scale", [-0.125, np.nan, np.inf])
def test_only_a_positive_factor_leaves_sums_in_order(scale: float) -> None:
    form = attention(attention_function(scaled, FOUR, scale=scale))
    assert form.score is not None and form.scale == 1.0
    form = attention(attention_function(scaled, FOUR, queries=scale))
    # Of queries times infinity sums are no multiple.
    assert form.scale == scale if np.isfinite(scale) else form is None


def test_scores_times_zero_are_scheduled_otherwise() -> None:
    """TVM's simplifier drops the product, so that the softmax depends on no input."""
    func = attention_function(scaled, FOUR, scale=0.0)
    assert attention(func) is None
    assert schedule(func, parse_target("cuda:sm_90"))[1] != "attention"


def test_values_may_have_a_factor() -> None:
    form = attention(attention_function(scaled, FOUR, values=-3.0))
    assert form.score is None and form.value_scale == -3.0
    assert attention(attention_function(scaled, FOUR, values=np.inf)) is None


def doubled_weights(builder, q, k, v):
    emit = builder.emit
    weights = emit(op.multiply(emit(op.nn.softmax(scores_of(emit, q, k))), number(2, q)))
    return emit(op.matmul(weights, v))


def turned_weights(builder, q, k, v):
    emit = builder.emit
    weights = emit(op.permute_dims(emit(op.nn.softmax(scores_of(emit, q, k))), (0, 1, 3, 2)))
    return emit(op.matmul(weights, v))


def other_axis(builder, q, k, v):
    emit = builder.emit
    return emit(op.matmul(emit(op.nn.softmax(scores_of(emit, q, k), axis=-2)), v))


def turned_keys(builder, q, k, v):
    emit = builder.emit
    return emit(op.matmul(emit(op.nn.softmax(emit(op.matmul(q, k)))), v))


@pytest.mark.parametrize("make", [doubled_weights, turned_weights, other_axis, turned_keys])
def test_what_is_none(make) -> None:
    assert attention(attention_function(make, [(2, 4, 32, 32)] * 3)) is None


def test_odd_rows_are_none() -> None:
    assert attention(attention_function(plain, [(2, 4, 48, 36)] * 3)) is None
