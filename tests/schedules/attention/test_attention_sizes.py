"""Values of the kernels that are chosen for lengths, heads and widths, against float64, by emulation."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from tvm_fusion.schedules import schedule

from tvm_fusion.targets import parse_target
from tvm_fusion.testing import cuda_emulation
from tvm_fusion.testing.attention import (
    TOLERANCE,
    attention_function,
    causal,
    error_of,
    expected,
    grouped,
    plain,
    random_arrays,
)


def check(make, shapes, dtype: str = "float16", arch: str = "sm_90", bias=None, **attrs) -> None:
    """Schedule, emulate and compare."""
    target = parse_target(f"cuda:{arch}")
    made, name = schedule(attention_function(make, shapes, dtype, **attrs), target)
    assert name == "attention"
    arrays = random_arrays(shapes, dtype)
    bits = [a.view("uint16") if dtype == "bfloat16" else a for a in arrays]
    (found,) = cuda_emulation.run(made, bits, target)
    found = found.view(ml_dtypes.bfloat16) if dtype == "bfloat16" else found
    assert error_of(found.astype("float64"), expected(*arrays, bias)) <= TOLERANCE[dtype]


def of(rows: int, keys: int, width: int, heads: int = 1, shared: int | None = None):
    """Shapes of queries, keys and values."""
    return [(1, heads, rows, width), *[(1, shared or heads, keys, width)] * 2]


def below(rows: int, keys: int) -> np.ndarray:
    """0 where a causal mask lets a key through, minus infinity elsewhere."""
    return np.where(np.arange(keys)[None] <= np.arange(rows)[:, None], 0, -np.inf)


@pytest.mark.parametrize("length", [1, 7, 128, 129, 511, 512, 2048])
def test_lengths(length: int) -> None:
    check(plain, of(length, length, 64))


@pytest.mark.parametrize("length", [1, 7, 129, 511])
def test_causal_lengths(length: int) -> None:
    check(causal, of(length, length, 64), bias=below(length, length))


@pytest.mark.parametrize(("rows", "keys"), [(1, 2048), (7, 129), (129, 7), (512, 1)])
def test_queries_and_keys_of_different_lengths(rows: int, keys: int) -> None:
    check(plain, of(rows, keys, 64))


@pytest.mark.parametrize("width", [32, 40, 64, 72, 80, 96, 112, 128, 160, 192, 224, 256])
def test_widths(width: int) -> None:
    check(plain, of(40, 70, width))


@pytest.mark.parametrize("width", [64, 80, 256])
def test_widths_in_bfloat16(width: int) -> None:
    check(plain, of(40, 70, width), "bfloat16")


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize(
    ("make", "heads", "shared", "width"),
    [(plain, 12, None, 64), (plain, 32, None, 128), (grouped, 32, 8, 128), (grouped, 8, 1, 64)],
)
def test_heads(make, heads: int, shared: int | None, width: int, dtype: str) -> None:
    check(make, of(33, 48, width, heads, shared), dtype)


@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_89", "sm_100", "sm_120"])
def test_archs(arch: str) -> None:
    check(plain, of(129, 129, 96), arch=arch)
