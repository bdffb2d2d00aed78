"""What guards know of the sizes of products."""

import numpy as np
import pytest

import tvm_fusion as tf
from tvm_fusion.compat import relax


@pytest.mark.parametrize(
    ("left", "right"), [((7,), (7,)), ((3, 7), (7,)), ((7,), (7, 2)), ((3, 7), (7, 2))]
)
def test_products_of_vectors(left, right):
    builder = relax.BlockBuilder()
    a = relax.Var("a", relax.TensorType(left, "float32"))
    b = relax.Var("b", relax.TensorType(right, "float32"))
    with builder.function("main", [a, b]):
        with builder.dataflow():
            product = builder.emit(relax.op.matmul(relax.op.nn.relu(a), b))
            result = builder.emit_output(relax.op.add(product, product))
        builder.emit_func_output(result)
    mod = builder.get()
    assert tf.plan(mod, "cuda:sm_90").to_json()
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal(shape).astype("float32") for shape in (left, right)]
    (got,) = tf.compile(mod, "llvm", verify=False)(*arrays)
    wanted = 2 * np.matmul(np.maximum(arrays[0], 0), arrays[1])
    np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-6)
