"""DecomposeBatchNorm: inference batch norm is one multiplication and one addition."""

from __future__ import annotations

import numpy as np
from tvm.script import ir as I
from tvm.script import relax as R

from tvm_fusion.frontend.canonical import DecomposeBatchNorm


def statistics():
    """Return gamma, beta, mean and variance."""
    generator = np.random.default_rng(0)
    gamma, beta, mean = (generator.standard_normal(3, dtype="float32") for _ in range(3))
    return {"g": gamma, "b": beta, "m": mean, "v": generator.uniform(0.5, 2, 3).astype("float32")}


def test_scale_and_shift(check_pass, bound, operators):
    @I.ir_module
    class Before:
        @R.function
        def main(
            x: R.Tensor((1, 3, 4, 4), "float32"), g: R.Tensor((3,), "float32"), b: R.Tensor((3,), "float32"),
            m: R.Tensor((3,), "float32"), v: R.Tensor((3,), "float32"),
        ):  # fmt: skip
            with R.dataflow():
                norm = R.nn.batch_norm(x, g, b, m, v, axis=1, epsilon=1e-3, training=False)
                out = norm[0]
                R.output(out)
            return out

    @I.ir_module
    class After:
        @R.function
        def main(
            x: R.Tensor((1, 3, 4, 4), "float32"), scale: R.Tensor((1, 3, 1, 1), "float32"),
            shift: R.Tensor((1, 3, 1, 1), "float32"),
        ):  # fmt: skip
            with R.dataflow():
                scaled = R.multiply(x, scale)
                out = R.add(scaled, shift)
                R.output(out)
            return out

    s = statistics()
    wide = {key: value.astype("float64") for key, value in s.items()}
    scale = 1.0 / np.sqrt(wide["v"] + 1e-3) * wide["g"]
    shift = -wide["m"] * scale + wide["b"]
    shaped = {"scale": scale, "shift": shift}
    after = bound(After, **{k: v.astype("float32").reshape(1, 3, 1, 1) for k, v in shaped.items()})
    result = check_pass(DecomposeBatchNorm(), bound(Before, **s), after)
    assert operators(result) == [("out", "multiply"), ("out", "add")]


def test_training_and_computed_statistics_stay(check_pass, bound):
    @I.ir_module
    class Before:
        @R.function
        def main(
            x: R.Tensor((1, 3, 4, 4), "float32"), mean: R.Tensor((3,), "float32"), g: R.Tensor((3,), "float32"),
            b: R.Tensor((3,), "float32"), m: R.Tensor((3,), "float32"), v: R.Tensor((3,), "float32"),
        ):  # fmt: skip
            with R.dataflow():
                trained = R.nn.batch_norm(x, g, b, m, v, axis=1, training=True)
                first = trained[0]
                computed = R.nn.batch_norm(x, g, b, mean, v, axis=1, training=False)
                second = computed[0]
                R.output(first, second)
            return (first, second)

    check_pass(DecomposeBatchNorm(), bound(Before, **statistics()))


def test_negative_variance_stays(check_pass, bound):
    @I.ir_module
    class Before:
        @R.function
        def main(
            x: R.Tensor((1, 3, 4, 4), "float32"), g: R.Tensor((3,), "float32"), b: R.Tensor((3,), "float32"),
            m: R.Tensor((3,), "float32"), v: R.Tensor((3,), "float32"),
        ):  # fmt: skip
            with R.dataflow():
                norm = R.nn.batch_norm(x, g, b, m, v, axis=1, training=False)
                out = norm[0]
                R.output(out)
            return out

    check_pass(
        DecomposeBatchNorm(), bound(Before, **{**statistics(), "v": np.full(3, -1, "float32")})
    )
