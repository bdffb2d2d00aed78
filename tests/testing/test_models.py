"""The model builders: sensible activations, documented names, canonical modules."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

from tvm_fusion.testing.models import light_model, norm_relu_branches, parallel_convs


def operators(mod):
    """Return (name, operator) of every binding."""
    return [
        (b.var.name, b.value.op.name.removeprefix("relax."))
        for b in mod["main"].body.blocks[0].bindings
    ]


def test_parallel_convs():
    mod = parallel_convs(
        3, channels=[8, 16, 8], in_channels=4, spatial=8, bias=True, relu=True, join="concat"
    )
    assert operators(mod)[:4] == [
        ("conv0", "nn.conv2d"),
        ("bias0", "add"),
        ("relu0", "nn.relu"),
        ("conv1", "nn.conv2d"),
    ]
    assert operators(mod)[-1] == ("join", "concat")
    assert [int(dim) for dim in mod["main"].ret_ty.shape.values] == [1, 32, 8, 8]
    towers = parallel_convs(
        2, channels=4, in_channels=4, spatial=8, depth=2, shared_input=False, join="add"
    )
    assert [param.name for param in towers["main"].params] == ["data0", "data1"]
    assert [name for name, _ in operators(towers)] == [
        "conv0",
        "conv0_1",
        "conv1",
        "conv1_1",
        "join",
    ]
    unequal = parallel_convs(2, channels=4, in_channels=4, spatial=8, stride=[1, 2], join=None)
    assert [int(ty.shape.values[2]) for ty in unequal["main"].ret_ty.fields] == [8, 4]
    with pytest.raises(ValueError, match="join must be"):
        parallel_convs(2, join="xor")


def test_norm_relu_branches():
    assert [op for _, op in operators(norm_relu_branches(2, spatial=4))] == [
        "multiply",
        "add",
        "nn.relu",
    ] * 2


def test_light_models_are_seeded():
    first, second, other = (light_model("squeezenet", seed) for seed in (0, 0, 1))
    assert first.SerializeToString() == second.SerializeToString() != other.SerializeToString()
    weights = {
        tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in first.graph.initializer
    }
    kernel = weights["conv1_w_0"]
    assert kernel.std() == pytest.approx(
        np.sqrt(1 / np.prod(kernel.shape[1:])), rel=0.1
    )  # reads the image: no ReLU
    with pytest.raises(ValueError, match="unknown light model"):
        light_model("lenet")
