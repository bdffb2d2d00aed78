"""Import of ONNX models: dimensions, operators, names, errors, silence."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import onnx
import pytest
import tvm
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from tvm_fusion.errors import InvalidModelError, UnsupportedOperatorError
from tvm_fusion.frontend import child, onnx_native
from tvm_fusion.frontend import onnx as frontend


def model(nodes, inputs, constants=(), output="y", opset=17, **kwargs):
    """Return a ModelProto; ``inputs`` maps names to shapes, ``constants`` maps names to arrays."""
    graph = helper.make_graph(
        nodes,
        "graph",
        [
            helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)
            for name, shape in inputs.items()
        ],
        [helper.make_tensor_value_info(output, TensorProto.FLOAT, None)],
        [
            numpy_helper.from_array(np.asarray(value), name)
            for name, value in dict(constants).items()
        ],
    )
    return helper.make_model(
        graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8, **kwargs
    )


def against_reference(run_module, proto, *arrays):
    """Assert that the imported module computes what ONNX's reference evaluator does; return the module."""
    mod = frontend.load(proto)
    names = [param.name for param in mod["main"].params]
    expected = ReferenceEvaluator(proto).run(None, dict(zip(names, arrays, strict=True)))
    for got, want in zip(run_module(mod, *arrays), expected, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)
    return mod


def data(*shape, seed=0):
    """Return random float32 numbers."""
    return np.random.default_rng(seed).standard_normal(shape, dtype="float32")


def test_names_are_the_models_own(operators):
    nodes = [
        helper.make_node(
            "Conv", ["in/put.0", "w", "b"], ["c"], name="block1/conv", pads=[1, 1, 1, 1]
        ),
        helper.make_node("Relu", ["c"], ["features"]),
        helper.make_node("Flatten", ["features"], ["f"], name="flat"),
        helper.make_node("Gemm", ["f", "m", "d"], ["y"], name="head:0", transB=1),
    ]
    constants = {"w": data(4, 3, 3, 3), "b": data(4), "m": data(5, 4 * 64), "d": data(5)}
    mod = frontend.load(model(nodes, {"in/put.0": [1, 3, 8, 8]}, constants))
    assert [param.name for param in mod["main"].params] == ["in/put.0"]
    assert int(mod["main"].attrs["num_input"]) == 1
    assert operators(mod) == [
        ("block1/conv", "nn.conv2d"), ("block1/conv", "add"), ("features", "nn.relu"), ("flat", "reshape"),
        ("head:0", "matmul"), ("head:0", "add"),
    ]  # fmt: skip


def test_sum_and_mean_are_chains(run_module, operators):
    nodes = [
        helper.make_node("Sum", ["a", "b", "c"], ["s"], name="shortcut"),
        helper.make_node("Mean", ["s", "a", "b"], ["m"], name="average"),
        helper.make_node("Max", ["m", "b"], ["x"], name="largest"),
        helper.make_node("Sum", ["x"], ["y"], name="alone"),
    ]
    proto = model(nodes, {"a": [2, 3], "b": [3], "c": [2, 1]})
    mod = against_reference(run_module, proto, data(2, 3), data(3, seed=1), data(2, 1, seed=2))
    assert operators(mod) == [
        ("shortcut", "add"), ("shortcut", "add"), ("average", "add"), ("average", "add"), ("average", "divide"),
        ("largest", "maximum"),
    ]  # fmt: skip


def test_operators_that_tvm_would_lower(run_module, operators):
    nodes = [
        helper.make_node("Clip", ["x", "low", "high"], ["c"]),
        helper.make_node("Pad", ["c", "pads"], ["p"], mode="reflect"),
        helper.make_node("Tile", ["p", "repeats"], ["t"]),
        helper.make_node(
            "Conv", ["t", "w"], ["k"], auto_pad="SAME_UPPER", strides=[2, 2], kernel_shape=[3, 3]
        ),
        helper.make_node("Einsum", ["k", "k"], ["y"], equation="nchw,nchw->nc"),
    ]
    constants = {
        "low": np.float32(-0.5), "high": np.float32(0.5), "pads": np.array([0, 0, 1, 0, 0, 0, 1, 0]),
        "repeats": np.array([1, 1, 1, 2]), "w": data(4, 3, 3, 3),
    }  # fmt: skip
    mod = frontend.load(model(nodes, {"x": [1, 3, 6, 6]}, constants))
    assert [op for _, op in operators(mod)] == [
        "maximum", "minimum", "nn.pad", "tile", "nn.conv2d", "einsum",
    ]  # fmt: skip
    against_reference(run_module, model(nodes, {"x": [1, 3, 6, 6]}, constants), data(1, 3, 6, 6))


