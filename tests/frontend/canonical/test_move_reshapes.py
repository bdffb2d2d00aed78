"""MoveReshapes: linear layers of flattened tensors work on what was flattened."""

from __future__ import annotations

import numpy as np
import pytest
from tvm.script import ir as I
from tvm.script import relax as R

from tvm_fusion.compat import relax
from tvm_fusion.frontend.canonical import MoveReshapes
from tvm_fusion.testing.modules import ModuleBuilder


def test_two_layers_that_flatten_and_restore(check_pass):
    @I.ir_module
    class Before:
        @R.function
        def main(
            x: R.Tensor((2, 3, 4), "float32"),
            w: R.Tensor((4, 8), "float32"),
            b: R.Tensor((8,), "float32"),
            v: R.Tensor((8, 4), "float32"),
        ):
            with R.dataflow():
                flat = R.reshape(x, R.shape([6, 4]))
                first = R.add(R.matmul(flat, w), b)
                whole = R.reshape(first, R.shape([2, 3, 8]))
                act = R.nn.gelu(whole)
                again = R.reshape(act, R.shape([6, 8]))
                second = R.reshape(R.matmul(again, v), R.shape([2, 3, 4]))
                out = R.add(second, x)
                R.output(out)
            return out

    @I.ir_module
    class After:
        @R.function
        def main(
            x: R.Tensor((2, 3, 4), "float32"),
            w: R.Tensor((4, 8), "float32"),
            b: R.Tensor((8,), "float32"),
            v: R.Tensor((8, 4), "float32"),
        ):
            with R.dataflow():
                act = R.nn.gelu(R.add(R.matmul(x, w), b))
                out = R.add(R.matmul(act, v), x)
                R.output(out)
            return out

    check_pass(MoveReshapes(), Before, After)


def test_towards_the_producers_where_another_reshape_waits(check_pass):
    """The heads of attention are flattened into rows; behind the projection stands the residual."""

    @I.ir_module
    class Before:
        @R.function
        def main(
            heads: R.Tensor((1, 3, 2, 4), "float32"),
            x: R.Tensor((1, 3, 6), "float32"),
            w: R.Tensor((8, 6), "float32"),
            b: R.Tensor((6,), "float32"),
        ):
            with R.dataflow():
                flat = R.reshape(heads, R.shape([3, 8]))
                product = R.add(b, R.matmul(flat, w))
                whole = R.reshape(product, R.shape([1, 3, 6]))
                out = R.add(x, whole)
                R.output(out)
            return out

    @I.ir_module
    class After:
        @R.function
        def main(
            heads: R.Tensor((1, 3, 2, 4), "float32"),
            x: R.Tensor((1, 3, 6), "float32"),
            w: R.Tensor((8, 6), "float32"),
            b: R.Tensor((6,), "float32"),
        ):
            with R.dataflow():
                rows = R.reshape(heads, R.shape([1, 3, 8]))
                out = R.add(x, R.add(b, R.matmul(rows, w)))
                R.output(out)
            return out

    check_pass(MoveReshapes(), Before, After)


def test_a_lookup_takes_the_reshape_of_its_indices(check_pass):
    @I.ir_module
    class Before:
        @R.function
        def main(i: R.Tensor((2, 3), "int32"), table: R.Tensor((9, 4), "float32")):
            with R.dataflow():
                found = R.take(table, R.reshape(i, R.shape([6])), axis=0)
                out = R.reshape(found, R.shape([2, 3, 4]))
                R.output(out)
            return out

    @I.ir_module
    class After:
        @R.function
        def main(i: R.Tensor((2, 3), "int32"), table: R.Tensor((9, 4), "float32")):
            with R.dataflow():
                out = R.take(table, i, axis=0)
                R.output(out)
            return out

    check_pass(MoveReshapes(), Before, After)


def test_a_lookup_of_known_indices_takes_the_reshape_too(check_pass, bound):
    """The relative positions of Swin V2: a table that is computed, at places that are stored."""

    @I.ir_module
    class Before:
        @R.function
        def main(x: R.Tensor((3, 2), "float32"), i: R.Tensor((6,), "int64")):
            with R.dataflow():
                found = R.take(R.exp(x), i, axis=0)
                out = R.reshape(R.negative(found), R.shape([2, 3, 2]))
                R.output(out)
            return out

    @I.ir_module
    class After:
        @R.function
        def main(x: R.Tensor((3, 2), "float32"), i: R.Tensor((2, 3), "int64")):
            with R.dataflow():
                found = R.take(R.exp(x), i, axis=0)
                out = R.negative(found)
                R.output(out)
            return out

    places = np.array([0, 2, 1, 1, 0, 2])
    check_pass(MoveReshapes(), bound(Before, i=places), bound(After, i=places.reshape(2, 3)))


