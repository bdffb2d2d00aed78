"""ConvertDtype: a whole module in another floating dtype."""

from __future__ import annotations

import numpy as np
import pytest
from tvm.script import ir as I
from tvm.script import relax as R

from tvm_fusion.frontend.canonical import ConvertDtype
from tvm_fusion.frontend.canonical.constants import cast


@I.ir_module
class Single:
    """Floats, integers, casts and operators that carry a dtype."""

    @R.function
    def main(
        x: R.Tensor((1, 2, 4, 4), "float32"),
        n: R.Tensor((2,), "int64"),
        w: R.Tensor((2, 2, 1, 1), "float32"),
    ):
        with R.dataflow():
            conv = R.nn.conv2d(x, w, out_dtype="float32")
            half = R.astype(conv, "float16")
            back = R.astype(half, "float32")
            masked = R.add(back, R.const(-1e9, "float32"))
            zeros = R.zeros(R.shape([4]), "float32")
            shifted = R.add(masked, zeros)
            out = R.image.resize2d(shifted, R.shape([8, 8]), out_dtype="float32")
            count = R.add(n, R.const(1, "int64"))
            counted = R.astype(count, "float32")
            R.output(out, counted)
        return (out, counted)


@I.ir_module
class Half:
    """What becomes of it."""

    @R.function
    def main(
        x: R.Tensor((1, 2, 4, 4), "float16"),
        n: R.Tensor((2,), "int64"),
        w: R.Tensor((2, 2, 1, 1), "float16"),
    ):
        with R.dataflow():
            conv = R.nn.conv2d(x, w)
            masked = R.add(conv, R.const(-65504, "float16"))
            zeros = R.zeros(R.shape([4]), "float16")
            shifted = R.add(masked, zeros)
            out = R.image.resize2d(shifted, R.shape([8, 8]), out_dtype="float16")
            count = R.add(n, R.const(1, "int64"))
            counted = R.astype(count, "float16")
            R.output(out, counted)
        return (out, counted)


W = np.random.default_rng(0).standard_normal((2, 2, 1, 1), dtype="float32")


def test_to_half(check_pass, bound):
    check_pass(ConvertDtype("float16"), bound(Single, w=W), bound(Half, w=W.astype("float16")))


def test_and_back(check_pass, bound):
    result = check_pass(ConvertDtype("float32"), bound(Half, w=W.astype("float16")), _back(bound))
    assert str(result["main"].params[0].ty.dtype) == "float32"


def _back(bound):
    @I.ir_module
    class After:
        @R.function
        def main(
            x: R.Tensor((1, 2, 4, 4), "float32"),
            n: R.Tensor((2,), "int64"),
            w: R.Tensor((2, 2, 1, 1), "float32"),
        ):
            with R.dataflow():
                conv = R.nn.conv2d(x, w)
                masked = R.add(conv, R.const(-65504, "float32"))
                zeros = R.zeros(R.shape([4]), "float32")
                shifted = R.add(masked, zeros)
                out = R.image.resize2d(shifted, R.shape([8, 8]), out_dtype="float32")
                count = R.add(n, R.const(1, "int64"))
                counted = R.astype(count, "float32")
                R.output(out, counted)
            return (out, counted)

    return bound(After, w=W.astype("float16").astype("float32"))


def test_bfloat16(bound):
    mod = ConvertDtype("bfloat16")(bound(Single, w=W))
    types = {str(getattr(b.var.ty, "dtype", "")) for b in mod["main"].body.blocks[0].bindings}
    assert types == {"bfloat16", "int64"}


def test_same_dtype_and_double_stay(check_pass):
    @I.ir_module
    class Before:
        @R.function
        def main(x: R.Tensor((2,), "float32"), y: R.Tensor((2,), "float64")):
            with R.dataflow():
                a = R.add(x, R.const(1.0, "float32"))
                b = R.add(y, R.const(1.0, "float64"))
                R.output(a, b)
            return (a, b)

    check_pass(ConvertDtype("float32"), Before)


def test_unknown_dtype():
    with pytest.raises(ValueError, match="float32, float16, bfloat16"):
        ConvertDtype("int8")


def test_what_tvm_has_in_float32_only_stays_there(operators):
    @I.ir_module
    class Norm:
        @R.function
        def main(x: R.Tensor((1, 4, 3, 3), "float32"), g: R.Tensor((4,), "float32")):
            with R.dataflow():
                norm = R.nn.group_norm(x, g, g, num_groups=2, channel_axis=1, axes=[2, 3])
                act = R.nn.relu(norm)
                R.output(act)
            return act

    wide = ConvertDtype("bfloat16")(Norm)
    names = [op for _, op in operators(wide)]
    assert names == ["astype", "astype", "astype", "nn.group_norm", "astype", "nn.relu"]
    assert str(wide["main"].ret_ty.dtype) == "bfloat16"
    half = ConvertDtype("float16")(Norm)  # TVM has it in float16
    assert [op for _, op in operators(half)] == ["nn.group_norm", "nn.relu"]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("number", [1e-60, -1e-60, 0.0, -0.0, np.nan, 1e-3, 1e60])
def test_a_single_number_that_is_not_0_stays_so(dtype, number):
    found = cast(np.array([number]), dtype, saturate=True).astype("float64")
    assert np.sign(found) == np.sign(number) or (np.isnan(number) and np.isnan(found))
    assert np.isnan(number) or np.isfinite(found)
    assert abs(found) < 1e-3 or abs(number) >= 1e-3 or np.isnan(number)


def test_of_many_numbers_small_ones_become_0():
    assert not cast(np.full(2, 1e-60), "float16", saturate=True).any()
    assert not cast(np.full(1, 1e-60), "float16").any()
