"""UnstackReductions: a reduction over freshly stacked values becomes a chain."""

from __future__ import annotations

import numpy as np
import pytest
from tvm import relax
from tvm.script import ir as I
from tvm.script import relax as R

from tvm_fusion.frontend.canonical import UnstackReductions


def test_sum_of_stack(check_pass, operators):
    @I.ir_module
    class Before:
        @R.function
        def main(
            a: R.Tensor((2, 3), "float32"),
            b: R.Tensor((2, 3), "float32"),
            c: R.Tensor((2, 3), "float32"),
        ):
            with R.dataflow():
                stacked = R.stack((a, b, c), axis=0)
                total = R.sum(stacked, axis=[0])
                R.output(total)
            return total

    @I.ir_module
    class After:
        @R.function
        def main(
            a: R.Tensor((2, 3), "float32"),
            b: R.Tensor((2, 3), "float32"),
            c: R.Tensor((2, 3), "float32"),
        ):
            with R.dataflow():
                partial = R.add(a, b)
                total = R.add(partial, c)
                R.output(total)
            return total

    result = check_pass(UnstackReductions(), Before, After)
    assert operators(result) == [("total", "add"), ("total", "add")]


@pytest.mark.parametrize("reduction", ["sum", "mean", "max", "min"])
@pytest.mark.parametrize("keepdims", [False, True])
@pytest.mark.parametrize("join", ["stack", "concat"])
def test_every_form_computes_the_same(run_module, operators, reduction, keepdims, join):
    params = [relax.Var(f"x{i}", relax.TensorType((2, 1, 3), "float32")) for i in range(3)]
    builder = relax.BlockBuilder()
    with builder.function("main", params):
        with builder.dataflow():
            joined = builder.emit(getattr(relax.op, join)(params, axis=1), "joined")
            total = builder.emit_output(
                getattr(relax.op, reduction)(joined, axis=1, keepdims=keepdims), "total"
            )
        builder.emit_func_output(total)
    before = builder.get()
    after = UnstackReductions()(before)
    assert join not in dict(operators(after)).values()
    inputs = [
        np.random.default_rng(i).standard_normal((2, 1, 3), dtype="float32") for i in range(3)
    ]
    np.testing.assert_allclose(
        run_module(after, *inputs)[0], run_module(before, *inputs)[0], rtol=1e-6
    )


def test_other_axes_and_wide_pieces_stay(check_pass):
    @I.ir_module
    class Before:
        @R.function
        def main(a: R.Tensor((2, 3), "float32"), b: R.Tensor((2, 3), "float32")):
            with R.dataflow():
                stacked = R.stack((a, b), axis=0)
                across = R.sum(stacked, axis=[1])
                everything = R.sum(stacked, axis=[0, 1])
                wide = R.concat((a, b), axis=0)
                rows = R.sum(wide, axis=[0])
                R.output(across, everything, rows)
            return (across, everything, rows)

    check_pass(UnstackReductions(), Before)
