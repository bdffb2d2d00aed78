"""RemoveNoOps: operators that compute nothing disappear, look-alikes stay."""

from __future__ import annotations

import numpy as np
from tvm.script import ir as I
from tvm.script import relax as R

from tvm_fusion.frontend.canonical import RemoveNoOps


def test_identities_go(check_pass):
    @I.ir_module
    class Before:
        @R.function
        def main(x: R.Tensor((2, 3, 4, 4), "float32")):
            with R.dataflow():
                a = R.reshape(x, R.shape([2, 3, 4, 4]))
                b = R.permute_dims(a, [0, 1, 2, 3])
                c = R.broadcast_to(b, R.shape([2, 3, 4, 4]))
                d = R.astype(c, "float32")
                e = R.strided_slice(d, axes=[1], begin=[0], end=[3])
                f = R.concat((e,), axis=1)
                g = R.nn.pad(f, [0, 0, 0, 0, 0, 0, 0, 0])
                h = R.nn.dropout(g, 0.5)
                i = h[0]
                out = R.nn.relu(i)
                R.output(out)
            return out

    @I.ir_module
    class After:
        @R.function
        def main(x: R.Tensor((2, 3, 4, 4), "float32")):
            with R.dataflow():
                out = R.nn.relu(x)
                R.output(out)
            return out

    check_pass(RemoveNoOps(), Before, After)


def test_neighbours_that_undo_each_other(check_pass):
    @I.ir_module
    class Before:
        @R.function
        def main(x: R.Tensor((2, 3, 4, 5), "float32")):
            with R.dataflow():
                a = R.permute_dims(x, [0, 2, 3, 1])
                b = R.permute_dims(a, [0, 3, 1, 2])
                c = R.nn.relu(b)
                d = R.permute_dims(c, [0, 2, 3, 1])
                e = R.permute_dims(d, [0, 2, 3, 1])
                f = R.reshape(e, R.shape([120]))
                out = R.reshape(f, R.shape([10, 12]))
                R.output(out)
            return out

    @I.ir_module
    class After:
        @R.function
        def main(x: R.Tensor((2, 3, 4, 5), "float32")):
            with R.dataflow():
                c = R.nn.relu(x)
                e = R.permute_dims(c, [0, 3, 1, 2])
                out = R.reshape(e, R.shape([10, 12]))
                R.output(out)
            return out

    check_pass(RemoveNoOps(), Before, After)


def test_neutral_constants_and_broadcasts(check_pass, bound):
    @I.ir_module
    class Before:
        @R.function
        def main(
            x: R.Tensor((2, 3), "float32"),
            y: R.Tensor((3,), "float32"),
            zeros: R.Tensor((3,), "float32"),
        ):
            with R.dataflow():
                a = R.multiply(x, R.const(1.0, "float32"))
                b = R.add(a, zeros)
                c = R.divide(b, R.const(1.0, "float32"))
                d = R.subtract(c, R.const(0.0, "float32"))
                e = R.broadcast_to(y, R.shape([2, 3]))
                out = R.add(d, e)
                R.output(out)
            return out

    @I.ir_module
    class After:
        @R.function
        def main(x: R.Tensor((2, 3), "float32"), y: R.Tensor((3,), "float32")):
            with R.dataflow():
                out = R.add(x, y)
                R.output(out)
            return out

    check_pass(RemoveNoOps(), bound(Before, zeros=np.zeros(3, "float32")), After)


def test_working_operators_stay(check_pass):
    @I.ir_module
    class Before:
        @R.function
        def main(x: R.Tensor((2, 3), "float32"), y: R.Tensor((1, 3), "float32")):
            with R.dataflow():
                a = R.strided_slice(
                    x, axes=[0], begin=[-1], end=[-3], strides=[-1]
                )  # reversed, of the same shape
                b = R.permute_dims(a, [1, 0])
                c = R.reshape(b, R.shape([2, 3]))
                d = R.astype(c, "float16")
                e = R.broadcast_to(y, R.shape([2, 3]))
                g = R.nn.pad(e, [0, 0, 1, 1])
                R.output(d, g)
            return (d, g)

    check_pass(RemoveNoOps(), Before)


def test_permutations_of_axes_of_one_place_are_reshapes(check_pass):
    @I.ir_module
    class Before:
        @R.function
        def main(x: R.Tensor((2, 1, 3, 4), "float32")):
            with R.dataflow():
                a = R.permute_dims(x, [0, 2, 1, 3])
                b = R.nn.relu(a)
                out = R.permute_dims(b, [2, 0, 1, 3])
                R.output(out)
            return out

    @I.ir_module
    class After:
        @R.function
        def main(x: R.Tensor((2, 1, 3, 4), "float32")):
            with R.dataflow():
                a = R.reshape(x, R.shape([2, 3, 1, 4]))
                b = R.nn.relu(a)
                out = R.reshape(b, R.shape([1, 2, 3, 4]))
                R.output(out)
            return out

    check_pass(RemoveNoOps(), Before, After)


def test_a_softmax_of_flattened_rows_is_one_of_the_tensor(check_pass, operators):
    @I.ir_module
    class Before:
        @R.function
        def main(x: R.Tensor((2, 3, 4), "float32")):
            with R.dataflow():
                a = R.reshape(x, R.shape([6, 4]))
                b = R.nn.softmax(a, axis=-1)
                c = R.reshape(b, R.shape([2, 3, 4]))
                d = R.reshape(c, R.shape([2, 12]))
                e = R.nn.softmax(d, axis=-1)
                f = R.reshape(e, R.shape([4, 6]))
                g = R.reshape(f, R.shape([8, 3]))
                h = R.nn.softmax(g, axis=-1)
                out = R.reshape(h, R.shape([4, 2, 3]))
                R.output(out)
            return out

    @I.ir_module
    class After:
        @R.function
        def main(x: R.Tensor((2, 3, 4), "float32")):
            with R.dataflow():
                c = R.nn.softmax(x, axis=-1)
                d = R.reshape(c, R.shape([2, 12]))
                e = R.nn.softmax(d, axis=-1)
                g = R.reshape(e, R.shape([4, 2, 3]))
                out = R.nn.softmax(g, axis=-1)
                R.output(out)
            return out

    check_pass(RemoveNoOps(), Before, After)
    # Nodes of the user's model keep their names.
    assert [n for n, kind in operators(RemoveNoOps()(Before)) if kind == "nn.softmax"] == [
        "b",
        "e",
        "h",
    ]