def test_equal_reshapes_of_one_tensor_become_one(check_pass):
    @I.ir_module
    class Before:
        @R.function
        def main(x: R.Tensor((2, 6), "float32")):
            with R.dataflow():
                a = R.reshape(x, R.shape([3, 4]))
                b = R.reshape(x, R.shape([3, 4]))
                out = R.concat((R.exp(a), R.sin(b)), axis=1)
                R.output(out)
            return out

    @I.ir_module
    class After:
        @R.function
        def main(x: R.Tensor((2, 6), "float32")):
            with R.dataflow():
                a = R.reshape(x, R.shape([3, 4]))
                out = R.concat((R.exp(a), R.sin(a)), axis=1)
                R.output(out)
            return out

    check_pass(MoveReshapes(), Before, After)


def test_norms_of_rows_commute(check_pass):
    @I.ir_module
    class Before:
        @R.function
        def main(
            x: R.Tensor((2, 3, 4), "float32"),
            g: R.Tensor((4,), "float32"),
            b: R.Tensor((4,), "float32"),
        ):
            with R.dataflow():
                y = R.nn.layer_norm(R.reshape(x, R.shape([6, 4])), g, b, axes=[1])
                out = R.reshape(y, R.shape([2, 3, 4]))
                R.output(out)
            return out

    @I.ir_module
    class After:
        @R.function
        def main(
            x: R.Tensor((2, 3, 4), "float32"),
            g: R.Tensor((4,), "float32"),
            b: R.Tensor((4,), "float32"),
        ):
            with R.dataflow():
                out = R.nn.layer_norm(x, g, b, axes=[-1])
                R.output(out)
            return out

    check_pass(MoveReshapes(), Before, After)


def last_axis_changes(b, x):
    return b.op("y", relax.op.exp(b.op("v", relax.op.reshape(x, (2, 12)))))


def sum_with_a_matrix(b, x):
    """The other operand has its own value for every row."""
    view = b.op("v", relax.op.reshape(x, (6, 4)))
    return b.op("y", relax.op.add(view, b.const(6, 4)))


def norm_over_rows(b, x):
    view = b.op("v", relax.op.reshape(x, (6, 4)))
    return b.op("y", relax.op.nn.layer_norm(view, b.const(6), b.const(6), axes=[0]))


def product_of_batches(b, x):
    view = b.op("v", relax.op.reshape(x, (1, 6, 4)))
    return b.op("y", relax.op.matmul(view, b.const(1, 4, 5)))


def softmax(b, x):
    return b.op("y", relax.op.nn.softmax(b.op("v", relax.op.reshape(x, (6, 4)))))


def result_that_is_read_as_rows_too(b, x):
    """Nothing waits in front of the product, so that its reshape stays."""
    product = b.op("p", relax.op.matmul(b.op("e", relax.op.nn.softmax(x)), b.const(4, 5)))
    return b.op("y", relax.op.nn.softmax(b.op("v", relax.op.reshape(product, (6, 5)))))


@pytest.mark.parametrize(
    "make",
    [last_axis_changes, sum_with_a_matrix, norm_over_rows, product_of_batches, softmax,
     result_that_is_read_as_rows_too],
)  # fmt: skip
def test_it_does_not_fire(make, check_pass):
    b = ModuleBuilder()
    check_pass(MoveReshapes(), b.finish(make(b, b.input("x", (2, 3, 4)))))


def test_a_sum_of_two_reshapes(run_module, operators):
    """Alike they join; of tensors of different shapes they stay where they are."""
    for shapes, moved in (((2, 3, 4), (2, 3, 4)), True), (((2, 3, 4), (3, 2, 4)), False):
        b = ModuleBuilder()
        views = [
            b.op(f"v{i}", relax.op.reshape(b.input(f"x{i}", shape), (6, 4)))
            for i, shape in enumerate(shapes)
        ]
        before = b.finish(b.op("y", relax.op.multiply(*views)))
        after = MoveReshapes()(before)
        assert operators(after)[0][1] == ("multiply" if moved else "reshape")
        arrays = [np.random.default_rng(i).standard_normal(s) for i, s in enumerate(shapes)]
        arrays = [array.astype("float32") for array in arrays]
        (got,), (wanted,) = run_module(after, *arrays), run_module(before, *arrays)
        np.testing.assert_array_equal(got, wanted)
