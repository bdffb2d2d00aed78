"""Functions that float16 lacks on CPUs: float32's, rounded once."""

from __future__ import annotations

import numpy as np
import pytest

import tvm_fusion
from tvm_fusion.compat import BlockBuilder, relax

#: Names of numpy's functions, where they are others.
NUMPY = {
    "acos": "arccos", "acosh": "arccosh", "asin": "arcsin", "asinh": "arcsinh", "atan": "arctan", "atanh": "arctanh",
    "atan2": "arctan2",
}  # fmt: skip
FUNCTIONS = (
    "acos", "acosh", "asin", "asinh", "atan", "atan2", "atanh", "cos", "cosh", "exp", "log", "sin", "sinh", "tan",
    "tanh",
)  # fmt: skip


@pytest.mark.parametrize("width", [3, 64], ids=["scalar", "vector"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_values_are_within_a_rounding(name, width):
    count = 2 if name == "atan2" else 1
    params = [relax.Var(f"x{i}", relax.TensorType((4, width), "float16")) for i in range(count)]
    builder = BlockBuilder()
    with builder.function("main", params):
        with builder.dataflow():
            output = builder.emit_output(getattr(relax.op, name)(*params))
        builder.emit_func_output(output)
    low, high = (1.0, 5.0) if name in ("acosh", "log") else (-0.9, 0.9)
    chance = np.random.default_rng(0)
    arrays = [chance.uniform(low, high, (4, width)).astype("float16") for _ in params]
    (found,) = tvm_fusion.compile(builder.get(), "llvm", verify=False)(*arrays)
    assert found.dtype == "float16"
    wanted = getattr(np, NUMPY.get(name, name))(*[a.astype("float64") for a in arrays])
    np.testing.assert_allclose(found.astype("float64"), wanted, rtol=2**-10, atol=1e-6)
