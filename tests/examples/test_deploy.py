"""A compiled library runs without this package: from Python with TVM alone, and from C++."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from tvm_fusion.cli import main
from tvm_fusion.testing.models import light_model

ROOT = Path(__file__).resolve().parent.parent.parent

#: Python that cannot import this package: whoever tries gets an error.
ALONE = "import sys; sys.modules['tvm_fusion'] = None; sys.argv = sys.argv[1:]; import runpy; "
ALONE += "runpy.run_path(sys.argv[0], run_name='__main__')"


def two_inputs_and_outputs():
    """ReLU(conv(x) + y) and its mean, of two inputs."""
    weight = np.random.default_rng(1).standard_normal((6, 3, 3, 3)).astype("float32")
    value, number = helper.make_tensor_value_info, TensorProto.FLOAT
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["c"], "conv", pads=[1, 1, 1, 1]),
        helper.make_node("Add", ["c", "y"], ["s"], "sum"),
        helper.make_node("Relu", ["s"], ["r"], "relu"),
        helper.make_node("GlobalAveragePool", ["r"], ["m"], "mean"),
    ]
    graph = helper.make_graph(
        nodes,
        "small",
        [value("x", number, [1, 3, 9, 11]), value("y", number, [1, 6, 9, 11])],
        [value("r", number, [1, 6, 9, 11]), value("m", number, [1, 6, 1, 1])],
        [numpy_helper.from_array(weight, "w")],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


@pytest.fixture(scope="module")
def deployed(tmp_path_factory):
    """Compiles a model; returns the library, the files of its inputs and of onnxruntime's first output."""

    def deploy(model) -> tuple[Path, list[Path], Path]:
        folder = tmp_path_factory.mktemp("deployed")
        (folder / "model.onnx").write_bytes(model.SerializeToString())
        library = folder / "model.so"
        assert main(["compile", str(folder / "model.onnx"), "-o", str(library)]) == 0
        session = onnxruntime.InferenceSession(folder / "model.onnx")
        rng = np.random.default_rng(0)
        inputs = {
            i.name: rng.standard_normal(i.shape).astype("float32") for i in session.get_inputs()
        }
        files = [folder / f"{name}.npy" for name in inputs]
        for file, array in zip(files, inputs.values(), strict=True):
            np.save(file, array)
        np.save(folder / "expected.npy", session.run(None, inputs)[0])
        return library, files, folder / "expected.npy"

    return deploy


def call(*words: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(word) for word in words], capture_output=True, text=True)


def test_python_with_tvm_alone(deployed, tmp_path) -> None:
    library, inputs, expected = deployed(two_inputs_and_outputs())
    program = [sys.executable, "-c", ALONE, ROOT / "examples/run_with_tvm.py", library]
    done = call(*program, *inputs, "--expect", expected)
    assert done.returncode == 0, done.stderr
    assert "largest difference" in done.stdout and done.stdout.count("mean") >= 2
    # What is wrong is noticed: another result, another shape of an input.
    np.save(tmp_path / "other.npy", np.load(expected) + 1)
    assert call(*program, *inputs, "--expect", tmp_path / "other.npy").returncode == 1
    done = call(*program, *inputs[::-1])
    assert done.returncode == 2 and "x must be float32[1, 3, 9, 11]" in done.stderr


@pytest.fixture(scope="module")
def run_model(tmp_path_factory) -> Path:
    """The C++ program, built by CMake as its page says."""
    if shutil.which("cmake") is None or not (shutil.which("c++") or shutil.which("g++")):
        pytest.skip("needs cmake and a C++ compiler")
    build = tmp_path_factory.mktemp("run_model")
    options = [f"-DPython_EXECUTABLE={sys.executable}", "-DCMAKE_CXX_FLAGS=-Werror"]
    for words in (["-S", ROOT / "examples/cpp", "-B", build, *options], ["--build", build]):
        done = call("cmake", *words)
        assert done.returncode == 0, done.stdout + done.stderr
    return build / "run_model"


@pytest.mark.slow
def test_cpp(deployed, run_model, tmp_path) -> None:
    """A small model of two inputs and outputs, and a real network."""
    for model in (two_inputs_and_outputs(), light_model("squeezenet")):
        library, inputs, expected = deployed(model)
        done = call(run_model, library, *inputs, "--expect", expected)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "second call" in done.stdout
        np.save(tmp_path / "other.npy", np.load(expected) * 1.01)
        done = call(run_model, library, *inputs, "--expect", tmp_path / "other.npy")
        assert done.returncode == 1, done.stderr


@pytest.mark.slow
def test_cpp_says_what_is_wrong(deployed, run_model, tmp_path) -> None:
    library, inputs, _ = deployed(two_inputs_and_outputs())
    np.save(tmp_path / "double.npy", np.zeros(3))
    (tmp_path / "short.npy").write_bytes(inputs[0].read_bytes()[:300])
    for words, message in (
        ([], "usage: run_model"),
        ([library], "usage: run_model"),
        ([tmp_path / "none.so", *inputs], "none.so"),
        ([library, *inputs[::-1]], "mismatch"),
        ([library, tmp_path / "double.npy", inputs[1]], "must be float32"),
        ([library, tmp_path / "short.npy", inputs[1]], "cut short"),
        ([library, library, inputs[1]], "no .npy file"),
    ):
        done = call(run_model, *words)
        assert done.returncode == 2 and message in done.stderr, (words, done.stderr)
    done = call(run_model, library, *inputs, "--expect", inputs[0])
    assert done.returncode == 1 and "another shape" in done.stderr
