"""Single operators of the onnx package's own test data: imported, compiled, compared with the expected outputs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx.backend.test
import onnx.numpy_helper
import pytest

from tvm_fusion.frontend import load

DATA = Path(onnx.backend.test.__file__).parent / "data"

#: One of each kind; the rest of the data runs with the slow tests.
QUICK = (
    "pytorch-converted/test_AvgPool2d_stride", "pytorch-converted/test_BatchNorm2d_eval",
    "pytorch-converted/test_Conv2d_depthwise", "pytorch-converted/test_Conv2d_groups",
    "pytorch-converted/test_Conv3d", "pytorch-converted/test_ConvTranspose2d", "pytorch-converted/test_GLU",
    "pytorch-converted/test_Linear", "pytorch-converted/test_MaxPool2d", "pytorch-converted/test_Softmax",
    "pytorch-operator/test_operator_addmm", "pytorch-operator/test_operator_chunk",
    "pytorch-operator/test_operator_concat2", "pytorch-operator/test_operator_reduced_sum_keepdim",
    "simple/test_shrink",
)  # fmt: skip

#: Cases that TVM 0.27 imports into modules that it cannot compile: PReLU slopes of rank above one.
UNCOMPILABLE = {f"test_PReLU_{n}d_multiparam" for n in (1, 2, 3)}

#: Cases whose operators cannot be imported.
REFUSED = {
    "test_operator_index", "test_expand_shape_model1", "test_expand_shape_model2", "test_expand_shape_model3",
    "test_expand_shape_model4", "test_gradient_of_add", "test_gradient_of_add_and_mul",
}  # fmt: skip


def cases():
    """Return the folders of all cases, the quick ones unmarked."""
    folders = [
        folder
        for group in ("pytorch-converted", "pytorch-operator", "simple")
        for folder in sorted((DATA / group).glob("test_*"))
        if folder.name not in UNCOMPILABLE | REFUSED
        if not folder.name.startswith(("test_sequence", "test_strnorm"))
    ]
    for folder in folders:
        name = f"{folder.parent.name}/{folder.name}"
        yield pytest.param(folder, id=name, marks=() if name in QUICK else pytest.mark.slow)


def read(path):
    """Return the array in a TensorProto file."""
    tensor = onnx.TensorProto()
    tensor.ParseFromString(path.read_bytes())
    return onnx.numpy_helper.to_array(tensor)


def test_quick_cases_exist():
    assert all((DATA / name / "model.onnx").is_file() for name in QUICK)


@pytest.mark.parametrize("folder", list(cases()))
def test_operator(run_module, folder):
    mod = load(folder / "model.onnx")
    data = folder / "test_data_set_0"
    inputs = [read(path) for path in sorted(data.glob("input_*.pb"))]
    outputs = [read(path) for path in sorted(data.glob("output_*.pb"))]
    results = run_module(mod, *inputs[: len(mod["main"].params)])
    for got, expected in zip(results, outputs, strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-3, atol=1e-5)
