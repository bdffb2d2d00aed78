"""How long a compilation takes, in seconds of processor time, which a busy machine does not stretch."""

from __future__ import annotations

import os

import pytest

import tvm_fusion as tf
from tvm_fusion.testing.models import light_model


def used():
    """Seconds of this process and of the compilers that it has run."""
    return sum(os.times()[:4])


@pytest.mark.slow
@pytest.mark.nvcc
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_an_untuned_resnet50_for_cuda_takes_less_than_a_minute(tmp_path, dtype):
    """From the model file to the library with machine code, every group's registers read on the way."""
    pytest.importorskip("onnx")
    from tvm_fusion.frontend import onnx as onnx_frontend

    start = used()
    module = onnx_frontend.load(light_model("resnet50"), dtype=dtype)
    compiled = tf.compile(module, "cuda:sm_90", verify=False)
    compiled.export(tmp_path / "resnet50.so")
    taken = used() - start
    print(f"\nresnet50 {dtype}: {taken:.1f} s")
    assert taken < 60
