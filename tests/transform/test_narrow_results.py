"""Operators that TVM computes in float32 return the type of their data: batch norms, samples between elements."""

import ml_dtypes
import numpy as np
import pytest

import tvm_fusion as tf
from tvm_fusion.compat import relax

TYPES = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16, "float32": np.float32}


@pytest.mark.parametrize("dtype", TYPES)
def test_batch_norms_of_computed_statistics(dtype):
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((2, 3, 4, 4), dtype))
    statistics = [relax.Var(name, relax.TensorType((3,), dtype)) for name in "gbmv"]
    with builder.function("main", [x, *statistics]):
        with builder.dataflow():
            norm = builder.emit(relax.op.nn.batch_norm(x, *statistics, axis=1, training=False))
            result = builder.emit_output(relax.TupleGetItem(norm, 0))
        builder.emit_func_output(result)
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal((2, 3, 4, 4)), *rng.standard_normal((3, 3)), rng.random(3) + 0.1]
    arrays = [array.astype(TYPES[dtype]) for array in arrays]
    (got,) = tf.compile(builder.get(), "llvm", verify=False)(*arrays)
    data, scale, shift, mean, variance = (array.astype("float64") for array in arrays)
    column = (3, 1, 1)
    wanted = (data - mean.reshape(column)) / np.sqrt(variance.reshape(column) + 1e-5)
    wanted = wanted * scale.reshape(column) + shift.reshape(column)
    assert got.dtype == TYPES[dtype]
    # One rounding, of a result that was computed in float32.
    ulp = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 1e-5}[dtype]
    assert np.allclose(got.astype("float64"), wanted, rtol=1.01 * ulp, atol=1e-5)


@pytest.mark.parametrize("dtype", TYPES)
def test_samples_between_elements(dtype):
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((1, 2, 3, 3), dtype))
    grid = relax.Var("grid", relax.TensorType((1, 2, 1, 3), dtype))
    with builder.function("main", [x, grid]):
        with builder.dataflow():
            sample = relax.op.image.grid_sample(x, grid, "bilinear", align_corners=True)
            result = builder.emit_output(builder.emit(sample))
        builder.emit_func_output(result)
    data = np.arange(18).reshape(1, 2, 3, 3).astype(TYPES[dtype])
    places = np.array([[[[-1, 0, 0.5]], [[-1, 0, 0.5]]]]).astype(TYPES[dtype])
    (got,) = tf.compile(builder.get(), "llvm", verify=False)(data, places)
    assert got.dtype == TYPES[dtype]
    assert np.array_equal(got.astype("float64"), [[[[0, 4, 6]], [[9, 13, 15]]]])


@pytest.mark.parametrize("dtype", TYPES)
def test_means_of_regions(dtype):
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((1, 1, 4, 4), dtype))
    regions = relax.Var("regions", relax.TensorType((1, 5), dtype))
    with builder.function("main", [x, regions]):
        with builder.dataflow():
            means = relax.op.vision.roi_align(x, regions, (1, 1), 1.0, 2)
            result = builder.emit_output(builder.emit(means))
        builder.emit_func_output(result)
    data = np.full((1, 1, 4, 4), 3).astype(TYPES[dtype])
    places = np.array([[0, 0, 0, 2, 2]]).astype(TYPES[dtype])
    (got,) = tf.compile(builder.get(), "llvm", verify=False)(data, places)
    assert got.dtype == TYPES[dtype] and float(got.reshape(())) == 3
