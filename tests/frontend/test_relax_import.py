"""Import of Relax modules, and the dispatch on a file's suffix."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from tvm.script import ir as I
from tvm.script import relax as R

from tvm_fusion.errors import InvalidModelError
from tvm_fusion.frontend import from_relax, load


@I.ir_module
class Dense:
    """A symbolic batch and a weight parameter."""

    @R.function
    def main(x: R.Tensor(("n", 2), "float32"), w: R.Tensor((2, 3), "float32")):
        R.func_attr({"num_input": 1})
        with R.dataflow():
            y = R.matmul(x, w)
            z = R.nn.relu(y)
            out = R.nn.dropout(z)
            first = out[0]
            R.output(first)
        return first


W = np.arange(6, dtype="float32").reshape(2, 3)


def test_from_relax(operators):
    digest = tvm.ir.save_json(Dense)
    mod = from_relax(Dense, params=[W], shape={"x": (4, 2)})
    assert operators(mod) == [("y", "matmul"), ("z", "nn.relu")]
    assert [int(dim) for dim in mod["main"].ret_ty.shape.values] == [4, 3]
    assert [param.name for param in mod["main"].params] == ["x"]
    assert tvm.ir.save_json(Dense) == digest


def test_dtype():
    mod = from_relax(Dense, "float16", params={"w": W})
    assert str(mod["main"].ret_ty.dtype) == "float16"
    with pytest.raises(ValueError, match="float32, float16, bfloat16"):
        from_relax(Dense, "int8")


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ({"y": (1, 2)}, "no input 'y'; the model's inputs are x=n,2"),
        ({"x": (1,)}, "does not have 1 dimensions"),
        ({"x": (1, 3)}, "static shape"),
    ],
)
def test_wrong_shapes(shape, message):
    with pytest.raises(ValueError, match=message):
        from_relax(Dense, shape=shape)


def test_json(tmp_path, operators):
    path = tmp_path / "model.json"
    path.write_text(tvm.ir.save_json(from_relax(Dense, params=[W])))
    assert operators(load(path, shape={"x": (4, 2)})) == [("y", "matmul"), ("z", "nn.relu")]
    text = path.read_text()
    for damaged in (
        text[: len(text) // 2],
        "{}",
        "[1, 2]",
        '"text"',
        text.replace('"relax.expr.Function"', '"relax.expr.Junction"'),
    ):
        path.write_text(damaged)
        with pytest.raises(InvalidModelError):
            load(path)


def test_json_with_parameters(tmp_path, operators):
    """A file of parameters gives the weights of a Relax module, too."""
    path, params = tmp_path / "model.json", tmp_path / "model.params"
    path.write_text(tvm.ir.save_json(Dense))
    params.write_bytes(tvm.runtime.save_param_dict({"w": tvm.runtime.tensor(W)}))
    mod = load(path, shape={"x": (4, 2)}, params=params)
    assert operators(mod) == [("y", "matmul"), ("z", "nn.relu")]
    assert [param.name for param in mod["main"].params] == ["x"]


@pytest.mark.parametrize("shape", [[1, 2], (1, 3, 4, 4), "1x3", 5])
def test_sizes_without_names_are_refused(tmp_path, shape):
    with pytest.raises(ValueError, match="must map names of inputs to sizes"):
        load(tmp_path / "model.onnx", shape=shape)


def test_suffix_and_missing_file(tmp_path):
    (tmp_path / "there.tflite").write_bytes(b"TFL3")
    with pytest.raises(InvalidModelError, match=r"must end in \.onnx, \.pt2, \.json"):
        load(tmp_path / "there.tflite")
    for name in ("model.onnx", "model.pt2", "model.json", "model.tflite"):
        with pytest.raises(InvalidModelError, match="does not exist"):
            load(tmp_path / name)
        (tmp_path / name).mkdir()
        with pytest.raises(InvalidModelError, match="is a folder"):
            load(tmp_path / name)
