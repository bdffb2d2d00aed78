"""ONNX that TVM would import with another meaning is refused by name."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

from tvm_fusion.errors import UnsupportedOperatorError
from tvm_fusion.frontend.onnx import load


def resize(scales, mode):
    node = helper.make_node(
        "Resize",
        ["x", "", "s"],
        ["y"],
        name="up",
        mode="linear",
        coordinate_transformation_mode=mode,
    )
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 2, 8, 8])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, None)
    stored = numpy_helper.from_array(np.array(scales, "float32"), "s")
    graph = helper.make_graph([node], "g", [x], [y], [stored])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)


@pytest.mark.parametrize("scales", [[1, 1, 0.6, 0.5], [1, 1, 2, 1.3]])
def test_corners_of_sizes_that_are_not_whole(scales):
    with pytest.raises(UnsupportedOperatorError, match=r"Resize \(node 'up'\).*it scales 8 by"):
        load(resize(scales, "align_corners"))


@pytest.mark.parametrize(
    ("scales", "mode"),
    [
        ([1, 1, 2, 1.5], "half_pixel"),
        ([1, 1, 0.6, 0.7], "half_pixel"),
        ([1, 1, 2, 1.5], "align_corners"),
    ],
)
def test_scales_that_mean_the_same(scales, mode, run_module):
    onnxruntime = pytest.importorskip("onnxruntime")
    model = resize(scales, mode)
    x = np.random.default_rng(0).standard_normal((1, 2, 8, 8)).astype("float32")
    (wanted,) = onnxruntime.InferenceSession(model.SerializeToString()).run(None, {"x": x})
    (got,) = run_module(load(model), x)
    assert np.allclose(got, wanted, atol=1e-5)
