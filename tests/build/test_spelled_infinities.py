"""Infinities of bfloat16 in generated CUDA: TVM's code generator alone writes what is no C++."""

from __future__ import annotations

import pytest

import tvm_fusion as tf
from tvm_fusion.build.ptxas import kernel_resources
from tvm_fusion.compat import relax
from tvm_fusion.testing.modules import ModuleBuilder


def pooled(dtype: str):
    """A maximum pooling with padding, which starts from minus infinity."""
    b = ModuleBuilder(dtype, "NHWC")
    x = b.input("x", (1, 8, 8, 16))
    call = relax.op.nn.max_pool2d(x, (3, 3), (1, 1), (1, 1), layout="NHWC", out_layout="NHWC")
    return b.finish(b.op("pool", call))


@pytest.mark.nvcc
@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_maxima_compile(dtype, arch):
    compiled = tf.compile(pooled(dtype), f"cuda:{arch}", verify=False, strict=True, records=False)
    sources = compiled.cuda_sources()
    assert any("CUDART_INF_F" in source for source in sources)
    assert all(kernel_resources(source, arch) for source in sources)  # nvcc takes them
