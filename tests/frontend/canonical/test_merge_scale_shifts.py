"""MergeScaleShifts: chains of constant operators become one multiplication and one addition."""

from __future__ import annotations

import numpy as np
from tvm.script import ir as I
from tvm.script import relax as R

from tvm_fusion.frontend.canonical import MergeScaleShifts


def test_a_long_chain(check_pass, operators):
    @I.ir_module
    class Before:
        @R.function
        def main(x: R.Tensor((2, 3), "float32")):
            with R.dataflow():
                a = R.multiply(R.const(2.0, "float32"), x)
                b = R.subtract(a, R.const(1.0, "float32"))
                c = R.multiply(b, R.const(0.5, "float32"))
                d = R.negative(c)
                e = R.subtract(R.const(3.0, "float32"), d)
                f = R.divide(e, R.const(4.0, "float32"))
                R.output(f)
            return f

    @I.ir_module
    class After:
        @R.function
        def main(x: R.Tensor((2, 3), "float32")):
            with R.dataflow():
                f1 = R.multiply(x, R.const(0.25, "float32"))
                f = R.add(f1, R.const(0.625, "float32"))
                R.output(f)
            return f

    result = check_pass(MergeScaleShifts(), Before, After)
    assert operators(result) == [("f", "multiply"), ("f", "add")]


def test_constants_move_to_the_right(check_pass, bound):
    @I.ir_module
    class Before:
        @R.function
        def main(x: R.Tensor((2, 3), "float32"), c: R.Tensor((3,), "float32")):
            with R.dataflow():
                a = R.add(c, x)
                b = R.nn.relu(a)
                out = R.subtract(b, c)
                R.output(out)
            return out

    @I.ir_module
    class After:
        @R.function
        def main(
            x: R.Tensor((2, 3), "float32"),
            c: R.Tensor((3,), "float32"),
            d: R.Tensor((3,), "float32"),
        ):
            with R.dataflow():
                a = R.add(x, c)
                b = R.nn.relu(a)
                out = R.add(b, d)
                R.output(out)
            return out

    c = np.arange(3, dtype="float32")
    check_pass(MergeScaleShifts(), bound(Before, c=c), bound(After, c=c, d=-c))


def test_what_must_stay(check_pass, bound):
    @I.ir_module
    class Before:
        @R.function
        def main(
            x: R.Tensor((1, 3), "float32"),
            n: R.Tensor((1, 3), "int32"),
            rows: R.Tensor((2, 1), "float32"),
        ):
            with R.dataflow():
                read_twice = R.multiply(x, R.const(2.0, "float32"))
                a = R.add(read_twice, R.const(1.0, "float32"))
                b = R.add(read_twice, R.const(2.0, "float32"))
                start2 = R.nn.relu(a)
                grown = R.add(start2, rows)  # two rows out of one
                c = R.multiply(grown, R.const(2.0, "float32"))
                integers = R.add(n, R.const(1, "int32"))
                d = R.multiply(integers, R.const(2, "int32"))
                start = R.nn.relu(b)
                big = R.multiply(start, R.const(1e30, "float32"))
                e = R.multiply(big, R.const(1e30, "float32"))  # infinite only when merged
                R.output(c, d, e)
            return (c, d, e)

    check_pass(MergeScaleShifts(), bound(Before, rows=np.ones((2, 1), "float32")))