def test_batch_norm_folds_into_the_convolution(run_module, operators):
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["c"], name="conv", group=2),
        helper.make_node("BatchNormalization", ["c", "s", "b", "m", "v"], ["n"], name="norm"),
        helper.make_node("Relu", ["n"], ["y"], name="relu"),
    ]
    constants = {
        "w": data(4, 2, 3, 3),
        "s": data(4),
        "b": data(4),
        "m": data(4),
        "v": np.abs(data(4)) + 0.5,
    }
    mod = against_reference(
        run_module, model(nodes, {"x": [1, 4, 8, 8]}, constants), data(1, 4, 8, 8)
    )
    assert operators(mod) == [("conv", "nn.conv2d"), ("norm", "add"), ("relu", "nn.relu")]


def computed_reshape(batch):
    """Return a model that flattens through Shape, Gather and Concat, as torch.onnx writes x.view(x.size(0), -1)."""
    nodes = [
        helper.make_node("Shape", ["x"], ["s"]),
        helper.make_node("Gather", ["s", "zero"], ["n"], axis=0),
        helper.make_node("Unsqueeze", ["n", "axes"], ["u"]),
        helper.make_node("Concat", ["u", "rest"], ["t"], axis=0),
        helper.make_node("Reshape", ["x", "t"], ["y"], name="view"),
    ]
    constants = {"zero": np.int64(0), "axes": np.array([0]), "rest": np.array([-1])}
    return model(nodes, {"x": [batch, 3, 4, 4]}, constants)


def test_shape_arithmetic_is_evaluated(operators):
    for mod in (
        frontend.load(computed_reshape(2)),
        frontend.load(computed_reshape("N"), shape={"x": (2, 3, 4, 4)}),
    ):
        assert operators(mod) == [("view", "reshape")]
        assert [int(dim) for dim in mod["main"].ret_ty.shape.values] == [2, 48]


def test_a_free_dimension_stays_symbolic(operators, run_module):
    mod = frontend.load(computed_reshape("N"))
    assert operators(mod) == [("view", "reshape")]
    batch = mod["main"].params[0].ty.shape.values[0]
    assert isinstance(batch, tvm.tirx.Var) and batch.name == "N"
    for n in (1, 3):
        x = data(n, 3, 4, 4)
        np.testing.assert_array_equal(run_module(mod, x)[0], x.reshape(n, -1))


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ({"z": (1, 3, 4, 4)}, "no input 'z'; the model's inputs are x=N,3,4,4"),
        ({"x": (1, 3, 4)}, "'x' has 4 dimensions.*has 3.*x=N,3,4,4"),
        ({"x": (1, 5, 4, 4)}, "static shape N,3,4,4, which.*contradicts"),
        ({"x": (0, 3, 4, 4)}, "positive integers"),
        ({"x": (1.5, 3, 4, 4)}, "positive integers"),
    ],
)
def test_wrong_shapes(shape, message):
    with pytest.raises(ValueError, match=message):
        frontend.load(computed_reshape("N"), shape=shape)


def test_one_symbol_has_one_value():
    proto = model([helper.make_node("Add", ["a", "b"], ["y"])], {"a": ["N", 2], "b": ["N", 2]})
    mod = frontend.load(proto, shape={"a": (3, 2)})
    assert [int(dim) for dim in mod["main"].params[1].ty.shape.values] == [3, 2]
    with pytest.raises(ValueError, match="'N' is given both 3 and 4"):
        frontend.load(proto, shape={"a": (3, 2), "b": (4, 2)})


def test_odd_symbols_and_unknown_ranks():
    proto = model([helper.make_node("Relu", ["x"], ["y"])], {"x": ["batch size - 1", None]})
    dims = frontend.load(proto)["main"].params[0].ty.shape.values
    assert [dim.name for dim in dims] == ["batch_size___1", "x_1"]
    proto = model([helper.make_node("Relu", ["x"], ["y"])], {"x": None})
    with pytest.raises(ValueError, match="'x' has an unknown shape"):
        frontend.load(proto)
    assert frontend.load(proto, shape={"x": (2, 3)})["main"].params[0].ty.ndim == 2


def test_missing_operators_are_named():
    custom = helper.make_node("Fancy", ["x"], ["y"], name="my_node", domain="com.example")
    proto = model([custom], {"x": [2]})
    proto.opset_import.append(helper.make_opsetid("com.example", 1))
    with pytest.raises(UnsupportedOperatorError, match=r"com\.example::Fancy \(node 'my_node'\)"):
        frontend.load(proto)
    with pytest.raises(UnsupportedOperatorError, match=r"Nonsense \(node 'y'\)"):
        frontend.load(model([helper.make_node("Nonsense", ["x"], ["y"])], {"x": [2]}))
    det = model([helper.make_node("Det", ["x"], ["y"], name="determinant")], {"x": [2, 2]})
    with pytest.raises(UnsupportedOperatorError, match=r"Det \(node 'determinant'\)"):
        frontend.load(det)


