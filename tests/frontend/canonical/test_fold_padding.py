"""FoldPadding: zeros around an image go into the convolution's own padding."""

from __future__ import annotations

from tvm.script import ir as I
from tvm.script import relax as R

from tvm_fusion.frontend.canonical import FoldPadding


def test_two_paddings(check_pass):
    @I.ir_module
    class Before:
        @R.function
        def main(x: R.Tensor((1, 3, 8, 8), "float32"), w: R.Tensor((4, 3, 3, 3), "float32")):
            with R.dataflow():
                a = R.nn.pad(x, [0, 0, 0, 0, 1, 2, 3, 4])
                b = R.nn.pad(a, [0, 0, 0, 0, 0, 1, 0, 1])
                out = R.nn.conv2d(b, w, padding=[1, 1, 1, 1])
                R.output(out)
            return out

    @I.ir_module
    class After:
        @R.function
        def main(x: R.Tensor((1, 3, 8, 8), "float32"), w: R.Tensor((4, 3, 3, 3), "float32")):
            with R.dataflow():
                out = R.nn.conv2d(x, w, padding=[2, 4, 4, 6])
                R.output(out)
            return out

    check_pass(FoldPadding(), Before, After)


def test_other_paddings_stay(check_pass):
    @I.ir_module
    class Before:
        @R.function
        def main(x: R.Tensor((1, 3, 8, 8), "float32"), w: R.Tensor((4, 3, 3, 3), "float32")):
            with R.dataflow():
                ones = R.nn.pad(x, [0, 0, 0, 0, 1, 1, 1, 1], pad_value=1.0)
                a = R.nn.conv2d(ones, w)
                mirrored = R.nn.pad(x, [0, 0, 0, 0, 1, 1, 1, 1], pad_mode="reflect")
                b = R.nn.conv2d(mirrored, w)
                batch = R.nn.pad(x, [0, 1, 0, 0, 0, 0, 0, 0])
                c = R.nn.conv2d(batch, w)
                R.output(a, b, c)
            return (a, b, c)

    check_pass(FoldPadding(), Before)
