"""Attention as one function on a CPU."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from tvm_fusion.schedules import schedule

from tvm_fusion.testing.attention import (
    attention_function,
    causal,
    error_of,
    expected,
    grouped,
    plain,
    random_arrays,
    sunk,
)

TOLERANCE = {"float32": 1e-5, "float16": 2e-3}


def below(rows, keys):
    return np.where(np.arange(keys)[None] <= np.arange(rows)[:, None], 0, -np.inf)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize(
    ("make", "shapes", "bias"),
    [
        pytest.param(plain, [(1, 2, 17, 32), *[(1, 2, 23, 32)] * 2], None, id="plain"),
        pytest.param(causal, [(1, 2, 20, 32)] * 3, below(20, 20), id="causal"),
        pytest.param(grouped, [(1, 4, 9, 32), *[(1, 2, 9, 32)] * 2], None, id="grouped"),
    ],
)
def test_values(make, shapes, bias, dtype) -> None:
    arrays = random_arrays(shapes, dtype)
    found = run(make, shapes, dtype, arrays)
    assert error_of(found, expected(*arrays, bias)) <= TOLERANCE[dtype]


def run(make, shapes, dtype, arrays) -> np.ndarray:
    """Run a form as one scheduled function; its result in float64."""
    func = attention_function(make, shapes, dtype).with_attr("tvm_fusion.strategy", "vertical")
    made, name = schedule(func, tvm.target.Target({"kind": "llvm", "num-cores": 2}))
    assert name.startswith("cpu_")
    built = tvm.compile(
        tvm.IRModule({"kernel": made.with_attr("global_symbol", "kernel")}), target="llvm"
    )
    result = tvm.runtime.tensor(np.zeros(shapes[0], dtype))
    built["kernel"](*map(tvm.runtime.tensor, arrays), result)
    return result.numpy().astype("float64")


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_a_sink(dtype) -> None:
    shapes = [*[(1, 2, 17, 32)] * 3, (1, 2, 1, 1)]
    arrays = random_arrays(shapes, dtype)
    found = run(sunk, shapes, dtype, arrays)
    assert error_of(found, expected(*arrays[:3], sink=arrays[3])) <= TOLERANCE[dtype]
