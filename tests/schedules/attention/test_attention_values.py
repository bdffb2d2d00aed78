"""Values of attention kernels against float64, by emulation."""

from __future__ import annotations

import numpy as np
import pytest

from tvm_fusion.guards.attention_tiles import AttentionTile
from tvm_fusion.testing.attention import (
    TOLERANCE,
    added,
    attention_function,
    causal,
    chosen_rows,
    emulate,
    error_of,
    expected,
    flattened,
    gated,
    grouped,
    heads,
    masked_rows,
    plain,
    random_arrays,
    scaled,
    undefined,
    zeroed,
)


def check(make, shapes, tile, want=expected, dtype="float16", arrays=None, **attrs) -> None:
    func = attention_function(make, shapes, dtype, **attrs)
    arrays = random_arrays(shapes, dtype) if arrays is None else arrays
    for backward in (False, True):
        found = emulate(func, AttentionTile(*tile), arrays, backward=backward)
        assert error_of(found, want(*arrays)) <= TOLERANCE[dtype]


def of(rows: int, keys: int, width: int, batch: tuple[int, ...] = (1, 2)) -> list[tuple[int, ...]]:
    """Shapes of queries, keys and values."""
    return [(*batch, rows, width), *[(*batch, keys, width)] * 2]


#: Shapes and tiles: keys, fragments, warps of rows, warps of keys, stages.
CASES = {
    "whole tiles": (of(32, 64, 32), (32, 1, 2, 1, 2)),
    "one row": (of(1, 7, 32), (32, 1, 1, 2, 2)),
    "one key": (of(7, 1, 32), (32, 1, 2, 1, 2)),
    "one of each": (of(1, 1, 32), (32, 1, 2, 1, 2)),
    "tails": (of(33, 70, 64), (32, 1, 2, 1, 3)),
    "two fragments": (of(70, 50, 64), (64, 2, 2, 1, 2)),
    "warps share keys": (of(33, 129, 64), (64, 1, 1, 4, 2)),
    "warps share both": (of(40, 100, 32), (64, 2, 2, 2, 3)),
    "a warp without keys": (of(16, 20, 32), (64, 1, 1, 4, 2)),
    "48 places": (of(20, 40, 48), (32, 1, 2, 1, 2)),
    "40 places": (of(20, 40, 40), (32, 1, 1, 2, 2)),
    "96 places, queries in shared memory": (of(33, 70, 96), (32, 2, 1, 2, 2)),
    "128 places": (of(16, 70, 128), (64, 1, 2, 1, 2)),
    "256 places": (of(20, 40, 256, (1,)), (32, 1, 2, 1, 2)),
}


@pytest.mark.parametrize("name", CASES)
def test_plain(name: str) -> None:
    check(plain, *CASES[name])


def test_bfloat16() -> None:
    check(plain, *CASES["tails"], dtype="bfloat16")
    check(plain, *CASES["warps share keys"], dtype="bfloat16")


def test_values_of_another_width() -> None:
    shapes = [(1, 2, 20, 32), (1, 2, 40, 32), (1, 2, 40, 64)]
    check(plain, shapes, (32, 1, 2, 1, 2))


@pytest.mark.parametrize("make", [flattened, plain])
def test_batches(make) -> None:
    check(make, of(20, 40, 32, (2, 3)), (32, 1, 2, 1, 2))


def test_heads_split_off_and_merged() -> None:
    def want(q, k, v):
        q, k, v = (a.reshape(*a.shape[:2], 4, 32).swapaxes(1, 2) for a in (q, k, v))
        return expected(q, k, v).swapaxes(1, 2).reshape(2, -1, 128)

    check(heads, [(2, 20, 128), *[(2, 40, 128)] * 2], (32, 1, 2, 1, 2), want)
    check(heads, [(2, 20, 128), *[(2, 40, 128)] * 2], (32, 1, 1, 2, 2), want)


def test_grouped_queries() -> None:
    check(grouped, [(2, 6, 20, 32), *[(2, 2, 40, 32)] * 2], (32, 1, 2, 1, 2))


