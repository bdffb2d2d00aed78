"""FoldConstants and CompactConstants: exact values, small constants."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from tvm import relax
from tvm.script import ir as I
from tvm.script import relax as R

from tvm_fusion.errors import InvalidModelError
from tvm_fusion.frontend.canonical import CompactConstants, FoldConstants


def constants(mod):
    """Return the tensor constants that ``main`` uses, in order."""
    found = []
    for block in mod["main"].body.blocks:
        for binding in block.bindings:
            args = [
                f
                for a in binding.value.args
                for f in (a.fields if isinstance(a, relax.Tuple) else [a])
            ]
            found += [
                a.value.numpy() for a in args if hasattr(a, "value") and hasattr(a.value, "numpy")
            ]
    return found


def test_shape_operators_of_a_weight(check_pass, bound):
    @I.ir_module
    class Before:
        @R.function
        def main(x: R.Tensor((1, 6), "float32"), w: R.Tensor((2, 2, 3), "float32")):
            with R.dataflow():
                a = R.reshape(w, R.shape([4, 3]))
                b = R.permute_dims(a, [1, 0])
                c = R.split(b, 2, axis=1)
                d = c[1]
                e = R.concat((d, d), axis=0)
                f = R.astype(e, "float16")
                g = R.astype(f, "float32")
                out = R.matmul(x, g)
                R.output(out)
            return out

    @I.ir_module
    class After:
        @R.function
        def main(x: R.Tensor((1, 6), "float32"), w: R.Tensor((6, 2), "float32")):
            with R.dataflow():
                out = R.matmul(x, w)
                R.output(out)
            return out

    w = np.random.default_rng(0).standard_normal((2, 2, 3), dtype="float32")
    half = w.reshape(4, 3).T[:, 2:].astype("float16").astype("float32")
    check_pass(FoldConstants(), bound(Before, w=w), bound(After, w=np.concatenate([half, half])))


def test_operators_that_take_only_a_shape(check_pass, bound):
    """TVM cannot lower an infinite ``full_like``; where the shape is symbolic it stays."""

    @I.ir_module
    class Before:
        @R.function
        def main(x: R.Tensor((2, 2), "float32"), y: R.Tensor(("n", 2), "float32")):
            with R.dataflow():
                a = R.full_like(x, R.const(float("-inf"), "float32"))
                b = R.matmul(x, a)
                c = R.matmul(b, R.zeros_like(x))
                d = R.matmul(c, R.ones_like(x))
                e = R.ones_like(y)
                R.output(d, e)
            return (d, e)

    @I.ir_module
    class After:
        @R.function
        def main(
            x: R.Tensor((2, 2), "float32"),
            y: R.Tensor(("n", 2), "float32"),
            i: R.Tensor((2, 2), "float32"),
            o: R.Tensor((2, 2), "float32"),
            k: R.Tensor((2, 2), "float32"),
        ):
            with R.dataflow():
                b = R.matmul(x, i)
                c = R.matmul(b, o)
                d = R.matmul(c, k)
                e = R.ones_like(y)
                R.output(d, e)
            return (d, e)

    values = {"i": -np.inf, "o": 0.0, "k": 1.0}
    weights = {name: np.full((2, 2), value, "float32") for name, value in values.items()}
    check_pass(FoldConstants(), bound(Before), bound(After, **weights))


def test_broadcast_weight_is_whole_and_broadcast_bias_is_small(check_pass, bound):
    @I.ir_module
    class Before:
        @R.function
        def main(x: R.Tensor((1, 2, 4, 4), "float32"), b: R.Tensor((2, 1, 1), "float32")):
            with R.dataflow():
                w = R.broadcast_to(R.const(0.5, "float32"), R.shape([2, 2, 1, 1]))
                conv = R.nn.conv2d(x, w)
                bias = R.broadcast_to(b, R.shape([1, 2, 4, 4]))
                out = R.add(conv, bias)
                R.output(out)
            return out

    @I.ir_module
    class After:
        @R.function
        def main(
            x: R.Tensor((1, 2, 4, 4), "float32"), w: R.Tensor((2, 2, 1, 1), "float32"),
            b: R.Tensor((1, 2, 1, 1), "float32"),
        ):  # fmt: skip
            with R.dataflow():
                conv = R.nn.conv2d(x, w)
                out = R.add(conv, b)
                R.output(out)
            return out

    b = np.array([1, 2], "float32").reshape(2, 1, 1)
    after = bound(After, w=np.full((2, 2, 1, 1), 0.5, "float32"), b=b[None])
    check_pass(FoldConstants(), bound(Before, b=b), after)


def test_arithmetic_is_exact(bound):
    @I.ir_module
    class Before:
        @R.function
        def main(
            x: R.Tensor((2,), "float32"), a: R.Tensor((2,), "float32"), b: R.Tensor((2,), "float32")
        ):
            with R.dataflow():
                c = R.divide(a, R.sqrt(b))
                out = R.multiply(x, c)
                R.output(out)
            return out

    from tvm_fusion.frontend.canonical import FlattenBindings

    a, b = np.array([1, 2], "float32"), np.array([3, 7], "float32")
    (value,) = constants(FoldConstants()(FlattenBindings()(bound(Before, a=a, b=b))))
    root = np.sqrt(b.astype("float64")).astype("float32")
    np.testing.assert_array_equal(value, (a.astype("float64") / root).astype("float32"))


def test_values_from_inputs_and_undefined_casts_stay(check_pass):
    @I.ir_module
    class Before:
        @R.function
        def main(x: R.Tensor((2,), "float32")):
            with R.dataflow():
                a = R.add(x, R.const(1.0, "float32"))
                b = R.astype(R.const(3e9, "float32"), "int32")
                R.output(a, b)
            return (a, b)

    check_pass(FoldConstants(), Before)


def test_a_huge_constant_is_refused():
    @I.ir_module
    class Before:
        @R.function
        def main(x: R.Tensor((1, 1048576), "float32")):
            with R.dataflow():
                w = R.broadcast_to(R.const(0.5, "float32"), R.shape([1048576, 1048576]))
                out = R.matmul(x, w)
                R.output(out)
            return out

    with pytest.raises(InvalidModelError, match="1048576"):
        FoldConstants()(Before)


def test_compaction_only_where_the_other_operand_has_the_extent(check_pass, bound):
    @I.ir_module
    class Before:
        @R.function
        def main(
            x: R.Tensor((1, 2, 3, 3), "float32"), y: R.Tensor((1, 2, 1, 3), "float32"),
            c: R.Tensor((1, 2, 3, 3), "float32"),
        ):  # fmt: skip
            with R.dataflow():
                a = R.add(x, c)
                b = R.add(y, c)
                R.output(a, b)
            return (a, b)

    @I.ir_module
    class After:
        @R.function
        def main(
            x: R.Tensor((1, 2, 3, 3), "float32"), y: R.Tensor((1, 2, 1, 3), "float32"),
            c: R.Tensor((1, 2, 1, 1), "float32"), d: R.Tensor((1, 2, 3, 1), "float32"),
        ):  # fmt: skip
            with R.dataflow():
                a = R.add(x, c)
                b = R.add(y, d)
                R.output(a, b)
            return (a, b)

    small = np.array([1, 2], "float32").reshape(1, 2, 1, 1)
    full = np.ascontiguousarray(np.broadcast_to(small, (1, 2, 3, 3)))
    tall = np.ascontiguousarray(full[..., :1])
    check_pass(CompactConstants(), bound(Before, c=full), bound(After, c=small, d=tall))


def test_varying_constant_is_not_compacted(check_pass, bound):
    @I.ir_module
    class Before:
        @R.function
        def main(x: R.Tensor((2, 3), "float32"), c: R.Tensor((2, 3), "float32")):
            with R.dataflow():
                out = R.add(x, c)
                R.output(out)
            return out

    check_pass(CompactConstants(), bound(Before, c=np.arange(6, dtype="float32").reshape(2, 3)))


def test_masks_that_a_model_computes(check_pass, bound):
    """Counted places, compared and combined: as transformers 5 finds out which tokens belong together."""

    @I.ir_module
    class Before:
        @R.function
        def main(x: R.Tensor((4, 4), "float32"), w: R.Tensor((4,), "int64")):
            with R.dataflow():
                a = R.cumsum(w, axis=0)
                b = R.reshape(a, R.shape([4, 1]))
                c = R.less_equal(w, b)
                d = R.astype(R.astype(c, "float32"), "bool")
                e = R.bitwise_and(c, d)
                f = R.where(e, R.const(0.0), R.const(-1.0))
                out = R.add(x, f)
                R.output(out)
            return out

    @I.ir_module
    class After:
        @R.function
        def main(x: R.Tensor((4, 4), "float32"), w: R.Tensor((4, 4), "float32")):
            with R.dataflow():
                out = R.add(x, w)
                R.output(out)
            return out

    w = np.array([1, 2, 3, 4], "int64")
    mask = np.where(w[None] <= np.cumsum(w)[:, None], 0.0, -1.0).astype("float32")
    check_pass(FoldConstants(), bound(Before, w=w), bound(After, w=mask))


def test_sums_of_floats_are_left(bound):
    @I.ir_module
    class Before:
        @R.function
        def main(x: R.Tensor((4,), "float32"), w: R.Tensor((4,), "float32")):
            with R.dataflow():
                a = R.cumsum(w, axis=0)
                out = R.add(x, a)
                R.output(out)
            return out

    after = FoldConstants()(bound(Before, w=np.ones(4, "float32")))
    assert "cumsum" in str(after)


def test_one_number_is_a_scalar(bound):
    @I.ir_module
    class Before:
        @R.function
        def main(x: R.Tensor((2, 4), "float32"), w: R.Tensor((1, 1), "float32")):
            with R.dataflow():
                out = R.multiply(x, w)
                R.output(out)
            return out

    (number,) = constants(CompactConstants()(bound(Before, w=np.full((1, 1), 3, "float32"))))
    assert number.shape == () and number == 3


def test_parts_beside_values_of_unknown_shape(bound):
    """Nothing says how small the constant may be there: it stays as it is."""

    @I.ir_module
    class Before:
        @R.function
        def main(x: R.Tensor(dtype="float32", ndim=2), w: R.Tensor((8,), "float32")):
            with R.dataflow():
                parts = R.split(w, 2, axis=0)
                part = parts[1]
                out = R.add(x, part)
                R.output(out)
            return out

    @I.ir_module
    class After:
        @R.function
        def main(x: R.Tensor(dtype="float32", ndim=2), w: R.Tensor((4,), "float32")):
            with R.dataflow():
                out = R.add(x, w)
                R.output(out)
            return out

    w = np.zeros(8, "float32")
    after = FoldConstants()(bound(Before, w=w))
    tvm.ir.assert_structural_equal(after, bound(After, w=w[4:]))


@pytest.mark.parametrize("dtype", ["int32", "int64", "int8", "uint8"])
def test_integers_are_folded_exactly(bound, dtype):
    """Of 64 bits as well, and the least one of a type, which has no positive twin; square roots of integers stay."""

    @I.ir_module
    class Before:
        @R.function
        def main(x: R.Tensor((4,), dtype), w: R.Tensor((4,), dtype)):
            with R.dataflow():
                a = R.abs(w)
                b = R.negative(a)
                out = R.add(x, b)
                R.output(out)
            return out

    info = np.iinfo(dtype)
    w = np.array([info.min, info.max, info.max - 1, 3], dtype)
    (found,) = constants(FoldConstants()(bound(Before, w=w)))
    assert (found == -np.abs(w)).all() and str(found.dtype) == dtype


def test_buckets_of_positions_are_those_of_the_models_precision(bound):
    """As T5 has them: a logarithm of constant distances, cut to whole numbers; in float16 some would be off by one."""

    @I.ir_module
    class Before:
        @R.function
        def main(x: R.Tensor((2, 129), "float32"), w: R.Tensor((129,), "int64")):
            with R.dataflow():
                a = R.abs(w)
                b = R.astype(a, "float32")
                c = R.divide(b, R.const(8.0, "float32"))
                d = R.log(c)
                e = R.divide(d, R.const(np.log(16.0), "float32"))
                f = R.multiply(e, R.const(8.0, "float32"))
                out = R.add(x, f)
                R.output(out)
            return out

    distances = -np.arange(1, 130)
    mod = FoldConstants()(bound(Before, w=distances))
    (found,) = constants(mod)
    assert np.allclose(found, np.log(-distances / 8) / np.log(16) * 8, rtol=1e-6, atol=1e-6)
    assert len(mod["main"].body.blocks[0].bindings) == 1
