"""CopyOutputs: a model that only returns its inputs keeps one operator an output."""

from __future__ import annotations

import numpy as np
import pytest
from tvm.script import ir as I
from tvm.script import relax as R

import tvm_fusion
from tvm_fusion.errors import InvalidModelError
from tvm_fusion.frontend.canonical import CopyOutputs, canonicalize


@I.ir_module
class Nothing:
    @R.function
    def main(x: R.Tensor((2, 3), "float32"), y: R.Tensor((4,), "int64")):
        return (y, x, R.const(1.0, "float32"))


def test_inputs_are_reshaped_to_their_own_shape(check_pass):
    @I.ir_module
    class After:
        @R.function
        def main(x: R.Tensor((2, 3), "float32"), y: R.Tensor((4,), "int64")):
            with R.dataflow():
                first = R.reshape(y, (4,))
                second = R.reshape(x, (2, 3))
                R.output(first, second)
            return (first, second, R.const(1.0, "float32"))

    check_pass(CopyOutputs(), Nothing, After)


def test_a_function_with_operators_stays(check_pass):
    @I.ir_module
    class Module:
        @R.function
        def main(x: R.Tensor((2, 3), "float32")):
            with R.dataflow():
                y = R.nn.relu(x)
                R.output(y)
            return (x, y)

    check_pass(CopyOutputs(), Module, Module)


def test_outputs_that_are_constants_only_are_refused():
    @I.ir_module
    class Constant:
        @R.function
        def main(x: R.Tensor((2, 3), "float32")):
            return R.const(1.0, "float32")

    with pytest.raises(InvalidModelError, match="computes nothing"):
        canonicalize(Constant)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_such_models_run(dtype):
    @I.ir_module
    class Transposed:
        @R.function
        def main(x: R.Tensor((1, 3, 1), "float32")):
            with R.dataflow():
                y = R.permute_dims(x, (2, 1, 0))
                R.output(y)
            return y

    mod = canonicalize(Transposed, dtype)
    assert tvm_fusion.plan(mod, "llvm") == tvm_fusion.plan(canonicalize(mod), "llvm")
    x = np.array([1.5, -2, 3], dtype).reshape(1, 3, 1)
    compiled = tvm_fusion.compile(mod, "llvm")
    (result,) = compiled(x)
    x[:] = 0
    np.testing.assert_array_equal(result.ravel(), np.array([1.5, -2, 3], dtype))
