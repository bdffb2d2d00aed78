"""Networks of torchvision, timm and transformers: exported, imported, compiled for the CPU, against PyTorch."""

from __future__ import annotations

import numpy as np
import pytest

import tvm_fusion as tf

torch = pytest.importorskip("torch")

from tvm_fusion.testing.torch_zoo import ZOO, smallest_of_each_family  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.slow]


@pytest.mark.parametrize("key", smallest_of_each_family())
def test_against_pytorch(key):
    model = ZOO[key]
    pytest.importorskip(model.package, exc_type=(ImportError, RuntimeError))
    net, inputs = model.make()
    with torch.no_grad():
        wanted = net(*inputs)
        program = torch.export.export(net, inputs)
    module = tf.frontend.torch.load(program)
    arrays = [tensor.numpy() for tensor in inputs]
    results = tf.compile(module, "llvm", verify=False, strict=True)(*arrays)
    outputs = wanted if isinstance(wanted, tuple | list) else [wanted]
    for got, output in zip(results, outputs, strict=True):
        reference = output.numpy()
        assert got.shape == reference.shape
        assert np.abs(got - reference).max() <= 1e-4 * np.abs(reference).max()
