"""SimplifyBias: one form of bias behind each kind of anchor."""

from __future__ import annotations

import numpy as np
from tvm.script import ir as I
from tvm.script import relax as R

from tvm_fusion.frontend.canonical import SimplifyBias

W = np.ones((2, 3, 1, 1), "float32")
M = np.ones((4, 2), "float32")


def test_forms(check_pass, bound):
    @I.ir_module
    class Before:
        @R.function
        def main(
            x: R.Tensor((1, 3, 4, 4), "float32"), y: R.Tensor((5, 4), "float32"), w: R.Tensor((2, 3, 1, 1), "float32"),
            m: R.Tensor((4, 2), "float32"), b: R.Tensor((2, 1, 1), "float32"), r: R.Tensor((1, 2), "float32"),
        ):  # fmt: skip
            with R.dataflow():
                conv = R.nn.conv2d(x, w)
                first = R.add(b, conv)
                conv2 = R.nn.conv2d(x, w)
                second = R.add(conv2, R.const(0.5, "float32"))
                dense = R.matmul(y, m)
                third = R.add(dense, r)
                R.output(first, second, third)
            return (first, second, third)

    @I.ir_module
    class After:
        @R.function
        def main(
            x: R.Tensor((1, 3, 4, 4), "float32"), y: R.Tensor((5, 4), "float32"), w: R.Tensor((2, 3, 1, 1), "float32"),
            m: R.Tensor((4, 2), "float32"), b: R.Tensor((1, 2, 1, 1), "float32"),
            c: R.Tensor((1, 2, 1, 1), "float32"), r: R.Tensor((2,), "float32"),
        ):  # fmt: skip
            with R.dataflow():
                conv = R.nn.conv2d(x, w)
                first = R.add(conv, b)
                conv2 = R.nn.conv2d(x, w)
                second = R.add(conv2, c)
                dense = R.matmul(y, m)
                third = R.add(dense, r)
                R.output(first, second, third)
            return (first, second, third)

    b, r = np.array([1, 2], "float32"), np.array([[3, 4]], "float32")
    after = bound(
        After, w=W, m=M, b=b.reshape(1, 2, 1, 1), c=np.full((1, 2, 1, 1), 0.5, "float32"), r=r[0]
    )
    check_pass(SimplifyBias(), bound(Before, w=W, m=M, b=b.reshape(2, 1, 1), r=r), after)


def test_other_additions_stay(check_pass, bound):
    @I.ir_module
    class Before:
        @R.function
        def main(
            x: R.Tensor((1, 3, 4, 4), "float32"), w: R.Tensor((2, 3, 1, 1), "float32"),
            plane: R.Tensor((1, 1, 4, 4), "float32"),
        ):  # fmt: skip
            with R.dataflow():
                conv = R.nn.conv2d(x, w)
                a = R.add(conv, plane)
                b = R.nn.relu(a)
                c = R.add(b, R.const(1.0, "float32"))
                out = R.add(c, a)
                R.output(out)
            return out

    check_pass(SimplifyBias(), bound(Before, w=W, plane=np.ones((1, 1, 4, 4), "float32")))
