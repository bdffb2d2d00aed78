"""BindWeights: weights that are parameters become constants."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from tvm.script import ir as I
from tvm.script import relax as R

from tvm_fusion.frontend.canonical import BindWeights


@I.ir_module
class Dense:
    """One input, two weights."""

    @R.function
    def main(
        x: R.Tensor((1, 2), "float32"), w: R.Tensor((2, 3), "float32"), b: R.Tensor((3,), "float32")
    ):
        R.func_attr({"num_input": 1})
        with R.dataflow():
            y = R.matmul(x, w)
            out = R.add(y, b)
            R.output(out)
        return out


W, B = np.ones((2, 3), "float32"), np.zeros(3, "float32")


def test_by_name_by_order_and_by_attribute(bound):
    expected = bound(Dense, w=W, b=B)
    attached = tvm.IRModule(
        {"main": Dense["main"].with_attr("params", [tvm.runtime.tensor(W), tvm.runtime.tensor(B)])}
    )
    for result in (
        BindWeights({"w": W, "b": B})(Dense),
        BindWeights([W, B])(Dense),
        BindWeights()(attached),
    ):
        tvm.ir.assert_structural_equal(result, expected)
        assert [param.name for param in result["main"].params] == ["x"]


def test_nothing_to_bind(bound, check_pass):
    check_pass(BindWeights(), bound(Dense, w=W, b=B))


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"w": W}, "no value given for the weight parameter 'b'"),
        ([W], "2 weight parameters, but 1"),
        ({"w": W.T, "b": B}, "'w' has type"),
        ({"w": W.astype("float64"), "b": B}, "'w' has type"),
    ],
)
def test_wrong_values(params, message):
    with pytest.raises(ValueError, match=message):
        BindWeights(params)(Dense)
