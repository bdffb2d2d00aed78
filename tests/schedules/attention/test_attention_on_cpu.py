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
    func = attention_function(make, shapes, dtype).with_attr("tvm_fusion.strategy", "vertical")
    made, name = schedule(func, tvm.target.Target({"kind": "llvm", "num-cores": 2}))
    assert name.startswith("cpu_")
    built = tvm.compile(
        tvm.IRModule({"kernel": made.with_attr("global_symbol", "kernel")}), target="llvm"
    )
    arrays = random_arrays(shapes, dtype)
    result = tvm.runtime.tensor(np.zeros(shapes[0], dtype))
    built["kernel"](*map(tvm.runtime.tensor, arrays), result)
    found = result.numpy().astype("float64")
    assert error_of(found, expected(*arrays, bias)) <= TOLERANCE[dtype]
