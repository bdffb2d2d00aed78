"""Attention with a sink: one more score in the softmax, which has no value."""

from __future__ import annotations

import numpy as np
import pytest
from tvm_fusion.schedules.cuda.attention.recognition import attention

from tvm_fusion.compat import relax, te
from tvm_fusion.guards.attention_tiles import AttentionTile
from tvm_fusion.testing.attention import (
    TOLERANCE,
    attention_function,
    emulate,
    error_of,
    expected,
    random_arrays,
    scores_of,
    sunk,
)

op = relax.op

#: One warp has all keys; warps share them.
TILES = [(32, 1, 2, 1, 2), (64, 1, 1, 2, 2), (32, 2, 2, 1, 2)]


def of(rows: int, keys: int) -> list[tuple[int, ...]]:
    return [(2, 3, rows, 32), *[(2, 3, keys, 32)] * 2]


def check(shapes, tile, want, dtype="float16", arrays=None, **attrs) -> None:
    """Compare one tile's kernel with float64."""
    arrays = arrays or random_arrays(shapes, dtype)
    func = attention_function(sunk, shapes, dtype, **attrs)
    found = emulate(func, AttentionTile(*tile), arrays)
    assert error_of(found, want(*arrays)) <= TOLERANCE[dtype]


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("shape", [(1, 3, 1, 1), (2, 3, 33, 1), (1, 1, 33, 1), (2, 1, 1, 1)])
def test_a_score_of_heads_or_rows(shape, tile) -> None:
    shapes = [*of(33, 70), shape]

    arrays = random_arrays(shapes)
    arrays[3] *= 3
    check(shapes, tile, lambda q, k, v, s: expected(q, k, v, sink=s), arrays=arrays)


@pytest.mark.parametrize("tile", TILES)
def test_numbers(tile) -> None:
    check(of(33, 70), tile, lambda q, k, v: expected(q, k, v, sink=0.0))
    check(of(33, 70), tile, lambda q, k, v: expected(q, k, v, sink=-1.5), score=-1.5)
    check(of(33, 70), tile, lambda q, k, v: expected(q, k, v, sink=0.0), "bfloat16")


@pytest.mark.parametrize("tile", TILES)
def test_a_share_of_the_largest(tile) -> None:
    def want(q, k, v):
        scores = q.astype("float64") @ k.astype("float64").swapaxes(-1, -2) * 0.125
        return expected(q, k, v, sink=scores.max(-1, keepdims=True) + np.log(2.0))

    check(of(33, 70), tile, want, share=2.0, counts=False)


@pytest.mark.parametrize("tile", TILES)
def test_sinks_far_above_and_below_every_score(tile) -> None:
    """Above, weights vanish; below, nothing changes; infinite ones as a softmax has it."""
    shapes = [*of(33, 70), (1, 3, 33, 1)]
    arrays = random_arrays(shapes)
    arrays[3][:] = np.array([-65504, -100, 40, 100, 65504, -np.inf, np.inf, np.nan], "float16")[
        np.arange(33) % 8, None
    ]

    def want(q, k, v, sink):
        with np.errstate(invalid="ignore"):
            out = expected(q, k, v, sink=sink)
        assert np.isnan(out).any() and not np.isnan(out).all()
        return out

    check(shapes, tile, want, arrays=arrays)


@pytest.mark.parametrize("tile", TILES)
def test_rows_without_keys_have_the_sink_alone(tile) -> None:
    shapes = [*of(33, 70), (1, 1, 33, 70), (1, 3, 1, 1)]
    arrays = random_arrays(shapes)
    arrays[3][:, :, [0, 20, 32]] = -np.inf
    arrays[3][:, :, 5, ::2] = -np.inf
    arrays[3][:, :, 7] = -65504

    def want(q, k, v, mask, sink):
        out = expected(q, k, v, mask, sink=sink)
        assert (out[:, :, [0, 20, 32]] == 0).all()
        return out

    check(shapes, tile, want, arrays=arrays, mask=True)


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("kind", [{"share": 1.0}, {"score": 0.0}])
def test_rows_without_keys_are_nan_where_the_largest_is_of_keys_alone(tile, kind) -> None:
    shapes = [*of(33, 70), (1, 1, 33, 70)]
    arrays = random_arrays(shapes)
    arrays[3][:, :, [0, 20, 32]] = -np.inf

    def want(q, k, v, mask):
        with np.errstate(invalid="ignore"):
            scores = q.astype("float64") @ k.astype("float64").swapaxes(-1, -2) * 0.125 + mask
        sink = scores.max(-1, keepdims=True) if "share" in kind else np.zeros((2, 3, 33, 1))
        sink[:, :, [0, 20, 32]] = np.nan
        return expected(q, k, v, mask, sink=sink)

    check(shapes, tile, want, arrays=arrays, counts=False, mask=True, **kind)


@pytest.mark.parametrize("tile", TILES)
def test_causal(tile) -> None:
    hidden = np.where(np.arange(70)[None] - np.arange(70)[:, None] <= 0, 0, -np.inf)
    shapes = [*of(70, 70), (1, 3, 1, 1)]

    def want(q, k, v, sink):
        return expected(q, k, v, hidden, sink=sink)

    check(shapes, tile, want, shift=0)
    form = attention(attention_function(sunk, shapes, shift=0))
    assert form.limit.shift == 0 and form.score is None and form.sink is not None


def written(extra):
    """A softmax that is written out, with something else in its sum."""

    def make(builder, q, k, v):
        def weights(scores):
            *row, keys = scores.shape
            key = te.reduce_axis((0, keys), "key")
            wide = lambda *i: scores(*i).astype("float32")  # noqa: E731
            most = te.compute(row, lambda *i: te.max(wide(*i, key), axis=key), name="most")
            powers = te.compute(scores.shape, lambda *i: te.exp(wide(*i) - most(*i[:-1])), name="e")
            total = te.compute(row, lambda *i: te.sum(powers(*i, key), axis=key), name="total")
            return te.compute(
                scores.shape,
                lambda *i: (powers(*i) / extra(total, most, i)).astype(scores.dtype),
                name="weights",
            )

        emit = builder.emit
        return emit(op.matmul(emit(builder.call_te(weights, scores_of(emit, q, k))), v))

    return make


@pytest.mark.parametrize(
    ("extra", "is_attention"),
    [
        (lambda total, most, i: total(*i[:-1]) + 1.0, True),
        (lambda total, most, i: total(*i[:-1]) + te.exp(most(*i[:-1])), False),
        (lambda total, most, i: total(*i[:-1]) * 2.0, False),
        (lambda total, most, i: total(*i[:-1]) + te.exp(0.5 - most(*i[:-1])), True),
        (lambda total, most, i: total(*i[:-1]) + te.exp(0.5 - 2.0 * most(*i[:-1])), False),
    ],
)
def test_other_sums_are_none(extra, is_attention) -> None:
    func = attention_function(written(extra), of(32, 32))
    assert (attention(func) is not None) is is_attention
