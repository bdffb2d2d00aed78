"""The model builders: sensible activations, documented names, canonical modules."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

from tvm_fusion.testing.models import light_model


def operators(mod):
    """Return (name, operator) of every binding."""
    return [
        (b.var.name, b.value.op.name.removeprefix("relax."))
        for b in mod["main"].body.blocks[0].bindings
    ]


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