def below(rows: int, keys: int, shift: int = 0) -> np.ndarray:
    """0 where a causal mask lets a key through, minus infinity elsewhere."""
    return np.where(np.arange(keys)[None] - np.arange(rows)[:, None] <= shift, 0, -np.inf)


@pytest.mark.parametrize("tile", [(32, 1, 2, 1, 2), (64, 1, 1, 2, 3), (32, 2, 2, 1, 2)])
@pytest.mark.parametrize(("rows", "keys", "shift"), [(100, 100, 0), (40, 100, 60), (100, 40, 0)])
def test_causal(tile, rows: int, keys: int, shift: int) -> None:
    def want(q, k, v):
        return expected(q, k, v, below(rows, keys, shift))

    check(causal, of(rows, keys, 32, (1, 1)), tile, want, shift=shift)


def test_rows_before_every_key_are_nan() -> None:
    def want(q, k, v):
        return expected(q, k, v, below(40, 40, -10))

    check(causal, of(40, 40, 32, (1, 1)), (32, 1, 2, 1, 2), want, shift=-10)


def masks(hidden: float, shape=(1, 1, 33, 40)) -> np.ndarray:
    """An additive mask of whose first three rows every place is hidden, of others some."""
    rng = np.random.default_rng(1)
    mask = np.where(rng.random(shape) < 0.3, hidden, rng.standard_normal(shape))
    mask[:, :, :3] = hidden
    return mask


@pytest.mark.parametrize("hidden", [-np.inf, -65504.0, -1e4])
@pytest.mark.parametrize("tile", [(32, 1, 2, 1, 2), (64, 1, 1, 4, 2)])
def test_masks_of_rows_and_keys(hidden: float, tile) -> None:
    shapes = [*of(33, 40, 32), (1, 1, 33, 40)]
    arrays = [*random_arrays(shapes[:3]), masks(hidden).astype("float16")]
    check(added, shapes, tile, arrays=arrays)


def test_lowest_bfloat16_masks_are_finite() -> None:
    """The lowest number times a factor would be infinite."""
    shapes = [*of(33, 40, 32), (1, 1, 33, 40)]
    arrays = random_arrays(shapes, "bfloat16")
    arrays[3] = masks(-3.38953139e38).astype(arrays[3].dtype)
    check(added, shapes, (32, 1, 2, 1, 2), dtype="bfloat16", arrays=arrays)


def test_masks_of_keys() -> None:
    shapes = [*of(20, 50, 32), (1, 1, 1, 50)]
    check(added, shapes, (32, 1, 2, 1, 2))
    shapes = [*of(20, 51, 32), (1, 2, 1, 51)]
    check(added, shapes, (32, 1, 1, 2, 2))


def test_rows_without_keys_become_zero_where_the_model_says_so() -> None:
    shapes = [*of(33, 40, 32), (1, 1, 33, 40)]
    arrays = [*random_arrays(shapes[:3]), masks(-np.inf).astype("float16")]

    def want(q, k, v, mask):
        return expected(q, k, v, mask, zero=True)

    check(zeroed, shapes, (32, 1, 2, 1, 2), want, arrays=arrays)
    check(zeroed, shapes, (64, 1, 1, 2, 2), want, arrays=arrays)


@pytest.mark.parametrize("tile", [(32, 1, 2, 1, 2), (64, 1, 1, 2, 2), (32, 2, 2, 1, 3)])
@pytest.mark.parametrize("make", [added, zeroed, undefined])
def test_rows_that_are_undefined(make, tile) -> None:
    """Rows of minus infinities, and those with one infinity or one NaN, early or late: each form has its own zeros."""
    shapes = [*of(33, 80, 32), (1, 1, 33, 80)]
    mask = np.random.default_rng(1).standard_normal(shapes[3])
    mask[..., [0, 20, 32], :] = -np.inf
    for row, place, value in ((1, 0, np.inf), (2, 79, np.inf), (5, 3, np.nan), (31, 79, np.nan)):
        mask[..., row, place] = value
    arrays = [*random_arrays(shapes[:3]), mask.astype("float16")]

    def want(q, k, v, mask):
        out = expected(q, k, v, mask, zero=make is undefined)
        if make is zeroed:
            out[..., [0, 20, 32], :] = 0.0
        assert np.isnan(out).any() != (make is undefined)
        return out

    check(make, shapes, tile, want, arrays=arrays)


