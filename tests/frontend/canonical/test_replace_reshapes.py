"""ReplaceReshapes: one operator for every reshaping."""

from __future__ import annotations

from tvm.script import ir as I
from tvm.script import relax as R

from tvm_fusion.frontend.canonical import ReplaceReshapes


def test_flatten_squeeze_expand_dims(check_pass):
    @I.ir_module
    class Before:
        @R.function
        def main(x: R.Tensor((2, 1, 4), "float32")):
            with R.dataflow():
                a = R.squeeze(x, axis=[1])
                b = R.expand_dims(a, axis=[0])
                out = R.flatten(b)
                R.output(out)
            return out

    @I.ir_module
    class After:
        @R.function
        def main(x: R.Tensor((2, 1, 4), "float32")):
            with R.dataflow():
                a = R.reshape(x, R.shape([2, 4]))
                b = R.reshape(a, R.shape([1, 2, 4]))
                out = R.reshape(b, R.shape([8]))
                R.output(out)
            return out

    check_pass(ReplaceReshapes(), Before, After)


def test_unknown_shape_stays(check_pass):
    @I.ir_module
    class Before:
        @R.function
        def main(x: R.Tensor("float32", ndim=3)):
            with R.dataflow():
                out = R.flatten(x)
                R.output(out)
            return out

    check_pass(ReplaceReshapes(), Before)
