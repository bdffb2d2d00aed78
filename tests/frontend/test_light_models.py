"""The nine architectures of the onnx package: canonical form, names, numbers against onnxruntime."""

from __future__ import annotations

from collections import Counter

import numpy as np
import onnxruntime
import pytest
import tvm

from tvm_fusion.frontend import onnx as frontend
from tvm_fusion.frontend.canonical import ConvertLayout, RemoveNoOps, canonicalize
from tvm_fusion.testing.models import LIGHT_MODELS, light_model, light_model_path

QUICK = ("resnet50", "shufflenet", "squeezenet")

#: Operators of each canonical model, counted by hand from the ONNX file: every Conv of these
#: networks has a bias or a batch norm behind it, which is one ``add``.
EXPECTED = {
    "bvlc_alexnet": {"nn.conv2d": 5, "matmul": 3, "nn.relu": 7, "nn.max_pool2d": 3},
    "densenet121": {"nn.conv2d": 121, "nn.relu": 121, "concat": 58, "nn.max_pool2d": 1, "nn.avg_pool2d": 3},
    "inception_v1": {"nn.conv2d": 57, "nn.relu": 57, "concat": 9, "matmul": 1, "nn.max_pool2d": 13},
    "inception_v2": {"nn.conv2d": 69, "add": 70, "nn.relu": 69, "concat": 10, "matmul": 1, "multiply": 0},
    "resnet50": {
        "nn.conv2d": 53, "add": 53 + 16 + 1, "nn.relu": 49, "nn.max_pool2d": 1, "nn.avg_pool2d": 1, "reshape": 1,
        "matmul": 1, "nn.softmax": 1,
    },
    "shufflenet": {"nn.conv2d": 49, "add": 49 + 13 + 1, "permute_dims": 16, "concat": 3, "multiply": 0},
    "squeezenet": {"nn.conv2d": 26, "add": 26, "nn.relu": 26, "concat": 8, "nn.dropout": 0},
    "vgg19": {"nn.conv2d": 16, "add": 19, "nn.relu": 18, "matmul": 3, "nn.max_pool2d": 5, "reshape": 1},
    "zfnet512": {"nn.conv2d": 5, "matmul": 3, "nn.relu": 7, "nn.max_pool2d": 3},
}  # fmt: skip


def compare(run_module, name, mod, proto):
    """Assert that ``mod`` computes what onnxruntime does."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 2
    session = onnxruntime.InferenceSession(proto.SerializeToString(), options)
    x = np.random.default_rng(1).standard_normal((1, 3, 224, 224), dtype="float32")
    (expected,) = session.run(None, {session.get_inputs()[0].name: x})
    (got,) = run_module(mod, x)
    assert expected.std() > 1e-4, "the outputs must differ, or a permuted channel would not show"
    np.testing.assert_allclose(
        got, expected, rtol=1e-3, atol=1e-3 * float(np.abs(expected).max()), err_msg=name
    )


@pytest.mark.parametrize("name", LIGHT_MODELS)
def test_canonical_operators(operators, name):
    mod = frontend.load(light_model_path(name))
    found = Counter(op for _, op in operators(mod))
    assert {op: found[op] for op in EXPECTED[name]} == EXPECTED[name]
    assert len(mod["main"].params) == 1 and len(mod["main"].body.blocks) == 1
    names = {node.name for node in light_model(name).graph.node} if name in QUICK else None
    if names is not None:
        assert {binding for binding, _ in operators(mod)} <= names


def test_resnet_has_nothing_else(operators):
    mod = frontend.load(light_model_path("resnet50"))
    assert {op for _, op in operators(mod)} == set(EXPECTED["resnet50"])
    assert [param.name for param in mod["main"].params] == ["gpu_0/data_0"]


@pytest.mark.parametrize("name", QUICK)
def test_canonicalisation_is_idempotent(name):
    mod = frontend.load(light_model(name))
    tvm.ir.assert_structural_equal(canonicalize(mod), mod)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in LIGHT_MODELS],
)
def test_numbers(run_module, name):
    proto = light_model(name)
    compare(run_module, name, frontend.load(proto), proto)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in QUICK[1:] else pytest.mark.slow)
        for name in LIGHT_MODELS
    ],
)
def test_numbers_channels_last(run_module, name):
    proto = light_model(name)
    mod = RemoveNoOps()(ConvertLayout()(frontend.load(proto)))
    compare(run_module, name, mod, proto)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in LIGHT_MODELS],
)
def test_half_precision_has_no_transposes_inside(operators, name):
    mod = canonicalize(frontend.load(light_model_path(name)), "float16")
    transposes = [binding for binding, op in operators(mod) if op == "permute_dims"]
    own = 16 if name == "shufflenet" else 0  # the channel shuffles
    assert len(transposes) == 1 + own  # the input; every one of these networks ends in a vector
    assert {str(param.ty.dtype) for param in mod["main"].params} == {"float16"}
    for binding in mod["main"].body.blocks[0].bindings:
        if binding.value.op.name == "relax.nn.conv2d":
            attrs = binding.value.attrs
            assert (attrs.data_layout, attrs.kernel_layout, attrs.out_layout) == (
                "NHWC",
                "OHWI",
                "NHWC",
            )


def test_a_free_batch_changes_nothing_else(operators):
    proto = light_model("squeezenet")
    for value in (*proto.graph.input, *proto.graph.output):
        value.type.tensor_type.shape.dim[0].dim_param = "batch"
    mod = frontend.load(proto)
    assert operators(mod) == operators(frontend.load(light_model("squeezenet")))
    assert [str(dim) for dim in mod["main"].params[0].ty.shape.values][:1] == ["batch"]
    last = RemoveNoOps()(ConvertLayout()(mod))
    assert [op for _, op in operators(last)].count("permute_dims") == 1