@pytest.mark.parametrize("keys", [80, 70])
@pytest.mark.parametrize("tile", [(32, 1, 2, 1, 2), (64, 1, 1, 2, 2), (32, 2, 2, 1, 3)])
def test_rows_whose_mask_hides_every_key_become_zero(tile, keys: int) -> None:
    """Whatever their scores; rows of scores that are minus infinity, or NaN, for another reason stay NaN."""
    shapes = [*of(33, keys, 32), (1, 1, 33, keys)]
    q, k, v, _ = random_arrays(shapes)
    mask = masks(-np.inf, shapes[3]).astype("float16")
    mask[..., 32, :] = -np.inf
    q[0, 0, 1] = np.nan
    q[0, 0, 32] = np.inf
    q[0, 1, 5], q[0, 1, 6] = np.nan, -np.inf
    k[0, 1] = np.abs(k[0, 1])

    def want(q, k, v, mask):
        out = expected(q, k, v, mask)
        out[:, :, [0, 1, 2, 32]] = 0.0
        assert np.isnan(out[0, 1, 5:7]).all() and np.isnan(out).sum() == 2 * 32
        return out

    for swapped in (False, True):
        check(masked_rows, shapes, tile, want, arrays=[q, k, v, mask], swapped=swapped)


@pytest.mark.parametrize("shape", [(1, 1, 33, 1), (2, 1, 1, 1), (1, 2, 33, 1)])
def test_rows_that_an_input_chooses(shape) -> None:
    shapes = [*of(33, 70, 32, (2, 2)), shape]
    arrays = random_arrays(shapes)
    arrays[0][:, :, 3] = np.nan

    def want(q, k, v, kept):
        out = expected(q, k, v)
        return np.where(np.asarray(kept) > 0, out, 0.0)

    for swapped in (False, True):
        check(chosen_rows, shapes, (32, 1, 2, 1, 2), want, arrays=arrays, swapped=swapped)
    check(chosen_rows, shapes, (64, 1, 1, 2, 2), want, arrays=arrays)


@pytest.mark.parametrize(
    "factors",
    [
        pytest.param({"scale": -0.125}, id="negative"),
        pytest.param({"queries": -1.0, "shift": 0}, id="negative queries, causal"),
        pytest.param({"queries": -2.0, "keys": -0.5, "values": -3.0}, id="all"),
    ],
)
def test_factors(factors) -> None:
    """Scores of the opposite sign have their largest where sums are least."""
    values, scale = factors.get("values", 1.0), factors.get("scale", 0.125)
    scale *= factors.get("queries", 1.0) * factors.get("keys", 1.0)
    mask = below(33, 70, 0) if "shift" in factors else None

    def want(q, k, v):
        return expected(q, k, values * v.astype("float64"), mask, scale)

    shapes = of(33, 70, 32)
    check(scaled, shapes, (32, 1, 2, 1, 2), want, **factors)
    check(scaled, shapes, (64, 1, 1, 2, 2), want, **factors)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("tile", [(32, 1, 2, 1, 2), (64, 1, 1, 2, 2), (32, 2, 2, 1, 2)])
def test_gates(tile, dtype: str) -> None:
    """Also of rows behind the last whole fragment."""

    def want(q, k, v, gate):
        return expected(q, k, v) / (1 + np.exp(-gate.astype("float64")))

    check(gated, [*of(33, 70, 32), (1, 2, 33, 32)], tile, want, dtype=dtype)


def test_large_scores_do_not_overflow() -> None:
    shapes = of(20, 40, 32)
    arrays = [(20 * a).astype("float16") for a in random_arrays(shapes)]
    check(plain, shapes, (32, 1, 2, 1, 2), arrays=arrays)


@pytest.mark.slow
@pytest.mark.parametrize("length", [128, 129, 511, 512, 2048])
def test_lengths(length: int) -> None:
    check(plain, of(length, length, 64, (1, 1)), (64, 2, 4, 1, 2))
    check(plain, of(16, length, 64, (1, 1)), (128, 1, 1, 4, 2))