def test_local_functions_are_inlined(run_module):
    function = helper.make_function(
        "local",
        "Double",
        ["a"],
        ["b"],
        [helper.make_node("Add", ["a", "a"], ["b"])],
        [helper.make_opsetid("", 17)],
    )
    call = helper.make_node("Double", ["x"], ["y"], name="call", domain="local")
    proto = model([call], {"x": [2, 3]}, functions=[function])
    proto.opset_import.append(helper.make_opsetid("local", 1))
    against_reference(run_module, proto, data(2, 3))


def test_files(tmp_path):
    with pytest.raises(InvalidModelError, match="does not exist"):
        frontend.load(tmp_path / "none.onnx")
    (tmp_path / "empty.onnx").write_bytes(b"")
    with pytest.raises(InvalidModelError, match="is empty"):
        frontend.load(tmp_path / "empty.onnx")
    (tmp_path / "text.onnx").write_text("not a model")
    with pytest.raises(InvalidModelError, match=r"text\.onnx"):
        frontend.load(tmp_path / "text.onnx")


def test_external_weights(tmp_path, run_module):
    proto = model(
        [helper.make_node("MatMul", ["x", "w"], ["y"])], {"x": [2, 64]}, {"w": data(64, 64)}
    )
    path = tmp_path / "model.onnx"
    onnx.save(proto, path, save_as_external_data=True, location="weights.bin", size_threshold=0)
    x = data(2, 64, seed=1)
    np.testing.assert_allclose(
        run_module(frontend.load(path), x)[0], x @ data(64, 64), rtol=1e-4, atol=1e-4
    )
    with pytest.raises(InvalidModelError, match="load the model by its path"):
        frontend.load(onnx.load(path, load_external_data=False))
    (tmp_path / "weights.bin").unlink()
    with pytest.raises(InvalidModelError, match="cannot be read"):
        frontend.load(path)


def test_the_given_model_is_not_changed():
    proto = computed_reshape("N")
    before = proto.SerializeToString()
    frontend.load(proto, shape={"x": (2, 3, 4, 4)})
    assert proto.SerializeToString() == before


def test_huge_computed_constants_are_refused():
    nodes = [
        helper.make_node("ConstantOfShape", ["s"], ["w"]),
        helper.make_node("MatMul", ["x", "w"], ["y"]),
    ]
    proto = model(nodes, {"x": [1, 1 << 20]}, {"s": np.array([1 << 20, 1 << 20])})
    with pytest.raises(InvalidModelError, match="take more than"):
        frontend.load(proto)


def test_a_model_without_work_returns_its_input(operators):
    mod = frontend.load(model([helper.make_node("Identity", ["x"], ["y"])], {"x": [2]}))
    assert [op for _, op in operators(mod)] == ["reshape"]


def test_a_model_of_constants_is_refused():
    node = helper.make_node("Constant", [], ["y"], value_floats=[1.0, 2.0])
    with pytest.raises(InvalidModelError, match="computes nothing"):
        frontend.load(model([node], {"x": [2]}))


def test_a_failing_simplifier_is_left_out(monkeypatch, caplog, operators):
    def fail(proto):
        raise child.ChildFailure("it crashed")

    monkeypatch.setattr(onnx_native, "simplify", fail)
    assert operators(frontend.load(computed_reshape("N"))) == [("view", "reshape")]
    assert "simplifier was left out: it crashed" in caplog.text


def test_nothing_is_printed(tmp_path):
    proto = computed_reshape("N")
    onnx.save(proto, tmp_path / "good.onnx")
    bad = model(
        [helper.make_node("Conv", ["x", "w"], ["y"])], {"x": [1, 3, 8, 8]}, {"w": data(4, 5, 3, 3)}
    )  # five input channels instead of three
    onnx.save(bad, tmp_path / "bad.onnx")
    script = (
        "import sys; from tvm_fusion.frontend import load\n"
        "from tvm_fusion.errors import FusionError\n"
        "for name in sys.argv[1:]:\n"
        "    try: load(name)\n"
        "    except FusionError: pass\n"
    )
    paths = [str(tmp_path / name) for name in ("good.onnx", "bad.onnx")]
    done = subprocess.run(
        [sys.executable, "-c", script, *paths], capture_output=True, text=True, check=True
    )
    assert (done.stdout, done.stderr) == ("", "")
