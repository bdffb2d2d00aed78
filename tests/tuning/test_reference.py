"""References: the unscheduled function in float64, and what counts as wrong."""

from __future__ import annotations

import dataclasses

import ml_dtypes
import numpy as np
import pytest
from tvm_fusion.schedules.base import CONSTANTS

from tvm_fusion.build.inputs import numpy_dtype
from tvm_fusion.compat import relax
from tvm_fusion.targets import parse_target, with_products
from tvm_fusion.tuning.build_worker import load_function
from tvm_fusion.tuning.measure import Inputs
from tvm_fusion.tuning.reference import References, describe, widened
from tvm_fusion.tuning.values import (
    arguments,
    difference,
    input_arrays,
    undefined,
    values_of,
)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_a_reference_is_computed_in_float64(kernels, references, dtype):
    (inputs,) = references.make([kernels.dense(dtype=dtype)])
    x, w, b = (input_arrays(inputs)[i].astype("float64") for i in range(3))
    (reference,) = values_of(inputs)[1]
    # float32 is how it is kept: a sum in float32, or in the kernel's type, is further away.
    np.testing.assert_allclose(reference, np.maximum(x @ w + b, 0), rtol=1e-6, atol=1e-12)
    assert inputs.outputs == (3,) and inputs.params[3].dtype == dtype
    assert inputs.tolerances == ({"float32": 1e-5, "float16": 4e-3, "bfloat16": 3e-2}[dtype],)


def test_products_in_tf32_may_be_off_by_more(kernels):
    func = load_function(kernels.dense(dtype="float32").func_json)
    narrow = load_function(kernels.dense(dtype="float16").func_json)
    assert describe(func).tolerances == (1e-5,)
    assert describe(func, tf32=True).tolerances == describe(narrow, tf32=True).tolerances == (4e-3,)
    source = kernels.dense(dtype="float32")
    target = parse_target("cuda:sm_90")
    given = [
        dataclasses.replace(source, target=str(t)) for t in (target, with_products(target, "tf32"))
    ]
    assert [s.has_tf32 for s in (source, *given)] == [False, False, True]


def test_a_kernel_is_computed_once_and_found_again(kernels, references, monkeypatch):
    source = kernels.dense()
    first = references.make([source, source])
    monkeypatch.setattr(references._pool, "map", lambda requests, limit: [None] * len(requests))
    assert references.make([source]) == first[:1] == first[1:]


def test_inputs_cross_processes_unchanged(kernels, references):
    (inputs,) = references.make([kernels.dense()])
    assert Inputs.from_dict(inputs.to_dict()) == inputs
    assert hash(inputs) == hash(Inputs.from_dict(inputs.to_dict()))


def test_several_outputs_and_the_kernels_own_constants(kernels, references):
    """Softmax starts from the least float32, a maximum from the least float16; argmax gives integers."""

    def make(builder, x):
        y = builder.emit(relax.op.nn.softmax(x))
        return [y, builder.emit(relax.op.max(x, axis=1)), builder.emit(relax.op.argmax(y, axis=1))]

    (inputs,) = references.make([kernels.of([(8, 33)], "float16", make)])
    x = input_arrays(inputs)[0].astype("float64")
    soft, most, where = values_of(inputs)[1]
    e = np.exp(x - x.max(1, keepdims=True))
    np.testing.assert_allclose(soft, e / e.sum(1, keepdims=True), rtol=1e-6)
    np.testing.assert_array_equal(most, x.max(1))
    np.testing.assert_array_equal(where, x.argmax(1))
    assert inputs.outputs == (1, 2, 3) and inputs.tolerances == (4e-3, 4e-3, 0.01)


def test_kernels_of_roots_and_logarithms_get_positive_values(kernels, references):
    def make(builder, x):
        return builder.emit(relax.op.log(builder.emit(relax.op.sqrt(x))))

    log, dense = references.make([kernels.of([(8, 33)], "float32", make), kernels.dense()])
    assert log.positive and not dense.positive
    assert np.isfinite(values_of(log)[1][0]).all() and (input_arrays(log)[0] > 0).all()


def test_weights_keep_chains_of_products_in_range(kernels):
    def make(builder, x, w):
        return builder.emit(relax.op.matmul(builder.emit(relax.op.matmul(x, w)), w))

    func = load_function(kernels.of([(4, 512), (512, 512)], "float16", make).func_json)
    plain = describe(func)
    constant = describe(func.with_attr(CONSTANTS, [1]))
    assert (plain.constants, constant.constants) == ((), (1,))
    x, w = (input_arrays(constant)[i].astype("float64") for i in range(2))
    assert 0.5 < (x @ w @ w).std() < 2 < (x @ input_arrays(plain)[1].astype("float64")).std()


def test_widening_leaves_integers_alone(kernels):
    source = kernels.of(
        [(8, 4)], "float16", lambda b, x: b.emit(relax.op.argmax(x, axis=1)), "llvm"
    )
    types = [str(p.ty.dtype) for p in widened(source.func_json).params]
    assert types == ["float64", "int64"]
    assert "float16" not in str(widened(source.func_json))


def test_what_cannot_run_has_no_reference(kernels, tmp_path):
    source = kernels.dense()
    damaged = dataclasses.replace(source, kernel="0" * 16, func_json="{}")
    with References(folder=tmp_path) as references:
        refused, made = references.make([damaged, source])
    assert isinstance(refused, str) and refused
    assert made.references[0].startswith(str(tmp_path))


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "int64", "bool"])
def test_outputs_start_undefined(kernels, dtype):
    spec = dataclasses.replace(describe(load_function(kernels.dense().func_json)).params[3])
    array = undefined(dataclasses.replace(spec, dtype=dtype))
    assert array.shape == (32, 128) and array.dtype == numpy_dtype(dtype)
    if array.dtype.kind in "iu":
        assert (array == -1).all()
    elif dtype != "bool":
        assert np.isnan(array.astype("float64")).all()


def test_constants_are_permuted_as_a_kernel_wants_them(kernels, references):
    (inputs,) = references.make([kernels.dense()])
    x, w, b, out = arguments(inputs, ((1, (1, 0)),))
    assert (x.shape, w.shape, b.shape, out.shape) == ((32, 64), (128, 64), (128,), (32, 128))
    np.testing.assert_array_equal(w.T, input_arrays(inputs)[1])
    assert w.flags.c_contiguous


def test_differences(kernels, references):
    (inputs,) = references.make([kernels.dense(dtype="bfloat16")])
    (right,) = values_of(inputs)[1]
    assert difference(inputs, [right.astype(ml_dtypes.bfloat16)]) == ""
    wrong = right.copy()
    wrong[3, 5] += np.abs(right).max()
    found = difference(inputs, [wrong.astype(ml_dtypes.bfloat16)])
    assert "error 1.00e+00 where 3e-02 is allowed: " in found and "[3, 5]" in found
    wrong[3, 5] = np.nan
    assert "inf" in difference(inputs, [wrong.astype(ml_dtypes.bfloat16)])
    assert difference(inputs, [undefined(inputs.params[3])])


def test_integers_differ_by_share(kernels, references):
    def make(builder, x):
        return builder.emit(relax.op.argmax(x, axis=1))

    (inputs,) = references.make([kernels.of([(400, 33)], "float32", make)])
    (right,) = values_of(inputs)[1]
    wrong = right.copy()
    wrong[:4] += 1  # ties that rounding decides
    assert difference(inputs, [wrong]) == ""
    wrong[:5] = right[:5] + 1
    assert difference(inputs, [wrong]).startswith("1.2% of the elements")
