"""WidenSums: float32 for running sums and for norms written out of primitives."""

import pytest
from tvm.script import ir as I
from tvm.script import relax as R

from tvm_fusion.frontend.canonical import WidenSums


def test_running_sum(check_pass):
    @I.ir_module
    class Before:
        @R.function
        def main(x: R.Tensor((4, 8), "float16")):
            with R.dataflow():
                total = R.cumsum(x, 1)
                R.output(total)
            return total

    @I.ir_module
    class After:
        @R.function
        def main(x: R.Tensor((4, 8), "float16")):
            with R.dataflow():
                total = R.astype(x, "float32")
                total_1 = R.cumsum(total, 1, dtype="float32")
                total_2 = R.astype(total_1, "float16")
                R.output(total_2)
            return total_2

    check_pass(WidenSums(), Before, After)


def test_root_mean_square(check_pass):
    @I.ir_module
    class Before:
        @R.function
        def main(x: R.Tensor((4, 8), "bfloat16")):
            with R.dataflow():
                square = R.multiply(x, x)
                mean = R.mean(square, [1], keepdims=True)
                shifted = R.add(mean, R.const(0.5, "bfloat16"))
                root = R.rsqrt(shifted)
                norm = R.multiply(x, root)
                R.output(norm)
            return norm

    @I.ir_module
    class After:
        @R.function
        def main(x: R.Tensor((4, 8), "bfloat16")):
            with R.dataflow():
                wide = R.astype(x, "float32")
                square = R.multiply(wide, wide)
                mean = R.mean(square, [1], keepdims=True)
                shifted = R.add(mean, R.const(0.5, "float32"))
                root = R.rsqrt(shifted)
                narrow = R.astype(root, "bfloat16")
                norm = R.multiply(x, narrow)
                R.output(norm)
            return norm

    check_pass(WidenSums(), Before, After)


@I.ir_module
class Float32:
    @R.function
    def main(x: R.Tensor((4, 8), "float32")):
        with R.dataflow():
            square = R.multiply(x, x)
            mean = R.mean(square, [1])
            total = R.cumsum(mean, 0)
            R.output(total)
        return total


@I.ir_module
class PlainMean:
    """Legalisation adds in float32 by itself."""

    @R.function
    def main(x: R.Tensor((4, 8), "float16")):
        with R.dataflow():
            relu = R.nn.relu(x)
            mean = R.mean(relu, [1])
            shifted = R.add(mean, R.const(0.5, "float16"))
            R.output(shifted)
        return shifted


@I.ir_module
class SharedProduct:
    """The product is needed in float16 all the same."""

    @R.function
    def main(x: R.Tensor((4, 8), "float16"), y: R.Tensor((4, 8), "float16")):
        with R.dataflow():
            product = R.multiply(x, y)
            mean = R.mean(product, [1], keepdims=True)
            scaled = R.multiply(product, mean)
            R.output(scaled)
        return scaled


@I.ir_module
class Replacing:
    @R.function
    def main(
        x: R.Tensor((4,), "float16"), i: R.Tensor((2,), "int64"), u: R.Tensor((2,), "float16")
    ):
        with R.dataflow():
            result = R.scatter_elements(x, i, u, 0, "update")
            R.output(result)
        return result


@pytest.mark.parametrize("mod", [Float32, PlainMean, SharedProduct, Replacing])
def test_left_alone(mod, check_pass):
    check_pass(WidenSums(), mod)
